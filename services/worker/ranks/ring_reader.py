"""The reader of a rank's progress ring (``contracts/progress.py``)."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from contracts import progress as layout
from contracts.ranks import MetricsLine

#: A heartbeat is written in well under a microsecond: one that was read while it was written is whole the next time.
BEAT_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Beat:
    """A rank's last position. ``at_s`` is CLOCK_MONOTONIC, which all processes of a machine share."""

    mark: int
    step: int
    at_s: float


class RingReader:
    """Reads one rank's ring. ``open`` returns None while there is none."""

    def __init__(self, path: Path) -> None:
        """Map the file.

        Raises:
            OSError: there is no such file.
            ValueError: it does not have this layout, or is not whole yet.
        """
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fixed = os.pread(fd, layout.FIXED.size, 0)
            if len(fixed) < layout.FIXED.size:
                raise ValueError(f"{path} is not whole yet")
            magic, self.capacity, record_bytes, _ = layout.FIXED.unpack(fixed)
            size_bytes = layout.HEADER_BYTES + self.capacity * layout.RECORD_BYTES
            if magic != layout.MAGIC or record_bytes != layout.RECORD_BYTES or os.fstat(fd).st_size != size_bytes:
                raise ValueError(f"{path} is not a progress ring of this layout")
            self._map = mmap.mmap(fd, size_bytes)
        finally:
            os.close(fd)
        self._names: list[str] = []

    @classmethod
    def open(cls, path: Path) -> RingReader | None:
        """Return the ring; None while there is none."""
        try:
            return cls(path)
        except (OSError, ValueError):
            return None

    def close(self) -> None:
        self._map.close()

    @property
    def pid(self) -> int:
        return int(layout.FIXED.unpack_from(self._map, 0)[3])

    @property
    def head(self) -> int:
        return int(layout.COUNTER.unpack_from(self._map, layout.HEAD_AT)[0])

    def beat(self) -> Beat | None:
        """Return the last heartbeat; None before the first."""
        for _ in range(BEAT_ATTEMPTS):
            raw = self._map[layout.BEAT_AT : layout.BEAT_AT + layout.BEAT.size + layout.CRC.size]
            body = raw[: layout.BEAT.size]
            mark, step, at_s = layout.BEAT.unpack(body)
            if layout.CRC.unpack(raw[layout.BEAT.size :])[0] == crc32(body):
                return Beat(mark, step, at_s) if mark else None
        return None

    def read(self, start: int, end: int) -> list[tuple[int, MetricsLine]]:
        """Return the records from ``start`` to ``end`` with their numbers, up to the first that is not whole."""
        found: list[tuple[int, MetricsLine]] = []
        for number in range(start, end):
            at = layout.HEADER_BYTES + number % self.capacity * layout.RECORD_BYTES
            raw = self._map[at : at + layout.RECORD.size + layout.CRC.size]
            body = raw[: layout.RECORD.size]
            if layout.CRC.unpack(raw[layout.RECORD.size :])[0] != crc32(body):
                break
            written, step, time, samples, total, epoch, count, *rest = layout.RECORD.unpack(body)
            if written != number:
                break
            names, values = rest[:count], rest[layout.VALUES_MAX : layout.VALUES_MAX + count]
            line = MetricsLine(
                step=step,
                time=time,
                values={self._name(name): value for name, value in zip(names, values, strict=True)},
                epoch=epoch,
                samples_consumed=samples,
                total_steps=total or None,
            )
            found.append((number, line))
        return found

    def release(self, number: int) -> None:
        """Let the rank overwrite the records before ``number``."""
        layout.COUNTER.pack_into(self._map, layout.TAIL_AT, number)

    def _name(self, number: int) -> str:
        while len(self._names) <= number:
            at = layout.NAMES_AT + len(self._names) * layout.NAME_BYTES
            self._names.append(self._map[at + 1 : at + 1 + self._map[at]].decode())
        return self._names[number]
