"""Preempt: make room for runs that do not fit, from runs that they may preempt."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from contracts.events.run import StopReason
from services.scheduler.core.cycle_state import MAX_SEARCH_WORK, CycleState
from services.scheduler.core.decisions import StopRun
from services.scheduler.core.order import queue
from services.scheduler.core.place.resource_request import ResourceRequest, resource_request_of
from services.scheduler.core.place.snapshot import ClusterSnapshot, NodeSlots
from services.scheduler.core.policy_features import Shortcut
from services.scheduler.core.preemption_rules import (
    AllocatedRun,
    PreemptionRule,
    PreemptionRules,
    allocated_runs,
    is_ruled_out_by_priority,
    preemption_depth,
)
from services.scheduler.core.price import preemption_price, restart_cost_slot_s
from services.scheduler.core.quota.transaction import Transaction
from services.scheduler.core.reasons import Why
from services.scheduler.core.state.index import Key
from services.scheduler.core.state.run import Run
from services.scheduler.core.state.suspects import note_suspect
from services.scheduler.core.steps.reserve import Reservations
from services.scheduler.core.victims import Candidate, PreemptionProblem, Victim, select_victims


def preempt_for_blocked(cycle: CycleState, reservations: Reservations | None) -> None:
    """Preempt runs for those that do not fit."""
    if is_ruled_out_by_priority(cycle):
        return
    memory = FailedSearches(cycle, reservations)
    if memory.holds_for_all():
        cycle.wake_at(memory.until_s)
        return
    preemption = Preemption(cycle, reservations, memory)
    preemption.make_room()
    cycle.wake_at(preemption.wake_s)
    memory.save(preemption.wake_s)


class _Turn(NamedTuple):
    """A run whose slots are looked for, in order."""

    key: Key
    run: Run
    #: False: it releases its slots, and waits again from then on.
    is_blocked: bool


@dataclass(frozen=True, slots=True)
class SavedSearches:
    """Searches that failed in an earlier cycle, the state that they depend on, and until when they fail."""

    state: tuple[Hashable, ...] | None = None
    until_s: float = 0.0
    known: dict[tuple[ResourceRequest, Hashable], int] = field(default_factory=dict)


class FailedSearches:
    """Searches for victims that found none, remembered until what they depend on changes.

    That is: what is free, and who has slots on what terms; the policy; and the clock, up to the next time at which
    a run has had its slots for long enough. Where more decides (quotas, shares, reservations, maintenance, turns),
    searches are remembered within the cycle alone. So are those that failed after slots had been given to other runs:
    these may never get them, since a decision may not become a fact, and a run that waits may be cancelled.
    """

    def __init__(self, cycle: CycleState, reservations: Reservations | None) -> None:
        self.cycle = cycle
        #: What failed in this cycle, so that no work is counted for it again.
        self.counted: dict[tuple[ResourceRequest, Hashable], int] = {}
        index, policy = cycle.cluster.index, cycle.policy
        self._state: tuple[Hashable, ...] | None = None
        #: (Request, standing) -> the least number of slots for which there were no victims.
        self.known: dict[tuple[ResourceRequest, Hashable], int] = {}
        #: Those of them that later cycles may rely on.
        self.lasting: dict[tuple[ResourceRequest, Hashable], int] = {}
        self.until_s = 0.0
        if not cycle.leaving and cycle.features.allows(Shortcut.SEARCH_MEMORY):
            versions = sum(node.version for node in cycle.cluster.nodes.values())
            limits = queue.wait_limits(cycle.cluster, policy)
            self._state = (index.nodes_version, versions, index.allocations_version, policy.digest, limits)
            saved = index.find_cache(SavedSearches)
            if saved.state == self._state and cycle.now_s + 2 * queue.AFTER_S < saved.until_s:
                self.known, self.lasting, self.until_s = dict(saved.known), dict(saved.known), saved.until_s

    def holds_for_all(self) -> bool:
        """Whether no run that waits need be searched for."""
        cycle, index = self.cycle, self.cycle.cluster.index
        if not self.known or index.stopping:
            return False
        depth = preemption_depth(cycle.policy)
        closed: set[str] = set()
        run_id = ""
        try:
            for run in cycle.blocked:
                run_id = run.run_id
                request = resource_request_of(cycle.cluster, run)
                if closed and cycle.placer.waits_for(run, request) <= closed:
                    continue
                features = cycle.features.for_run(asks_turns=run.spec.scheduling.time_slice)
                if closed or not features.allows(Shortcut.LEADING_KEYS):
                    return False
                key = queue.current_key(cycle.cluster, run, cycle.now, cycle.policy)
                standing = key[:depth], cycle.entitlements.alike(run)
                if self.known.get((request, standing), run.spec.slots.min + 1) > run.spec.slots.min:
                    return False
                if not cycle.policy.order.skip:
                    closed.update(cycle.placer.waits_for(run, request))
        except Exception as error:
            note_suspect(error, run_id=run_id)
            raise
        return True

    def note(self, request: ResourceRequest, standing: Hashable, slots: int, *, is_lasting: bool) -> None:
        """Remember that there are no victims; unless ``is_lasting`` within this cycle only."""
        self.known[request, standing] = self.counted[request, standing] = slots
        if is_lasting:
            self.lasting[request, standing] = slots

    def forget_earlier_cycles(self) -> None:
        """Forget what failed before this cycle: victims may have more slots than their preemptor takes."""
        self.known = dict(self.counted)

    def save(self, until_s: float) -> None:
        """Save the failed searches for later cycles."""
        index = self.cycle.cluster.index
        index.caches[SavedSearches] = SavedSearches(self._state, until_s, self.lasting)


class Preemption:
    """The preemptions of one cycle."""

    def __init__(self, cycle: CycleState, reservations: Reservations | None, memory: FailedSearches) -> None:
        self.cycle, self.reservations, self.memory = cycle, reservations, memory
        policy, features = cycle.policy, cycle.features
        may_preempt = not features.allows(Shortcut.NO_VICTIMS)
        self._leaving = set(cycle.leaving)
        is_any_stopping = bool(self._leaving or cycle.cluster.index.stopping)
        self._allocated = (
            allocated_runs(cycle.cluster, cycle.now, policy, features) if may_preempt or is_any_stopping else []
        )
        preemptible = [each for each in self._allocated if may_preempt and self._is_preemptible(each.run)]
        self.rules = PreemptionRules(cycle, preemptible)
        #: When another search may find more, in seconds since the epoch.
        self.wake_s = self.rules.next_change_s()
        #: The run with which the search goes on, until its turn has come.
        self._go_on: Run | None = None
        #: What will be free once all runs that are stopping have released their slots.
        self.future: ClusterSnapshot
        self._misfits: dict[ResourceRequest, int] = {}
        #: Whether another run gets slots that a search would find if that came to nothing.
        self._is_given = bool(cycle.placements)

    def make_room(self) -> None:
        """Preempt for the blocked runs, in order, as long as that makes them fit."""
        cycle = self.cycle
        stopping = [each for each in self._allocated if self._is_stopping(each.run)]
        if not self.rules.preemptible and not stopping:
            return
        self.future = cycle.snapshot.copy()
        for each in stopping:
            try:
                self.future.release_run(each.run)
                cycle.entitlements.refund_run(each.run)
            except Exception as error:
                note_suspect(error, run_id=each.run.run_id)
                raise
        #: Where more does not decide, a request that did not fit need not be tried again until more is free.
        is_plain = cycle.features.allows(Shortcut.FUTURE_MISFITS)
        closed: set[str] = set()
        turns = self._turns(stopping)
        self._go_on = next((run for _, run, _ in turns if run.run_id == cycle.left_over.preempt), None)
        for turn in turns:
            try:
                self._make_room_for(turn, closed, is_plain=is_plain)
            except Exception as error:
                note_suspect(error, run_id=turn.run.run_id)
                raise

    def _make_room_for(self, turn: _Turn, closed: set[str], *, is_plain: bool) -> None:
        """Find slots for the run in what will be free, or preempt for it; else it may close the nodes."""
        cycle, (key, run, is_blocked) = self.cycle, turn
        request, least = resource_request_of(cycle.cluster, run), run.spec.slots.min
        shut, refusal = cycle.entitlements.shut(run, request, least)
        if refusal is not None:
            return
        unusable = closed | shut if shut else closed
        slots = None
        if not is_plain or self._misfits.get(request, least + 1) > least:
            slots = self._find(run, request, unusable)
            if slots is None and is_plain:
                self._misfits[request] = least
        if slots is None and is_blocked:
            slots = self._preempt_for(key, run, request, unusable)
        if slots is not None:
            self.future.allocate(request.slot_spec, slots)
            self._is_given = True
            cycle.entitlements.charge(run, slots)
            if is_blocked:
                cycle.result.waits[run.run_id] = self._awaiting(cycle.result.waits[run.run_id], slots)
        elif is_blocked and not cycle.policy.order.skip:
            closed.update(cycle.placer.waits_for(run, request))

    def _turns(self, stopping: list[AllocatedRun]) -> list[_Turn]:
        """Return the runs that wait, and those that are stopped and will wait again, in order."""
        cycle = self.cycle
        keys = {run.run_id: queue.current_key(cycle.cluster, run, cycle.now, cycle.policy) for run in cycle.blocked}
        ranks = {run.run_id: cycle.entitlements.rank(run, keys[run.run_id]) for run in cycle.blocked}
        # A run with a promise goes first, as in the queue.
        turns, run_id = [], ""
        try:
            for run in cycle.blocked:
                run_id = run.run_id
                turns.append(((run.reserved is None, ranks[run_id]), 0, keys[run_id], run))
            for each in stopping:
                run_id = each.run.run_id
                stop = each.run.stopping
                is_over = each.run.terminal or each.run.cancel_reason is not None
                if is_over or (stop is not None and stop.then != "queue"):
                    continue  # it does not come back
                rank = cycle.entitlements.rank(each.run, each.key)
                if stop is not None and stop.preemptor in ranks:
                    # Its preemptor goes before it, or it would not have been stopped.
                    rank = max(rank, ranks[stop.preemptor])
                turns.append(((True, rank), 1, each.key, each.run))
        except Exception as error:
            note_suspect(error, run_id=run_id)
            raise
        turns.sort(key=lambda turn: turn[:3])
        return [_Turn(key, run, not returns) for _, returns, key, run in turns]

    def _find(self, run: Run, request: ResourceRequest, closed: Iterable[str]) -> list[NodeSlots] | None:
        """Return slots for the run in what will be free, beside what is reserved for others."""
        future = self.future if self.reservations is None else self.reservations.snapshot_for(run, self.future)
        return self.cycle.placer.find(future, run, run.spec.slots.min, request, closed=frozenset(closed))

    # -- victims ---------------------------------------------------------------

    def _preempt_for(self, key: Key, run: Run, request: ResourceRequest, closed: set[str]) -> list[NodeSlots] | None:
        """Preempt the cheapest victims with whose slots the run fits, and return its slots; None if it does not."""
        least, standing = run.spec.slots.min, self._standing(key, run)
        if self.memory.counted.get((request, standing), least + 1) <= least or not self._is_searched_for(run):
            return None
        # Remembered or not, a search counts, so that a scheduler with an empty memory decides the same.
        self.cycle.search_work += len(self.future.nodes) + least
        if self.memory.known.get((request, standing), least + 1) <= least:
            self.memory.counted[request, standing] = least
            return None
        victims, rules = self._select(key, run, request, closed)
        with Transaction(self.future, self.cycle.entitlements) as trial:
            for victim in victims:
                trial.release(self.cycle.cluster.runs[victim.run_id], victim.freed)
            slots = self._find(run, request, closed) if victims else None
            if slots is None:
                self.memory.note(request, standing, least, is_lasting=not closed and not self._is_given)
                return None
            trial.commit()
        priority = run.spec.priority
        for victim in victims:
            self._leaving.add(victim.run_id)
            victim_run = self.cycle.cluster.runs[victim.run_id]
            try:
                stop = self._stop(rules[victim.run_id], victim_run, run, priority, victim.by)
            except Exception as error:
                note_suspect(error, run_id=victim.run_id)
                raise
            self.cycle.result.decisions.append(stop)
        self._by_cost = [each for each in self._by_cost if each.run.run_id not in self._leaving]
        self._misfits.clear()
        self.memory.forget_earlier_cycles()
        return slots

    def _standing(self, key: Key, run: Run) -> Hashable:
        """Return what decides, beside its request, for whom a search fails: the same for runs for which it is."""
        standing = self.rules.standing(key, run)
        if self.cycle.features.allows(Shortcut.SAME_SLOTS):
            return standing
        binding = tuple(self.reservations.binding(run)) if self.reservations is not None else ()
        return standing, self.cycle.placer.shut(run), binding

    def _is_searched_for(self, run: Run) -> bool:
        """Whether this cycle has time to search victims for the run; the next one goes on where there was none."""
        cycle = self.cycle
        if run is self._go_on:
            self._go_on = None
        if self._go_on is None and cycle.search_work < MAX_SEARCH_WORK:
            return True
        if self._go_on is None and cycle.result.left_over.preempt is None:
            cycle.result.left_over = cycle.result.left_over._replace(preempt=run.run_id)
        cycle.result.is_left_over |= run.run_id == cycle.about
        return run.run_id == cycle.about

    def _select(
        self, key: Key, run: Run, request: ResourceRequest, closed: set[str]
    ) -> tuple[list[Victim], dict[str, PreemptionRule]]:
        """Return the victims for a run, and the rule by which each is preempted; none if no set of them is enough.

        Where a rule depends on who else is preempted (a team gives back what it has borrowed, and no more), the set is
        chosen again among those that may go together, the ones chosen first before all others.
        """
        cycle = self.cycle
        cells = cycle.placer.open_cells(run, request, closed)
        reserved = self.reservations.kept_on_nodes(run) if self.reservations is not None else {}

        def select(found: dict[str, tuple[AllocatedRun, PreemptionRule]]) -> list[Victim]:
            freed = sum(each.milli for each, _ in found.values())
            if not found or self.future.milli + freed < request.slot_spec.milli * run.spec.slots.min:
                return []
            candidates = [self._candidate(each) for each, _ in found.values()]
            problem = PreemptionProblem(
                request.slot_spec, run.spec.slots.min, self.future.nodes, cells, candidates, reserved
            )
            return select_victims(problem) or []

        found = self.rules.candidates(key, run, self._by_cost, cumulative=False)
        victims = select(found)
        if victims and not cycle.features.allows(Shortcut.NO_RIGHTS):
            chosen = {victim.run_id for victim in victims}
            for order in (sorted(self._by_cost, key=lambda each: each.run.run_id not in chosen), self._by_cost):
                found = self.rules.candidates(key, run, order, cumulative=True)
                if chosen <= found.keys():
                    break
                if victims := select(found):
                    break
        return victims, {run_id: rule for run_id, (_, rule) in found.items()}

    def _candidate(self, each: AllocatedRun) -> Candidate:
        rank, restart_cost = self._ranks.get(each.run.run_id, 0), self._restart_costs[each.run.run_id]
        try:
            parts = tuple((part.node_id, part.slots) for part in each.run.live)
            priority = each.run.spec.priority
            return Candidate(each.run.run_id, each.run.slot_spec, parts, priority, each.spare, rank, restart_cost)
        except Exception as error:
            note_suspect(error, run_id=each.run.run_id)
            raise

    @cached_property
    def _restart_costs(self) -> dict[str, float]:
        """What it costs to restart each run that may be preempted."""
        now, policy = self.cycle.now, self.cycle.policy
        return {each.run.run_id: restart_cost_slot_s(each.run, now, policy) for each in self.rules.preemptible}

    @cached_property
    def _by_cost(self) -> list[AllocatedRun]:
        """Those that may be preempted and have not been, the cheapest by themselves first."""

        def cost(each: AllocatedRun) -> tuple[float | str, ...]:
            run_id = each.run.run_id
            try:
                return each.run.spec.priority, self._ranks.get(run_id, 0), self._restart_costs[run_id], run_id
            except Exception as error:
                note_suspect(error, run_id=run_id)
                raise

        return sorted(self.rules.preemptible, key=cost)

    @cached_property
    def _ranks(self) -> dict[str, int]:
        """Where the policy preempts by even wait: the run that counts most goes first."""
        policy = self.cycle.policy
        if "even-wait" not in policy.preemption.by or "even-wait" not in policy.order.by:
            return {}
        at = policy.order.by.index("even-wait")
        counts = sorted({each.key[at] for each in self.rules.preemptible}, reverse=True)
        ranks = {count: rank for rank, count in enumerate(counts)}
        return {each.run.run_id: ranks[each.key[at]] for each in self.rules.preemptible}

    def _is_stopping(self, run: Run) -> bool:
        try:
            return run.stopping is not None or run.run_id in self._leaving
        except Exception as error:
            note_suspect(error, run_id=run.run_id)
            raise

    def _is_preemptible(self, run: Run) -> bool:
        try:
            return not self._is_stopping(run) and run.spec.scheduling.preemptible and not run.terminal
        except Exception as error:
            note_suspect(error, run_id=run.run_id)
            raise

    # -- texts -------------------------------------------------------------------

    def _stop(self, rule: PreemptionRule, run: Run, preemptor: Run, priority: int, by: int | None) -> StopRun:
        """Return the decision to stop a run for another; ``by``: how many slots it shrinks, None: by all."""
        does = "gives way to" if by is None else f"shrinks by {by} for"
        slice_s = self.cycle.policy.preemption.time_slice_s or 0.0
        why = {
            "quota": "whose team gets back slots that it is owed",
            "share": "whose team is further below its share",
            "ahead": "of which it went ahead",
            "turn": f"whose turn it is after {slice_s:g} s",
            "order": _order_text(run, priority, shrinks=by is not None),
        }[rule.rule]
        message = f"{does} run {preemptor.run_id} {why}"
        reason: StopReason = "preempted" if by is None else "resized"
        price = preemption_price(self.cycle.cluster, run, preemptor, self.cycle.now, self.cycle.policy)
        return StopRun(
            run.run_id, run.generation, reason, message, run.spec.grace_s, preemptor=preemptor.run_id, price=price
        )

    def _awaiting(self, why: Why, slots: Iterable[NodeSlots]) -> Why:
        """Return the reason with the runs that have been asked to release slots for the run."""
        nodes = {node_id for node_id, _ in slots}
        names = (
            each.run.run_id
            for each in self._allocated
            if self._is_stopping(each.run) and any(part.node_id in nodes for part in each.run.live)
        )
        return replace(why, victims=tuple(sorted(names)))


def _order_text(run: Run, priority: int, *, shrinks: bool) -> str:
    if priority > run.spec.priority:
        return "of higher priority" if shrinks else f"of priority {priority}"
    return "which goes before it by the policy"
