"""Scheduling cycles, repeated: from a cluster, a clock and a policy to the facts that a cycle would publish."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from contracts.base import Fact
from contracts.events.capacity import CapacityWanted
from contracts.events.run import DecisionRecord, RunAccepted, RunRejected
from contracts.scheduling import Policy
from services.scheduler.core.capacity.demand import capacity_fact, compute_demand
from services.scheduler.core.cycle_state import UNLIMITED, CycleResult
from services.scheduler.core.decisions import NOTHING_LEFT, LeftOver, fact_of
from services.scheduler.core.quarantine import run_cycle
from services.scheduler.core.state.cluster import Cluster
from services.scheduler.core.state.run import EPOCH


class CycleKey(NamedTuple):
    """The inputs of a cycle: the same for all of its decisions."""

    at_sequence: int
    at: datetime
    #: Digest of the policy.
    policy: str
    reachable_since: datetime | None
    #: Whether it computed the demand for nodes, rather than decisions about runs.
    about_nodes: bool = False
    left_over: LeftOver = NOTHING_LEFT

    @property
    def record(self) -> DecisionRecord:
        """What its facts contain about their decision."""
        return DecisionRecord(
            at_sequence=self.at_sequence,
            at=self.at,
            policy=self.policy,
            reachable_since=self.reachable_since,
            place_from=self.left_over.place,
            preempt_from=self.left_over.preempt,
        )


def key_of(fact: Fact | None) -> CycleKey | None:
    """Return the inputs that a fact was decided from; None if it is no decision, or does not contain them."""
    decision: DecisionRecord | None = getattr(fact, "decision", None)
    if decision is None:
        return None
    about_nodes = isinstance(fact, CapacityWanted)
    left_over = LeftOver(decision.place_from, decision.preempt_from)
    return CycleKey(
        decision.at_sequence, decision.at, decision.policy, decision.reachable_since, about_nodes, left_over
    )


def cycle_key_of(fact: Fact | None) -> CycleKey | None:
    """Return the cycle that decided the fact; None for an answer to a request, which no cycle decides."""
    return None if isinstance(fact, RunAccepted | RunRejected) else key_of(fact)


def replay_cycle(cluster: Cluster, key: CycleKey, policy: Policy) -> CycleResult:
    """Return the result of that cycle. ``cluster`` must be folded up to ``key.at_sequence``.

    A live cycle explains only some waiting runs, and the next one others; a replayed cycle explains all.
    """
    since = key.reachable_since or EPOCH
    return run_cycle(cluster, key.at, policy, since, max_explained=UNLIMITED, left_over=key.left_over)


def facts_of(result: CycleResult, cluster: Cluster, key: CycleKey) -> list[Fact]:
    """Return the facts of the decisions, in the order in which they were made."""
    return [fact_of(decision, cluster, key.at, key.record) for decision in result.decisions]


def demand_facts(cluster: Cluster, key: CycleKey, policy: Policy) -> list[Fact]:
    """Return the facts about demand for nodes, computed from the same cluster."""
    return [capacity_fact(demand, key.at, key.record) for demand in compute_demand(cluster, key.at, policy)]
