"""The files that processes are writing."""

from __future__ import annotations

from collections.abc import Iterable

import psutil


def find_written_files(pids: Iterable[int]) -> set[str] | None:
    """Return the paths that these processes and their children have open for writing; None if that is unknown."""
    written: set[str] = set()
    for pid in pids:
        try:
            parent = psutil.Process(pid)
            for process in (parent, *parent.children(recursive=True)):
                written |= _written_by(process)
        except psutil.NoSuchProcess:
            continue
        except psutil.Error:
            return None
    return written


def _written_by(process: psutil.Process) -> set[str]:
    try:
        return {file.path for file in process.open_files() if file.mode != "r"}
    except psutil.NoSuchProcess:
        return set()
