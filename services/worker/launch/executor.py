"""The executor: how the processes of ranks are started, watched and killed.

``ProcessExecutor`` runs ranks as processes of this machine. An executor for containers or pods has the same methods.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil
import structlog

import contracts
from contracts.ranks import LAUNCH_VARIABLE
from services.kit.warm_server import WarmServer, WarmServerError, WarmServerTimeout
from services.worker import metrics
from services.worker.core.rank_environment import ProcessSpec

log = structlog.get_logger(__name__)

#: The folder from which ranks import ``trainbus`` and ``contracts``.
PYTHON_ROOT = Path(contracts.__file__).resolve().parent.parent
#: Writes the exit code where a restarted agent finds it. The shell survives a SIGTERM to the group, which the rank
#: gets, too: it still has to write.
WRAPPER = (
    'trap : TERM INT; "$@"; code=$?; echo $code > "$TRAINBUS_EXIT.tmp" && mv "$TRAINBUS_EXIT.tmp" "$TRAINBUS_EXIT"'
)


#: Prefixes of variables that libraries read when they are loaded: a fork of the warm server would ignore them.
READ_AT_IMPORT = ("ATEN_", "ONEDNN_", "DNNL_", "MKL_", "KMP_", "GOMP_", "LD_", "TORCH_", "PYTORCH_", "PYTHONHASHSEED")
#: Those of them that are read later, when the process group is created.
READ_AT_INIT = ("TORCH_FR_", "TORCH_NCCL_")


class RankStartError(Exception):
    """A rank may or may not have been started; the text says why that is unknown."""


def is_refused_by_exec(error: Exception) -> bool:
    """Whether a process could not be started for what it was to be given: too long, or no text for arguments."""
    return isinstance(error, ValueError) or (isinstance(error, OSError) and error.errno == errno.E2BIG)


UNKNOWN_EXIT = -int(signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A process, identified also after the agent or the machine was restarted."""

    rank: int
    pid: int
    #: When it and the machine were started, by psutil: a pid alone is soon another process's.
    created: float
    booted: float


class Executor(Protocol):
    """How the ranks of one generation are run."""

    async def start(self, start: ProcessSpec, folder: Path, cwd: Path) -> RankProcess:
        """Start a rank; its exit code will be in ``exit_path(folder, rank)``, even if no agent runs then."""
        ...

    def is_alive(self, process: RankProcess) -> bool:
        """Whether the process has not ended."""
        ...

    def watch(self, process: RankProcess, on_end: Callable[[], None]) -> Callable[[], None]:
        """Call ``on_end`` when the process ends, and again when its exit code is written; return what stops that.

        The calls are best effort: the caller has to poll as well.
        """
        ...

    def signal(self, process: RankProcess, number: int) -> None:
        """Send a signal to the rank's process group; do nothing if it has ended."""
        ...

    async def sweep(self, folder: Path, processes: Sequence[RankProcess]) -> int:
        """Kill every process that belongs to the generation in ``folder``; return how many."""
        ...

    async def close(self) -> None:
        """Release what the executor itself holds."""
        ...


def exit_path(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.exit"


def log_path(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.log"


def read_exit(folder: Path, rank: int) -> tuple[int, float] | None:
    """Return (exit code, time); None while it is not written."""
    path = exit_path(folder, rank)
    try:
        text, at = path.read_text().strip(), path.stat().st_mtime
    except FileNotFoundError:
        return None
    return int(text) if re.fullmatch(r"-?\d+", text) else UNKNOWN_EXIT, at


class ProcessExecutor:
    """Runs ranks as processes: forked from the warm server where possible, else started cold."""

    def __init__(
        self,
        warm_server: WarmServer | None = None,
        rank_command: Sequence[str] = (sys.executable, "-m", "trainbus.rank"),
    ) -> None:
        self._warm_server, self._rank_command = warm_server, tuple(rank_command)
        self._children: list[subprocess.Popen[bytes]] = []

    async def start(self, start: ProcessSpec, folder: Path, cwd: Path) -> RankProcess:
        pid = await self._fork(start, folder, cwd)
        way = "cold" if pid is None else "warm"
        if pid is None:
            pid = self._start_cold(start, folder, cwd)
        metrics.RANK_STARTS.labels(way).inc()
        created = 0.0  # of a process that has ended already; its exit file has the code
        with contextlib.suppress(psutil.NoSuchProcess):
            created = psutil.Process(pid).create_time()
        return RankProcess(start.rank, pid, created, psutil.boot_time())

    async def _fork(self, start: ProcessSpec, folder: Path, cwd: Path) -> int | None:
        """Fork a rank from the warm server; return None if it has to start cold."""
        server = self._warm_server
        if start.command is not None or server is None or not server.is_ready or not self._can_fork(start):
            return None
        log_file, exit_file = log_path(folder, start.rank), exit_path(folder, start.rank)
        try:
            return await server.fork(start.environment, cwd, log_file, exit_file)
        except WarmServerTimeout as error:
            # It may still fork: a cold start now could make two of one rank.
            raise RankStartError(str(error)) from error
        except WarmServerError as error:
            log.warning("the warm server cannot fork, starting cold", error=str(error))
            return None

    def _can_fork(self, start: ProcessSpec) -> bool:
        """Whether a fork behaves as a fresh start with the rank's environment does."""
        assert self._warm_server is not None
        imported_with = self._warm_server.environment
        return all(
            imported_with.get(name) == value
            for name, value in start.environment.items()
            if name.startswith(READ_AT_IMPORT) and not name.startswith(READ_AT_INIT)
        )

    def _start_cold(self, start: ProcessSpec, folder: Path, cwd: Path) -> int:
        command = start.command or self._rank_command
        environment = {**start.environment, "TRAINBUS_EXIT": str(exit_path(folder, start.rank))}
        with log_path(folder, start.rank).open("ab") as output:
            child = subprocess.Popen(
                ["/bin/sh", "-c", WRAPPER, "sh", *command],
                cwd=cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._children.append(child)
        return child.pid

    def is_alive(self, process: RankProcess) -> bool:
        self._children = [child for child in self._children if child.poll() is None]
        return _is_alive(process)

    def watch(self, process: RankProcess, on_end: Callable[[], None]) -> Callable[[], None]:
        # The kernel reports the end; the warm server reports the exit code, which is written after it.
        stops = contextlib.ExitStack()
        stops.callback(_call_on_death(process.pid, on_end))
        if self._warm_server is not None:
            stops.callback(self._warm_server.on_exit(process.pid, on_end))
        return stops.close

    def signal(self, process: RankProcess, number: int) -> None:
        if _is_alive(process):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)

    async def sweep(self, folder: Path, processes: Sequence[RankProcess]) -> int:
        return await asyncio.to_thread(self._sweep, folder, processes)

    def _sweep(self, folder: Path, processes: Sequence[RankProcess]) -> int:
        """Process groups alone are not enough: a launcher may give its children sessions of their own."""
        killed = 0
        booted = psutil.boot_time()
        sessions = {each.pid for each in processes if abs(each.booted - booted) < 60 and not _is_pid_reused(each)}
        for _ in range(20):
            pids = list(_find_pids(folder, sessions))
            if not pids:
                break
            for pid in pids:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
                    killed += 1
            psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=0.1)
        self._children = [child for child in self._children if child.poll() is None]
        return killed

    async def close(self) -> None:
        if self._warm_server is not None:
            await self._warm_server.close()


def _is_alive(process: RankProcess) -> bool:
    """Whether this very process is alive. A zombie is not: it has ended."""
    try:
        now = psutil.Process(process.pid)
        return bool(abs(now.create_time() - process.created) < 0.05 and now.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _call_on_death(pid: int, callback: Callable[[], None]) -> Callable[[], None]:
    """Call ``callback`` once when the process has ended; return what stops that."""
    try:
        handle = os.pidfd_open(pid)
    except (OSError, AttributeError):  # ended already, or no pidfd here: the caller polls
        return lambda: None
    loop = asyncio.get_running_loop()
    open_handles = [handle]

    def stop() -> None:
        if open_handles:
            loop.remove_reader(handle)
            os.close(open_handles.pop())

    def on_readable() -> None:
        stop()
        callback()

    loop.add_reader(handle, on_readable)
    return stop


def _is_pid_reused(process: RankProcess) -> bool:
    try:
        return bool(abs(psutil.Process(process.pid).create_time() - process.created) >= 0.05)
    except psutil.Error:
        return False


def _find_pids(folder: Path, sessions: Iterable[int]) -> Iterator[int]:
    """Yield a generation's processes, found by session, by the log they write, or by their environment."""
    launch = str(folder / "launch.json")
    logs = f"{folder.resolve()}/"
    sessions = set(sessions)
    for process in psutil.process_iter():
        pid = process.pid
        try:
            if pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if (
                os.getsid(pid) in sessions
                or _stdout_path(pid).startswith(logs)
                or process.environ().get(LAUNCH_VARIABLE) == launch
            ):
                yield pid
        except (psutil.Error, OSError):
            continue


def _stdout_path(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/1")
    except OSError:
        return ""
