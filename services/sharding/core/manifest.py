"""The manifest of a dataset, and the name of its journal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from contracts.datasets import (
    LAYOUT_VERSION,
    SPLITS,
    FieldStatistics,
    Manifest,
    SplitFiles,
    plan_id,
    split_config_hash,
)
from contracts.events.dataset import DatasetIngested, ShardFile

#: Formats whose samples have one size and lie in flat files.
FLAT = ("text", "tokens")


def journal_name(fingerprint: str, shard_bytes: int) -> str:
    """Return the name of the object that lists finished shards while others are written."""
    return f"shards-{plan_id(fingerprint, shard_bytes)}.json"


def build_manifest(
    ingested: DatasetIngested,
    shards: Mapping[str, Sequence[ShardFile]],
    statistics: Mapping[str, FieldStatistics] | None = None,
) -> Manifest:
    """Return the manifest of a dataset whose shards are written."""
    return Manifest(
        format=ingested.data.format,
        # A text's tokens are its bytes.
        token_bytes={"text": 1, "tokens": ingested.data.token_bytes}.get(ingested.data.format),
        source=ingested.data.source,
        fingerprint=ingested.fingerprint,
        made_by={"layout": LAYOUT_VERSION},
        split=ingested.data.split,
        split_config_hash=split_config_hash(ingested.data.split),
        classes=ingested.classes,
        statistics=dict(statistics or {}),
        splits={
            split: SplitFiles(samples=sum(shard.samples for shard in shards[split]), shards=tuple(shards[split]))
            for split in SPLITS
        },
    )
