"""Processes that do not outlive their parent: forked services, and orphans that are found and ended.

On Linux a child can request a signal for its parent's death, and a subreaper becomes the parent of its descendants'
orphans, so that it can end them. Elsewhere these functions do nothing, and only an orderly stop ends the children.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib.util
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36

# Loaded before any fork: a child between fork and exec must not import.
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def _prctl(option: int, argument: int | bytes) -> None:
    if _libc is not None:
        _libc.prctl(option, argument, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent(number: int | None = None) -> Callable[[], None]:
    """Return a function that a child calls first to get signal ``number`` (SIGKILL) when this process dies."""
    parent, number = os.getpid(), number or signal.SIGKILL

    def tie() -> None:
        _prctl(PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # it died before the request
            os.kill(os.getpid(), number)

    return tie


def fork(target: Callable[[], int], process_name: str, environment: Mapping[str, str], log_path: Path) -> int:
    """Run ``target`` in a fork of this process with its own session, environment and log; return its pid.

    The fork shares the imported modules: that saves a second per start and tens of megabytes per service. This
    process must have one thread.
    """
    tie = end_with_parent()
    sys.stdout.flush()
    sys.stderr.flush()
    gc.collect()
    gc.freeze()  # a collection would write to every shared page and so copy it
    pid = os.fork()
    if pid:
        gc.unfreeze()
        return pid
    code = 1
    try:
        tie()
        _become_child(process_name, environment, log_path)
        code = target()
    except BaseException:
        traceback.print_exc()
    finally:
        # Not sys.exit: it would run the finally clauses of the supervisor's frames.
        with contextlib.suppress(Exception):
            atexit._run_exitfuncs()
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _become_child(process_name: str, environment: Mapping[str, str], log_path: Path) -> None:
    """Replace the supervisor's session, signals, files, environment and name."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.closerange(3, 4096)
    os.environ.clear()
    os.environ.update(environment)
    set_title(process_name)


def set_title(title: str) -> None:
    """Set the title that ``ps`` shows, which distinguishes forks. Linux only."""
    if _libc is None:
        return
    _prctl(PR_SET_NAME, title.split()[-1].encode()[:15])
    # The kernel shows the memory that held the arguments: fields 48 and 49 are its bounds.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    if end > start:
        ctypes.memmove(start, title.encode()[: end - start - 1].ljust(end - start, b"\0"), end - start)


def run_service(name: str) -> int:
    """Run ``services.<name>`` as ``python -m services.<name>`` does; return its exit code.

    Raises:
        ModuleNotFoundError: there is no such service.
    """
    import runpy

    if importlib.util.find_spec(f"services.{name}.__main__") is None:
        raise ModuleNotFoundError(f"there is no service {name!r}", name=f"services.{name}")
    try:
        sys.argv[:] = [f"services.{name}"]  # the service gets no arguments
        runpy.run_module(f"services.{name}", run_name="__main__", alter_sys=False)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    return 0


def descendants(pid: int) -> list[int]:
    """Return every living process below ``pid``, children before grandchildren; empty where this is not Linux."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError, ValueError, IndexError):
            # "pid (any name) state ppid ...": the name may hold spaces and brackets.
            state, parent = entry.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(entry.parent.name))
    found: list[int] = []
    level = [pid]
    while level:
        level = [child for each in level for child in children.get(each, ())]
        found += level
    return found


def end_all(pids: Callable[[], Iterable[int]], patience_s: float = 2.0) -> int:
    """End every process that ``pids`` returns by SIGTERM, then by SIGKILL; return how many there were."""
    first = list(pids())
    deadline = time.monotonic() + patience_s
    for pid in first:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    while (left := list(pids())) and time.monotonic() < deadline + patience_s:
        if time.monotonic() > deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        reap()
        time.sleep(0.02)
    return len(first)


def reap(known: Iterable[int] = ()) -> None:
    """Collect ended children except ``known``: adopted orphans."""
    keep = set(known)
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid in keep:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)
