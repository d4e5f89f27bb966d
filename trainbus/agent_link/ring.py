"""Writes the progress ring (``contracts/progress.py``): a rank reports a step in a few microseconds."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Mapping
from pathlib import Path
from zlib import crc32

from contracts.progress import (
    BEAT,
    BEAT_AT,
    CAPACITY,
    COUNTER,
    CRC,
    FIXED,
    HEAD_AT,
    HEADER_BYTES,
    MAGIC,
    NAME_BYTES,
    NAMES_AT,
    NAMES_COUNT_AT,
    NAMES_MAX,
    RECORD,
    RECORD_BYTES,
    TAIL_AT,
    VALUES_MAX,
)

_NO_NAMES = (0,) * VALUES_MAX
_NO_VALUES = (0.0,) * VALUES_MAX


class RingWriter:
    """Writes records and heartbeats. Only one thread at a time may use it; the journal has a lock."""

    def __init__(self, path: Path, capacity: int = CAPACITY) -> None:
        """Create the file, or continue the one that is there.

        Raises:
            OSError: the disk is full, or the file is not a ring of this layout.
        """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fresh = os.fstat(fd).st_size == 0
            if fresh:
                # Allocate the blocks now: a store to a page without one would kill the rank (SIGBUS).
                os.posix_fallocate(fd, 0, HEADER_BYTES)
                os.ftruncate(fd, HEADER_BYTES + capacity * RECORD_BYTES)
                os.pwrite(fd, FIXED.pack(MAGIC, capacity, RECORD_BYTES, os.getpid()), 0)
            magic, self.capacity, record_bytes, _ = FIXED.unpack(os.pread(fd, FIXED.size, 0).ljust(FIXED.size, b"\0"))
            size_bytes = HEADER_BYTES + self.capacity * RECORD_BYTES
            if magic != MAGIC or record_bytes != RECORD_BYTES or os.fstat(fd).st_size != size_bytes:
                raise OSError(f"{path} is not a progress ring of this layout")
            os.pwrite(fd, FIXED.pack(MAGIC, self.capacity, RECORD_BYTES, os.getpid()), 0)
            self._map = mmap.mmap(fd, size_bytes)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        self._reserved = False
        self._mark = 0
        self._head: int = COUNTER.unpack_from(self._map, HEAD_AT)[0]
        self._tail = 0
        self._names = {_name(self._map, number): number for number in range(self._names_count())}
        #: The names of the last record and their numbers: nearly always those of the next.
        self._known: tuple[tuple[str, ...], tuple[int, ...]] = ((), _NO_NAMES)

    def write_heartbeat(self, step: int) -> None:
        """Show that the rank is alive and has done ``step`` steps."""
        self._mark += 1
        beat = BEAT.pack(self._mark, step, time.monotonic())
        self._map[BEAT_AT : BEAT_AT + BEAT.size + CRC.size] = beat + CRC.pack(crc32(beat))

    def record(
        self, step: int, values: Mapping[str, float], epoch: int, samples_consumed: int, total_steps: int | None
    ) -> bool:
        """Write a record; return False if the ring cannot hold it: no room, too many values, a name too long."""
        names = tuple(values)
        if names != self._known[0]:
            numbers = self._number_names(names)
            if numbers is None:
                return False
            self._known = (names, numbers)
        head = self._head
        if head - self._tail >= self.capacity:
            self._tail = COUNTER.unpack_from(self._map, TAIL_AT)[0]
            if head - self._tail >= self.capacity:
                return False
        if not self._reserved and not self._reserve():
            return False
        numbers, floats = self._known[1], tuple(values.values())
        count = len(floats)
        record = RECORD.pack(
            head,
            step,
            time.time(),
            samples_consumed,
            total_steps or 0,
            epoch,
            count,
            *numbers,
            *floats,
            *_NO_VALUES[count:],
        )
        at = HEADER_BYTES + head % self.capacity * RECORD_BYTES
        self._map[at : at + RECORD.size + CRC.size] = record + CRC.pack(crc32(record))
        self._head = head + 1
        COUNTER.pack_into(self._map, HEAD_AT, head + 1)
        return True

    def close(self) -> None:
        self._map.close()
        os.close(self._fd)

    def _reserve(self) -> bool:
        """Allocate the disk's blocks for all records with the first one: most ranks only write heartbeats."""
        try:
            os.posix_fallocate(self._fd, 0, HEADER_BYTES + self.capacity * RECORD_BYTES)
        except OSError:
            return False
        self._reserved = True
        return True

    def _number_names(self, names: tuple[str, ...]) -> tuple[int, ...] | None:
        """Return the names' numbers in the table, adding new names; None if a record cannot hold them."""
        if len(names) > VALUES_MAX:
            return None
        for name in names:
            if name in self._names:
                continue
            encoded, number = name.encode(), len(self._names)
            if len(encoded) >= NAME_BYTES or number >= NAMES_MAX:
                return None
            at = NAMES_AT + number * NAME_BYTES
            self._map[at : at + 1 + len(encoded)] = bytes((len(encoded),)) + encoded
            COUNTER.pack_into(self._map, NAMES_COUNT_AT, number + 1)
            self._names[name] = number
        return tuple(self._names[name] for name in names) + _NO_NAMES[len(names) :]

    def _names_count(self) -> int:
        return min(int(COUNTER.unpack_from(self._map, NAMES_COUNT_AT)[0]), NAMES_MAX)


def _name(memory: mmap.mmap, number: int) -> str:
    at = NAMES_AT + number * NAME_BYTES
    return memory[at + 1 : at + 1 + memory[at]].decode()
