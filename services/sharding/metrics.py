"""Sharding's metrics."""

from __future__ import annotations

from prometheus_client import Counter, Histogram

from contracts.datasets import SPLITS
from services.kit.metrics import counter, initialize_series

SAMPLES = counter("trainbus_sharding_samples_total", "Samples written into shards.", split=SPLITS)
SHARDS = counter("trainbus_sharding_shards_total", "Shards made.", split=SPLITS)
SHARD_BYTES = counter(
    "trainbus_sharding_bytes_total",
    "Bytes of shards and indexes, by outcome: sent, there (the store had them already).",
    outcome=("sent", "there"),
)
JOB_SECONDS = initialize_series(
    Histogram(
        "trainbus_sharding_job_seconds",
        "Time one dataset took, by outcome: sharded, reused (it was there already), failed.",
        ["outcome"],
        buckets=(0.01, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 300, 1800, 7200, 36000),
    ),
    ("sharded", "reused", "failed"),
)
GC_RUNS = counter(
    "trainbus_dataset_gc_runs_total", "Garbage collections, by outcome: done, failed.", outcome=("done", "failed")
)
GC_DELETED = counter(
    "trainbus_dataset_gc_deleted_total",
    "Objects removed by garbage collection: shard, ingestion.",
    kind=("shard", "ingestion"),
)
GC_FREED_BYTES = Counter("trainbus_dataset_gc_freed_bytes_total", "Bytes of objects removed by garbage collection.")
