"""The dumps of ranks that have stalled: Python stacks, and the flight recorders of NCCL.

torch keeps the last collectives in a ring in every process. It makes a named pipe for each rank, and a thread of its
own writes the ring to a file when something is written to the pipe, also while the rank hangs in a collective. The file
is a pickle, which the agent never opens: `torchfrtrace` reads the files of all ranks and names the missing one.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)

TEXT_MAX_CHARS = 16_000
DUMP_TIMEOUT_S = 10.0
#: Seconds for a process to write its own stacks.
STACKS_ANSWER_S = 2.0
#: Seconds for a flight recorder: torch's thread polls its pipe once a second, and then queries every stream.
RECORDER_ANSWER_S = 5.0
POLL_S = 0.05
#: A dump that has not changed for this long is complete.
QUIET_S = 0.3
#: ``core/rank_environment.py`` sets the names; torch adds the rank and the suffix.
_PIPE = re.compile(r"(flight_g\d+_(\d+))\.pipe")


def dump_stacks(pid: int, own_file: Path) -> str:
    """Return the stacks of all threads of a process, or else where it waits in the kernel. Takes seconds at most.

    ``own_file``: where the process writes its stacks when it gets SIGUSR2.
    """
    state = _state(pid)
    if not state:
        return "the process has ended"
    text = _dump_by_py_spy(pid, stopped=state.startswith("T")) or _dump_by_process(pid, own_file) or _kernel_wait(pid)
    return f"process {pid}, state {state}\n{text}"[:TEXT_MAX_CHARS]


def is_stopped(pid: int) -> bool:
    """Whether the process is suspended: by SIGSTOP, a debugger, a frozen container."""
    return _state(pid).startswith(("T", "t"))


def _dump_by_py_spy(pid: int, *, stopped: bool) -> str:
    program = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
    if program is None:
        return ""
    command = [program, "dump", "--pid", str(pid), *(["--nonblocking"] if stopped else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DUMP_TIMEOUT_S, check=False)
    except (subprocess.TimeoutExpired, OSError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _dump_by_process(pid: int, file: Path) -> str:
    """Return what the process writes on SIGUSR2, unless the signal would kill it."""
    caught = int(_status(pid).get("SigCgt", "0"), 16)
    if not caught >> (signal.SIGUSR2 - 1) & 1:
        return ""
    try:
        before = file.stat().st_size
        os.kill(pid, signal.SIGUSR2)
        now = grown_at = time.monotonic()
        deadline, size = now + STACKS_ANSWER_S, before
        while now < deadline and (size == before or now < grown_at + QUIET_S):
            time.sleep(0.05)
            now, was, size = time.monotonic(), size, file.stat().st_size
            if size != was:
                grown_at = now
        with file.open("rb") as content:
            content.seek(before)
            return content.read().decode(errors="replace")
    except OSError:
        return ""


def _kernel_wait(pid: int) -> str:
    try:
        where = Path(f"/proc/{pid}/wchan").read_text().strip()
    except OSError:
        where = ""
    return f"no stack could be read (py-spy needs the right to trace); it waits in the kernel at {where or 'unknown'}"


def _state(pid: int) -> str:
    return _status(pid).get("State", "")


def _status(pid: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def dump_flight_recorders(folder: Path) -> dict[int, Path]:
    """Make every rank with a recorder in ``folder`` write it; return the files by rank. Takes seconds at most."""
    pipes = {path: name for path in folder.iterdir() if (name := _PIPE.fullmatch(path.name))}
    dumps = {int(name[2]): (pipe, folder / name[1]) for pipe, name in pipes.items()}
    before_ns = {rank: _written_ns(path) for rank, (_, path) in dumps.items()}
    missing = {rank for rank, (pipe, _) in dumps.items() if _request_dump(pipe)}
    found: dict[int, Path] = {}
    deadline = time.monotonic() + RECORDER_ANSWER_S
    while missing and time.monotonic() < deadline:
        time.sleep(POLL_S)
        for rank in list(missing):
            path = dumps[rank][1]
            if before_ns[rank] < _written_ns(path) < time.time_ns() - QUIET_S * 1e9:
                found[rank] = path
                missing.remove(rank)
    if missing:
        log.warning("flight recorders did not answer", ranks=sorted(missing))
    return found


def describe_dump(rank: int, dump: Path, uri: str | None) -> str:
    """Return a line that says where a dump is and what reads it."""
    where = uri or f"{dump} on the node"
    return f"flight recorder of rank {rank}: {where} (`torchfrtrace` reads those of all ranks from one folder)"


def _written_ns(path: Path) -> int:
    """Return when a file was last written; 0 if there is none."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _request_dump(pipe: Path) -> bool:
    """Write to a rank's pipe; return whether a rank reads it. One that has ended must not be waited for."""
    try:
        end = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno != errno.ENXIO:
            log.warning("a flight recorder cannot be requested", pipe=str(pipe), error=str(error))
        return False
    try:
        return stat.S_ISFIFO(os.fstat(end).st_mode) and os.write(end, b"1") == 1
    except OSError:
        return False
    finally:
        os.close(end)
