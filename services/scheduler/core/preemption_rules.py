"""Who may preempt whom, and by what rule."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, NamedTuple

from contracts.scheduling import Policy
from services.scheduler.core.cycle_state import CycleState
from services.scheduler.core.order import queue
from services.scheduler.core.order.share import AHEAD_HALF_LIVES
from services.scheduler.core.price import is_resumable
from services.scheduler.core.quota.entitlements import held
from services.scheduler.core.state.cluster import Cluster, Run
from services.scheduler.core.state.index import Key, RunCache


class PreemptionRule(NamedTuple):
    """Why a run may have the slots of another, and how long that one keeps them at least."""

    rule: Literal["quota", "share", "order", "turn", "ahead"]
    granted_s: float


@dataclass(slots=True, eq=False)
class AllocatedRun:
    """A run whose slots could go to another run (slots on draining nodes could not)."""

    run: Run
    key: Key
    slots: int
    #: When it got them, in seconds since the epoch.
    placed_s: float
    #: When its key changes, if nothing happens, in seconds since the epoch.
    until_s: float = math.inf

    @property
    def spare(self) -> int:
        """Slots by which it can shrink."""
        return max(self.slots - self.run.spec.slots.min, 0)


class AllocatedRuns(RunCache[AllocatedRun]):
    """Allocated runs as of the last cycle."""

    #: What all of them follow from, beside the facts about the run itself.
    state: Hashable = None


def allocated_runs(cluster: Cluster, now: datetime, policy: Policy) -> list[AllocatedRun]:
    """Return every run with slots on schedulable nodes; those without a new fact are known from the last cycle."""
    index = cluster.index
    # Where it is not known until when a key stays, it holds for this time alone.
    state = (
        policy.digest,
        queue.wait_limits(cluster, policy),
        index.nodes_version,
        None if queue.has_stable_keys(policy) else now,
    )
    known = index.find_cache(AllocatedRuns)
    if known.state != state:
        known.clear()
        known.state = state
    # A key changes a little before it has changed for sure.
    soon_s = now.timestamp() + 2 * queue.AFTER_S
    closed = {node.node_id for node in cluster.nodes.values() if not node.is_schedulable}
    found = []
    for run_id in cluster.active:
        each = known.get(run_id)
        if each is None or each.until_s <= soon_s:
            each = _allocated_run(cluster, cluster.runs[run_id], now, policy, closed)
            if each is None:
                continue
            known[run_id] = each
        found.append(each)
    return found


def _allocated_run(cluster: Cluster, run: Run, now: datetime, policy: Policy, closed: set[str]) -> AllocatedRun | None:
    slots = sum(len(part.slots) for part in run.live if part.node_id not in closed) if closed else run.slot_count
    if not slots:
        return None
    key, until_s = queue.holder_key(cluster, run, now, policy)
    return AllocatedRun(run, key, slots, run.placed_at.timestamp(), until_s)


class PreemptionRules:
    """The rules of one cycle."""

    def __init__(self, cycle: CycleState, preemptible: list[AllocatedRun]) -> None:
        self.cycle, self.policy, self.preemptible = cycle, cycle.policy, preemptible
        #: The number of leading keys that decide which run may preempt which.
        self._depth = preemption_depth(cycle.policy)

    def standing(self, key: Key, run: Run) -> Hashable:
        """Return what decides whom the run may preempt: the same for all runs for which the same holds."""
        if self.policy.reclaim.overtakers:
            part = key  # who went ahead of it is another question for each run
        else:
            whole = self.cycle.entitlements.shares is not None or run.spec.scheduling.time_slice
            part = key[:-1] if whole else key[: self._depth]
        return part, self.cycle.entitlements.alike(run)

    def candidates(
        self, key: Key, run: Run, order: Iterable[AllocatedRun], *, cumulative: bool
    ) -> dict[str, tuple[AllocatedRun, PreemptionRule]]:
        """Return the runs that the run may preempt, and by what rules.

        ``cumulative``: each one as if those before it were gone.
        """
        found: dict[str, tuple[AllocatedRun, PreemptionRule]] = {}
        entitlements, reclaim = self.cycle.entitlements, self.policy.reclaim
        depth, standing = self._depth, key[: self._depth]
        turns = run.spec.scheduling.time_slice and reclaim.time_slice_s is not None
        by_order_alone = not entitlements.at_work and not reclaim.overtakers and not turns
        if by_order_alone and all(each.key[:depth] <= standing for each in self.preemptible):
            return found  # in most cycles: it goes before none of them
        for each in order:
            if by_order_alone and each.key[:depth] <= standing:
                continue
            rule = self._rule(key, run, each)
            if rule is None or (self.cycle.now - each.run.placed_at).total_seconds() < rule.granted_s:
                continue
            found[each.run.run_id] = each, rule
            if cumulative:
                entitlements.refund_run(each.run)
        for each, _ in found.values() if cumulative else ():
            entitlements.charge(each.run, held(each.run))
        return found

    def _rule(self, key: Key, run: Run, each: AllocatedRun) -> PreemptionRule | None:
        entitlements, reclaim, least = self.cycle.entitlements, self.policy.reclaim, run.spec.slots.min
        verdict = entitlements.verdict(run, least, each.run)
        if verdict is not None:
            # Rights go before standing: what the one may take back the other cannot keep by priority.
            return PreemptionRule("quota", reclaim.min_run_s) if verdict else None
        if each.run.reserved is not None:
            return None  # a run whose start was promised is not stopped as soon as it has come
        if entitlements.by_share(key, run, each.key, each.run):
            may = "fair-share" in reclaim.by and entitlements.may_take_share(run, least, each.run)
            return PreemptionRule("share", reclaim.min_run_s) if may and is_resumable(each.run) else None
        if queue.may_preempt(key, each.key, self.policy):
            by = next((name for name, a, b in zip(self.policy.order.by, key, each.key, strict=False) if a != b), None)
            if by != "priority" and not is_resumable(each.run):
                return None  # its work would be destroyed only to change the order
            return PreemptionRule("order", reclaim.quantum_s if by in queue.BY_SERVICE else reclaim.min_run_s)
        if reclaim.overtakers and each.run.placed_at > run.queued_at and is_resumable(each.run):
            if run.reserved is not None:
                return PreemptionRule("ahead", 0.0)  # a promise is kept
            if key < each.key:
                return PreemptionRule("ahead", reclaim.min_run_s)
        turns = run.spec.scheduling.time_slice and each.run.spec.scheduling.time_slice
        if turns and reclaim.time_slice_s is not None and key[:-1] == each.key[:-1]:
            return PreemptionRule("turn", max(reclaim.time_slice_s, reclaim.min_run_s))
        return None

    def next_change_s(self) -> float:
        """Return when a run has had its granted time, or attains the next level, in seconds since the epoch."""
        reclaim, now_s, found = self.policy.reclaim, self.cycle.now_s, math.inf
        by_service = not queue.BY_SERVICE.isdisjoint(reclaim.by)
        granted = {reclaim.min_run_s, reclaim.quantum_s if by_service else 0.0, reclaim.time_slice_s or 0.0} - {0.0}
        if "fair-share" in reclaim.by and self.preemptible:
            # Standing changes all the time; as often as this is soon enough.
            found = now_s + self.cycle.cluster.usage.half_life_s * AHEAD_HALF_LIVES / 4
        if not granted and not by_service:
            return found
        for each in self.preemptible:
            for granted_s in granted:
                if each.placed_s + granted_s > now_s:
                    found = min(found, each.placed_s + granted_s)
            if by_service:
                found = min(found, each.until_s)
        return found


def preemption_depth(policy: Policy) -> int:
    """Return how many of the first keys of the order decide who may preempt whom."""
    return max((at + 1 for at, name in enumerate(policy.order.by) if name in policy.reclaim.by), default=0)


def is_ruled_out_by_priority(cycle: CycleState) -> bool:
    """Whether only priority lets runs preempt others, no allocated run is below one that waits, and none is stopping.

    This needs no look at the allocated runs.
    """
    index, reclaim, by = cycle.cluster.index, cycle.policy.reclaim, cycle.policy.order.by
    other_rules = cycle.entitlements.at_work or reclaim.overtakers or reclaim.time_slice_s is not None
    if cycle.leaving or index.stopping or other_rules or not set(reclaim.by) & set(by) <= {"priority"}:
        return False
    if "priority" in reclaim.by and "priority" in by and index.priorities:
        return max(run.spec.priority for run in cycle.blocked) <= min(index.priorities)
    return True
