"""What the scheduler can decide, in the imperative, and the fact that each becomes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Literal, NamedTuple

from contracts.events.node import NodeLost
from contracts.events.run import (
    Artifact,
    CheckpointRef,
    DecisionRecord,
    Member,
    QueueReason,
    RunAccepted,
    RunCancelled,
    RunCompleted,
    RunFact,
    RunFailed,
    RunPlaced,
    RunQueued,
    RunRejected,
    RunReserved,
    RunStaging,
    RunStopping,
    RunWaiting,
    StopReason,
)
from contracts.problems import FieldProblem
from contracts.scheduling import Policy
from contracts.spec.run import RunSpec
from services.scheduler.core.place.resource_request import useful
from services.scheduler.core.price import Price
from services.scheduler.core.state.cluster import Cluster

#: Which constraint binds, in a word.
Code = Literal[
    "slots",
    "infeasible",
    "priority",
    "no nodes",
    "fragmented",
    "draining",
    "paused",
    "quota",
    "ceiling",
    "reserved",
    "maintenance",
    "uncommitted",
]


@dataclass(frozen=True, slots=True)
class AcceptRun:
    run_id: str
    spec: RunSpec
    parent_run_id: str | None = None


@dataclass(frozen=True, slots=True)
class RejectRun:
    run_id: str
    name: str | None
    reason: str
    problems: tuple[FieldProblem, ...] = ()


@dataclass(frozen=True, slots=True)
class StageRun:
    """Have the files of a script's data on these nodes before it is queued."""

    run_id: str
    node_ids: tuple[str, ...]
    limit_s: float


@dataclass(frozen=True, slots=True)
class QueueRun:
    run_id: str
    next_generation: int
    reason: QueueReason
    failures: int


@dataclass(frozen=True, slots=True)
class PlaceRun:
    run_id: str
    generation: int
    members: tuple[Member, ...]
    resume: CheckpointRef | None


@dataclass(frozen=True, slots=True)
class StopRun:
    run_id: str
    generation: int
    reason: StopReason
    message: str
    grace_s: float
    then: Literal["queue", "cancel", "fail"] = "queue"
    preemptor: str | None = None
    price: Price | None = None


@dataclass(frozen=True, slots=True)
class CompleteRun:
    run_id: str
    generation: int
    checkpoint: CheckpointRef | None
    metrics: tuple[tuple[str, float], ...]
    artifacts: tuple[Artifact, ...]
    notice: str = ""


@dataclass(frozen=True, slots=True)
class FailRun:
    run_id: str
    generation: int
    reason: str
    log_tail: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CancelRun:
    run_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class ExplainRun:
    """Say why a run still waits; decided only when the kind of reason has changed."""

    run_id: str
    next_generation: int
    code: Code
    message: str


@dataclass(frozen=True, slots=True)
class ReserveRun:
    """Promise a run that waits when it will start."""

    run_id: str
    next_generation: int
    start_by: datetime
    node_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LoseNode:
    node_id: str
    incarnation: str
    reason: str


#: Decisions published in one cycle. The next cycle makes the others again, from newer facts: a burst of ten thousand
#: requests must not delay the first placement.
MAX_FACTS_PER_CYCLE = 1000
#: Runs placed in one cycle: each of them may need a ``queued`` fact too.
MAX_PLACEMENTS_PER_CYCLE = MAX_FACTS_PER_CYCLE // 2


class LeftOver(NamedTuple):
    """The runs with which the steps of the next cycle go on, because there was too much work for one cycle."""

    place: str | None = None
    preempt: str | None = None


NOTHING_LEFT = LeftOver()

Decision = StageRun | QueueRun | PlaceRun | StopRun | CompleteRun | FailRun | CancelRun | ExplainRun | ReserveRun


def in_order(decisions: Iterable[Decision]) -> list[Decision]:
    """Return the decisions of one cycle in the order of publication.

    The decisions about placed runs come first, then endings and preemptions, explanations last.
    """
    listed = list(decisions)
    placed = {decision.run_id for decision in listed if isinstance(decision, PlaceRun)}
    return sorted(listed, key=lambda each: (isinstance(each, ExplainRun), each.run_id not in placed))


def decision_record(
    cluster: Cluster,
    now: datetime,
    policy: Policy,
    reachable_since: datetime | None = None,
    left_over: LeftOver = NOTHING_LEFT,
) -> DecisionRecord:
    """Return the inputs of a cycle, which its facts record."""
    return DecisionRecord(
        at_sequence=cluster.sequence,
        at=now,
        policy=policy.digest,
        reachable_since=reachable_since,
        place_from=left_over.place,
        preempt_from=left_over.preempt,
    )


FACTS_WITH_THE_SAME_FIELDS: dict[type[Decision], type[RunFact]] = {
    QueueRun: RunQueued,
    FailRun: RunFailed,
    CancelRun: RunCancelled,
    ReserveRun: RunReserved,
}


def fact_of(decision: Decision, cluster: Cluster, now: datetime, made: DecisionRecord | None = None) -> RunFact:
    """The fact that this decision, made from ``cluster`` at ``now``, is published as."""
    run_id = decision.run_id
    made = made or DecisionRecord(at_sequence=cluster.sequence, at=now)
    match decision:
        case QueueRun() | FailRun() | CancelRun() | ReserveRun():
            same = {each.name: getattr(decision, each.name) for each in fields(decision)}
            return FACTS_WITH_THE_SAME_FIELDS[type(decision)](**same, decision=made)
        case StageRun():
            return RunStaging(
                run_id=run_id,
                node_ids=decision.node_ids,
                dataset=cluster.runs[run_id].dataset,
                limit_s=decision.limit_s,
                decision=made,
            )
        case PlaceRun():
            known = cluster.runs[run_id]
            return RunPlaced(
                run_id=run_id,
                generation=decision.generation,
                members=decision.members,
                world_size=sum(len(member.slots) for member in decision.members),
                resume=decision.resume,
                init=known.init,
                spec=known.spec,
                dataset=known.dataset,
                decided_at_sequence=cluster.sequence,
                decided_at=now,
                wanted_slots=useful(known, known.spec.slots.max),
                failures_seen=known.failures_seen,
                run_s=known.run_s,
                decision=made,
            )
        case StopRun():
            return RunStopping(
                run_id=run_id,
                generation=decision.generation,
                reason=decision.reason,
                message=decision.message,
                grace_s=decision.grace_s,
                then=decision.then,
                preemptor=decision.preemptor,
                cost_slot_s=decision.price.cost_slot_s if decision.price is not None else None,
                gain_slot_s=decision.price.gain_slot_s if decision.price is not None else None,
                decision=made,
            )
        case CompleteRun():
            return RunCompleted(
                run_id=run_id,
                generation=decision.generation,
                checkpoint=decision.checkpoint,
                metrics=dict(decision.metrics),
                artifacts=decision.artifacts,
                notice=decision.notice,
                decision=made,
            )
        case ExplainRun():
            return RunWaiting(
                run_id=run_id,
                next_generation=decision.next_generation,
                code=decision.code,
                message=decision.message,
                decided_at_sequence=cluster.sequence,
                decision=made,
            )


def answer_fact(
    answer: AcceptRun | RejectRun, request_id: str, request_source: str, made: DecisionRecord | None = None
) -> RunAccepted | RunRejected:
    """The fact that answers a request. ``made``: from what was folded when it was answered."""
    if isinstance(answer, AcceptRun):
        return RunAccepted(
            run_id=answer.run_id,
            spec=answer.spec,
            request_id=request_id,
            request_source=request_source,
            parent_run_id=answer.parent_run_id,
            decision=made,
        )
    return RunRejected(
        run_id=answer.run_id, name=answer.name, reason=answer.reason, problems=answer.problems, decision=made
    )


def lost_fact(decision: LoseNode) -> NodeLost:
    return NodeLost(node_id=decision.node_id, incarnation=decision.incarnation, reason=decision.reason)
