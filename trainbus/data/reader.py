"""Reads samples out of shards by offset: one pread a field, no scan through a tar."""

from __future__ import annotations

import bisect
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contracts.events.dataset import ShardFile


class DatasetError(Exception):
    """The local copy of the dataset cannot be used; the text says which file and why."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample as it is stored: its key and its fields by extension."""

    key: str
    fields: dict[str, bytes]


class ShardReader:
    """One shard. The index is read when the first sample is asked for. Safe to share between threads."""

    def __init__(self, folder: Path, shard: ShardFile) -> None:
        self._folder = folder
        self._shard = shard
        self._fd: int | None = None
        self._index: list[dict[str, Any]] = []

    def read(self, row: int) -> Sample:
        """Return the sample in ``row`` of this shard."""
        fd = self._open()
        entry = self._index[row]
        fields: dict[str, bytes] = {}
        for name, (offset, size) in entry["fields"].items():
            data = os.pread(fd, size, offset)
            if len(data) != size:
                raise DatasetError(f"{self._shard.path}: field {name!r} of {entry['key']!r} is cut short")
            fields[name] = data
        return Sample(entry["key"], fields)

    def key(self, row: int) -> str:
        self._open()
        return str(self._index[row]["key"])

    def _open(self) -> int:
        if self._fd is not None:
            return self._fd
        path = self._folder / self._shard.path
        try:
            index = json.loads((self._folder / self._shard.index_path).read_bytes())["samples"]
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, ValueError, KeyError) as error:
            raise DatasetError(f"{self._shard.path} cannot be read: {error}") from error
        if os.fstat(fd).st_size != self._shard.size_bytes or len(index) != self._shard.samples:
            os.close(fd)
            raise DatasetError(f"{self._shard.path} is not what the manifest says (size or number of samples)")
        self._index, self._fd = index, fd
        return fd


class SplitReader:
    """All samples of one split, numbered from 0 in the order of the manifest's shards."""

    def __init__(self, folder: Path, shards: Sequence[ShardFile]) -> None:
        self._shards = [ShardReader(folder, shard) for shard in shards]
        self._starts = [0]
        for shard in shards:
            self._starts.append(self._starts[-1] + shard.samples)

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, sample_id: int) -> Sample:
        shard, row = self._locate(sample_id)
        return shard.read(row)

    def key(self, sample_id: int) -> str:
        """Return the sample's key without reading its fields."""
        shard, row = self._locate(sample_id)
        return shard.key(row)

    def _locate(self, sample_id: int) -> tuple[ShardReader, int]:
        if not 0 <= sample_id < len(self):
            raise IndexError(f"sample {sample_id} of {len(self)}")
        position = bisect.bisect_right(self._starts, sample_id) - 1
        return self._shards[position], sample_id - self._starts[position]
