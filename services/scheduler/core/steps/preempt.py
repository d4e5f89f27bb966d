"""Whose slots are taken for a run that waits: shrink what can shrink, preempt whole only if that is too little."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from typing import Literal, NamedTuple

from contracts.events.run import QueueReason
from contracts.scheduling import Policy
from services.scheduler.core.decisions import PreemptRun
from services.scheduler.core.order import queue
from services.scheduler.core.order.share import AHEAD_HALF_LIVES
from services.scheduler.core.place.placer import Placer
from services.scheduler.core.place.resource_request import ResourceRequest, resource_request_of
from services.scheduler.core.place.snapshot import ClusterSnapshot, NodeSlots
from services.scheduler.core.quota.entitlements import Entitlements, held
from services.scheduler.core.reasons import Why
from services.scheduler.core.state.cluster import Cluster, Run
from services.scheduler.core.state.index import Key
from services.scheduler.core.steps.reserve import Reservations, resumable
from services.scheduler.core.victims import Candidate, PreemptionProblem, Victim, select_victims


class PreemptionRule(NamedTuple):
    """Why a run may have the slots of another, and how long that one keeps them at least."""

    rule: Literal["quota", "share", "order", "turn", "ahead"]
    granted_s: float


@dataclass(slots=True, eq=False)
class AllocatedRun:
    """A run that holds slots which could be placed anew (those on draining nodes could not)."""

    run: Run
    key: Key
    slots: int
    #: When it got them, in seconds since the epoch.
    placed_s: float
    #: When its work was last safe.
    safe_at: datetime
    #: When its key changes, if nothing happens, in seconds since the epoch.
    until_s: float = math.inf

    def at_stake(self, now: datetime) -> float:
        """How long ago its work was last safe, times its slots: what a kill would lose."""
        return self.slots * max((now - self.safe_at).total_seconds(), 0.0)

    @property
    def spare(self) -> int:
        """Slots that it can do without."""
        return max(self.slots - self.run.spec.slots.min, 0)


def allocated_runs(cluster: Cluster, now: datetime, policy: Policy) -> list[AllocatedRun]:
    """Every run that holds slots on open nodes. Those about which nothing was said since the last pass are known."""
    index = cluster.index
    # Where it is not known until when a key stays, it holds for this very time.
    state = (
        policy.digest,
        queue.wait_limit_s(cluster, policy),
        index.nodes_version,
        None if queue.has_stable_keys(policy) else now,
    )
    if index.allocated_runs_state != state:
        index.allocated_runs, index.allocated_runs_state = {}, state
    # A key changes a little before it has changed for sure.
    soon_s = now.timestamp() + 2 * queue.AFTER_S
    closed = {node.node_id for node in cluster.nodes.values() if not node.is_schedulable}
    found = []
    for run_id in cluster.active:
        each: AllocatedRun | None = index.allocated_runs.get(run_id)
        if each is None or each.until_s <= soon_s:
            each = _allocated_run(cluster, cluster.runs[run_id], now, policy, closed)
            if each is None:
                continue
            index.allocated_runs[run_id] = each
        found.append(each)
    return found


def _allocated_run(cluster: Cluster, run: Run, now: datetime, policy: Policy, closed: set[str]) -> AllocatedRun | None:
    slots = sum(len(part.slots) for part in run.live if part.node_id not in closed) if closed else run.slot_count
    if not slots:
        return None
    key, until_s = queue.holder_key(cluster, run, now, policy)
    return AllocatedRun(run, key, slots, run.placed_at.timestamp(), max(run.committed_at, run.placed_at), until_s)


def is_preemption_in_vain(
    cluster: Cluster, policy: Policy, entitlements: Entitlements, blocked: list[Run], leaving: set[str]
) -> bool:
    """Whether nobody lets go, and all who have slots are of a priority that nobody who waits is above.

    Known without a look at those that have slots, where nothing but the priority decides who may take from whom.
    """
    index, reclaim, by = cluster.index, policy.reclaim, policy.order.by
    other_rules = entitlements.at_work or reclaim.overtakers or reclaim.time_slice_s is not None
    if leaving or index.going or other_rules or not set(reclaim.by) & set(by) <= {"priority"}:
        return False
    if "priority" in reclaim.by and "priority" in by and index.priorities:
        return max(run.spec.priority for run in blocked) <= min(index.priorities)
    return True


class Preemption:
    """Taking slots in one pass."""

    def __init__(
        self,
        cluster: Cluster,
        now: datetime,
        policy: Policy,
        placer: Placer,
        snapshot: ClusterSnapshot,
        entitlements: Entitlements,
        leaving: set[str],
        reserve: Reservations | None = None,
    ) -> None:
        self._reserve = reserve
        self.cluster, self.now, self.policy, self.placer, self.entitlements = cluster, now, policy, placer, entitlements
        self._snapshot, self._leaving = snapshot, set(leaving)
        #: By so many of the first keys it is decided who may take from whom.
        self._depth = max((at + 1 for at, name in enumerate(policy.order.by) if name in policy.reclaim.by), default=0)
        by_order = bool(self._depth) or policy.reclaim.time_slice_s is not None
        self._may_take = by_order or entitlements.at_work or policy.reclaim.overtakers
        going = bool(self._leaving or cluster.index.going)
        self._allocated_runs = allocated_runs(cluster, now, policy) if self._may_take or going else []
        self._preemptible = [each for each in self._allocated_runs if self._may_take and self._can_be_taken(each.run)]
        #: When another look may find more, in seconds since the epoch.
        self.wake_s = self._next_change()
        self._in_vain: dict[tuple[ResourceRequest, Key, Hashable], int] = {}
        self._no_room: dict[ResourceRequest, int] = {}

    def for_blocked(self, blocked: list[Run], waits: dict[str, Why]) -> list[PreemptRun]:
        """The stops that make room for the blocked runs, in order, as long as they make them fit."""
        returning = [each for each in self._allocated_runs if self._returns(each.run)]
        if not self._preemptible and not any(self._goes(each.run) for each in self._allocated_runs):
            return []
        coming = self._snapshot.copy()
        for each in self._allocated_runs:
            if self._goes(each.run):
                coming.release_run(each.run)
                self.entitlements.refund_run(each.run)
        turns = self._turns(blocked, returning)
        #: What was looked for does not fit into what comes free: until more does, whoever wants as much need not look.
        plain = self.policy.order.skip and self._reserve is None and self.entitlements.quotas is None
        made: list[PreemptRun] = []
        closed: set[str] = set()
        for key, run, blocked_now in turns:
            wants, least = resource_request_of(self.cluster, run), run.spec.slots.min
            shut, refusal = self.entitlements.shut(run, wants, least)
            if refusal is not None:
                continue
            out = closed | shut if shut else closed
            if plain and self._no_room.get(wants, least + 1) <= least:
                found = None
            else:
                found = self.placer.find(self._for(run, coming), run, least, wants, closed=out)
                if found is None and plain:
                    self._no_room[wants] = least
            if not blocked_now:
                # One that lets go and waits again, before others: what it needs is not there for them.
                coming.allocate(wants.demand, found or ())
                self.entitlements.charge(run, found or ())
                continue
            chosen: list[PreemptRun] = []
            if found is None:
                chosen, found = self._victims(key, run, wants, coming, out)
                made += chosen
                if chosen:
                    self._no_room.clear()
            if found is None:
                if not self.policy.order.skip:
                    closed.update(self.placer.waits_for(run, wants))
                continue
            coming.allocate(wants.demand, found)
            self.entitlements.charge(run, found)
            waits[run.run_id] = self._freeing(waits[run.run_id], found)
        return made

    def _turns(self, blocked: list[Run], returning: list[AllocatedRun]) -> list[tuple[Key, Run, bool]]:
        """In what order slots are looked for, for those that wait (True) and those that will wait again."""
        keys = {run.run_id: queue.current_key(self.cluster, run, self.now, self.policy) for run in blocked}
        ranks = {run.run_id: self.entitlements.rank(run, keys[run.run_id]) for run in blocked}
        # Whoever has a promise goes first, as in the line.
        turns = [((run.reserved is None, ranks[run.run_id]), 0, keys[run.run_id], run) for run in blocked]
        for each in returning:
            rank = self.entitlements.rank(each.run, each.key)
            stop = each.run.preempting
            if stop is not None and stop.preemptor in ranks:
                # Whoever it makes room for goes before it, or it would not have to.
                rank = max(rank, ranks[stop.preemptor])
            turns.append(((True, rank), 1, each.key, each.run))
        turns.sort(key=lambda turn: turn[:3])
        return [(key, run, not back) for _, back, key, run in turns]

    def _for(self, run: Run, snapshot: ClusterSnapshot) -> ClusterSnapshot:
        """What the run may have of a space: not what is kept for others. To take slots for them would be in vain."""
        return snapshot if self._reserve is None else self._reserve.space_for(run, snapshot)

    # -- whose ---------------------------------------------------------------

    def _goes(self, run: Run) -> bool:
        return run.preempting is not None or run.run_id in self._leaving

    def _returns(self, run: Run) -> bool:
        """Whether it lets go now and waits for slots again."""
        stop = run.preempting
        return self._goes(run) and not (
            run.terminal or run.cancel_reason is not None or (stop is not None and stop.then != "queue")
        )

    def _can_be_taken(self, run: Run) -> bool:
        return not self._goes(run) and run.spec.scheduling.preemptible and not run.terminal

    @cached_property
    def _takeable(self) -> list[AllocatedRun]:
        """Those of whom slots may be taken by somebody, and have not been; the cheapest first."""
        return sorted(self._preemptible, key=self._cheapest)

    def _taking(self, key: Key, run: Run, each: AllocatedRun) -> PreemptionRule | None:
        """By what rule the run may have the holder's slots now; None: it may not, or not yet."""
        found = self._rule(key, run, each)
        held_s = (self.now - each.run.placed_at).total_seconds()
        return found if found is not None and held_s >= found.granted_s else None

    def _rule(self, key: Key, run: Run, each: AllocatedRun) -> PreemptionRule | None:
        reclaim, least = self.policy.reclaim, run.spec.slots.min
        verdict = self.entitlements.verdict(run, least, each.run)
        if verdict is not None:
            # Rights go before standing: what the one may take back the other cannot keep by priority.
            return PreemptionRule("quota", reclaim.min_run_s) if verdict else None
        if each.run.reserved is not None:
            return None  # whose start was promised is not stopped as soon as it has come
        if self.entitlements.by_share(key, run, each.key, each.run):
            may = "fair-share" in reclaim.by and self.entitlements.may_take_share(run, least, each.run)
            return PreemptionRule("share", reclaim.min_run_s) if may else None
        if queue.may_preempt(key, each.key, self.policy):
            by = next((name for name, a, b in zip(self.policy.order.by, key, each.key, strict=False) if a != b), None)
            return PreemptionRule("order", reclaim.quantum_s if by in queue.BY_SERVICE else reclaim.min_run_s)
        if reclaim.overtakers and each.run.placed_at > run.queued_at and resumable(each.run):
            if run.reserved is not None:
                return PreemptionRule("ahead", 0.0)  # what was promised is kept
            if key < each.key:
                return PreemptionRule("ahead", reclaim.min_run_s)
        turns = run.spec.scheduling.time_slice and each.run.spec.scheduling.time_slice
        if turns and reclaim.time_slice_s is not None and key[:-1] == each.key[:-1]:
            return PreemptionRule("turn", max(reclaim.time_slice_s, reclaim.min_run_s))
        return None

    def _next_change(self) -> float:
        """When a holder has had its granted time, or attains the next level."""
        reclaim, now_s, found = self.policy.reclaim, self.now.timestamp(), math.inf
        by_service = not queue.BY_SERVICE.isdisjoint(reclaim.by)
        granted = {reclaim.min_run_s, reclaim.quantum_s if by_service else 0.0, reclaim.time_slice_s or 0.0} - {0.0}
        if "fair-share" in reclaim.by and self._preemptible:
            # Standing changes all the time; as often as this is soon enough.
            found = now_s + self.cluster.usage.half_life_s * AHEAD_HALF_LIVES / 4
        if not granted and not by_service:
            return found
        for each in self._preemptible:
            for granted_s in granted:
                if each.placed_s + granted_s > now_s:
                    found = min(found, each.placed_s + granted_s)
            if by_service:
                found = min(found, each.until_s)
        return found

    def _victims(
        self, key: Key, run: Run, wants: ResourceRequest, coming: ClusterSnapshot, closed: set[str]
    ) -> tuple[list[PreemptRun], list[NodeSlots] | None]:
        """The stops that free what ``run`` needs and where it then lies, or nothing if that cannot be."""
        least = run.spec.slots.min
        memo = (wants, self._standing(key, run), self.entitlements.alike(run))
        if self._in_vain.get(memo, least + 1) <= least:
            return [], None
        victims, takings = self._cheapest_victims(key, run, wants, coming, closed)
        trial = coming.copy()
        for victim in victims:
            trial.release(self.cluster.runs[victim.run_id].demand, victim.freed)
        found = self.placer.find(self._for(run, trial), run, least, wants, closed=closed) if victims else None
        if found is None:
            self._in_vain[memo] = least
            return [], None
        stops = []
        for victim in victims:
            preempted = self.cluster.runs[victim.run_id]
            coming.release(preempted.demand, victim.freed)
            self.entitlements.refund(preempted, victim.freed)
            self._leaving.add(victim.run_id)
            stops.append(self._stop(takings[victim.run_id], preempted, run, victim.by))
        self._takeable = [each for each in self._takeable if each.run.run_id not in self._leaving]
        return stops, found

    def _cheapest_victims(
        self, key: Key, run: Run, wants: ResourceRequest, coming: ClusterSnapshot, closed: set[str]
    ) -> tuple[list[Victim], dict[str, PreemptionRule]]:
        """The victims for a run, and the rule by which each is preempted; none if no set of them is enough.

        Where a rule depends on who else is preempted (a team gives back what it has borrowed, and no more), the set is
        chosen again among those that may go together, the ones chosen first before all others.
        """
        cells = self.placer.open_cells(run, wants, closed)
        reserved = self._reserve.kept_on_nodes(run) if self._reserve is not None else {}

        def select(candidates: list[AllocatedRun]) -> list[Victim]:
            if not candidates:
                return []
            known = self._as_candidates(candidates)
            problem = PreemptionProblem(wants.demand, run.spec.slots.min, coming.nodes, cells, known, reserved)
            return select_victims(problem) or []

        candidates, takings = self._candidates(key, run, self._takeable, together=False)
        victims = select(candidates)
        if not victims or not self.entitlements.at_work:
            return victims, takings
        chosen = {victim.run_id for victim in victims}
        for order in (sorted(self._takeable, key=lambda each: each.run.run_id not in chosen), self._takeable):
            candidates, takings = self._candidates(key, run, order, together=True)
            if chosen <= takings.keys():
                return victims, takings
            if others := select(candidates):
                return others, takings
        return [], {}

    def _as_candidates(self, allocated: Iterable[AllocatedRun]) -> list[Candidate]:
        counts = self._counts
        ranks = {count: rank for rank, count in enumerate(sorted(set(counts.values()), reverse=True))}
        return [
            Candidate(
                each.run.run_id,
                each.run.demand,
                tuple((part.node_id, part.slots) for part in each.run.live),
                each.run.spec.priority,
                each.spare,
                ranks[counts[each.run.run_id]] if counts else 0,
                each.at_stake(self.now),
            )
            for each in allocated
        ]

    @cached_property
    def _counts(self) -> dict[str, float]:
        """What each run counts where the policy preempts by it: the one that counts most goes first."""
        by = self.policy.order.by
        if "even-wait" not in self.policy.reclaim.by or "even-wait" not in by:
            return {}
        at = by.index("even-wait")
        return {each.run.run_id: each.key[at] for each in self._preemptible}

    def _standing(self, key: Key, run: Run) -> Key:
        """The part of its key that tells what a run may take: the same for all that came one after the other."""
        if self.policy.reclaim.overtakers:
            return key  # who went ahead of it is another question for each run
        whole = self.entitlements.shares is not None or run.spec.scheduling.time_slice
        return key[:-1] if whole else key[: self._depth]

    def _candidates(
        self, key: Key, run: Run, order: Iterable[AllocatedRun], *, together: bool
    ) -> tuple[list[AllocatedRun], dict[str, PreemptionRule]]:
        """Whose slots the run may have, and by what rules.

        ``together``: each one as if those before it were gone.
        """
        found: list[AllocatedRun] = []
        takings: dict[str, PreemptionRule] = {}
        depth, standing = self._depth, key[: self._depth]
        turns = run.spec.scheduling.time_slice and self.policy.reclaim.time_slice_s is not None
        by_order_alone = not self.entitlements.at_work and not self.policy.reclaim.overtakers and not turns
        if by_order_alone and all(each.key[:depth] <= standing for each in self._preemptible):
            return [], {}  # at most looks: it goes before nobody
        for each in order:
            if by_order_alone and each.key[:depth] <= standing:
                continue
            taking = self._taking(key, run, each)
            if taking is not None:
                found.append(each)
                takings[each.run.run_id] = taking
                if together:
                    self.entitlements.refund_run(each.run)
        for each in found if together else ():
            self.entitlements.charge(each.run, held(each.run))
        return found, takings

    def _cheapest(self, each: AllocatedRun) -> tuple[float | str, ...]:
        """Least priority, then whoever counts most where that is how slots are taken, then whoever loses least."""
        by = self.policy.order.by
        counts = each.key[by.index("even-wait")] if "even-wait" in self.policy.reclaim.by and "even-wait" in by else 0.0
        return each.run.spec.priority, -counts, each.at_stake(self.now), each.run.run_id

    def _stop(self, taking: PreemptionRule, run: Run, waiter: Run, by: int | None) -> PreemptRun:
        """The stop of a run for another; by how many slots it shrinks, None: by all."""
        does = "gives way to" if by is None else f"shrinks by {by} for"
        slice_s = self.policy.reclaim.time_slice_s or 0.0
        why = {
            "quota": "whose team gets back slots that it is owed",
            "share": "whose team is further below its share",
            "ahead": "of which it went ahead",
            "turn": f"whose turn it is after {slice_s:g} s",
            "order": _standing(run, waiter, shrinks=by is not None),
        }[taking.rule]
        reason = f"{does} run {waiter.run_id} {why}"
        queue_reason: QueueReason = "preempted" if by is None else "resized"
        return PreemptRun(run.run_id, run.generation, reason, queue_reason, run.spec.grace_s, preemptor=waiter.run_id)

    def _freeing(self, why: Why, taken: Iterable[NodeSlots]) -> Why:
        """Who has been asked to let go of slots for it."""
        nodes = {node_id for node_id, _ in taken}
        names = (
            each.run.run_id
            for each in self._allocated_runs
            if self._goes(each.run) and any(part.node_id in nodes for part in each.run.live)
        )
        return replace(why, freeing=tuple(sorted(names)))


def _standing(run: Run, waiter: Run, *, shrinks: bool) -> str:
    if waiter.spec.priority > run.spec.priority:
        return "of higher priority" if shrinks else f"of priority {waiter.spec.priority}"
    return "which goes before it by the policy"
