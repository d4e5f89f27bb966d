"""Streams, consumers, buckets, and who publishes and reads each event, as data.

``services/kit/reconcile.py`` makes the server match. Sizes and ages are what a new stream starts with; what an operator
raised later is kept. ``python -m tests.contracts.generate`` writes the tables of docs/design.md and docs/events.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from contracts import subjects
from contracts.base import Event, Request
from contracts.earlier_events import subject_filters
from contracts.events import BY_NAME, BY_TYPE
from contracts.events import FACTS as ALL_FACTS
from contracts.events import REQUESTS as ALL_REQUESTS

# The streams belong to the topology; what needs no events imports them from their own module.
from contracts.streams import DAY_S
from contracts.streams import DEAD_LETTERS as DEAD_LETTERS
from contracts.streams import FACTS as FACTS
from contracts.streams import LOGS as LOGS
from contracts.streams import PROGRESS as PROGRESS
from contracts.streams import REQUESTS as REQUESTS
from contracts.streams import SHADOW as SHADOW
from contracts.streams import STREAMS as STREAMS
from contracts.streams import Stream as Stream


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
    def service(self) -> str:
        return self.name.removesuffix("-requests")

    @property
    def filters(self) -> tuple[str, ...]:
        return tuple(subject for event in self.events for subject in subject_filters(event))


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


LEASES = Bucket("LEASES", "Who leads and who lives: holder, time to live, and the revision as fencing token.")
JOBS = Bucket("JOBS", "Work that takes minutes: taken from a message, held by a lease until its result is out.")
RENDEZVOUS = Bucket("RENDEZVOUS", "Address and port where the ranks of one generation meet.", ttl_s=DAY_S)
OUTPUTS = Bucket(
    "OUTPUTS",
    "What the nodes without rank 0 have in their output folders: the address of each one's newest list.",
    # Garbage collection may have removed what an older list names.
    ttl_s=2 * DAY_S,
)
BUCKETS: tuple[Bucket, ...] = (LEASES, JOBS, RENDEZVOUS, OUTPUTS)
SNAPSHOTS = ObjectBucket("SNAPSHOTS", "What the log adds up to, now and then: a shortcut for those who fold it.")
OBJECT_BUCKETS: tuple[ObjectBucket, ...] = (SNAPSHOTS,)


def _events(*, requests: str = "", **facts: str) -> tuple[type[Event], ...]:
    """Return the requests of these verbs and the facts of these names, given by their aggregate."""
    listed = [f"trainbus.{aggregate}.{name}" for aggregate, names in facts.items() for name in names.split()]
    listed += [f"trainbus.{verb}.requested" for verb in requests.split()]
    return tuple(BY_NAME[name] for name in listed)


SCHEDULER_REQUESTS = Consumer(
    "scheduler-requests",
    REQUESTS.name,
    _events(requests="train cancel restore drain undrain adopt_policy"),
    "Requests the scheduler decides on.",
    # Each answer is fenced on its own, so their order does not matter.
    concurrency=16,
)
INGESTION = Consumer("ingestion", FACTS.name, _events(run="accepted"), "Runs that bring raw data.")
INGESTION_REQUESTS = Consumer(
    "ingestion-requests", REQUESTS.name, _events(requests="ingest"), "Datasets wanted without a run."
)
SHARDING = Consumer(
    "sharding",
    FACTS.name,
    _events(dataset="ingested", run="accepted"),
    "Ingested data to be sharded, and runs that name a dataset to be looked up.",
)
CHECKPOINT = Consumer(
    "checkpoint",
    FACTS.name,
    _events(run="checkpoint_staged checkpoint_repaired"),
    "Staged checkpoints to verify and commit, repaired blobs to verify.",
    # A run waits for them: the store may be away for days, and none of them is given up.
    max_deliver=-1,
)
CHECKPOINT_REQUESTS = Consumer(
    "checkpoint-requests",
    REQUESTS.name,
    _events(requests="pin scrub"),
    "Checkpoints to pin against retention, and to read back.",
)
EVALUATION = Consumer(
    "evaluation",
    FACTS.name,
    # Rejected ones too: the service's own requests may be.
    _events(run="completed failed cancelled rejected"),
    "Runs whose result is to be measured, compared and perhaps promoted.",
)
EVALUATION_REQUESTS = Consumer(
    "evaluation-requests",
    REQUESTS.name,
    _events(requests="promote rollback configure approve stage"),
    "Requests of operators.",
)
TUNING_REQUESTS = Consumer(
    "tuning-requests", REQUESTS.name, _events(requests="tune stop_study"), "Studies to begin and to stop."
)
TRACKING = Consumer(
    "tracking",
    FACTS.name,
    _events(
        run="accepted prepared placed started checkpoint_committed completed failed cancelled evaluated not_promoted",
        model="promoted staged",
    ),
    "Facts that are mirrored to MLflow.",
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
    TUNING_REQUESTS,
    TRACKING,
)


@dataclass(frozen=True, slots=True)
class Topology:
    """Everything that must exist on the server."""

    streams: tuple[Stream, ...] = field(default=STREAMS)
    consumers: tuple[Consumer, ...] = field(default=CONSUMERS)
    buckets: tuple[Bucket, ...] = field(default=BUCKETS)
    object_buckets: tuple[ObjectBucket, ...] = field(default=OBJECT_BUCKETS)


# -- who publishes and reads what ---------------------------------------------


@dataclass(frozen=True, slots=True)
class ServiceEvents:
    """The events that a service publishes, and those that it reads besides its durable consumers'."""

    publishes: tuple[type[Event], ...] = ()
    follows: tuple[type[Event], ...] = ()


_STUDY_FACTS = (
    "accepted rejected trial_suggested trial_reported trial_pruned trial_paused trial_resumed trial_ended completed "
    "stopped"
)
#: Every other system: it publishes requests and may read everything.
CLIENTS = "clients"
SERVICES: dict[str, ServiceEvents] = {
    "scheduler": ServiceEvents(
        publishes=_events(
            run="accepted rejected staging queued waiting reserved placed stopping cancelling completed failed "
            "cancelled "
            # Of parts that only the scheduler, or only the agent of the node takes to run.
            "released",
            node="lost draining undrained",
            capacity="wanted",
            policy="adopted",
            request="refused",
        ),
        # It fences on the sequence of every fact about a run.
        follows=tuple(
            fact
            for fact in ALL_FACTS
            if subjects.parts(fact.subject_filter())[0] in ("run", "node", "capacity", "policy")
        ),
    ),
    "ingestion": ServiceEvents(
        _events(dataset="ingested ingest_failed progress", run="prepare_failed", request="refused")
    ),
    "sharding": ServiceEvents(_events(dataset="sharded shard_failed progress", run="prepared prepare_failed")),
    "worker": ServiceEvents(
        publishes=_events(
            node="joined left notice staged unfit",
            run="held_up started stalled straggler starved released exited progress log checkpoint_staged "
            "checkpoint_repaired",
        ),
        # Whether the log supports a placement follows from what was accepted and queued.
        follows=_events(
            run="accepted staging queued placed stopping released exited completed failed cancelled "
            "checkpoint_committed checkpoint_refused checkpoint_rotten",
            node="joined lost draining",
        ),
    ),
    "checkpoint": ServiceEvents(
        # It rebuilds a manifest from the facts (``checkpoint_repaired``), and requests a scrub every few days.
        publishes=_events(
            run="checkpoint_committed checkpoint_refused checkpoint_deleted checkpoint_pinned checkpoint_rotten "
            "checkpoint_repaired",
            requests="scrub",
            request="refused",
        ),
        follows=_events(
            run="accepted placed exited completed failed cancelled evaluated checkpoint_staged checkpoint_committed "
            "checkpoint_refused checkpoint_deleted checkpoint_pinned checkpoint_rotten",
            model="promoted",
        ),
    ),
    "evaluation": ServiceEvents(
        # An evaluation is a run of its own.
        publishes=_events(
            run="evaluated promotion_pending promoted not_promoted",
            model="promoted configured approved staged",
            requests="train",
            request="refused",
        ),
        # What the run cost follows from its placements.
        follows=_events(
            run="accepted prepared completed failed cancelled rejected evaluated promotion_pending promoted "
            "not_promoted checkpoint_committed checkpoint_deleted placed released exited",
            model="promoted configured approved staged",
        ),
    ),
    "tuning": ServiceEvents(
        # A trial is a run of its own.
        publishes=_events(study=_STUDY_FACTS, requests="train cancel", request="refused"),
        follows=_events(
            study=_STUDY_FACTS, run="accepted rejected prepared cancelling completed failed cancelled progress"
        ),
    ),
    "autoscaler": ServiceEvents(
        publishes=_events(requests="drain"),
        follows=_events(
            node="joined left lost draining undrained notice",
            capacity="wanted",
            policy="adopted",
            run="placed released exited",
        ),
    ),
    "tracking": ServiceEvents(publishes=_events(run="tracked"), follows=_events(run="progress")),
    "serving": ServiceEvents(
        publishes=_events(model="deployed deploy_failed deploy_delayed"),
        # A run that trains for a model says that a server is wanted soon.
        follows=_events(
            model="promoted deployed deploy_failed", run="accepted prepared completed evaluated checkpoint_committed"
        ),
    ),
    # It publishes what its HTTP clients ask for.
    "gateway": ServiceEvents(publishes=ALL_REQUESTS, follows=tuple(BY_TYPE.values())),
}


class WrongProducer(Exception):
    """A service publishes an event that belongs to another one."""


def producers_of(event: type[Event]) -> tuple[str, ...]:
    """Return who may publish the event: services, and the clients for requests."""
    found = tuple(name for name, service in SERVICES.items() if event in service.publishes)
    return (CLIENTS, *found) if issubclass(event, Request) else found


def consumers_of(event: type[Event]) -> tuple[str, ...]:
    """Return the services that read the event."""
    handlers = {consumer.service for consumer in CONSUMERS if event in consumer.events}
    return tuple(name for name, service in SERVICES.items() if name in handlers or event in service.follows)


def stream_of(event: type[Event]) -> Stream:
    """Return the stream that keeps the event."""
    return next(
        stream
        for stream in STREAMS
        if any(subjects.matches(pattern, event.subject_filter()) for pattern in stream.subjects)
    )


def compatibility_of(event: type[Event]) -> str:
    """Return what may change about the event within its version, in words."""
    if issubclass(event, Request):
        return "optional fields are added, limits are loosened; unknown fields are refused"
    return "optional fields are added; readers ignore unknown fields and check no limits of recorded values"


def require_producer(service: str, event: type[Event]) -> None:
    """Check that a service publishes only its own events. Other names (tools, tests) are checked by NATS permissions.

    Raises:
        WrongProducer: the event belongs to other services.
    """
    if service in SERVICES and event not in SERVICES[service].publishes:
        producers = ", ".join(producers_of(event)) or "no service"
        raise WrongProducer(f"{service} may not publish {event.type}: it belongs to {producers}")
