"""Whose slots are taken for a run that waits: shrink what can shrink, preempt whole only if that is too little."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import accumulate

from contracts.scheduling import Policy
from services.scheduler.core import order
from services.scheduler.core.cluster import Cluster, Run
from services.scheduler.core.decisions import PreemptRun
from services.scheduler.core.explain import Why
from services.scheduler.core.index import Key
from services.scheduler.core.place import Placer, Wants, wants_of
from services.scheduler.core.space import Space, Taken

#: How many of the chosen are looked at again, whether it could be done without them.
SPARED = 64


@dataclass(frozen=True, slots=True)
class Holding:
    """A run that holds slots which could be placed anew (those on draining nodes could not)."""

    run: Run
    key: Key
    slots: int
    #: How long ago its work was last safe, times its slots: what a kill would lose.
    at_stake: float

    @property
    def spare(self) -> int:
        """Slots that it can do without."""
        return max(self.slots - self.run.spec.slots.min, 0)


def holdings(cluster: Cluster, now: datetime, policy: Policy) -> list[Holding]:
    """Every run that holds slots on open nodes."""
    found = []
    for run_id in cluster.active:
        run = cluster.runs[run_id]
        slots = sum(len(part.slots) for part in run.live if cluster.nodes[part.node_id].open)
        if slots:
            safe_s = max((now - max(run.committed_at, run.placed_at)).total_seconds(), 0.0)
            found.append(Holding(run, order.key_of(cluster, run, now, policy), slots, slots * safe_s))
    return found


class Reclaim:
    """Taking slots in one pass."""

    def __init__(
        self, cluster: Cluster, now: datetime, policy: Policy, placer: Placer, space: Space, leaving: set[str]
    ) -> None:
        self.cluster, self.now, self.policy, self.placer = cluster, now, policy, placer
        self._space, self._leaving = space, set(leaving)
        self._holdings = holdings(cluster, now, policy)
        self._takeable = [each for each in self._holdings if self._can_be_taken(each.run)]
        #: When another look may find more, in seconds since the epoch.
        self.wake_s = self._next_change()
        self._in_vain: dict[tuple[Wants, Key], int] = {}

    def for_blocked(self, blocked: list[Run], waits: dict[str, Why]) -> list[PreemptRun]:
        """The stops that make room for the blocked runs, in order, as long as they make them fit."""
        returning = [each for each in self._holdings if self._returns(each.run)]
        if not self._takeable and not any(self._goes(each.run) for each in self._holdings):
            return []
        coming = self._space.copy()
        for each in self._holdings:
            if self._goes(each.run):
                coming.release(each.run)
        waiting = [(order.key_of(self.cluster, run, self.now, self.policy), run, True) for run in blocked]
        turns = waiting + [(each.key, each.run, False) for each in returning]
        turns.sort(key=lambda turn: turn[0])
        made: list[PreemptRun] = []
        closed: set[str] = set()
        for key, run, blocked_now in turns:
            wants, least = wants_of(self.cluster, run), run.spec.slots.min
            found = self.placer.find(coming, run, least, wants, closed=closed)
            if not blocked_now:
                # One that lets go and waits again, before others: what it needs is not there for them.
                coming.take(wants.demand, found or ())
                continue
            chosen: list[PreemptRun] = []
            if found is None:
                chosen, found = self._victims(key, run, wants, coming, closed)
                made += chosen
            if found is None:
                if not self.policy.order.skip:
                    closed.update(self.placer.waits_for(run, wants))
                continue
            coming.take(wants.demand, found)
            waits[run.run_id] = self._freeing(waits[run.run_id], found)
        return made

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

    def _had_enough(self, each: Holding, key: Key) -> bool:
        """Whether it has had its slots for as long as it is granted."""
        reclaim = self.policy.reclaim
        by = next((name for name, a, b in zip(self.policy.order.by, key, each.key, strict=False) if a != b), None)
        granted_s = reclaim.quantum_s if by == "least-attained" else reclaim.min_run_s
        return (self.now - each.run.placed_at).total_seconds() >= granted_s

    def _next_change(self) -> float:
        """When a holder has had its granted time, or attains the next level."""
        reclaim, now_s, found = self.policy.reclaim, self.now.timestamp(), math.inf
        by_level = "least-attained" in reclaim.by
        if not by_level and not reclaim.min_run_s:
            return found
        levels = self.policy.order.attained.levels_slot_s if by_level else ()
        for each in self._takeable:
            placed_s = each.run.placed_at.timestamp()
            for granted_s in {reclaim.quantum_s if by_level else reclaim.min_run_s, reclaim.min_run_s}:
                if placed_s + granted_s > now_s:
                    found = min(found, placed_s + granted_s)
            attained = each.run.attained_slot_s(self.now)
            above = next((level for level in levels if level > attained), None)
            if above is not None:
                found = min(found, now_s + (above - attained) / each.slots + 1e-3)
        return found

    def _victims(
        self, key: Key, run: Run, wants: Wants, coming: Space, closed: set[str]
    ) -> tuple[list[PreemptRun], list[Taken] | None]:
        """The stops that free what ``run`` needs and where it then lies, or nothing if that cannot be.

        The cheapest go first: least priority, then whoever loses least.
        """
        least = run.spec.slots.min
        memo = (wants, key[:-1])
        if self._in_vain.get(memo, least + 1) <= least:
            return [], None
        candidates = [
            each
            for each in self._takeable
            if order.may_take(key, each.key, self.policy) and self._had_enough(each, key)
        ]
        candidates.sort(key=lambda each: (each.run.spec.priority, each.at_stake, each.run.run_id))
        need = least - self.placer.most(coming, run, wants, closed)
        chosen = self._enough(candidates, max(need, 1), run, wants, coming, closed) if candidates else None
        if chosen is None:
            self._in_vain[memo] = least
            return [], None
        stops = []
        for each, by in chosen:
            coming.release(each.run)
            self._takeable.remove(each)
            self._leaving.add(each.run.run_id)
            stops.append(_preempt(each.run, run) if by is None else _shrink(each.run, run, by))
        return stops, self.placer.find(coming, run, least, wants, closed=closed)

    def _enough(
        self, candidates: list[Holding], need: int, run: Run, wants: Wants, coming: Space, closed: set[str]
    ) -> list[tuple[Holding, int | None]] | None:
        """Which of the candidates stop, and by how much those shrink that need not stop whole."""
        freed = [0, *accumulate(each.slots for each in candidates)]
        spare = [*reversed([*accumulate((each.spare for each in reversed(candidates)), initial=0)])]
        for whole in range(len(candidates) + 1):
            if freed[whole] + spare[whole] < need:
                continue
            chosen: list[tuple[Holding, int | None]] = [(each, None) for each in candidates[:whole]]
            chosen += _shrinks(candidates[whole:], need - freed[whole])
            if self._fits_after(chosen, run, wants, coming, closed):
                return self._spared(chosen, run, wants, coming, closed)
            if run.demand.simple and not run.exact:
                # Counting is all there is to it, unless the candidates lie where the run cannot.
                need = min(need + 1, freed[-1] + 1)
        return None

    def _fits_after(
        self, chosen: list[tuple[Holding, int | None]], run: Run, wants: Wants, coming: Space, closed: set[str]
    ) -> bool:
        trial = coming.copy()
        for each, _ in chosen:
            trial.release(each.run)
        return self.placer.find(trial, run, run.spec.slots.min, wants, closed=closed) is not None

    def _spared(
        self, chosen: list[tuple[Holding, int | None]], run: Run, wants: Wants, coming: Space, closed: set[str]
    ) -> list[tuple[Holding, int | None]]:
        """Without those that are not needed: they lie where the run cannot, or bundles do not need them."""
        if run.demand.simple and not run.exact and not wants.clusters and not wants.together:
            return chosen
        kept = list(chosen)
        for each in list(reversed(chosen))[:SPARED]:
            without = [other for other in kept if other is not each]
            if self._fits_after(without, run, wants, coming, closed):
                kept = without
        return kept

    def _freeing(self, why: Why, taken: Iterable[Taken]) -> Why:
        """Who has been asked to let go of slots for it."""
        nodes = {node_id for node_id, _ in taken}
        names = (
            each.run.run_id
            for each in self._holdings
            if self._goes(each.run) and any(part.node_id in nodes for part in each.run.live)
        )
        return replace(why, freeing=tuple(sorted(names)))


def _shrinks(candidates: list[Holding], missing: int) -> list[tuple[Holding, int | None]]:
    """Who shrinks by how much to free ``missing`` slots."""
    chosen: list[tuple[Holding, int | None]] = []
    for each in candidates:
        if missing <= 0:
            break
        by = min(each.spare, missing)
        if by > 0:
            chosen.append((each, by))
            missing -= by
    return chosen


def _preempt(run: Run, waiter: Run) -> PreemptRun:
    reason = f"gives way to run {waiter.run_id} {_standing(run, waiter)}"
    return PreemptRun(run.run_id, run.generation, reason, "preempted", run.spec.grace_s, waiter=waiter.run_id)


def _shrink(run: Run, waiter: Run, by: int) -> PreemptRun:
    of = "of higher priority" if waiter.spec.priority > run.spec.priority else _standing(run, waiter)
    reason = f"shrinks by {by} for run {waiter.run_id} {of}"
    return PreemptRun(run.run_id, run.generation, reason, "resized", run.spec.grace_s, waiter=waiter.run_id)


def _standing(run: Run, waiter: Run) -> str:
    if waiter.spec.priority > run.spec.priority:
        return f"of priority {waiter.spec.priority}"
    return "which goes before it by the policy"
