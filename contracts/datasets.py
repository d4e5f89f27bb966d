"""What a dataset looks like in the object store: shared by ingestion, sharding, worker and trainer.

Everything that is hashed is canonical JSON, so that the same content has the same name everywhere.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal, NotRequired, TypedDict

from pydantic import BaseModel, ConfigDict, Field

from contracts.base import Sha256
from contracts.events.dataset import ShardFile
from contracts.spec.data import Split

Format = Literal["images", "jsonl", "csv", "parquet", "text", "tokens", "binary", "webdataset", "mds"]
#: Every manifest names all three, even those without samples.
SPLITS = ("train", "validation", "test")
#: Changes whenever the same index results in other shards.
LAYOUT_VERSION = 3


def canonical_json(value: Any) -> bytes:
    """The one way to write ``value``: sorted keys, no spaces, UTF-8.

    Raises:
        ValueError: NaN or infinity, or text that is no Unicode (a lone surrogate).
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def split_config_hash(split: Split) -> str:
    """The hash that two datasets split in the same way share."""
    return hashlib.sha256(canonical_json(split.model_dump(mode="json"))).hexdigest()


class IndexRecord(TypedDict):
    """One accepted record, a line of an ingestion's ``index.jsonl`` (sorted by ``key``)."""

    key: str
    split: str
    #: Where it was read from, and the version that was read.
    uri: str
    etag: str
    #: Byte offset (jsonl, text) or row number (parquet) in the source object; null: the whole object.
    offset: int | None
    label: str | None
    #: Extension of the sample's file in a shard: png, json, bin...
    ext: str
    #: Size and hash of the content as it goes into a shard.
    size: int
    sha256: str
    #: Number of the pack that holds a copy, and where in it; null: read it from ``uri``.
    pack: int | None
    pack_offset: int | None
    #: Extensions and sizes of its files where it has more than one: they lie one after the other in the pack, and
    #: ``ext``, ``size`` and ``sha256`` are the first's, and those of all of it. null: one file, ``ext``.
    fields: NotRequired[list[tuple[str, int]] | None]
    #: XXH3-128 of a content that lies in a pack, in hex: what sharding compares, a tenth of the price of SHA-256.
    xxh3: NotRequired[str]


def pack_name(number: int) -> str:
    """The pack's object beside the index."""
    return f"pack-{number:05d}"


class _Format(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class SplitFiles(_Format):
    """One split's shards, in order."""

    samples: int = Field(ge=0)
    shards: tuple[ShardFile, ...] = ()


class FieldStatistics(_Format):
    """One numeric field over the train split, in float64, merged in a fixed order."""

    count: int
    nulls: int = 0
    mean: float
    #: Of the population.
    std: float
    min: float
    max: float


class Manifest(_Format):
    """``manifest.json``; the SHA-256 of its bytes is the dataset's id."""

    version: Literal[2] = 2
    format: Format
    #: Samples of one size in flat files, as integers of this many bytes; null: ustar archives.
    token_bytes: Literal[1, 2, 4] | None = None
    #: What it was made of: the ingestion's settings and listing, and where they are.
    source: str
    fingerprint: Sha256
    #: Versions of the algorithms that made it.
    made_by: dict[str, int] = Field(default_factory=dict)
    split: Split
    split_config_hash: Sha256
    classes: tuple[str, ...] = ()
    statistics: dict[str, FieldStatistics] = Field(default_factory=dict)
    splits: dict[str, SplitFiles]

    def to_bytes(self) -> bytes:
        """The canonical bytes, those that are stored and hashed."""
        return canonical_json(self.model_dump(mode="json"))

    @property
    def size_bytes(self) -> int:
        return sum(shard.size_bytes for split in self.splits.values() for shard in split.shards)


def dataset_uri(bucket: str, dataset_id: str) -> str:
    """Where the manifest of a dataset is."""
    return f"s3://{bucket}/datasets/{dataset_id}/manifest.json"


def shard_uri(bucket: str, sha256: str) -> str:
    """Where a shard, or its index, is: under its hash, so that datasets share what they have in common."""
    return f"s3://{bucket}/shards/{sha256[:2]}/{sha256}"


def ingestion_uri(bucket: str, fingerprint: str, name: str = "") -> str:
    """Where what an ingestion found is: ``index.jsonl``, ``quarantine.jsonl``, ``statistics.json``, ``done.json``."""
    return f"s3://{bucket}/ingestions/{fingerprint}" + (f"/{name}" if name else "")


def plan_id(fingerprint: str, shard_bytes: int) -> str:
    """The id of what becomes of one input: the same index, cut into shards of one size, in this layout."""
    return hashlib.sha256(canonical_json([LAYOUT_VERSION, fingerprint, shard_bytes])).hexdigest()[:16]


def link_name(fingerprint: str, shard_bytes: int) -> str:
    """The name of the object that links this input to its dataset, beside the ingestion's index."""
    return f"dataset-{plan_id(fingerprint, shard_bytes)}.json"
