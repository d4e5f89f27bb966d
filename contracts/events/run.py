"""Facts about a run: its whole life, in order, on ``run.<run_id>.<fact>``."""

from __future__ import annotations

import hashlib
import json
from datetime import datetime
from typing import Literal

from pydantic import Field

from contracts import subjects
from contracts.base import Fact, FactPart, Instant, ObjectUri, Sha256, Token
from contracts.checkpoint_ref import CheckpointRef as CheckpointRef
from contracts.problems import FieldProblem
from contracts.spec.run import DatasetName, RunSpec


class RunFact(Fact, aggregate="run", id_field="run_id"):
    run_id: Token


class GenerationFact(RunFact, occurrence="generation"):
    """A fact of one placement. What an older generation says is ignored everywhere."""

    generation: int = Field(ge=1)


class Member(FactPart):
    """One node's part of a placement."""

    node_id: Token
    #: Which of the node's slots; the ranks run on them in this order.
    slots: tuple[int, ...]
    ranks: tuple[int, ...]


class DecisionRecord(FactPart):
    """From what the scheduler decided: enough to make the decision again, and compare."""

    #: Sequence of the last fact that it had folded.
    at_sequence: int
    #: Its clock.
    at: Instant
    #: Digest of the policy.
    policy: str = ""
    #: From when on agents could reach the bus.
    reachable_since: Instant | None = None
    #: The runs with which placing and the search for victims went on, because the cycle before had left them over.
    place_from: str | None = None
    preempt_from: str | None = None


class RunAccepted(RunFact, fact="accepted"):
    """The request is valid and will be run as soon as its data and its slots are there."""

    spec: RunSpec
    request_id: str
    request_source: str
    #: Set when the request starts from another run's checkpoint.
    parent_run_id: str | None = None
    decision: DecisionRecord | None = None


class RunRejected(RunFact, fact="rejected"):
    """The request can never run as it is; ``problems`` say what to change."""

    name: str | None = None
    reason: str
    problems: tuple[FieldProblem, ...] = ()
    decision: DecisionRecord | None = None


class PreparedDataset(FactPart):
    """A dataset that is sharded and verified."""

    dataset_id: Sha256
    manifest_uri: ObjectUri
    train_samples: int
    validation_samples: int = 0
    test_samples: int = 0


class RunPrepared(RunFact, fact="prepared"):
    """The run's data is sharded and verified. Where it has names, the other fields are of the first by name."""

    dataset_id: Sha256
    manifest_uri: ObjectUri
    train_samples: int
    validation_samples: int = 0
    test_samples: int = 0
    datasets: dict[DatasetName, PreparedDataset] = Field(default_factory=dict)

    @property
    def by_name(self) -> dict[str, PreparedDataset]:
        """All datasets; '' is the name of an only one without a name."""
        if self.datasets:
            return self.datasets
        return {"": PreparedDataset(**self.model_dump(include=set(PreparedDataset.model_fields)))}

    @property
    def identity(self) -> Sha256:
        """What two runs on the same data have in common: the dataset's id, or a hash of all names and ids."""
        if not self.datasets:
            return self.dataset_id
        named = sorted((name, each.dataset_id) for name, each in self.datasets.items())
        return hashlib.sha256(json.dumps(named).encode()).hexdigest()


class RunPrepareFailed(RunFact, fact="prepare_failed"):
    """The run's data cannot be used; the scheduler fails the run with this reason."""

    reason: str


class RunStaging(RunFact, fact="staging"):
    """The files of a script's data are copied to these nodes; the run is queued once they are there."""

    node_ids: tuple[Token, ...]
    dataset: RunPrepared
    #: Seconds after which it is queued in any case.
    limit_s: float = Field(gt=0)
    decision: DecisionRecord | None = None


QueueReason = Literal["new", "preempted", "resized", "node lost", "crashed"]


class RunQueued(RunFact, fact="queued", occurrence="next_generation"):
    """The run waits for slots. ``next_generation`` is what its placement will be."""

    next_generation: int = Field(ge=1)
    reason: QueueReason = "new"
    #: Failures by the run's own fault so far.
    failures: int = 0
    decision: DecisionRecord | None = None


class RunWaiting(RunFact, fact="waiting", occurrence="next_generation/decided_at_sequence"):
    """Why the run is not placed. Published when the kind of reason changes, not at every decision."""

    next_generation: int
    #: Which constraint binds, in a word: slots, infeasible, priority, quota, reserved...
    code: str
    message: str
    decided_at_sequence: int = 0
    decision: DecisionRecord | None = None


class RunPlaced(GenerationFact, fact="placed"):
    """These ranks run on these slots, from this checkpoint on (None: from the beginning)."""

    members: tuple[Member, ...]
    world_size: int = Field(ge=1)
    resume: CheckpointRef | None = None
    #: The checkpoint that it begins with (``spec.init_from``): of a Task as long as there is nothing to resume.
    init: CheckpointRef | None = None
    spec: RunSpec
    dataset: RunPrepared | None = None
    #: Sequence of the last fact, and the time, that the decision was made from: it can be re-made.
    decided_at_sequence: int
    decided_at: Instant
    #: The slots the run would like to have: more than it got when it was shrunk.
    wanted_slots: int = 0
    #: How many generations of the run have ended unasked, and for how many seconds it has had slots in total. The
    #: interval between checkpoints follows from both.
    failures_seen: int = Field(0, ge=0)
    run_s: float = Field(0.0, ge=0)
    decision: DecisionRecord | None = None


class RunReserved(RunFact, fact="reserved"):
    """A run that waits for many slots is promised its start: nothing is placed that would hold it up."""

    next_generation: int = Field(ge=1)
    #: It starts by then as long as the runs that hold its slots keep their limits.
    #: It may be centuries ahead, where limits are: no check of its own.
    start_by: datetime
    node_ids: tuple[Token, ...] = ()
    decision: DecisionRecord | None = None

    @property
    def occurrence(self) -> str:
        at_sequence = self.decision.at_sequence if self.decision else 0
        return f"{self.next_generation}/{at_sequence}"


class RunStarted(GenerationFact, fact="started", occurrence="generation/node_id"):
    """The ranks on this node train (rank 0's node says from which sample)."""

    node_id: Token
    step: int = 0
    samples_consumed: int = 0
    #: Where the state came from. ``memory``: from ranks of the generation before that outlived it, beyond its
    #: last committed checkpoint; what that generation reported up to ``step`` then stands.
    resumed_from: Literal["scratch", "checkpoint", "memory"] = "checkpoint"
    #: What decides the last bits of arithmetic: machine, libraries, threads. And a hash of it.
    environment: dict[str, str] = Field(default_factory=dict)
    environment_digest: Sha256 | None = None
    exactness: Literal["exact", "samples-exact"] = "samples-exact"


class RunHeldUp(GenerationFact, fact="held_up", occurrence="generation/node_id"):
    """The ranks on this node cannot begin: others have not come to the rendezvous."""

    node_id: Token
    #: Host and port of rank 0; empty: its node has not published them.
    address: str
    missing_ranks: tuple[int, ...]
    #: Where they were placed.
    missing_nodes: tuple[Token, ...]
    waited_s: float


class RunStalled(GenerationFact, fact="stalled", occurrence="generation/node_id/rank/step"):
    """A rank has made no step for many times the median; ``stacks`` say where every rank of the node is."""

    node_id: Token
    rank: int
    step: int
    silent_s: float
    median_step_s: float
    on_stall: Literal["observe", "restart", "exclude"] = "observe"
    #: One text a rank.
    stacks: dict[str, str] = Field(default_factory=dict)


class RunStraggler(GenerationFact, fact="straggler", occurrence="generation/rank/step"):
    """A rank's own work takes longer than the others', who wait for it in every step."""

    node_id: Token
    rank: int
    step: int
    #: The rank's own seconds a step over the median of all ranks.
    factor: float
    over_steps: int


class RunStarved(GenerationFact, fact="starved", occurrence="generation/rank/step"):
    """A rank waits for its data: the accelerator stands idle for a part of each step."""

    node_id: Token
    rank: int
    step: int
    #: Share of the time since the last look that was spent waiting for data, and how long that time was.
    wait_share: float
    over_s: float
    over_steps: int
    #: Where the time goes: shards that are not on the node yet, reading, decoding, or the batch's way to the device.
    bound_by: Literal["fetch", "read", "decode", "transfer"]
    #: What would help.
    hint: str


#: Why a placement is stopped.
StopReason = Literal[
    "preempted",  # another run gets its slots
    "resized",  # it goes on with more or fewer slots
    "cancelled",  # somebody asked for its end
    "run_over",  # the run was over when it was placed
    "time_limit",  # it has had its slots for as long as it may
    "quota_spent",  # its team has used up the slot-hours of the period
    "drained",  # a node of it is being emptied
    "maintenance",  # a node of it has to be empty soon
    "notice",  # a machine of it is about to be taken away
    "released",  # a node of it has released its ranks unasked
    "unfit",  # a device of it has failed its check
    "stalled",  # a rank of it makes no step
    "start_deadline",  # ranks of it have not started in time
    "node_lost",  # a node of it is lost
    "infrastructure",  # ranks of it have failed by a fault of their node or of the store
    "crashed",  # ranks of it have failed by the run's own fault
]
#: The run is not at fault: a node or the store is.
NODE_FAULTS: frozenset[StopReason] = frozenset({"unfit", "stalled", "start_deadline", "node_lost", "infrastructure"})
#: The placement is broken already: its other ranks hang in a collective.
BREAKS: frozenset[StopReason] = NODE_FAULTS | {"crashed"}


def queue_reason_of(reason: StopReason) -> QueueReason:
    """Return why a run is queued again that was stopped for ``reason``."""
    if reason in NODE_FAULTS:
        return "node lost"
    return reason if reason in ("crashed", "resized") else "preempted"


class RunStopping(GenerationFact, fact="stopping", version=2):
    """The ranks must checkpoint and release their slots within ``grace_s``; 0: at once, without a checkpoint."""

    reason: StopReason
    #: The same for people, with what it was about.
    message: str
    grace_s: float = Field(ge=0)
    #: What becomes of the run once every node has released its slots.
    then: Literal["queue", "cancel", "fail"] = "queue"
    #: The run that gets the slots.
    preemptor: Token | None = None
    #: Slot-seconds that the restart costs (work lost, and the time to resume), and those that it gains.
    cost_slot_s: float | None = None
    gain_slot_s: float | None = None
    decision: DecisionRecord | None = None


class RunReleased(GenerationFact, fact="released", occurrence="generation/node_id"):
    """The ranks on this node ended because they were asked to; their slots are free."""

    node_id: Token
    #: Whether everything trained in this generation is in a committed checkpoint.
    clean: bool = True
    step: int = 0
    samples_consumed: int = 0
    detail: str = ""


class Artifact(FactPart):
    """A file that a run produced, in the object store."""

    name: str
    uri: ObjectUri
    sha256: Sha256
    size_bytes: int


class RunExited(GenerationFact, fact="exited", occurrence="generation/node_id"):
    """The ranks on this node ended by themselves: done, or failed. Their slots are free."""

    node_id: Token
    outcome: Literal["succeeded", "failed"]
    #: Failed through no fault of the run (a node's trouble): it does not count as an attempt.
    infrastructure_failure: bool = False
    #: The request itself is at fault (weights that do not fit the model): another attempt would end alike.
    permanent: bool = False
    #: It failed before its first step: the same reason twice in a row is final, too.
    made_no_step: bool = False
    #: The exception's last line and its place in the user's code, or the last line of output.
    reason: str = ""
    rank: int | None = None
    exit_code: int | None = None
    log_tail: tuple[str, ...] = ()
    step: int = 0
    samples_consumed: int = 0
    metrics: dict[str, float] = Field(default_factory=dict)
    artifacts: tuple[Artifact, ...] = ()
    #: What the author should know of a run that ended well: that it kept no file, and what to do.
    notice: str = ""


class RunCompleted(RunFact, fact="completed"):
    """Every rank ended well; the last checkpoint holds the result."""

    generation: int
    checkpoint: CheckpointRef | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    artifacts: tuple[Artifact, ...] = ()
    #: What the author should know: that the run kept no file, and what to do.
    notice: str = ""
    decision: DecisionRecord | None = None


class RunFailed(RunFact, fact="failed"):
    """The run is over and has no result; ``reason`` says what to change."""

    generation: int = 0
    reason: str
    log_tail: tuple[str, ...] = ()
    decision: DecisionRecord | None = None


class RunCancelling(RunFact, fact="cancelling"):
    """A request to stop the run for good came. ``cancelled`` follows once its ranks have released their slots."""

    reason: str


class RunCancelled(RunFact, fact="cancelled"):
    """The run was stopped for good by request."""

    reason: str
    decision: DecisionRecord | None = None


class RunTracked(RunFact, fact="tracked", occurrence="mlflow_run_id"):
    """The run's page in the tracking system."""

    mlflow_run_id: str
    mlflow_experiment_id: str


class GateVerdict(FactPart):
    """What one gate found about a candidate, with the numbers."""

    #: ``threshold``, ``improvement``, ``latency``... or ``slice class=cat``.
    name: str
    #: None: the gate waits for somebody (an approval, a reproduction).
    passed: bool | None
    value: float | None = None
    limit: float | None = None
    #: Confidence interval of ``value``.
    interval: tuple[float, float] | None = None
    #: The verdict in a sentence.
    words: str = ""


class RunEvaluated(RunFact, fact="evaluated"):
    """The run's result was measured on the test split and compared with the champion's."""

    evaluation_run_id: Token
    metrics: dict[str, float]
    champion_run_id: str | None = None
    champion_metrics: dict[str, float] = Field(default_factory=dict)
    report: tuple[Artifact, ...] = ()
    #: What each gate found, against this version of the champion, under this version of the model's configuration (0:
    #: none). A candidate that is judged again against a later champion has those verdicts in its last fact.
    gates: tuple[GateVerdict, ...] = ()
    champion_version: int | None = None
    configuration: int = 0


class RunPromotionPending(RunFact, fact="promotion_pending", occurrence="awaits"):
    """The run's result passed every other gate; its promotion waits for a person or for a second training."""

    model: Token
    awaits: Literal["approval", "reproduction"]
    reason: str
    gates: tuple[GateVerdict, ...] = ()


class RunPromoted(RunFact, fact="promoted"):
    """The run's result is the model's champion."""

    model: Token
    version: int
    reason: str


class RunNotPromoted(RunFact, fact="not_promoted"):
    """The run's result did not become champion, and why."""

    model: Token
    reason: str
    #: What each gate found; none where the candidate could not be judged.
    gates: tuple[GateVerdict, ...] = ()


class ProgressPoint(FactPart):
    """Metric values at one step. ``time`` is seconds since the epoch, set once by the trainer."""

    step: int
    time: float
    values: dict[str, float]


class RunProgress(RunFact, fact="progress", occurrence="generation/kind/node_id/rank/offset"):
    """A batch of metric points, on ``progress.<run_id>``: many a second, kept for a while only."""

    generation: int
    node_id: str
    #: Place of the batch in the rank's journal; with generation and rank it identifies the batch.
    rank: int
    offset: int
    points: tuple[ProgressPoint, ...]
    #: ``training`` points are the run's own; ``system`` ones are measured by the node's agent.
    kind: Literal["training", "system"] = "training"
    step: int = 0
    total_steps: int | None = None
    epoch: int = 0
    samples_consumed: int = 0
    #: Parameters and tags that the script has set for its page in MLflow.
    params: dict[str, str] = Field(default_factory=dict)
    tags: dict[str, str] = Field(default_factory=dict)

    @classmethod
    def subject_filter(cls) -> str:
        return subjects.progress()

    @property
    def subject(self) -> str:
        return subjects.progress(self.run_id)


class RunLog(RunFact, fact="log", occurrence="generation/rank/offset"):
    """Lines of output of one rank, on ``log.<run_id>.<rank>``."""

    generation: int
    rank: int
    offset: int
    lines: tuple[str, ...]

    @classmethod
    def subject_filter(cls) -> str:
        return subjects.log()

    @property
    def subject(self) -> str:
        return subjects.log(self.run_id, self.rank)


#: Facts after which nothing more happens to the run itself.
TERMINAL: tuple[type[RunFact], ...] = (RunRejected, RunCompleted, RunFailed, RunCancelled)
