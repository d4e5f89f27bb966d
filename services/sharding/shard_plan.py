"""Sorts an ingestion's records into the order of samples, on disk, and divides them into shards.

An external radix sort: rows go into files by the first bits of their place, each file is then sorted in memory.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from pydantic_core import from_json

from contracts.datasets import SPLITS
from services.kit.bus import PoisonMessage
from services.kit.sample_order import place
from services.sharding.core import rows as core
from services.sharding.core import tar
from services.sharding.core.rows import ROW, Rows

#: The most bytes of the index that one file of rows represents; each file is sorted in memory.
PART_BYTES = 16 * 2**20
MAX_PARTS_BITS = 12
LINES_PER_BATCH = 500
#: Rows buffered before they are written to the files of their parts.
BUFFERED_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class PlannedShard:
    """One shard to be written: a run of rows in its split's file."""

    split: str
    number: int
    first: int
    samples: int
    stored_bytes: int
    #: Where in the order it begins, of 2**64.
    place: int

    @property
    def name(self) -> str:
        return f"{self.split}/shard-{self.number:05d}"


class ShardPlan:
    """All shards of a dataset, and the rows that each is made of, on disk."""

    def __init__(self, folder: Path, classes: tuple[str, ...], seed: int, shard_bytes: int, *, flat: bool) -> None:
        self._folder, self._seed = folder, seed
        self.flat = flat
        #: The end of an archive is not available to samples.
        self._room = shard_bytes if flat else shard_bytes - len(tar.END)
        self.encoder = core.RowEncoder(classes, flat=flat)
        self.shards: list[PlannedShard] = []
        folder.mkdir(parents=True, exist_ok=True)

    def build(self, index: Path) -> None:
        """Read the index and cut it into shards.

        Raises:
            PoisonMessage: a record cannot be in a shard.
        """
        self._cut(self._deal(index))
        # In the order of all splits, because neighbours need the same packs.
        self.shards.sort(key=lambda shard: (shard.place, shard.split))

    def rows(self, shard: PlannedShard, at_most: int) -> Generator[Rows]:
        """Yield the rows of a shard in order, ``at_most`` at a time."""
        with self._split_path(shard.split).open("rb") as file:
            file.seek(shard.first * ROW.itemsize)
            left = shard.samples
            while left:
                read: Rows = np.frombuffer(file.read(min(left, at_most) * ROW.itemsize), dtype=ROW)
                left -= len(read)
                yield read

    def extras(self, wanted: Rows) -> dict[int, dict[str, Any]]:
        """Return the extra lines of rows that have one, by offset."""
        places = wanted["extra"][wanted["extra"] >= 0].tolist()
        with (self._folder / "extras.jsonl").open("rb") as file:
            return {at: _line_at(file, at) for at in places}

    # -- making it ------------------------------------------------------------

    def _deal(self, index: Path) -> int:
        """Write every record's row into the file of its part of the order; return the number of parts."""
        bits = min((index.stat().st_size // PART_BYTES).bit_length(), MAX_PARTS_BITS)
        waiting: list[list[bytes]] = [[] for _ in range(2**bits)]
        held = 0
        with index.open("rb") as lines, (self._folder / "extras.jsonl").open("wb") as extras:
            while batch := list(islice(lines, LINES_PER_BATCH)):
                rows = self._rows(batch, extras)
                # The parts are equal runs of the order, so the first bits of a place select one.
                parts = (rows["place_high"].astype(np.uint64) >> np.uint64(64 - bits)) if bits else np.zeros(len(rows))
                for part in np.unique(parts).tolist():
                    waiting[int(part)].append(rows[parts == part].tobytes())
                held += rows.nbytes
                if held >= BUFFERED_BYTES:
                    self._spill(waiting)
                    held = 0
        self._spill(waiting)
        return len(waiting)

    def _rows(self, lines: list[bytes], extras: BinaryIO) -> Rows:
        records = from_json(b"[" + b",".join(lines) + b"]")
        places = [place(self._seed, record["key"]) for record in records]
        try:
            return self.encoder.rows(records, places, [_keep_extra(record, extras) for record in records])
        except ValueError as error:
            raise PoisonMessage(f"{error}: rename the file that it comes from") from error

    def _spill(self, waiting: list[list[bytes]]) -> None:
        for part, waits in enumerate(waiting):
            if waits:
                with self._part_path(part).open("ab") as file:
                    file.write(b"".join(waits))
                waits.clear()

    def _cut(self, parts: int) -> None:
        """Sort part by part; append the rows to their splits' files, and note where shards begin."""
        cutters = [_ShardCutter(split, self._room) for split in SPLITS]
        for part in range(parts):
            path = self._part_path(part)
            if not path.exists():
                continue
            ordered = core.sort_rows(np.fromfile(path, dtype=ROW))
            path.unlink()
            for number, cutter in enumerate(cutters):
                mine = ordered[ordered["split"] == number]
                if len(mine):
                    cutter.add(mine)
                    with self._split_path(cutter.split).open("ab") as file:
                        mine.tofile(file)
        self.shards = [shard for cutter in cutters for shard in cutter.finish()]

    def _part_path(self, part: int) -> Path:
        return self._folder / f"part-{part:04d}.rows"

    def _split_path(self, split: str) -> Path:
        return self._folder / f"{split}.rows"


class _ShardCutter:
    """Cuts the rows of one split, which arrive in order, into shards."""

    def __init__(self, split: str, room: int) -> None:
        self.split, self._room = split, room
        self._made: list[PlannedShard] = []
        #: Of the shard that is open: its first row, its bytes, its place.
        self._first = self._stored = self._place = 0
        self._rows = 0

    def add(self, rows: Rows) -> None:
        stored = rows["stored"]
        if self._rows == 0:
            self._place = int(rows["place_high"][0])
        begins = 0
        for start in [*core.fill(stored, self._room, self._stored), len(rows)]:
            self._stored += int(stored[begins:start].sum())
            if start < len(rows):
                self._close(self._rows + start)
                self._place = int(rows["place_high"][start])
            begins = start
        self._rows += len(rows)

    def finish(self) -> Iterator[PlannedShard]:
        if self._rows > self._first:
            self._close(self._rows)
        return iter(self._made)

    def _close(self, end: int) -> None:
        number, samples = len(self._made), end - self._first
        self._made.append(PlannedShard(self.split, number, self._first, samples, self._stored, self._place))
        self._first, self._stored = end, 0


def _keep_extra(record: Mapping[str, Any], extras: BinaryIO) -> int:
    """Write a row's extra line and return its offset; return -1 where it needs none."""
    if not core.needs_extra(record):
        return -1
    at = extras.tell()
    kept = {name: record.get(name) for name in ("uri", "etag", "fields")}
    extras.write(json.dumps(kept).encode() + b"\n")
    return at


def _line_at(file: BinaryIO, offset: int) -> dict[str, Any]:
    file.seek(offset)
    found: dict[str, Any] = json.loads(file.readline())
    return found
