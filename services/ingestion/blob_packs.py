"""Packs: small records copied into few large objects, so that sharding does not read the source again.

Records that come near each other in the order of samples lie in one group of packs, so that sharding needs the packs
of one group at a time.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from contracts.datasets import pack_name
from services.kit import sample_order

PACK_BYTES = 64 * 2**20
MIN_PACK_BYTES = 8 * 2**20
#: On the local disk at a time.
OPEN_BYTES = 4 * 2**30
GROUP_BYTES = 2**30
MAX_GROUPS = 256
#: Larger records stay where they are.
KEEP_BELOW_BYTES = 2**20


def choose_group_count(expected_bytes: int) -> int:
    """Return the number of pack groups for this much data."""
    return max(1, min(MAX_GROUPS, round(expected_bytes / GROUP_BYTES)))


class PackWriter:
    """Appends records to local files, one open for each group; ``closed`` ones are ready for upload."""

    def __init__(self, folder: Path, seed: int = 0, groups: int = 1) -> None:
        self._folder, self._seed, self._groups = folder, seed, groups
        self._pack_bytes = max(MIN_PACK_BYTES, min(PACK_BYTES, OPEN_BYTES // groups)) if groups > 1 else PACK_BYTES
        self._count = 0
        self._open: dict[int, tuple[int, BinaryIO]] = {}
        self.closed: list[Path] = []

    def next_location(self, key: str) -> tuple[int, int]:
        """Return the pack that this record would be written to, and the offset in it."""
        number, file = self._file(key)
        return number, file.tell()

    def write(self, key: str, content: bytes) -> None:
        """Write a record to its ``next_location``."""
        self._file(key)[1].write(content)

    def _file(self, key: str) -> tuple[int, BinaryIO]:
        group = sample_order.group(self._seed, key, self._groups) if self._groups > 1 else 0
        found = self._open.get(group)
        if found is not None and found[1].tell() >= self._pack_bytes:
            self._close(group)
            found = None
        if found is None:
            found = self._open[group] = self._count, (self._folder / pack_name(self._count)).open("wb")
            self._count += 1
        return found

    def _close(self, group: int) -> None:
        _, file = self._open.pop(group)
        file.close()
        self.closed.append(Path(file.name))

    def close(self) -> None:
        """Close the packs that are open."""
        for group in sorted(self._open):
            self._close(group)

    def discard_open(self) -> None:
        """Close the packs that are open, for good."""
        for _, file in self._open.values():
            file.close()
        self._open.clear()
