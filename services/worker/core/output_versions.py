"""Which files of an output folder are complete, so that a copy of them can be kept."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class FileVersion(NamedTuple):
    """What changes when a file is written or replaced."""

    size_bytes: int
    modified_ns: int
    inode: int


@dataclass(slots=True)
class SettledFiles:
    """Finds the files that have not changed for ``settle_s``. A file of which a part is written counts as changing."""

    settle_s: float
    _seen: dict[str, tuple[FileVersion, float]] = field(default_factory=dict)

    def observe(self, files: Mapping[str, FileVersion], now_s: float) -> set[str]:
        """Return the names of the files that have settled. ``now_s``: a monotonic clock."""
        seen = {}
        for name, version in files.items():
            known = self._seen.get(name)
            seen[name] = known if known is not None and known[0] == version else (version, now_s)
        self._seen = seen
        return {name for name, (_, since_s) in seen.items() if now_s - since_s >= self.settle_s}


def unambiguous(files: Mapping[str, FileVersion], clock_ns: int) -> set[str]:
    """Return the files whose version changes with the next write.

    A file system stamps files with a clock of its own, which stands still for milliseconds: a file that is written
    twice within that time can have one version. ``clock_ns``: that clock, before the versions were read.
    """
    return {name for name, version in files.items() if version.modified_ns < clock_ns}


def written_before(files: Mapping[str, FileVersion], time_s: float) -> set[str]:
    """Return the files that were last written before a time: those of a process that was killed later are whole."""
    return {name for name, version in files.items() if version.modified_ns / 1e9 < time_s}


def complete_at_stop(files: Mapping[str, FileVersion], stopped_at_s: float, written: Collection[str]) -> set[str]:
    """Return the files that are whole after a process was asked to stop, and ended by itself.

    ``written``: what it was writing when it was asked; it was held meanwhile. A process that does not handle the
    request ends at once, in the middle of those; one that handles it closes what it still writes.
    """
    return {name for name, version in files.items() if name not in written or version.modified_ns / 1e9 > stopped_at_s}


def next_step(reported: int | None, last: int) -> int:
    """Return the step of the next kept state: the reported one, but always beyond the last.

    Where it is not the reported one it is a version number: a step at which the script was is not known, or it has
    changed its files again since the last copy.
    """
    return max(reported or 0, last + 1)
