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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import psutil
import structlog

import contracts
from contracts.ranks import LAUNCH_VARIABLE
from services.kit.clock import boot_s
from services.kit.warm_server import WarmServer, WarmServerError, WarmServerTimeout
from services.worker import metrics
from services.worker.core.rank_environment import ProcessSpec
from services.worker.launch.processes import RankProcess, find_sessions, kill_processes
from services.worker.local_files import hold_space

log = structlog.get_logger(__name__)

#: The folder from which ranks import ``trainbus`` and ``contracts``.
PYTHON_ROOT = Path(contracts.__file__).resolve().parent.parent
#: Writes the exit code where a restarted agent finds it. The shell survives a SIGTERM to the group, which the rank
#: gets, too: it still has to write, over the blanks that hold space for the code.
#: It starts nothing after the uptime of its first argument, in hundredths of a second: the agent may have been stopped
#: for long since it decided to.
WRAPPER = (
    'if [ -n "$1" ]; then read -r up _ < /proc/uptime && [ "${up%.*}${up#*.}" -lt "$1" ] || exit 75; fi; shift; '
    'trap : TERM INT; "$@"; code=$?; '
    'echo $code 1<> "$TRAINBUS_EXIT.spare" && mv "$TRAINBUS_EXIT.spare" "$TRAINBUS_EXIT"'
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


UPTIME = Path("/proc/uptime")
UNKNOWN_EXIT = -int(signal.SIGKILL)


class Executor(Protocol):
    """How the ranks of one generation are run."""

    async def start(
        self, start: ProcessSpec, folder: Path, cwd: Path, start_before: float | None = None
    ) -> RankProcess:
        """Start a rank; its exit code will be in ``exit_path(folder, rank)``, even if no agent runs then.

        ``start_before``: it must not begin after that time of the boot clock, however long this process is held.
        """
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
        rank_command: Sequence[str] = (sys.executable, "-m", "trainbus.ranks.rank"),
    ) -> None:
        self._warm_server, self._rank_command = warm_server, tuple(rank_command)
        self._children: list[subprocess.Popen[bytes]] = []
        self._is_environment_checked = False

    async def start(
        self, start: ProcessSpec, folder: Path, cwd: Path, start_before: float | None = None
    ) -> RankProcess:
        hold_space(exit_path(folder, start.rank))
        pid = await self._fork(start, folder, cwd, start_before)
        way = "cold" if pid is None else "warm"
        if pid is None:
            pid = self._start_cold(start, folder, cwd, start_before)
        metrics.RANK_STARTS.labels(way).inc()
        self._check_environment(pid)
        created = 0.0  # of a process that has ended already; its exit file has the code
        with contextlib.suppress(psutil.NoSuchProcess):
            created = psutil.Process(pid).create_time()
        return RankProcess(start.rank, pid, created, psutil.boot_time())

    def _check_environment(self, pid: int) -> None:
        """Log once that the environments of ranks cannot be read here (hidepid, a security module)."""
        if self._is_environment_checked:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            try:
                psutil.Process(pid).environ()
            except (psutil.AccessDenied, OSError) as error:
                log.warning(
                    "the environments of ranks cannot be read: a process that leaves its rank's session, and writes to "
                    "another log, is not found, and may outlive its run",
                    error=str(error),
                )
            self._is_environment_checked = True

    async def _fork(self, start: ProcessSpec, folder: Path, cwd: Path, start_before: float | None) -> int | None:
        """Fork a rank from the warm server; return None if it has to start cold."""
        server = self._warm_server
        if start.command is not None or server is None or not server.is_ready or not self._can_fork(start):
            return None
        log_file, exit_file = log_path(folder, start.rank), exit_path(folder, start.rank)
        try:
            return await server.fork(start.environment, cwd, log_file, exit_file, start_before=start_before)
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

    def _start_cold(self, start: ProcessSpec, folder: Path, cwd: Path, start_before: float | None) -> int:
        command = start.command or self._rank_command
        environment = {**start.environment, "TRAINBUS_EXIT": str(exit_path(folder, start.rank))}
        with log_path(folder, start.rank).open("ab") as output:
            child = subprocess.Popen(
                ["/bin/sh", "-c", WRAPPER, "sh", _uptime_limit(start_before), *command],
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
        return process.is_alive

    def watch(self, process: RankProcess, on_end: Callable[[], None]) -> Callable[[], None]:
        # The kernel reports the end; the warm server reports the exit code, which is written after it.
        stops = contextlib.ExitStack()
        stops.callback(_call_on_death(process.pid, on_end))
        if self._warm_server is not None:
            stops.callback(self._warm_server.on_exit(process.pid, on_end))
        return stops.close

    def signal(self, process: RankProcess, number: int) -> None:
        if process.is_alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)

    async def sweep(self, folder: Path, processes: Sequence[RankProcess]) -> int:
        return await asyncio.to_thread(self._sweep, folder, processes)

    def _sweep(self, folder: Path, processes: Sequence[RankProcess]) -> int:
        killed = kill_processes({folder: find_sessions(processes)}, LAUNCH_VARIABLE)
        self._children = [child for child in self._children if child.poll() is None]
        return killed

    async def close(self) -> None:
        if self._warm_server is not None:
            await self._warm_server.close()


def _uptime_limit(start_before: float | None) -> str:
    """Return a time of the boot clock as an uptime in hundredths of a second; '' where the system tells none."""
    try:
        uptime_s = float(UPTIME.read_text().split()[0])
    except OSError:
        return ""
    # A container may have an uptime of its own.
    return "" if start_before is None else str(int((uptime_s + start_before - boot_s()) * 100))


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
