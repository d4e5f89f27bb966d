"""Starting and ending rank processes.

``Executor`` is what a placement needs; ``ProcessExecutor`` runs ranks as processes of this machine.
An executor for containers or another scheduler's pods has the same five methods.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil
import structlog

from contracts.ranks import LAUNCH_VARIABLE
from services.worker import metrics
from services.worker.core.rank_environment import ProcessSpec
from services.worker.launch.warm_server import WarmServer, WarmServerError, WarmServerTimeout

log = structlog.get_logger(__name__)

#: Writes the exit code where a restarted agent finds it. The shell survives a SIGTERM to the group,
#: which the rank gets too, because it has still to write.
WRAPPER = (
    'trap : TERM INT; "$@"; code=$?; echo $code > "$TRAINBUS_EXIT.tmp" && mv "$TRAINBUS_EXIT.tmp" "$TRAINBUS_EXIT"'
)


#: Beginnings of variables that libraries read when they are loaded: a fork of the warm process would not heed them.
READ_WHEN_LOADED = ("ATEN_", "ONEDNN_", "DNNL_", "MKL_", "KMP_", "GOMP_", "LD_", "TORCH_", "PYTORCH_", "PYTHONHASHSEED")
#: Of these, the ones that are read later, when ranks begin to talk to each other.
READ_WHEN_JOINING = ("TORCH_FR_", "TORCH_NCCL_")


class StartError(Exception):
    """A rank may or may not have been started; the text says why that is not known."""


UNKNOWN_EXIT = -int(signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A process that can be told from any other, also after the agent or the machine was restarted."""

    rank: int
    pid: int
    #: Its start as psutil gives it, and the machine's: a pid alone is soon another process's.
    created: float
    booted: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Executor(Protocol):
    """How the ranks of one generation are run."""

    async def start(self, start: ProcessSpec, folder: Path, cwd: Path) -> RankProcess:
        """Start one; its exit code will be in ``exit_path(folder, rank)`` whoever is there to see it."""
        ...

    def is_alive(self, process: RankProcess) -> bool: ...

    def watch(self, process: RankProcess, on_end: Callable[[], None]) -> Callable[[], None]:
        """Call ``on_end`` when the process ends, and again when its exit code is written; returns what stops that.

        A help and no promise: whoever waits for the end looks now and then as well.
        """
        ...

    def signal(self, process: RankProcess, number: int) -> None:
        """Send a signal to the rank and everything it started. No error if it is gone."""
        ...

    async def sweep(self, folder: Path, processes: Sequence[RankProcess]) -> int:
        """Kill whatever still belongs to the generation in ``folder``; return how many that were."""
        ...

    async def close(self) -> None: ...


def exit_path(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.exit"


def log_path(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.log"


def read_exit(folder: Path, rank: int) -> tuple[int, float] | None:
    """(exit code, when), None while there is none."""
    path = exit_path(folder, rank)
    try:
        return int(path.read_text().strip() or UNKNOWN_EXIT), path.stat().st_mtime
    except FileNotFoundError:
        return None
    except ValueError:
        return UNKNOWN_EXIT, path.stat().st_mtime


class ProcessExecutor:
    """Ranks as processes: forked from a warm one where possible, started cold otherwise."""

    def __init__(
        self, warm: WarmServer | None = None, rank_command: Sequence[str] = (sys.executable, "-m", "trainbus.rank")
    ) -> None:
        self._warm, self._rank_command = warm, tuple(rank_command)
        self._children: list[subprocess.Popen[bytes]] = []

    async def start(self, start: ProcessSpec, folder: Path, cwd: Path) -> RankProcess:
        pid: int | None = None
        if start.command is None and self._warm is not None and self._warm.ready and self._heeds(start):
            try:
                pid = await self._warm.fork(
                    start.environment, cwd, log_path(folder, start.rank), exit_path(folder, start.rank)
                )
                metrics.RANK_STARTS.labels("warm").inc()
            except WarmServerTimeout as error:
                # It may yet fork: starting cold now could make two of one rank.
                raise StartError(str(error)) from error
            except WarmServerError as error:
                log.warning("the warm process cannot fork, starting cold", error=str(error))
        if pid is None:
            pid = self._start_cold(start, folder, cwd)
            metrics.RANK_STARTS.labels("cold").inc()
        try:
            created = psutil.Process(pid).create_time()
        except psutil.NoSuchProcess:
            created = 0.0  # it has ended already; its exit file tells
        return RankProcess(start.rank, pid, created, psutil.boot_time())

    def _heeds(self, start: ProcessSpec) -> bool:
        """Whether a fork is as good as a fresh start under the rank's environment."""
        assert self._warm is not None
        loaded_with = self._warm.environment
        return all(
            loaded_with.get(name) == value
            for name, value in start.environment.items()
            if name.startswith(READ_WHEN_LOADED) and not name.startswith(READ_WHEN_JOINING)
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
        return _same(process)

    def watch(self, process: RankProcess, on_end: Callable[[], None]) -> Callable[[], None]:
        # The kernel tells of the end; of the exit code, which is written after it, the warm process does.
        warm = self._warm
        stops = [_on_death(process.pid, on_end)]
        if warm is not None:
            stops.append(warm.on_exit(process.pid, on_end))

        def stop_all() -> None:
            for stop in stops:
                stop()

        return stop_all

    def signal(self, process: RankProcess, number: int) -> None:
        if _same(process):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)

    async def sweep(self, folder: Path, processes: Sequence[RankProcess]) -> int:
        return await asyncio.to_thread(self._sweep, folder, processes)

    def _sweep(self, folder: Path, processes: Sequence[RankProcess]) -> int:
        """Process groups alone are not enough: torchrun gives its children sessions of their own."""
        killed = 0
        booted = psutil.boot_time()
        sessions = {each.pid for each in processes if abs(each.booted - booted) < 60 and not _reused(each)}
        for _ in range(20):
            left = list(_belonging(folder, sessions))
            if not left:
                break
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
                    killed += 1
            psutil.wait_procs([psutil.Process(pid) for pid in left if psutil.pid_exists(pid)], timeout=0.1)
        self._children = [child for child in self._children if child.poll() is None]
        return killed

    async def close(self) -> None:
        if self._warm is not None:
            await self._warm.close()


def _same(process: RankProcess) -> bool:
    """Whether the very process is alive. A zombie is not: it has ended and waits to be noticed."""
    try:
        now = psutil.Process(process.pid)
        return bool(abs(now.create_time() - process.created) < 0.05 and now.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _on_death(pid: int, then: Callable[[], None]) -> Callable[[], None]:
    """Call ``then`` once when the process is dead; returns what stops waiting for it."""
    try:
        handle = os.pidfd_open(pid)
    except (OSError, AttributeError):  # dead already, or a system without: looking now and then finds it
        return lambda: None
    loop = asyncio.get_running_loop()
    open_handles = [handle]

    def stop() -> None:
        if open_handles:
            loop.remove_reader(handle)
            os.close(open_handles.pop())

    def died() -> None:
        stop()
        then()

    loop.add_reader(handle, died)
    return stop


def _reused(process: RankProcess) -> bool:
    try:
        return bool(abs(psutil.Process(process.pid).create_time() - process.created) >= 0.05)
    except psutil.Error:
        return False


def _belonging(folder: Path, sessions: Iterable[int]) -> Iterable[int]:
    """Processes of a generation: in a rank's session, writing to its log, or with its launch in the environment."""
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
                or _output(pid).startswith(logs)
                or process.environ().get(LAUNCH_VARIABLE) == launch
            ):
                yield pid
        except (psutil.Error, OSError):
            continue


def _output(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/1")
    except OSError:
        return ""
