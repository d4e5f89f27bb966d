"""Reads samples out of shards by offset, whole batches at a time, as fast as memory.

Samples that follow each other in a shard are read with ``preadv``; others are copied out of the mapped file. Nothing is
made for each sample where a field has one size; see docs/adr/0026-reader.md.
"""

from __future__ import annotations

import bisect
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from contracts import shard_index
from contracts.events.dataset import ShardFile
from trainbus.data import gather
from trainbus.data.gather import Bytes, FieldLocations, Ints

#: Shards that a reader has mapped at once. They cost address space and page tables (2 MB for each GB that was read).
MAX_OPEN_SHARDS = 512
#: The least consecutive samples that are faster to read than to map their shard.
MIN_RUN_SAMPLES = 8
#: How often opening a shard may fail because the cache evicted it after its arrival.
MAX_OPEN_ATTEMPTS = 4

WaitForShard = Callable[[ShardFile], None]


class DatasetError(Exception):
    """The local copy of the dataset cannot be used; the message names the file and the reason."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample as it is stored: its key and its fields by extension."""

    key: str
    fields: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class RaggedField:
    """A field of n samples whose sizes differ: sample i has ``buffer[offsets[i]:offsets[i + 1]]``."""

    buffer: Bytes
    #: n + 1 of them.
    offsets: Ints
    #: Which samples have the field; None: all of them.
    present: NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, place: int) -> bytes | None:
        """Return the field of one sample, None where it has none."""
        if self.present is not None and not self.present[place]:
            return None
        return self.buffer[self.offsets[place] : self.offsets[place + 1]].tobytes()


#: Fields of n samples by name: ``uint8[n, size]`` where all have one size, else ``RaggedField``.
Fields = dict[str, "Bytes | RaggedField"]


def sample_fields(fields: Mapping[str, Bytes | RaggedField], place: int) -> dict[str, bytes]:
    """Return the fields of one of the samples, those that it has."""
    found: dict[str, bytes] = {}
    for name, field in fields.items():
        value = field[place] if isinstance(field, RaggedField) else field[place].tobytes()
        if value is not None:
            found[name] = value
    return found


class ShardReader:
    """An open shard, mapped, with its index. All places in the index were checked to be inside the file."""

    def __init__(self, folder: Path, shard: ShardFile) -> None:
        """Open it.

        Raises:
            DatasetError: it is not there, or differs from the manifest.
        """
        self.path = folder / shard.path
        try:
            self._content = _map(self.path, shard.size_bytes)
            self._index_content = _map(folder / shard.index_path, shard.index_bytes or None)
            self.index = shard_index.decode(self._index_content.bytes.data)
            if self.index.samples != shard.samples:
                raise ValueError(f"its index has {self.index.samples} samples, not as many as the manifest")
            self.fields = {name: _field(name, self.index, shard.size_bytes) for name in self.index.fields}
        except (OSError, ValueError) as error:
            raise DatasetError(f"{shard.path} cannot be read: {error}") from error
        self.address = self._content.address

    def places(self, name: str, rows: Ints) -> tuple[Ints, Ints]:
        """Return where in memory a field of some rows lies, and its sizes (``ABSENT`` where it is not there)."""
        match self.fields.get(name):
            case None:
                return np.zeros(len(rows), dtype=np.int64), np.full(len(rows), shard_index.ABSENT, dtype=np.int64)
            case shard_index.StridedField(first, stride, size):
                return self.address + first + rows * stride, np.full(len(rows), size, dtype=np.int64)
            case offsets, sizes:
                return self.address + offsets[rows], sizes[rows]

    def read(self, row: int) -> Sample:
        """Return one sample."""
        content, places = self._content.bytes, self.index.places(row)
        fields = {name: content[at : at + size].tobytes() for name, (at, size) in places.items()}
        return Sample(self.index.key(row), fields)

    def close(self) -> None:
        """Unmap it. None of its memory may be used afterwards."""
        self.fields, self.address = {}, 0
        del self.index
        self._content.close()
        self._index_content.close()


class SplitReader:
    """All samples of one split, numbered from 0 in the order of the manifest's shards. Threads may share it."""

    def __init__(
        self,
        folder: Path,
        shards: Sequence[ShardFile],
        arrive: WaitForShard | None = None,
        max_open: int = MAX_OPEN_SHARDS,
    ) -> None:
        """Open nothing yet.

        Args:
            arrive: called with each shard before it is opened; returns when its files are there.
            max_open: shards that stay open; the one that was used the longest time ago gives way.
        """
        self.shards = tuple(shards)
        self._folder, self._arrive, self._max_open = folder, arrive, max_open
        self._starts = np.cumsum([0, *(shard.samples for shard in shards)], dtype=np.int64)
        self._ends: list[int] = self._starts[1:].tolist()
        self._count = int(self._starts[-1])
        self._lock = threading.RLock()
        self._open: dict[int, ShardReader] = {}
        #: When each shard was last used, counted in batches.
        self._used, self._batch = np.zeros(len(shards), dtype=np.int64), 0
        self._opened_any = False
        #: By field, every one that was seen so far.
        self._places: dict[str, FieldLocations] = {}
        #: The shard that runs are being read from, and its file.
        self._run_shard, self._run_fd = -1, -1

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, sample_id: int) -> Sample:
        with self._lock:
            number, row = self._locate(sample_id)
            sample = self._shard(number).read(row)
            self._trim()
            return sample

    def key(self, sample_id: int) -> str:
        """Return the sample's key without reading its fields."""
        with self._lock:
            number, row = self._locate(sample_id)
            key = self._shard(number).index.key(row)
            self._trim()
            return key

    def keys(self, ids: Iterable[int]) -> tuple[str, ...]:
        return tuple(self.key(int(sample_id)) for sample_id in ids)

    def shard_path(self, sample_id: int) -> str:
        """Return what the sample's shard is called."""
        return self.shards[self._locate(sample_id)[0]].path

    def gather(self, ids: Ints, fields: Sequence[str] | None = None, out: Mapping[str, Bytes] | None = None) -> Fields:
        """Read samples, in the order of ``ids``.

        Args:
            fields: which; None: all that any of the samples has.
            out: for fields of one size, contiguous ``uint8[n, size]`` to read into; what does not fit is not used.

        Returns:
            By name ``uint8[n, size]`` where every sample has the field in one size, else ``RaggedField``.

        Raises:
            IndexError: there is no such sample.
            DatasetError: a shard cannot be read.
        """
        ids, out = np.ascontiguousarray(ids, dtype=np.int64), out or {}
        with self._lock:
            self._batch += 1
            found: Fields = {}
            if fields is not None:
                found = {name: self._gather(name, ids, out.get(name)) for name in fields}
            elif len(ids):
                if not self._places:
                    self._shard(self._locate(int(ids[0]))[0])
                # A shard that is opened on the way may have fields that no other had.
                while missing := [name for name in self._places if name not in found]:
                    found |= {name: self._gather(name, ids, out.get(name)) for name in missing}
                found = {name: found[name] for name in sorted(found) if _is_there(found[name])}
            self._trim()
            return found

    def close(self) -> None:
        """Close all shards; they are opened again on demand."""
        with self._lock:
            for number in list(self._open):
                self._drop(number)
            self._end_run()

    def __del__(self) -> None:
        if hasattr(self, "_run_fd"):
            self._end_run()

    # --- one field ----------------------------------------------------------------------------

    def _gather(self, name: str, ids: Ints, out: Bytes | None) -> Bytes | RaggedField:
        if not len(ids):
            return np.empty((0, 0), dtype=np.uint8)
        first = self._locate(int(ids[0]))[0]
        field = self._shard(first).fields.get(name)
        if isinstance(field, shard_index.StridedField):
            shape = len(ids), field.size
            if out is None or out.shape != shape or out.dtype != np.uint8 or not out.flags.c_contiguous:
                out = np.empty(shape, dtype=np.uint8)
            if self._copy(self._places[name], ids, out):
                return out
        return self._gather_any(name, ids)

    def _copy(self, places: FieldLocations, ids: Ints, out: Bytes) -> bool:
        """Fill ``out``; return False unless the field has this size and a stride in all samples."""
        done, rows = 0, len(ids)
        run = gather.run_length(ids)
        if run >= MIN_RUN_SAMPLES:
            done = self._copy_run(places, int(ids[0]), out[:run])
        while done < rows:
            done += places.copy(ids[done:], out[done:], self._batch) if done else places.copy(ids, out, self._batch)
            if done < rows:
                number = self._locate(int(ids[done]))[0]
                if number in self._open:
                    return False
                self._shard(number)
        return True

    def _copy_run(self, places: FieldLocations, start: int, out: Bytes) -> int:
        """Read samples that follow each other; return how many of them are there."""
        rows, size = out.shape
        done = 0
        while done < rows:
            number, row = self._locate(start + done)
            field_at = self._shard(number).address
            first, stride = int(places.first[number]) - field_at, int(places.stride[number])
            here = min(rows - done, self._ends[number] - start - done)
            if first < 0 or places.sizes[number] != size or stride > 2 * size or (fd := self._run_file(number)) < 0:
                break
            got = gather.read_run(fd, first + row * stride, stride, out[done : done + here])
            done += got
            if got < here:
                break
        return done

    def _gather_any(self, name: str, ids: Ints) -> Bytes | RaggedField:
        """Gather in the general way: look up the place of each sample, shard by shard."""
        outside = np.flatnonzero((ids < 0) | (ids >= len(self)))
        if len(outside):
            self._locate(int(ids[outside[0]]))
        addresses, sizes = np.empty(len(ids), dtype=np.int64), np.empty(len(ids), dtype=np.int64)
        numbers = self._starts.searchsorted(ids, side="right") - 1
        for number in np.unique(numbers).tolist():
            here = np.flatnonzero(numbers == number)
            rows = ids[here] - self._starts[number]
            addresses[here], sizes[here] = self._shard(number).places(name, rows)
        present = sizes != shard_index.ABSENT
        everywhere = bool(present.all())
        sizes = np.where(present, sizes, 0)
        offsets = np.concatenate(([0], np.cumsum(sizes)))
        buffer = np.empty(int(offsets[-1]), dtype=np.uint8)
        gather.copy_pieces(addresses, sizes, buffer)
        if everywhere and bool((sizes == sizes[0]).all()):
            return buffer.reshape(len(ids), int(sizes[0]))
        return RaggedField(buffer, offsets, None if everywhere else present)

    # --- shards -------------------------------------------------------------------------------

    def _locate(self, sample_id: int) -> tuple[int, int]:
        if not 0 <= sample_id < self._count:
            raise IndexError(f"sample {sample_id} of {self._count}")
        number = bisect.bisect_right(self._ends, sample_id)
        return number, sample_id - (self._ends[number - 1] if number else 0)

    def _shard(self, number: int) -> ShardReader:
        self._used[number] = self._batch
        shard = self._open.get(number)
        if shard is not None:
            return shard
        shard = self._open[number] = self._open_shard(self.shards[number])
        self._opened_any = True
        for name, field in shard.fields.items():
            places = self._places.setdefault(name, FieldLocations(self._starts, self._used))
            if isinstance(field, shard_index.StridedField):
                places.first[number] = shard.address + field.first
                places.stride[number], places.sizes[number] = field.stride, field.size
        return shard

    def _open_shard(self, file: ShardFile) -> ShardReader:
        if self._arrive is None:
            return ShardReader(self._folder, file)
        for _ in range(MAX_OPEN_ATTEMPTS):
            self._arrive(file)
            try:
                return ShardReader(self._folder, file)
            except DatasetError as error:
                if not isinstance(error.__cause__, FileNotFoundError):
                    raise
                gone = error  # the cache evicted it after its arrival
        raise gone

    def _trim(self) -> None:
        """Close shards that the node's cache evicted, and the oldest, after a batch that opened shards."""
        if not self._opened_any:
            return
        self._opened_any = False
        for number in [number for number, shard in self._open.items() if not shard.path.exists()]:
            self._drop(number)
        oldest = sorted(self._open, key=lambda number: int(self._used[number]))
        for number in oldest[: max(0, len(oldest) - self._max_open)]:
            self._drop(number)

    def _drop(self, number: int) -> None:
        for places in self._places.values():
            places.first[number] = 0
        self._open.pop(number).close()

    def _run_file(self, number: int) -> int:
        """Return the open file of the shard, which stays open while runs are read from it; -1: it is gone."""
        if self._run_shard != number:
            self._end_run()
            try:
                self._run_fd = os.open(self._open[number].path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:  # the cache has evicted it since it was mapped
                return -1
            self._run_shard = number
        return self._run_fd

    def _end_run(self) -> None:
        if self._run_fd >= 0:
            os.close(self._run_fd)
        self._run_shard, self._run_fd = -1, -1


def _map(path: Path, size_bytes: int | None) -> gather.MappedFile:
    """Map a file of ``size_bytes``."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        if size_bytes is not None and size != size_bytes:
            raise ValueError(f"{path.name} has {size} bytes, the manifest has {size_bytes}")
        if size == 0:
            raise ValueError(f"{path.name} is empty")
        return gather.MappedFile(fd, size)
    finally:
        os.close(fd)


def _field(name: str, index: shard_index.ShardIndex, size_bytes: int) -> shard_index.StridedField | tuple[Ints, Ints]:
    """Return one field's places, made sure to lie within a shard of ``size_bytes``: they become addresses."""
    field = index.fields[name]
    if isinstance(field, shard_index.StridedField):
        last = field.first + (index.samples - 1) * field.stride
        if min(field.first, field.stride, field.size) < 0 or last + field.size > size_bytes:
            raise ValueError(f"its index puts field {name!r} outside of the file")
        return field
    offsets, sizes = np.frombuffer(field.offsets, dtype="<i8"), np.frombuffer(field.sizes, dtype="<i8")
    there = sizes != shard_index.ABSENT
    inside = (sizes >= 0) & (sizes <= size_bytes) & (offsets >= 0) & (offsets <= size_bytes - sizes)
    if not bool((inside | ~there).all()):
        raise ValueError(f"its index puts field {name!r} outside of the file")
    return offsets, sizes


def _is_there(field: Bytes | RaggedField) -> bool:
    return not isinstance(field, RaggedField) or field.present is None or bool(field.present.any())
