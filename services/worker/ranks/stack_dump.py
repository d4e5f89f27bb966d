"""The Python stacks of a process, by the best way that the machine allows."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

TEXT_MAX_CHARS = 16_000
DUMP_TIMEOUT_S = 10.0
#: Seconds for a process to write its own stacks.
ANSWER_S = 2.0
#: Stacks that have not grown for this long are complete.
QUIET_S = 0.3


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
        deadline, size = now + ANSWER_S, before
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
