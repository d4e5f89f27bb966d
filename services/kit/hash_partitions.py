"""A set of SHA-256 hashes that need not fit into memory: files by the first byte, one of which is read at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from contracts.disk_space import DISK_FULL

if TYPE_CHECKING:
    import numpy as np

    #: Hashes as strings of 32 bytes, shape [count], sorted and each once.
    SortedHashes = np.ndarray[tuple[int], np.dtype[np.bytes_]]

HASH_BYTES = 32
#: One for each first byte.
PARTITIONS = 256
#: What is kept in memory of all partitions together before it is appended to the files.
BUFFER_BYTES = 8 * 2**20
#: A file may hold hashes more than once until it is this long and twice as long as after its last compaction.
COMPACTION_MIN_BYTES = 2**20


class HashPartitions:
    """Hashes in files of a folder: 32 bytes each, up to twice that while some are there several times.

    Not for several threads at a time. ``add`` and ``read`` block on files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._buffers = [bytearray() for _ in range(PARTITIONS)]
        self._buffered_bytes = 0
        self._file_bytes = [0] * PARTITIONS
        self._compacted_bytes = [0] * PARTITIONS

    @property
    def file_bytes(self) -> int:
        """Bytes of all files."""
        return sum(self._file_bytes)

    def add(self, hashes: Iterable[str]) -> None:
        """Add lower-case hex hashes.

        Raises:
            ValueError: the disk is full.
        """
        for sha256 in hashes:
            raw = bytes.fromhex(sha256)
            self._buffers[raw[0]] += raw
            self._buffered_bytes += HASH_BYTES
            if self._buffered_bytes >= BUFFER_BYTES:
                self._flush()

    def read(self, first_byte: int) -> SortedHashes:
        """Return the hashes that begin with a byte."""
        import numpy as np

        path = self._path(first_byte)
        stored = path.read_bytes() if path.exists() else b""
        # Two strings of the full width are equal only if all of their bytes are, zeros at the end among them.
        return np.unique(np.frombuffer(stored + self._buffers[first_byte], f"S{HASH_BYTES}"))

    def _flush(self) -> None:
        try:
            for number, buffer in enumerate(self._buffers):
                self._append(number, buffer)
                buffer.clear()
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            raise ValueError(
                f"{self._folder} has no room for the names of what must stay, {self.file_bytes:,} bytes so far: each "
                f"takes {HASH_BYTES} bytes, twice that at times; free some, or give TRAINBUS_DATA_DIR a larger disk. "
                "Nothing was collected"
            ) from error
        self._buffered_bytes = 0

    def _append(self, number: int, content: bytearray) -> None:
        with self._path(number).open("ab") as file:
            file.write(content)
        self._file_bytes[number] += len(content)
        if self._file_bytes[number] > max(COMPACTION_MIN_BYTES, 2 * self._compacted_bytes[number]):
            self._compact(number)

    def _compact(self, number: int) -> None:
        import numpy as np

        path = self._path(number)
        unique = np.unique(np.frombuffer(path.read_bytes(), f"S{HASH_BYTES}")).tobytes()
        path.write_bytes(unique)
        self._file_bytes[number] = self._compacted_bytes[number] = len(unique)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:02x}"


def find_missing(names: SortedHashes, hashes: Sequence[str]) -> list[bool]:
    """Return for each of the lower-case hex hashes whether it is not among ``names``."""
    import numpy as np

    if not len(names):
        return [True] * len(hashes)
    asked = np.array([bytes.fromhex(sha256) for sha256 in hashes], f"S{HASH_BYTES}")
    places = np.minimum(np.searchsorted(names, asked), len(names) - 1)
    return [bool(differs) for differs in names[places] != asked]
