"""The rank's end of the progress ring (``contracts/progress.py``): a step is reported in a few microseconds."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Mapping
from math import isfinite
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
    """Writes records and beats. One thread at a time; the journal's lock sees to it."""

    def __init__(self, path: Path, capacity: int = CAPACITY) -> None:
        """Make the file, or go on with the one that is there.

        Raises:
            OSError: there is no room for it, or what is there is no ring of this layout.
        """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fresh = os.fstat(fd).st_size == 0
            if fresh:
                # The disk's blocks are taken now: a store to a page without one would kill the rank (SIGBUS).
                os.posix_fallocate(fd, 0, HEADER_BYTES)
                os.ftruncate(fd, HEADER_BYTES + capacity * RECORD_BYTES)
                os.pwrite(fd, FIXED.pack(MAGIC, capacity, RECORD_BYTES, os.getpid()), 0)
            magic, self.capacity, record_bytes, _ = FIXED.unpack(os.pread(fd, FIXED.size, 0).ljust(FIXED.size, b"\0"))
            size_bytes = HEADER_BYTES + self.capacity * RECORD_BYTES
            if magic != MAGIC or record_bytes != RECORD_BYTES or os.fstat(fd).st_size != size_bytes:
                raise OSError(f"{path} is no progress ring of this layout")
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
        #: The values' names of the step before are those of this one, nearly always.
        self._known: tuple[tuple[str, ...], tuple[int, ...]] = ((), _NO_NAMES)

    def beat(self, step: int) -> None:
        """Say that the rank is alive and has ``step`` steps behind it."""
        self._mark += 1
        beat = BEAT.pack(self._mark, step, time.monotonic())
        self._map[BEAT_AT : BEAT_AT + BEAT.size + CRC.size] = beat + CRC.pack(crc32(beat))

    def record(
        self, step: int, values: Mapping[str, float], epoch: int, samples_consumed: int, total_steps: int | None
    ) -> bool:
        """Write a record; False if it must be said in another way: no room, too many values, a name too long."""
        names = tuple(values)
        if names != self._known[0]:
            numbers = self._numbers(names)
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
        if not isfinite(sum(floats)):  # a quicker question; the answer is worked out only where it is no
            kept = [(number, value) for number, value in zip(numbers, floats, strict=False) if isfinite(value)]
            count = len(kept)
            numbers = tuple(number for number, _ in kept) + _NO_NAMES[count:]
            floats = tuple(value for _, value in kept)
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
        """Take the disk's blocks for all records, once there is one: most ranks only beat."""
        try:
            os.posix_fallocate(self._fd, 0, HEADER_BYTES + self.capacity * RECORD_BYTES)
        except OSError:
            return False
        self._reserved = True
        return True

    def _numbers(self, names: tuple[str, ...]) -> tuple[int, ...] | None:
        """The names' places in the table, new ones entered; None if a record cannot tell them."""
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
