"""The sharding service's own settings."""

from __future__ import annotations

from pydantic import Field

from contracts.machine_limits import usable_cores
from services.kit.settings import Settings
from services.kit.store.objects import REUSE_AGE_S

DAY_S = 86_400.0


class ShardingSettings(Settings):
    #: Shards that are written at the same time, of all datasets together.
    sharding_workers: int = Field(default_factory=lambda: min(usable_cores(), 4), ge=1)
    #: Local disk for copies of packs, for each of the two datasets that may be under way.
    sharding_disk_bytes: int = Field(8 * 2**30, ge=2**20)
    dataset_gc_every_s: float = Field(6 * 3600.0, gt=0)
    #: Objects younger than this are never garbage.
    dataset_gc_grace_s: float = Field(48 * 3600.0, ge=4 * REUSE_AGE_S)
    #: How long packs remain after the ingestion's dataset is made, for datasets with other shards.
    dataset_keep_packs_s: float = Field(7 * DAY_S, ge=4 * REUSE_AGE_S)
