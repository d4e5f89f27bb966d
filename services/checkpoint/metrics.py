"""The checkpoint service's metrics. Labels are bounded: never a run or a file."""

from __future__ import annotations

from prometheus_client import Counter, Histogram

from services.kit.metrics import counter

COMMITTED = Counter("trainbus_checkpoints_committed_total", "Checkpoints that can be restored from now on.")
REFUSED = counter(
    "trainbus_checkpoints_refused_total",
    "Checkpoints that will never be committed, by cause: parts (the ranks' parts do not fit), files (missing or "
    "wrong in the store), digests (the ranks disagree about a tensor), manifest (another is there), error (it could "
    "not be read, again and again).",
    cause=("parts", "files", "digests", "manifest", "error"),
)
IGNORED = counter(
    "trainbus_checkpoints_ignored_total",
    "Staged parts of no consequence, by cause: zombie (an older generation's), known (settled before), superseded "
    "(retention would delete the checkpoint at once: newer ones are committed).",
    cause=("zombie", "known", "superseded"),
)
COMMIT_SECONDS = Histogram(
    "trainbus_checkpoint_commit_seconds",
    "From the last part arriving to the commit: verifying the files and writing the manifest.",
    buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300),
)
VERIFIED_BYTES = Counter("trainbus_checkpoint_verified_bytes_total", "Bytes read back from the store and hashed.")
DELETED = Counter("trainbus_checkpoints_deleted_total", "Checkpoints removed by retention.")
PINNED = counter(
    "trainbus_checkpoints_pinned_total", "Requests to pin or unpin that were done.", **{"as": ("pinned", "unpinned")}
)
SCRUBS = counter("trainbus_checkpoint_scrubs_total", "Scrubs, by outcome: done, failed.", outcome=("done", "failed"))
SCRUBBED_BYTES = Counter("trainbus_checkpoint_scrubbed_bytes_total", "Bytes read back from the store by scrubs.")
ROTTEN = Counter("trainbus_checkpoint_rotten_blobs_total", "Blobs (or manifests) that are missing or no longer fit.")
REPAIRED = counter(
    "trainbus_checkpoint_repaired_blobs_total",
    "Repairs that were looked at: right, wrong (still rotten).",
    **{"as": ("right", "wrong")},
)
GC_RUNS = counter(
    "trainbus_checkpoint_gc_runs_total", "Garbage collections, by outcome: done, failed.", outcome=("done", "failed")
)
GC_DELETED = counter(
    "trainbus_checkpoint_gc_deleted_total",
    "Objects removed by garbage collection: blob, manifest.",
    kind=("blob", "manifest"),
)
GC_FREED_BYTES = Counter("trainbus_checkpoint_gc_freed_bytes_total", "Bytes of blobs removed by garbage collection.")
