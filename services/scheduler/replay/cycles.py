"""One pass of the scheduler, made again: from a cluster, a clock and a policy to the facts it would have published."""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple

from contracts.base import Fact
from contracts.events.capacity import CapacityWanted
from contracts.events.run import DecisionRecord
from contracts.scheduling import Policy
from services.scheduler.core.capacity.demand import capacity_fact, compute_demand
from services.scheduler.core.cycle_state import CycleResult
from services.scheduler.core.decisions import fact_of
from services.scheduler.core.quarantine import run_cycle
from services.scheduler.core.state.cluster import EPOCH, Cluster

#: More than can wait.
UNLIMITED = 10**9


class CycleKey(NamedTuple):
    """What a pass was made from: the same for all of its decisions."""

    at_sequence: int
    at: datetime
    #: Digest of the policy.
    policy: str
    reachable_since: datetime | None
    #: Whether it is about nodes that are wanted, rather than about runs.
    about_nodes: bool = False


def key_of(fact: Fact | None) -> CycleKey | None:
    """The pass that a fact was decided in; None if it is no decision, or does not say."""
    decision: DecisionRecord | None = getattr(fact, "decision", None)
    if decision is None:
        return None
    about_nodes = isinstance(fact, CapacityWanted)
    return CycleKey(decision.at_sequence, decision.at, decision.policy, decision.reachable_since, about_nodes)


def replay_cycle(cluster: Cluster, key: CycleKey, policy: Policy) -> CycleResult:
    """The plan of that pass. ``cluster`` must be folded up to ``key.at_sequence``.

    A live cycle explains only some waiting runs, and the next one others; a replayed cycle explains all.
    """
    return run_cycle(cluster, key.at, policy, key.reachable_since or EPOCH, max_explained=UNLIMITED)


def facts_of(made: CycleResult, cluster: Cluster, key: CycleKey) -> list[Fact]:
    """What the decisions of a plan are published as, in the order in which they were decided."""
    stamp = DecisionRecord(
        at_sequence=key.at_sequence, at=key.at, policy=key.policy, reachable_since=key.reachable_since
    )
    return [fact_of(decision, cluster, key.at, stamp) for decision in made.decisions]


def wanted_of(cluster: Cluster, key: CycleKey, policy: Policy) -> list[Fact]:
    """Return the facts about demand for nodes, computed from the same cluster."""
    stamp = DecisionRecord(
        at_sequence=key.at_sequence, at=key.at, policy=key.policy, reachable_since=key.reachable_since
    )
    return [capacity_fact(each, key.at, stamp) for each in compute_demand(cluster, key.at, policy)]


def stamped(fact: Any, decision: DecisionRecord | None) -> Any:
    """The fact with this word on what it was decided from, if it is of a kind that says so."""
    if "decision" not in type(fact).model_fields or fact.decision == decision:
        return fact
    return fact.model_copy(update={"decision": decision})
