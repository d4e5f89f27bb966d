"""The memory that a version asks for, and what is there for it: of this machine, or of the container's limit."""

from __future__ import annotations

from pathlib import Path

import psutil

from contracts.machine_limits import ROOT, limited_memory

#: A model is read into memory beside its file's pages, and its process has modules of its own.
FILE_COPIES, PROCESS_BYTES = 2, 256 * 2**20


def needed_bytes(folder: Path) -> int:
    """Return what a process with the model in ``folder`` asks for, the copy of the version before not included."""
    return FILE_COPIES * sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) + PROCESS_BYTES


def available_bytes(root: Path = ROOT) -> int:
    """Return what can be had without swapping. Below ``root`` lie the ``proc`` and ``sys`` of the control groups."""
    available, limited = int(psutil.virtual_memory().available), limited_memory(root)
    return available if limited is None else min(available, limited.limit_bytes - limited.used_bytes)
