"""Sharding's metrics."""

from __future__ import annotations

from prometheus_client import Counter, Histogram

SAMPLES = Counter("trainbus_sharding_samples_total", "Samples written into shards.", ["split"])
SHARDS = Counter("trainbus_sharding_shards_total", "Shards made.", ["split"])
SHARD_BYTES = Counter(
    "trainbus_sharding_bytes_total",
    "Bytes of shards and indexes, by outcome: sent, there (the store had them already).",
    ["outcome"],
)
JOB_SECONDS = Histogram(
    "trainbus_sharding_job_seconds",
    "Time one dataset took, by outcome: sharded, reused (it was there already), failed.",
    ["outcome"],
    buckets=(0.01, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 300, 1800, 7200, 36000),
)
GC_RUNS = Counter("trainbus_dataset_gc_runs_total", "Garbage collections, by outcome: done, failed.", ["outcome"])
GC_DELETED = Counter(
    "trainbus_dataset_gc_deleted_total", "Objects removed by garbage collection: shard, ingestion.", ["kind"]
)
GC_FREED_BYTES = Counter("trainbus_dataset_gc_freed_bytes_total", "Bytes of objects removed by garbage collection.")
