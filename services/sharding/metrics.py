"""Sharding's metrics."""

from __future__ import annotations

from prometheus_client import Counter, Histogram

SAMPLES = Counter("trainbus_sharding_samples_total", "Samples written into shards.", ["split"])
SHARDS = Counter("trainbus_sharding_shards_total", "Shards uploaded.", ["split"])
SHARD_BYTES = Counter("trainbus_sharding_bytes_total", "Bytes of shards uploaded.", ["split"])
JOB_SECONDS = Histogram(
    "trainbus_sharding_job_seconds",
    "Time one dataset took, by outcome: sharded, reused (it was there already), failed.",
    ["outcome"],
    buckets=(0.01, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 300, 1800, 7200, 36000),
)
