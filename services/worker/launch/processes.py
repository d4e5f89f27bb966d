"""The processes of ranks: how they are known again, found and ended. With psutil alone, as the guard uses it, too."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

#: Seconds by which the start of one process, and of one machine, may differ between two readings.
CREATED_TOLERANCE_S = 0.05
BOOTED_TOLERANCE_S = 60.0
SWEEPS = 20


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A process, identified also after the agent or the machine was restarted."""

    rank: int
    pid: int
    #: When it and the machine were started, by psutil: a pid alone is soon another process's.
    created: float
    booted: float

    @property
    def is_alive(self) -> bool:
        """Whether this very process is alive. A zombie is not: it has ended."""
        try:
            now = psutil.Process(self.pid)
            is_same = abs(now.create_time() - self.created) < CREATED_TOLERANCE_S
            return is_same and bool(now.status() != psutil.STATUS_ZOMBIE)
        except psutil.Error:
            return False

    @property
    def is_pid_reused(self) -> bool:
        """Whether another process has its number now."""
        try:
            return bool(abs(psutil.Process(self.pid).create_time() - self.created) >= CREATED_TOLERANCE_S)
        except psutil.Error:
            return False


def processes_path(folder: Path) -> Path:
    """Return where the processes of the generation in ``folder`` are written down."""
    return folder / "processes.json"


def read_processes(folder: Path) -> list[RankProcess]:
    """Return the processes that are written down of the generation in ``folder``; none without the file."""
    with contextlib.suppress(FileNotFoundError):
        return [RankProcess(**each) for each in json.loads(processes_path(folder).read_bytes())]
    return []


def find_sessions(processes: Collection[RankProcess]) -> set[int]:
    """Return the sessions of ranks: each has its own, which outlives the rank."""
    booted = psutil.boot_time()
    return {each.pid for each in processes if abs(each.booted - booted) < BOOTED_TOLERANCE_S and not each.is_pid_reused}


def find_processes(folders: Mapping[Path, Collection[int]], launch_variable: str) -> Iterator[tuple[Path, int]]:
    """Yield (folder, pid) of each process of the generations in ``folders``, which have the sessions of their ranks.

    Found by session, by the log they write, or by their environment: process groups alone are not enough, a launcher
    may give its children sessions of their own.
    """
    sessions = {session: folder for folder, own in folders.items() for session in own}
    launches = {str(folder / "launch.json"): folder for folder in folders}
    logs = {f"{folder.resolve()}/": folder for folder in folders}
    for process in psutil.process_iter():
        pid = process.pid
        try:
            if pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            folder = (
                sessions.get(os.getsid(pid))
                or _find_log_owner(_stdout_path(pid), logs)
                or launches.get(process.environ().get(launch_variable, ""))
            )
        except (psutil.Error, OSError):
            continue
        if folder is not None:
            yield folder, pid


def kill_processes(folders: Mapping[Path, Collection[int]], launch_variable: str) -> int:
    """Kill what is found of the generations in ``folders`` until nothing is; return how many there were."""
    killed = 0
    for _ in range(SWEEPS):
        pids = [pid for _, pid in find_processes(folders, launch_variable)]
        if not pids:
            break
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                killed += 1
        psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=0.1)
    return killed


def _find_log_owner(path: str, logs: Mapping[str, Path]) -> Path | None:
    return next((folder for prefix, folder in logs.items() if path.startswith(prefix)), None)


def _stdout_path(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/1")
    except OSError:
        return ""
