"""What a dataset looks like in the object store: shared by ingestion, sharding, worker and trainer.

Everything that is hashed is canonical JSON, so that the same content has the same name everywhere.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal, TypedDict

from pydantic import BaseModel, ConfigDict, Field

from contracts.base import Sha256
from contracts.events.dataset import ShardFile
from contracts.events.train import Split

Format = Literal["images", "jsonl", "parquet", "text"]
#: Every manifest names all three, even those without samples.
SPLITS = ("train", "validation", "test")


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


def pack_name(number: int) -> str:
    """The pack's object beside the index."""
    return f"pack-{number:05d}"


class _Format(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class SplitFiles(_Format):
    """One split's shards, in order."""

    samples: int = Field(ge=0)
    shards: tuple[ShardFile, ...] = ()


class Manifest(_Format):
    """``manifest.json``; the SHA-256 of its bytes is the dataset's id."""

    version: Literal[1] = 1
    format: Format
    fingerprint: Sha256
    split_config_hash: Sha256
    classes: tuple[str, ...] = ()
    splits: dict[str, SplitFiles]

    def to_bytes(self) -> bytes:
        """The canonical bytes, those that are stored and hashed."""
        return canonical_json(self.model_dump(mode="json"))

    @property
    def size_bytes(self) -> int:
        return sum(shard.size_bytes for split in self.splits.values() for shard in split.shards)


def dataset_uri(bucket: str, dataset_id: str, path: str = "manifest.json") -> str:
    """Where a file of a dataset is; ``path`` as the manifest names it."""
    return f"s3://{bucket}/datasets/{dataset_id}/{path}"
