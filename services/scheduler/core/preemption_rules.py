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
from services.scheduler.core.policy_features import BY_SERVICE, Feature, PolicyFeatures, Shortcut
from services.scheduler.core.quota.entitlements import held
from services.scheduler.core.state.cluster import Cluster, schedulable_nodes
from services.scheduler.core.state.index import Key, RunCache
from services.scheduler.core.state.run import Run
from services.scheduler.core.state.suspects import note_suspect


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
    def milli(self) -> int:
        """Thousandths of all its slots."""
        try:
            return self.run.slot_spec.milli * self.slots
        except Exception as error:
            note_suspect(error, run_id=self.run.run_id)
            raise

    @property
    def spare(self) -> int:
        """Slots by which it can shrink."""
        return max(self.slots - self.run.spec.slots.min, 0)


class Preemptor(NamedTuple):
    """A run that waits, and what decides whom it may preempt."""

    run: Run
    key: Key
    slots: int
    queued_at: datetime
    is_promised: bool
    takes_turns: bool


class AllocatedRuns(RunCache[AllocatedRun]):
    """Allocated runs as of the last cycle."""

    #: What all of them follow from, beside the facts about the run itself.
    state: Hashable = None


def allocated_runs(cluster: Cluster, now: datetime, policy: Policy, features: PolicyFeatures) -> list[AllocatedRun]:
    """Return every run with slots on schedulable nodes; those without a new fact are known from the last cycle."""
    index, is_stable = cluster.index, features.allows(Shortcut.KEY_MEMORY)
    # Where it is not known until when a key stays, it holds for this time alone.
    state = (
        policy.digest,
        queue.wait_limits(cluster, policy),
        index.nodes_version,
        None if is_stable else now,
    )
    known = index.find_cache(AllocatedRuns)
    if known.state != state:
        known.clear()
        known.state = state
    # A key changes a little before it has changed for sure.
    soon_s = now.timestamp() + 2 * queue.AFTER_S
    closed = cluster.nodes.keys() - schedulable_nodes(cluster)
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
    try:
        slots = sum(len(part.slots) for part in run.live if part.node_id not in closed) if closed else run.slot_count
        if not slots:
            return None
        key, until_s = queue.holder_key(cluster, run, now, policy)
        return AllocatedRun(run, key, slots, run.placed_at.timestamp(), until_s)
    except Exception as error:
        note_suspect(error, run_id=run.run_id)
        raise


class PreemptionRules:
    """The rules of one cycle."""

    def __init__(self, cycle: CycleState, preemptible: list[AllocatedRun]) -> None:
        self.cycle, self.policy, self.preemptible = cycle, cycle.policy, preemptible
        #: The number of leading keys that decide which run may preempt which.
        self._depth = preemption_depth(cycle.policy)
        #: Whether a run asks for turns -> the features as they are for it.
        self._features = {asks: cycle.features.for_run(asks_turns=asks) for asks in (False, True)}

    def standing(self, key: Key, run: Run) -> Hashable:
        """Return what decides whom the run may preempt: the same for all runs for which the same holds."""
        features, part = self._features[run.spec.scheduling.time_slice], key
        if features.allows(Shortcut.LEADING_KEYS):
            part = key[: self._depth]
        elif features.allows(Shortcut.ALL_KEYS):
            part = key[:-1]
        return part, self.cycle.entitlements.alike(run)

    def candidates(
        self, key: Key, run: Run, order: Iterable[AllocatedRun], *, cumulative: bool
    ) -> dict[str, tuple[AllocatedRun, PreemptionRule]]:
        """Return the runs that the run may preempt, and by what rules.

        ``cumulative``: each one as if those before it were gone.
        """
        found: dict[str, tuple[AllocatedRun, PreemptionRule]] = {}
        entitlements, features = self.cycle.entitlements, self._features[run.spec.scheduling.time_slice]
        depth, standing = self._depth, key[: self._depth]
        turns, by_order_alone = features.has(Feature.TURNS), features.allows(Shortcut.ORDER_ALONE)
        if by_order_alone and all(each.key[:depth] <= standing for each in self.preemptible):
            return found  # in most cycles: it goes before none of them
        preemptor = Preemptor(run, key, run.spec.slots.min, run.queued_at, run.reserved is not None, turns)
        for each in order:
            if by_order_alone and each.key[:depth] <= standing:
                continue
            try:
                rule = self._rule(preemptor, each)
                if rule is None or (self.cycle.now - each.run.placed_at).total_seconds() < rule.granted_s:
                    continue
                found[each.run.run_id] = each, rule
                if cumulative:
                    entitlements.refund_run(each.run)
            except Exception as error:
                note_suspect(error, run_id=each.run.run_id)
                raise
        for each, _ in found.values() if cumulative else ():
            entitlements.charge(each.run, held(each.run))
        return found

    def _rule(self, preemptor: Preemptor, each: AllocatedRun) -> PreemptionRule | None:
        rules, key = self.policy.preemption, preemptor.key
        if not self.cycle.features.allows(Shortcut.NO_RIGHTS):
            verdict, is_by_share, may_take = self._rights(preemptor, each)
            if verdict is not None:
                # Rights go before standing: what the one may take back the other cannot keep by priority.
                return PreemptionRule("quota", rules.min_run_s) if verdict else None
        else:
            is_by_share = may_take = False
        if each.run.reserved is not None:
            return None  # a run whose start was promised is not stopped as soon as it has come
        if is_by_share:
            return PreemptionRule("share", rules.min_run_s) if may_take and each.run.is_resumable else None
        if queue.may_preempt(key, each.key, self.policy):
            by = next((name for name, a, b in zip(self.policy.order.by, key, each.key, strict=False) if a != b), None)
            if by != "priority" and not each.run.is_resumable:
                return None  # its work would be destroyed only to change the order
            return PreemptionRule("order", rules.quantum_s if by in BY_SERVICE else rules.min_run_s)
        if rules.overtakers and each.run.placed_at > preemptor.queued_at and each.run.is_resumable:
            if preemptor.is_promised:
                return PreemptionRule("ahead", 0.0)  # a promise is kept
            if key < each.key:
                return PreemptionRule("ahead", rules.min_run_s)
        turns = preemptor.takes_turns and each.run.spec.scheduling.time_slice
        if turns and rules.time_slice_s is not None and key[:-1] == each.key[:-1]:
            return PreemptionRule("turn", max(rules.time_slice_s, rules.min_run_s))
        return None

    def _rights(self, preemptor: Preemptor, each: AllocatedRun) -> tuple[bool | None, bool, bool]:
        """Return the verdict of quotas; whether shares decide, and whether they let the preemptor have the slots."""
        entitlements, (run, key, slots, *_) = self.cycle.entitlements, preemptor
        try:
            if (verdict := entitlements.verdict(run, slots, each.run)) is not None:
                return verdict, False, False
            if not entitlements.by_share(key, run, each.key, each.run):
                return None, False, False
            may = "fair-share" in self.policy.preemption.by and entitlements.may_take_share(run, slots, each.run)
            return None, True, may
        except Exception as error:
            note_suspect(error, run_id=run.run_id, victim_id=each.run.run_id)
            raise

    def next_change_s(self) -> float:
        """Return when a run has had its granted time, or attains the next level, in seconds since the epoch."""
        rules, now_s, found = self.policy.preemption, self.cycle.now_s, math.inf
        by_service = not BY_SERVICE.isdisjoint(rules.by)
        granted = {rules.min_run_s, rules.quantum_s if by_service else 0.0, rules.time_slice_s or 0.0} - {0.0}
        if "fair-share" in rules.by and self.preemptible:
            # Standing changes all the time; as often as this is soon enough.
            found = now_s + self.cycle.cluster.usage.half_life_s * AHEAD_HALF_LIVES / 4
        # A key by which no run is preempted still decides whether those behind it are compared at all.
        may_change = not BY_SERVICE.isdisjoint(self.policy.order.by[: self._depth])
        if not granted and not may_change:
            return found
        for each in self.preemptible:
            for granted_s in granted:
                if each.placed_s + granted_s > now_s:
                    found = min(found, each.placed_s + granted_s)
            if may_change:
                found = min(found, each.until_s)
        return found


def preemption_depth(policy: Policy) -> int:
    """Return how many of the first keys of the order decide who may preempt whom."""
    return max((at + 1 for at, name in enumerate(policy.order.by) if name in policy.preemption.by), default=0)


def is_ruled_out_by_priority(cycle: CycleState) -> bool:
    """Whether only priority lets runs preempt others, no allocated run is below one that waits, and none is stopping.

    This needs no look at the allocated runs.
    """
    index, features = cycle.cluster.index, cycle.features
    if cycle.leaving or index.stopping or not features.allows(Shortcut.PRIORITY_ALONE):
        return False
    if features.has(Feature.PREEMPTION_BY_PRIORITY) and index.priorities:
        return max(map(_priority_of, cycle.blocked)) <= min(index.priorities)
    return True


def _priority_of(run: Run) -> int:
    try:
        return run.spec.priority
    except Exception as error:
        note_suspect(error, run_id=run.run_id)
        raise
