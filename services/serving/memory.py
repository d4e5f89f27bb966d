"""The memory that a version asks for, and what is there for it: of this machine, or of the container's limit."""

from __future__ import annotations

from pathlib import Path

import psutil

#: A model is read into memory beside its file's pages, and its process has modules of its own.
FILE_COPIES, PROCESS_BYTES = 2, 256 * 2**20
CGROUP = Path("/sys/fs/cgroup")


def needed_bytes(folder: Path) -> int:
    """Return what a process with the model in ``folder`` asks for, the copy of the version before not included."""
    return FILE_COPIES * sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) + PROCESS_BYTES


def available_bytes(cgroup: Path = CGROUP) -> int:
    """Return what can be had without swapping."""
    available = int(psutil.virtual_memory().available)
    try:
        limit, used = ((cgroup / name).read_text().strip() for name in ("memory.max", "memory.current"))
        statistics = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        if limit != "max":
            # Pages of files that nothing reads are given up when there is need.
            available = min(available, int(limit) - int(used) + int(statistics.get("inactive_file", 0)))
    except (OSError, ValueError):
        pass  # no cgroup v2, or no limit of its own
    return available
