"""The rows of the read model, as values."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import PlainSerializer

from contracts.state.node import NodeDrain


def _utc(time_s: float) -> datetime:
    return datetime.fromtimestamp(time_s, UTC)


#: Seconds since the epoch, so that any SQL can plot them; an answer of the HTTP interface has them as RFC 3339.
Time = Annotated[float, PlainSerializer(_utc, return_type=datetime, when_used="unless-none")]


@dataclass(frozen=True, slots=True)
class Run:
    """One run as its facts so far add up."""

    run_id: str
    state: str = "requested"
    name: str = ""
    kind: str = "train"
    experiment: str = "default"
    user: str | None = None
    team: str | None = None
    priority: int = 0
    model: str | None = None
    parent_run_id: str | None = None
    #: For a run of kind evaluate: the run whose checkpoint it measures.
    evaluates: str | None = None
    #: The study whose trial it is.
    study: str | None = None
    spec: dict[str, Any] | None = None
    #: Hash of the request's body: another request under the same idempotency key is refused.
    request_hash: str | None = None
    requested_at: float | None = None
    queued_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    generation: int = 0
    next_generation: int = 0
    #: Nodes of its placement whose ranks have not ended well.
    unfinished: list[str] = field(default_factory=list)
    failures: int = 0
    slots_min: int = 0
    slots_max: int = 0
    slots_got: int = 0
    slots_wanted: int = 0
    #: Each node's part of the placement, with ``released`` once it has released its slots.
    members: list[dict[str, Any]] = field(default_factory=list)
    #: ``{"generation", "resume_step"}`` of every placement, and ``started_step`` once it trains: which metric
    #: points survive. A placement may go on from beyond its checkpoint: ranks leave their state in memory.
    placements: list[dict[str, int]] = field(default_factory=list)
    #: The slots of each placement.
    sizes: list[int] = field(default_factory=list)
    #: What every node reported when the ranks of a generation started: where from, in which environment.
    starts: list[dict[str, Any]] = field(default_factory=list)
    #: exact or samples-exact; why not exact, and since which generation.
    exactness: str | None = None
    exactness_reason: str | None = None
    inexact_since: int | None = None
    #: Why the run is where it is: a failure, a preemption, a rejection.
    reason: str | None = None
    problems: list[dict[str, str]] = field(default_factory=list)
    waiting_code: str | None = None
    waiting_message: str | None = None
    waiting_since: float | None = None
    dataset_id: str | None = None
    #: What the run amounts to, once it has completed.
    metrics: dict[str, float] = field(default_factory=dict)
    checkpoint: dict[str, Any] | None = None
    mlflow_run_id: str | None = None
    mlflow_experiment_id: str | None = None
    #: evaluated, promoted or not_promoted, once it is known.
    verdict: str | None = None
    verdict_reason: str | None = None
    model_version: int | None = None
    evaluation: dict[str, Any] | None = None
    log_tail: list[str] = field(default_factory=list)
    artifacts: list[dict[str, Any]] = field(default_factory=list)
    #: How far its ranks said they were when they ended: reports of progress are kept for some days alone.
    reached_step: int = 0
    reached_samples: int = 0
    #: Sequence of the last fact folded in.
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress that a run reports. A row of its own: PROGRESS and FACTS are read independently."""

    run_id: str
    generation: int
    step: int
    total_steps: int | None
    epoch: int
    samples_consumed: int
    #: Newest value of each metric.
    latest: dict[str, float]
    reported_at: float


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint. ``deleted_at`` is set once retention removed it."""

    uri: str
    run_id: str
    generation: int
    step: int
    epoch: int
    samples_consumed: int
    size_bytes: int
    committed_at: Time
    metrics: dict[str, float] = field(default_factory=dict)
    final: bool = False
    exactness: str = "samples-exact"
    state_digest: str | None = None
    manifest_sha256: str | None = None
    #: ``step`` is a version of the script's output folder, counted: at which step it was is not known.
    step_is_count: bool = False
    deleted_at: Time | None = None
    deleted_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """A node's present life. ``state`` is up, draining, notice, unfit, left or lost."""

    node_id: str
    incarnation: str
    state: str
    slots: int
    accelerator: str
    address: str
    memory_bytes: int
    slot_memory_bytes: int
    labels: dict[str, str]
    software: dict[str, str]
    joined_at: float
    changed_at: float
    reason: str | None = None
    #: Nodes with the same one do arithmetic with the same last bits.
    machine_digest: str = ""
    past_incarnations: list[str] = field(default_factory=list)
    #: The last decision about its drain, as ``NodeDrain`` has it.
    drain_decision: dict[str, Any] | None = None

    @property
    def last_drain(self) -> NodeDrain | None:
        return None if self.drain_decision is None else NodeDrain.model_validate(self.drain_decision)


@dataclass(frozen=True, slots=True)
class Study:
    """One search over hyper-parameters, without its trials."""

    study_id: str
    name: str
    state: str
    requested_at: float
    reason: str = ""
    #: Numbers of the best trials so far.
    best: list[int] = field(default_factory=list)
    #: How many trials it has in the end; 0: not known.
    planned_trials: int = 0
    #: Number of a trial of the search -> its state.
    trial_states: dict[str, str] = field(default_factory=dict)
    #: The metric that is optimised and min or max, where there is one alone, and its best value so far.
    objective: str | None = None
    mode: str | None = None
    best_value: float | None = None


@dataclass(frozen=True, slots=True)
class Dataset:
    """The training_datasets record."""

    dataset_id: str
    feature_store_version: str
    split_config_hash: str
    s3_path: str
    row_count: int
    created_at: Time
    split_counts: dict[str, int]
    shard_count: int
    size_bytes: int
    classes: list[str]
    manifest_uri: str
    #: Of the ingestion that it was made of; '' and None where the log does not say which that was.
    source: str = ""
    format: str | None = None
    #: Kind of fault -> records that were set aside.
    quarantined: dict[str, int] = field(default_factory=dict)
    #: The input that becomes this dataset; None: of any size of shards.
    fingerprint: str = ""
    shard_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Ingestion:
    """One ingestion of a source, and its result."""

    ingestion_id: str
    at: Time
    #: The same input, in shards of the same size, becomes the same dataset.
    fingerprint: str | None = None
    shard_bytes: int = 0
    #: What it found, as in its fact; None: it has not succeeded.
    found: dict[str, Any] | None = None
    dataset_id: str | None = None
    #: Why it, or the sharding after it, has failed.
    failed: str = ""


@dataclass(frozen=True, slots=True)
class Model:
    """One champion of a registered model; the highest version is the present one."""

    name: str
    version: int
    run_id: str
    checkpoint_uri: str
    dataset_id: str | None
    metrics: dict[str, float]
    previous_run_id: str | None
    reason: str
    rollback: bool
    promoted_at: Time


@dataclass(frozen=True, slots=True)
class RegisteredModel:
    """A registered model without its versions: what people have set for it, and what of it is served."""

    name: str
    #: The gates that are set; ``configuration`` is their version, 0: none were ever set.
    gates: dict[str, Any] = field(default_factory=dict)
    configuration: int = 0
    #: Alias -> the version that it names.
    aliases: dict[str, int] = field(default_factory=dict)
    #: The version that answers requests; None: none does. And why it is not the champion.
    served_version: int | None = None
    serving_problem: str = ""


@dataclass(frozen=True, slots=True)
class Point:
    """One value of one metric. ``kind`` system is measured by a node and placed by second, not by step."""

    run_id: str
    kind: str
    name: str
    node_id: str
    step: int
    time: float
    value: float
    generation: int
