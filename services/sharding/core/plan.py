"""Which samples a dataset has, in which order, and how they are told apart."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

from contracts.datasets import SPLITS, IndexRecord, Manifest, SplitFiles, canonical_json, split_config_hash
from contracts.events.dataset import DatasetIngested, ShardFile

#: Changes whenever the same index would give other shards.
LAYOUT_VERSION = 1
_HASH_BYTES, _OFFSET_BYTES = 16, 8


class Place(NamedTuple):
    """Where a record's line begins in the index."""

    split: str
    offset: int


class Order:
    """Puts records into the order of a hash, split by split; 60 bytes of memory a record.

    Any window of a shard is then mixed, and the order depends on the keys and the seed alone.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._places: dict[str, list[bytes]] = {split: [] for split in SPLITS}

    def add(self, key: str, split: str, offset: int) -> None:
        rank = hashlib.sha256(f"order\0{self._seed}\0{key}".encode()).digest()[:_HASH_BYTES]
        self._places[split].append(rank + offset.to_bytes(_OFFSET_BYTES, "big"))

    def count(self, split: str) -> int:
        return len(self._places[split])

    def offsets(self, split: str) -> Iterable[int]:
        """Offsets of the split's lines, in the order of their samples."""
        return (int.from_bytes(place[_HASH_BYTES:], "big") for place in sorted(self._places[split]))


def link_name(fingerprint: str, shard_bytes: int) -> str:
    """The object that remembers which dataset this input became, beside the ingestion's index."""
    digest = hashlib.sha256(canonical_json([LAYOUT_VERSION, fingerprint, shard_bytes])).hexdigest()
    return f"dataset-{digest[:16]}.json"


def members(record: IndexRecord, content: bytes, class_index: dict[str, int]) -> list[tuple[str, bytes]]:
    """The files of one sample, by extension: the content, and for an image its class."""
    files = [(record["ext"], content)]
    if record["label"] is not None and record["ext"] not in ("json", "bin"):
        files.append(("cls", str(class_index[record["label"]]).encode()))
    return files


def manifest(ingested: DatasetIngested, shards: dict[str, list[ShardFile]]) -> Manifest:
    """The manifest of a dataset whose shards are written."""
    return Manifest(
        format=ingested.data.format,
        fingerprint=ingested.fingerprint,
        split_config_hash=split_config_hash(ingested.data.split),
        classes=ingested.classes,
        splits={
            split: SplitFiles(samples=sum(shard.samples for shard in shards[split]), shards=tuple(shards[split]))
            for split in SPLITS
        },
    )
