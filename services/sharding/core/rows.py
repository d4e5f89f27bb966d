"""Records of an ingestion as rows of one width: what sharding sorts, plans with and writes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contracts.datasets import SPLITS
from services.sharding.core import tar

#: A row as numpy reads it; packed, little-endian but for the place.
ROW = np.dtype(
    [
        #: Where it comes in the order of samples, 128 bits.
        ("place_high", ">u8"),
        ("place_low", ">u8"),
        #: Hash of its content: XXH3-128, in the first half, if ``fast``; else SHA-256.
        ("check", "u1", (32,)),
        #: Bytes of its content, and of the sample in a shard.
        ("size", "<i8"),
        ("stored", "<i8"),
        #: Where in its pack.
        ("offset", "<i8"),
        #: Where its line of ``Extras`` begins; -1: it has none.
        ("extra", "<i8"),
        #: -1: it is in no pack; its extra line has the location.
        ("pack", "<i4"),
        #: Number of its class; -1: the shard holds no class.
        ("label", "<i4"),
        #: Number of its extension.
        ("ext", "<i4"),
        ("split", "u1"),
        ("fast", "?"),
        ("key", "S100"),
    ]
)
MAX_KEY_BYTES = 100
CLASS = "cls"
#: Fills up the column of a hash of 16 bytes.
_HALF = "0" * 32
_SPLIT_NUMBERS = {split: number for number, split in enumerate(SPLITS)}

Rows = NDArray[np.void]


class RowEncoder:
    """Turns lines of the index into rows; numbers the extensions."""

    def __init__(self, classes: Sequence[str], *, flat: bool) -> None:
        self._classes = {name: number for number, name in enumerate(classes)}
        self._flat = flat
        self._numbers: dict[str, int] = {}
        self.class_contents = [str(number).encode() for number in range(len(classes))]
        sizes = [tar.member_bytes(len(content)) for content in self.class_contents]
        #: Bytes of each class in an archive, by its number; the last is for -1, no class.
        self._class_stored = np.array([*sizes, 0], dtype=np.int64)

    @property
    def extensions(self) -> list[str]:
        """Return the extension of each number."""
        return list(self._numbers)

    def rows(self, records: Sequence[Mapping[str, Any]], places: Sequence[bytes], extras: Sequence[int]) -> Rows:
        """Encode records as rows; ``extras`` gives the offset of each record's extra line, or -1.

        Raises:
            ValueError: a key is too long for an archive.
        """
        keys = [record["key"].encode() for record in records]
        if max(map(len, keys)) > MAX_KEY_BYTES:
            longest = max(keys, key=len).decode()
            raise ValueError(f"the key {longest!r} is longer than {MAX_KEY_BYTES} bytes")
        made: Rows = np.empty(len(records), dtype=ROW)
        made["place_high"], made["place_low"] = np.frombuffer(b"".join(places), dtype=">u8").reshape(-1, 2).T
        fast = [record.get("xxh3") for record in records]
        checks = "".join(
            f"{xxh3}{_HALF}" if xxh3 else record["sha256"] for xxh3, record in zip(fast, records, strict=True)
        )
        made["check"] = np.frombuffer(bytes.fromhex(checks), dtype=np.uint8).reshape(-1, 32)
        made["fast"] = [xxh3 is not None for xxh3 in fast]
        made["size"] = sizes = np.array([record["size"] for record in records], dtype=np.int64)
        made["offset"] = [-1 if (offset := record["pack_offset"]) is None else offset for record in records]
        made["pack"] = [-1 if (pack := record["pack"]) is None else pack for record in records]
        made["label"] = labels = np.array([self._label(record) for record in records], dtype=np.int64)
        made["extra"] = extras
        made["ext"] = [self._numbers.setdefault(record["ext"], len(self._numbers)) for record in records]
        made["split"] = [_SPLIT_NUMBERS[record["split"]] for record in records]
        made["key"] = keys
        made["stored"] = (
            sizes if self._flat else self._archive_sizes(records, sizes, extras) + self._class_stored[labels]
        )
        return made

    def _label(self, record: Mapping[str, Any]) -> int:
        """Return the number of the record's class; -1 where its content holds the label."""
        label = record["label"]
        if label is None or (record["ext"] == "json" and not record.get("fields")):
            return -1
        return self._classes.get(label, -1)

    def _archive_sizes(
        self, records: Sequence[Mapping[str, Any]], sizes: NDArray[np.int64], extras: Sequence[int]
    ) -> NDArray[np.int64]:
        """Return the bytes of the contents in an archive, with headers and padding."""
        stored = tar.BLOCK + sizes + -sizes % tar.BLOCK
        for i, extra in enumerate(extras):
            if extra >= 0 and (fields := records[i].get("fields")):
                stored[i] = sum(tar.member_bytes(size) for _, size in fields)
        return stored


def needs_extra(record: Mapping[str, Any]) -> bool:
    """Whether a row needs an extra line to be written: it is in no pack, or has several files."""
    return record["pack"] is None or bool(record.get("fields"))


def sort_rows(rows: Rows) -> Rows:
    """Return the rows in the order of samples."""
    ordered: Rows = rows[np.lexsort((rows["place_low"].astype(np.uint64), rows["place_high"].astype(np.uint64)))]
    return ordered


def fill(stored: NDArray[np.int64], room: int, taken: int) -> list[int]:
    """Return where to cut samples of ``stored`` bytes into shards of ``room`` bytes; ``taken`` is used in the open one.

    Returns where each new shard begins. A sample that is larger than a shard has one of its own.
    """
    starts: list[int] = []
    at, before = 0, np.concatenate(([0], np.cumsum(stored)))
    while True:
        fits = max(int(np.searchsorted(before, before[at] + room - taken, side="right")) - 1, at)
        if fits == at and taken == 0:
            fits += 1
        if fits >= len(stored):
            return starts
        starts.append(fits)
        at, taken = fits, 0
