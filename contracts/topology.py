"""Streams, consumers and buckets as data. ``services/kit/reconcile.py`` makes the server match.

Sizes and ages are what a new stream starts with; what an operator raised later is kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from contracts import subjects
from contracts.base import Event
from contracts.events import checkpoint, dataset, model, run, train

DAY_S = 86_400.0
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Stream:
    """A JetStream stream. Limits retention always: a work queue would delete what replay needs."""

    name: str
    subjects: tuple[str, ...]
    doc: str
    #: None keeps everything.
    max_bytes: int | None = None
    max_age_s: float | None = None
    max_messages_per_subject: int | None = None
    #: How long the server remembers message ids. Beyond it, expected sequences do the same job.
    duplicate_window_s: float = 120.0
    compress: bool = True
    #: Whether several messages may be published at once, all of them or none.
    atomic: bool = False


@dataclass(frozen=True, slots=True)
class Consumer:
    """A durable pull consumer: one service's place in a stream."""

    name: str
    stream: str
    events: tuple[type[Event], ...]
    doc: str
    #: Deliveries before the message goes to DEAD_LETTERS.
    max_deliver: int = 12
    ack_wait_s: float = 10.0
    #: How many messages one instance works on at a time; 1 keeps the stream's order.
    concurrency: int = 1

    @property
    def filters(self) -> tuple[str, ...]:
        return tuple(event.subject_filter() for event in self.events)


@dataclass(frozen=True, slots=True)
class Bucket:
    """A key-value bucket."""

    name: str
    doc: str
    ttl_s: float | None = None
    max_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ObjectBucket:
    """A bucket of objects of any size, kept by the bus itself."""

    name: str
    doc: str


REQUESTS = Stream("REQUESTS", subjects.ALL_REQUESTS, "What somebody wants: train, cancel, ingest, restore...")
FACTS = Stream("FACTS", subjects.ALL_FACTS, "What has happened, in one total order. The source of truth.", atomic=True)
PROGRESS = Stream(
    "PROGRESS", subjects.ALL_PROGRESS, "Metric points of running trainings.", max_bytes=4 * GIB, max_age_s=14 * DAY_S
)
LOGS = Stream("LOGS", subjects.ALL_LOGS, "Output lines of ranks.", max_bytes=4 * GIB, max_age_s=14 * DAY_S)
DEAD_LETTERS = Stream(
    "DEAD_LETTERS",
    subjects.ALL_DEAD,
    "What could not be handled, with the reason and where it came from.",
    max_bytes=1 * GIB,
    max_age_s=90 * DAY_S,
)
SHADOW = Stream("SHADOW", subjects.ALL_SHADOW, "What a candidate policy would do.", max_bytes=GIB, max_age_s=30 * DAY_S)
STREAMS: tuple[Stream, ...] = (REQUESTS, FACTS, PROGRESS, LOGS, DEAD_LETTERS, SHADOW)

LEASES = Bucket("LEASES", "Who leads and who lives: holder, time to live, and the revision as fencing token.")
JOBS = Bucket("JOBS", "Work that takes minutes: taken from a message, held by a lease until its result is out.")
RENDEZVOUS = Bucket("RENDEZVOUS", "Address and port where the ranks of one generation meet.", ttl_s=DAY_S)
BUCKETS: tuple[Bucket, ...] = (LEASES, JOBS, RENDEZVOUS)
SNAPSHOTS = ObjectBucket("SNAPSHOTS", "What the log adds up to, now and then: a shortcut for those who fold it.")
OBJECT_BUCKETS: tuple[ObjectBucket, ...] = (SNAPSHOTS,)

SCHEDULER_REQUESTS = Consumer(
    "scheduler-requests",
    REQUESTS.name,
    (train.TrainRequested, train.CancelRequested, train.RestoreRequested, train.DrainRequested, train.TuneRequested),
    "Requests the scheduler decides on.",
    # Each answer is fenced on its own, so their order does not matter.
    concurrency=16,
)
INGESTION = Consumer("ingestion", FACTS.name, (run.RunAccepted,), "Runs that bring raw data.")
INGESTION_REQUESTS = Consumer(
    "ingestion-requests", REQUESTS.name, (train.IngestRequested,), "Datasets wanted without a run."
)
SHARDING = Consumer(
    "sharding",
    FACTS.name,
    (dataset.DatasetIngested, run.RunAccepted),
    "Ingested data to be sharded, and runs that name a dataset to be looked up.",
)
CHECKPOINT = Consumer(
    "checkpoint",
    FACTS.name,
    (checkpoint.CheckpointStaged, checkpoint.CheckpointRepaired),
    "Staged checkpoints to verify and commit, repaired blobs to look at again.",
)
CHECKPOINT_REQUESTS = Consumer(
    "checkpoint-requests",
    REQUESTS.name,
    (train.PinRequested, train.ScrubRequested),
    "Checkpoints to be kept whatever retention says, and to be read back.",
)
EVALUATION = Consumer(
    "evaluation",
    FACTS.name,
    # Rejected ones too: the service's own requests may be.
    (run.RunCompleted, run.RunFailed, run.RunCancelled, run.RunRejected),
    "Runs whose result is to be measured, compared and perhaps promoted.",
)
EVALUATION_REQUESTS = Consumer(
    "evaluation-requests", REQUESTS.name, (train.PromoteRequested, train.RollbackRequested), "An operator's word."
)
TRACKING = Consumer(
    "tracking",
    FACTS.name,
    (
        run.RunAccepted,
        run.RunPrepared,
        run.RunPlaced,
        run.RunStarted,
        checkpoint.CheckpointCommitted,
        run.RunCompleted,
        run.RunFailed,
        run.RunCancelled,
        run.RunEvaluated,
        run.RunNotPromoted,
        model.ModelPromoted,
    ),
    "What MLflow is told.",
    # MLflow may be away for days: the facts wait in order, none of them is given up.
    max_deliver=-1,
)
CONSUMERS: tuple[Consumer, ...] = (
    SCHEDULER_REQUESTS,
    INGESTION,
    INGESTION_REQUESTS,
    SHARDING,
    CHECKPOINT,
    CHECKPOINT_REQUESTS,
    EVALUATION,
    EVALUATION_REQUESTS,
    TRACKING,
)


@dataclass(frozen=True, slots=True)
class Topology:
    """Everything that must exist on the server."""

    streams: tuple[Stream, ...] = field(default=STREAMS)
    consumers: tuple[Consumer, ...] = field(default=CONSUMERS)
    buckets: tuple[Bucket, ...] = field(default=BUCKETS)
    object_buckets: tuple[ObjectBucket, ...] = field(default=OBJECT_BUCKETS)
