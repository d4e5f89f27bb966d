"""The metrics of the worker."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from services.kit.metrics import counter

#: Where a shard was: on this node, in the shared folder, in the store.
TIERS = ("hot", "warm", "cold")

SLOTS = Gauge("trainbus_worker_slots", "Slots that this node offers.")
SLOTS_USED = Gauge("trainbus_worker_slots_used", "Slots used by generations on this node.")
RANKS_RUNNING = Gauge("trainbus_worker_ranks_running", "Rank processes alive on this node.")
PLACEMENTS = counter(
    "trainbus_worker_placements_total",
    "Placements that ended here, by how: succeeded, failed, released, dropped.",
    outcome=("succeeded", "failed", "released", "dropped"),
)
UNSUPPORTED = counter(
    "trainbus_worker_unsupported_facts_total",
    "Facts on which this node would have acted and that nothing in the log supports: somebody else published them.",
    fact=("placed", "completed"),
)
RANK_STARTS = counter(
    "trainbus_worker_rank_starts_total", "Ranks started, by way: warm (forked) or cold.", way=("warm", "cold")
)
PREPARE_SECONDS = Histogram(
    "trainbus_worker_prepare_seconds",
    "Seconds to prepare a generation before its ranks start: code, data, checkpoint, rendezvous.",
    buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800),
)
STAGING_SECONDS = Histogram(
    "trainbus_worker_staging_seconds",
    "Seconds to copy the files of a script's data to this node before its run is placed.",
    buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800),
)
UPLOAD_SECONDS = Histogram(
    "trainbus_worker_checkpoint_upload_seconds",
    "Seconds from a checkpoint's last local rank to its staging.",
    buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300),
)
UPLOAD_BYTES = Counter(
    "trainbus_worker_checkpoint_bytes_total", "Bytes of staged checkpoints, sent or already in the store."
)
SENT_BYTES = Counter("trainbus_worker_checkpoint_sent_bytes_total", "Bytes of checkpoints that the store did not have.")
JOURNAL_LAG_BYTES = Gauge("trainbus_worker_journal_lag_bytes", "Journal bytes written by ranks and not yet published.")
BAD_LINES = Counter("trainbus_worker_bad_journal_lines_total", "Journal lines that could not be read and were skipped.")
CACHE_LOOKUPS = counter(
    "trainbus_worker_cache_lookups_total", "Files requested from the node's cache.", result=("hit", "miss")
)
CACHE_BYTES = Gauge("trainbus_worker_cache_bytes", "Size of the node's cache.")
JOINS = Counter(
    "trainbus_worker_joins_total", "Times that this agent joined: after its start, and after it was declared lost."
)
REATTACHED = Counter("trainbus_worker_reattached_total", "Generations whose ranks a restarted agent found running.")
STALLS = Counter("trainbus_worker_stalls_total", "Times that a rank here made no progress for too long.")
STARVED = counter(
    "trainbus_worker_starved_total",
    "Times that a rank here waited for its data, by cause.",
    bound_by=("fetch", "read", "decode", "transfer"),
)
NOTICES = counter(
    "trainbus_worker_notices_total",
    "Notices that the machine will be taken away, or may.",
    source=("signal", "slurm", "kubernetes", "ec2", "gcp", "azure"),
)
DEVICE_CHECKS = counter(
    "trainbus_worker_device_checks_total", "Checks of devices before a run, by result.", result=("passed", "failed")
)
SHARDS_BYTES = Gauge("trainbus_worker_shards_bytes", "Size of the dataset shards on this node.")
SHARD_BYTES = counter(
    "trainbus_worker_shard_bytes_total",
    "Bytes of shards used, by tier: hot (this node), warm (the shared folder), cold (the store).",
    tier=TIERS,
)
SHARD_EVICTIONS = Counter("trainbus_worker_shard_evictions_total", "Shards deleted to make room for others.")
SHARDS_CORRUPTED = counter(
    "trainbus_worker_shards_corrupted_total", "Shards whose content did not match their hash, by tier.", tier=TIERS
)
SHARDS_AHEAD_SECONDS = Gauge(
    "trainbus_worker_shards_ahead_seconds", "Seconds until a rank here needs a shard that is not here yet."
)
SHARD_WAIT_SECONDS = Histogram(
    "trainbus_worker_shard_wait_seconds",
    "Seconds that a rank waited for a shard that was not here.",
    buckets=(0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300),
)
