"""Small records, copied into few large objects, so that sharding does not read the source again."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from contracts.datasets import pack_name

PACK_BYTES = 64 * 2**20
#: Larger records stay where they are.
KEEP_BELOW_BYTES = 2**20


class PackWriter:
    """Appends records to local files of about ``PACK_BYTES``; ``finished`` ones are to be uploaded."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: BinaryIO | None = None
        self._number = -1
        self._offset = 0
        self.finished: list[Path] = []

    def add(self, content: bytes) -> tuple[int, int]:
        """Return the number of the pack that ``content`` is in, and where."""
        if self._file is None or self._offset >= PACK_BYTES:
            self.finish()
            self._number, self._offset = self._number + 1, 0
            self._file = (self._folder / pack_name(self._number)).open("wb")
        place = (self._number, self._offset)
        self._file.write(content)
        self._offset += len(content)
        return place

    def finish(self) -> None:
        """Close the pack that is open."""
        if self._file is not None:
            self._file.close()
            self.finished.append(Path(self._file.name))
            self._file = None
