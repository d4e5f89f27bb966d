"""The files that processes are writing."""

from __future__ import annotations

import fcntl
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

#: Listings that are tried while children of the processes come and go.
LISTINGS = 3
#: Seconds in which a process that is sent SIGSTOP has stopped, unless it waits for a disk.
STOP_S = 0.5
STOP_POLL_S = 0.001


class ScriptEndedError(Exception):
    """A script has ended: which files it was writing at its end is unknown."""


def has_writer(file: int) -> bool | None:
    """Whether any process has an open file open for writing, or writes it through memory; None if that is unknown.

    The kernel leases a file to its readers only while nobody writes it.
    """
    if sys.platform != "linux":
        return None
    try:
        # A process that opens the file meanwhile waits for the lease, for some microseconds. By default the notice of
        # that would end this process; this signal does nothing.
        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except BlockingIOError:
        return True
    except OSError:  # a file of another user, or of a file system without leases
        return None
    return False


def check_scripts_run(wrappers: Iterable[int]) -> None:
    """Check that no script has ended: a script that runs has itself closed what it does not have open.

    Raises:
        ScriptEndedError: one has, perhaps in the middle of a file.
    """
    for pid in wrappers:
        try:
            _check_runs(psutil.Process(pid))
        except psutil.Error as error:
            raise ScriptEndedError from error


def find_written_files(wrappers: Iterable[int]) -> set[str] | None:
    """Return the paths that scripts and their children have open for writing; None if that is unknown.

    A script runs as the child of a shell, its wrapper, which outlives it for a moment.

    Raises:
        ScriptEndedError: a script has ended, perhaps in the middle of a file.
    """
    written: set[str] = set()
    for pid in wrappers:
        try:
            found = _find_written(psutil.Process(pid))
        except psutil.NoSuchProcess as error:
            raise ScriptEndedError from error
        except psutil.Error:
            return None
        if found is None:
            return None
        written |= found
    return written


def wait_until_stopped(wrappers: Iterable[int]) -> bool:
    """Wait until processes that were sent SIGSTOP have stopped with all their threads; return whether they have.

    Children in process groups of their own are not waited for: the signal does not reach them.
    """
    deadline = time.monotonic() + STOP_S
    while True:
        is_late = time.monotonic() > deadline  # before the look: a pause of this process takes none away
        if all(_has_stopped(pid) for pid in wrappers):
            return True
        if is_late:
            return False
        time.sleep(STOP_POLL_S)


def _find_written(wrapper: psutil.Process) -> set[str] | None:
    """Return what a script writes; None if its children come and go too fast to list what they write."""
    for _ in range(LISTINGS):
        family = wrapper.children(recursive=True)
        parts = [_written_by(process) for process in family]
        _check_runs(wrapper)
        if None not in parts and set(wrapper.children(recursive=True)) <= set(family):
            return {path for part in parts if part is not None for path in part}
    return None


def _check_runs(wrapper: psutil.Process) -> None:
    if wrapper.status() == psutil.STATUS_ZOMBIE or not any(_is_running(child) for child in _children(wrapper)):
        raise ScriptEndedError


def _children(process: psutil.Process) -> list[psutil.Process]:
    """Return the direct children. Linux lists them; to search all processes for them takes milliseconds."""
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if not path.exists():
        return list(process.children())
    return [psutil.Process(int(pid)) for pid in path.read_text().split()]


def _written_by(process: psutil.Process) -> set[str] | None:
    """Return what a process has open for writing; None if it ends meanwhile."""
    try:
        written = {file.path for file in process.open_files() if file.mode != "r"}
        # A process that is killed has no open files a moment before it counts as ended.
        return written if process.num_fds() else None
    except psutil.NoSuchProcess:
        return None


def _is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE and process.num_fds())
    except psutil.NoSuchProcess:
        return False


def _has_stopped(wrapper: int) -> bool:
    try:
        group = psutil.Process(wrapper)
        return all(_is_stopped(each.pid) for each in (group, *group.children(recursive=True)) if _is_in(each, wrapper))
    except psutil.NoSuchProcess:
        return True


def _is_in(process: psutil.Process, group: int) -> bool:
    return _read_stat(Path(f"/proc/{process.pid}/stat"))[2:3] == [str(group)]


def _is_stopped(pid: int) -> bool:
    states = [_read_stat(path)[:1] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(state in ([], ["T"], ["t"], ["Z"], ["X"]) for state in states)


def _read_stat(path: Path) -> list[str]:
    """Return state, parent, process group and so on; nothing of a process that has ended."""
    try:
        return path.read_text().rpartition(")")[2].split()
    except OSError:
        return []
