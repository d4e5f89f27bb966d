"""The processors and the memory that this process may use: of the machine's, what its control groups leave it.

A container sees the whole machine. Its limits stand in its control group (cgroup v1 and v2), or in one above that.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

#: Below it lie ``proc`` and ``sys``; the tests have a folder of their own.
ROOT = Path("/")


class MemoryUse(NamedTuple):
    """Memory that is used of a limit. What the kernel can take back at once (files that it has read) does not count."""

    used_bytes: int
    limit_bytes: int


def usable_cpus(root: Path = ROOT) -> float:
    """Return the processors that this process may use, in parts of one where its share of time is limited."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([float(cores), *(limit for group in _groups("cpu", root) if (limit := _cpu_limit(group)) > 0)])


def usable_cores(root: Path = ROOT) -> int:
    """Return the whole processors that this process may use: how many threads, slots or processes it keeps busy."""
    return max(1, int(usable_cpus(root)))


def usable_memory_bytes(root: Path = ROOT) -> int:
    """Return the memory that this process may use."""
    limited = [limit for group in _groups("memory", root) if (limit := _memory_limit(group)) is not None]
    return min([_machine_memory_bytes(root), *limited])


def limited_memory(root: Path = ROOT) -> MemoryUse | None:
    """Return the use of the memory that this process shares with its control group; None if that is not limited."""
    uses = []
    for group in _groups("memory", root):
        limit = _memory_limit(group)
        if limit is not None and limit < _machine_memory_bytes(root):
            used = _number(group / "memory.current", group / "memory.usage_in_bytes") or 0
            uses.append(MemoryUse(max(0, used - _reclaimable_bytes(group)), limit))
    return min(uses, key=lambda use: use.limit_bytes - use.used_bytes, default=None)


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control groups that have a controller, each with those above it."""
    mounts = list(_mounts(root))
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            kind = "" if number == "0" else controller
            if kind and kind not in controllers.split(","):
                continue
            for mount in mounts:
                if mount.controllers is None if not kind else kind in (mount.controllers or ()):
                    yield from mount.find_groups(path)


class _Mount(NamedTuple):
    """A file system of control groups. ``controllers``: of version 1; None for version 2, which has all of them."""

    folder: Path
    #: The control group that lies at ``folder``.
    group: str
    controllers: tuple[str, ...] | None

    def find_groups(self, path: str) -> Iterator[Path]:
        """Yield the folder of a control group and of those above it, as far as they can be seen."""
        above = self.group.rstrip("/") + "/"
        below = path.removeprefix(above) if path.startswith(above) else ""
        # Of a process outside of its namespace the kernel writes /../other.
        parts = [part for part in below.split("/") if part]
        for count in range(len(parts), -1, -1):
            if ".." not in parts[:count]:
                yield self.folder.joinpath(*parts[:count])


def _mounts(root: Path) -> Iterator[_Mount]:
    with suppress(OSError):
        for line in (root / "proc/self/mountinfo").read_text().splitlines():
            place, _, kind = line.partition(" - ")
            fields, (system, _, options) = place.split(" "), kind.split(" ", 2)
            folder = root / fields[4].lstrip("/")
            if system == "cgroup2":
                yield _Mount(folder, fields[3], None)
            elif system == "cgroup":
                yield _Mount(folder, fields[3], tuple(options.split(",")))


def _cpu_limit(group: Path) -> float:
    """Return the processors that a group may use; infinity without a limit."""
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = (group / "cpu.max").read_text().split()
        return int(quota) / int(period)
    quota_us, period_us = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
    return quota_us / period_us if quota_us and period_us and quota_us > 0 else math.inf


def _memory_limit(group: Path) -> int | None:
    return _number(group / "memory.max", group / "memory.limit_in_bytes")


def _reclaimable_bytes(group: Path) -> int:
    with suppress(OSError, ValueError):
        found = dict(line.split(" ", 1) for line in (group / "memory.stat").read_text().splitlines())
        return int(found.get("total_inactive_file") or found.get("inactive_file") or 0)
    return 0


def _number(*paths: Path) -> int | None:
    """Return the number in the first of these files that has one; None if none does ("max")."""
    for path in paths:
        with suppress(OSError, ValueError):
            return int(path.read_text())
    return None


def _machine_memory_bytes(root: Path) -> int:
    with suppress(OSError, StopIteration):
        lines = (root / "proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:"))
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
