"""What the HTTP interface answers: the response models, and how rows become them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from contracts.base import TOKEN_PATTERN
from contracts.events.capacity import PolicyOrigin
from contracts.main_metric import choose_main_metric
from contracts.metric_names import describe_absent_metrics
from contracts.problems import FieldProblem
from contracts.run_states import TERMINAL_STATES
from contracts.state.node import NodeDrain
from services.gateway.core import rows


def _time(value: Any) -> Any:
    return datetime.fromtimestamp(value, UTC) if isinstance(value, (int, float)) else value


#: Rows hold seconds since the epoch, answers RFC 3339.
Time = Annotated[datetime, BeforeValidator(_time)]


class View(BaseModel):
    #: NaN and infinity travel as text, as in facts: JSON has no number for them.
    model_config = ConfigDict(from_attributes=True, ser_json_inf_nan="strings")


class StoredPackage(BaseModel):
    """A code package in the object store: the ``code`` of a request that runs it."""

    uri: str
    sha256: str


class LakeObject(View):
    """An object of the lake; ``etag`` is its MD5, or that of its parts' MD5s."""

    uri: str
    key: str
    size_bytes: int
    etag: str
    modified_at: datetime


class LakePage(View):
    """Some of the lake, in the order of keys."""

    bucket: str
    #: Beginnings of the keys of more objects, each up to a ``/``.
    folders: list[str] = []
    objects: list[LakeObject] = []
    #: Gets the next page; None after the last one.
    next_cursor: str | None = None


class PutObject(View):
    """An object that was stored."""

    uri: str
    size_bytes: int
    etag: str


class LakePart(View):
    """A part of an upload; of a completed one, the number of parts and the object's ETag."""

    number: int
    etag: str


class LakeUpload(View):
    """An upload that has begun, and the parts that have arrived."""

    upload_id: str
    parts: list[LakePart] = []


class LakeParts(BaseModel):
    """The ETags of all parts, in order."""

    etags: list[str] = Field(min_length=1, max_length=10_000)


class AcceptedEvent(View):
    """The request is on the bus; a fact shows its result."""

    request_id: str
    #: Subject of the fact that says why it was refused, should it be.
    refusal: str
    #: The same request had been published before.
    duplicate: bool = False
    sequence: int


class AcceptedRequest(AcceptedEvent):
    """The request is on the bus; the run's facts show its result."""

    run_id: str
    state: str = "requested"
    parent_run_id: str | None = None


class AcceptedStudyRequest(AcceptedEvent):
    """The request is on the bus; the study's facts show its result."""

    study_id: str


class AcceptedIngestionRequest(AcceptedEvent):
    """The request is on the bus; the ingestion's facts show its result."""

    ingestion_id: str


class TrialView(View):
    """A trial of a study: its parameters, and what it has reached."""

    trial: int
    #: Its present run, and all of them: a trial that was resumed has several.
    run_id: str
    run_ids: list[str]
    state: str
    purpose: str
    params: dict[str, Any]
    values: list[float]
    #: Epoch -> a value for each objective.
    reports: dict[int, list[float]]
    metrics: dict[str, float]
    reason: str = ""


class StudyView(View):
    """A study as its facts add up."""

    study_id: str
    name: str
    state: str
    reason: str = ""
    #: Numbers of the best trials so far.
    best: list[int] = Field(default_factory=list)
    #: When it was requested; None where a single study is shown.
    requested_at: Time | None = None
    #: How many trials it has in the end, and how many of the search are in each state.
    planned_trials: int = 0
    trials_by_state: dict[str, int] = Field(default_factory=dict)
    #: The metric that is optimised and min or max, where there is one alone, and its best value so far.
    objective: str | None = None
    mode: str | None = None
    best_value: float | None = None
    #: Slots that its runs hold now; 0 where a single study is shown.
    allocated_slots: int = 0
    trials: list[TrialView] = Field(default_factory=list)


class Slots(View):
    min: int
    max: int
    got: int
    wanted: int


class WaitingReason(View):
    code: str
    message: str
    since: Time


class LastCheckpoint(View):
    uri: str
    step: int
    epoch: int
    samples_consumed: int
    committed_at: Time | None = None
    #: ``step`` is a version of the script's output folder, counted: at which step it was is not known.
    step_is_count: bool = False


class BestCheckpoint(View):
    """The checkpoint that is the best by the metric that the request names."""

    uri: str
    step: int
    epoch: int
    metric: str
    #: min or max: what is better.
    mode: str
    value: float
    #: ``step`` is a version of the script's output folder, counted: at which step it was is not known.
    step_is_count: bool = False


class MainMetric(View):
    """The one metric that a list shows of a run."""

    name: str
    value: float


class RunSummary(View):
    """A run as it stands."""

    run_id: str
    name: str
    kind: str
    #: One of ``contracts.state.run.STATES``.
    state: str
    terminal: bool
    #: evaluated, awaiting_approval, awaiting_reproduction, promoted or not_promoted.
    verdict: str | None
    verdict_reason: str | None
    experiment: str
    user: str | None
    team: str | None
    priority: int
    model: str | None
    #: The version that it was promoted to.
    model_version: int | None
    #: The version by which it is the champion of its model now; None: it is not, or no longer.
    champion_version: int | None = None
    parent_run_id: str | None
    #: For a run of kind evaluate: the run whose checkpoint it measures.
    evaluates: str | None = None
    #: The study whose trial it is.
    study: str | None = None
    slots: Slots
    generation: int
    #: Placements after the first.
    restarts: int
    #: Failures by the run's own fault.
    failures: int
    step: int
    total_steps: int | None
    epoch: int
    samples_consumed: int
    #: When the run last reported its progress.
    reported_at: Time | None
    #: Newest value of each metric; a completed run's own results last.
    metrics: dict[str, float]
    #: What the last evaluation found: metrics, the champion's and the gates; None before there is one.
    evaluation: dict[str, Any] | None
    #: The metric by which it is evaluated.
    evaluation_metric: str | None
    params: dict[str, Any]
    #: Nodes that it holds slots of, and the slots of each of its placements so far.
    nodes: list[str]
    sizes: list[int]
    #: Of the evaluation if there is one, else of the training; None before there is any.
    main_metric: MainMetric | None = None
    last_checkpoint: LastCheckpoint | None
    dataset_id: str | None
    reason: str | None
    #: exact or samples-exact; None before it has started, and where it means nothing.
    exactness: str | None
    exactness_reason: str | None
    #: The generation from which on it is not exact to the bit.
    inexact_since: int | None
    waiting: WaitingReason | None
    requested_at: Time | None
    queued_at: Time | None
    started_at: Time | None
    ended_at: Time | None
    mlflow_run_id: str | None
    mlflow_experiment_id: str | None


class Page(View):
    """A part of a list."""

    next_cursor: str | None = Field(default=None, description="give it as `cursor` for what comes after")


class RunPage(Page):
    """Runs, newest first."""

    runs: list[RunSummary]
    #: With ``counts=true``: column (state, kind, user, team, model) -> value -> how many runs have it.
    counts: dict[str, dict[str, int]] | None = None


class Studies(Page):
    studies: list[StudyView]


class TimelineEntry(View):
    """One fact of a run in one line."""

    sequence: int
    time: Time
    type: str
    fact: str
    summary: str


class RunDetail(RunSummary):
    """Everything the read model knows about a run."""

    spec: dict[str, Any] | None
    members: list[dict[str, Any]]
    placements: list[dict[str, int]]
    #: What each node's ranks reported when they started: from where, in which environment.
    starts: list[dict[str, Any]]
    problems: list[FieldProblem]
    #: None if no checkpoint has a metric that the request names.
    best_checkpoint: BestCheckpoint | None = None
    #: Of the last checkpoint: the same for the same state on any number of ranks.
    state_digest: str | None = None
    #: How fast it has trained in the last minute; None while that is not known.
    steps_per_s: float | None = None
    log_tail: list[str]
    artifacts: list[dict[str, Any]]
    #: What is probably a mistake in its request: metrics that it names, and that its first epoch did not report.
    warnings: list[str] = []
    #: Place in the log of the newest fact on its own subjects.
    sequence: int = 0
    #: Its newest facts.
    timeline: list[TimelineEntry]


class Fact(TimelineEntry):
    """One fact with its data and its place in the chain of causes."""

    subject: str
    event_id: str
    causation_id: str
    correlation_id: str
    run_id: str | None
    data: dict[str, Any]


class Range(View):
    """A part of a stream of events."""

    #: Pass it as ``Last-Event-ID`` to go on from here.
    last_event_id: int
    has_more: bool = Field(description="whether more was there, after `last_event_id`")


class Facts(Range):
    events: list[Fact]


class CloudEvent(View):
    """An event of the bus in the structured form of CloudEvents 1.0."""

    specversion: str = "1.0"
    id: str
    source: str
    type: str
    time: datetime
    subject: str
    correlationid: str
    causationid: str
    #: Its place in its stream.
    sequence: int
    natssubject: str
    #: Without fields that have their defaults.
    data: dict[str, Any]


class CloudEvents(Range):
    events: list[CloudEvent]


class MetricBatch(View):
    """A batch of metric points as a rank reported it."""

    generation: int
    kind: str
    node_id: str
    rank: int
    step: int
    total_steps: int | None = None
    epoch: int
    samples_consumed: int
    points: list[dict[str, Any]]


class Metrics(Range):
    batches: list[MetricBatch]


class Curves(Page):
    """Metric curves without what was abandoned: name -> [[step, value], ...], thinned to ``max_points``.

    They are in the order of the names; ``next_cursor`` stands for those of the further metrics.
    """

    run_id: str
    curves: dict[str, list[tuple[int, float]]]


class LogBatch(View):
    generation: int
    rank: int
    offset: int
    lines: list[str]


class Logs(Range):
    batches: list[LogBatch]


class Checkpoints(Page):
    """Committed checkpoints of a run, the newest first, deleted ones too."""

    checkpoints: list[rows.Checkpoint]
    #: The best of those that are not deleted.
    best: BestCheckpoint | None = None


class RunFile(View):
    """A file of a run, and where its bytes are served."""

    path: str
    size_bytes: int
    sha256: str
    url: str


class CheckpointFiles(View):
    checkpoint: rows.Checkpoint
    files: list[RunFile]


class Artifacts(View):
    artifacts: list[RunFile]


class Why(View):
    """Why a run is where it is. ``answered_by`` is scheduler, or read model when that does not answer."""

    run_id: str
    state: str
    message: str
    answered_by: str
    #: The scheduler's whole answer.
    answer: dict[str, Any] = Field(default_factory=dict)


class BusySlot(View):
    """A slot of a node, and the rank that has it."""

    slot: int
    run_id: str
    rank: int


class Node(View):
    node_id: str
    state: str
    slots: int
    used: int
    accelerator: str
    address: str
    memory_bytes: int
    slot_memory_bytes: int
    labels: dict[str, str]
    software: dict[str, str]
    incarnation: str
    joined_at: Time
    changed_at: Time
    reason: str | None
    #: Who drained it, when and why; None: it is not drained.
    drain: NodeDrain | None = None
    #: Nodes with the same one do arithmetic with the same last bits.
    machine_digest: str
    #: Runs that hold slots here.
    runs: list[str]
    #: Run -> its name.
    run_names: dict[str, str] = {}
    busy: list[BusySlot] = []


class About(View):
    """What a page needs to know of the stack: its version, and where MLflow's pages are, if they are served."""

    version: str
    mlflow_url: str | None


class Nodes(Page):
    nodes: list[Node]


@dataclass(frozen=True, slots=True)
class Dataset(rows.Dataset):
    #: Runs that have trained on it, or were evaluated with it.
    run_count: int = 0


class Datasets(Page):
    datasets: list[Dataset]


class Ingestions(Page):
    ingestions: list[rows.Ingestion]


class DatasetChampion(View):
    """A model that the result of a run was promoted to."""

    model: str
    version: int
    promoted_at: Time
    metrics: dict[str, float]
    #: Whether it is the present champion.
    champion: bool


class DatasetUse(View):
    """A run that trained on a dataset, or was evaluated with it."""

    run_id: str
    name: str
    kind: str
    state: str
    #: The checkpoint that its weights were initialised from.
    init_from: str | None = None
    champions: list[DatasetChampion] = []


class DatasetDetail(View):
    """A dataset, the ingestions that it was made from, the runs that used it, and the models that they became."""

    dataset_id: str
    manifest_uri: str
    #: None: the log does not have it, but the store may.
    dataset: Dataset | None
    #: The first ones.
    ingestions: list[rows.Ingestion]
    #: The newest ones, the oldest of them first.
    runs: list[DatasetUse]


class DatasetChoice(View):
    """The datasets that are verified, by their ids or beginnings of them; none: all that are known."""

    datasets: list[str] = []


class DatasetRepair(View):
    """An ingestion that the dataset was made from, and the paths of its damaged shards; none: all are read."""

    ingestion_id: str = Field(pattern=TOKEN_PATTERN)
    files: list[str] = []


class RepairedDataset(View):
    """What was deleted, and the ingestion that was asked for to make it again."""

    deleted: list[str]
    ingestion_id: str


class SourceVerification(View):
    """The objects that a dataset was made of, and those of them that are gone or have changed since."""

    source: str
    objects: int
    #: False: it is a folder of a machine.
    is_compared: bool = False
    changed_count: int = 0
    #: The first of them.
    changed: list[str] = []


class IngestionView(View):
    """An ingestion that has read its source."""

    ingestion_id: str
    #: The hash of what it has read, and of how.
    fingerprint: str
    #: None: its dataset is not all in the store yet.
    dataset_id: str | None


@dataclass(frozen=True, slots=True)
class ModelVersion(rows.Model):
    champion: bool = False
    #: What its training reported of its checkpoint. ``metrics`` are of its evaluation, and absent where it had none.
    training_metrics: dict[str, float] = field(default_factory=dict)


class Models(Page):
    models: list[ModelVersion]


class PendingPromotion(View):
    """A run that passed every other gate, and what its promotion waits for."""

    run_id: str
    name: str
    #: approval or reproduction.
    awaits: str
    reason: str | None


class RegisteredModel(View):
    """A registered model as it stands."""

    model: str
    #: None: no run was promoted yet.
    champion: ModelVersion | None
    aliases: dict[str, int]
    #: The version that answers requests; None: none does. And why it is not the champion.
    served_version: int | None
    serving_problem: str
    #: Those that are set.
    gates: dict[str, Any]
    #: Version of the gates; 0: none were ever set.
    configuration: int
    #: The oldest 100.
    pending: list[PendingPromotion]


class RegisteredModels(Page):
    models: list[RegisteredModel]


class AcceptedNodeRequest(AcceptedEvent):
    """The request is on the bus; the node's facts show its result."""

    node_id: str


class AcceptedModelRequest(AcceptedEvent):
    """The request is on the bus; the model's facts show its result."""

    model: str


class AdoptedPolicy(View):
    """The scheduler's policy in force, and how it came to be."""

    name: str
    digest: str
    adopted_at: datetime
    #: The scheduler that published it.
    adopted_by: str
    #: default: nobody has chosen it; setting: the first scheduler was started with it; request. None: in an old log.
    origin: PolicyOrigin | None
    settings: list[str]
    user: str
    reason: str
    policy: dict[str, Any]


class AcceptedPolicyRequest(AcceptedEvent):
    """The request is on the bus; ``GET /policy`` has its digest once the policy is in force."""

    digest: str


def run_fields(row: Mapping[Any, Any]) -> dict[str, Any]:
    """A ``runs`` row in the shape of ``RunSummary``."""
    metrics, evaluation = {**(row["latest"] or {}), **row["metrics"]}, row["evaluation"] or {}
    # What reports no progress still has the position of its checkpoint.
    saved = row["checkpoint"] or {}
    saved_step = 0 if saved.get("step_is_count") else saved.get("step", 0)
    wanted = (row["spec"] or {}).get("evaluation")
    waiting = None
    if row["waiting_message"] is not None:
        waiting = {"code": row["waiting_code"], "message": row["waiting_message"], "since": row["waiting_since"]}
    return {
        **row,
        "terminal": row["state"] in TERMINAL_STATES,
        "slots": {
            "min": row["slots_min"],
            "max": row["slots_max"],
            "got": row["slots_got"],
            "wanted": row["slots_wanted"],
        },
        "metrics": metrics,
        "evaluation_metric": wanted and wanted["metric"],
        "params": (row["spec"] or {}).get("params") or {},
        "nodes": [member["node_id"] for member in row["members"] if not member["released"]],
        "main_metric": choose_main_metric(metrics, evaluation.get("metrics") or {}, wanted and wanted["metric"]),
        "step": max(row["step"] or 0, saved_step, row["reached_step"]),
        "epoch": max(row["epoch"] or 0, saved.get("epoch", 0)),
        "samples_consumed": max(row["samples_consumed"] or 0, saved.get("samples_consumed", 0), row["reached_samples"]),
        "restarts": max(row["generation"] - 1, 0),
        "last_checkpoint": row["checkpoint"],
        "waiting": waiting,
    }


def find_warnings(fields: Mapping[str, Any]) -> list[str]:
    """Return what is probably a mistake in the request of a run, which is in the shape of ``RunSummary``."""
    return describe_absent_metrics(
        fields["spec"] or {},
        fields["metrics"],
        epoch=fields["epoch"],
        is_ended=fields["state"] == "completed",
        is_evaluated=fields["evaluation"] is not None,
    )


def timeline_fields(row: Mapping[Any, Any]) -> dict[str, Any]:
    """An ``events`` row in the shape of ``Fact``."""
    return {**row, "fact": row["subject"].rsplit(".", 1)[-1]}


def is_settled(row: Mapping[Any, Any]) -> bool:
    """Whether no further fact about the run is to be expected, its verdict included."""
    if row["state"] not in TERMINAL_STATES:
        return False
    evaluation = (row["spec"] or {}).get("evaluation")
    return row["state"] != "completed" or not evaluation or row["verdict"] in ("promoted", "not_promoted")
