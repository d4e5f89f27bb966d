"""Place: whole gangs, in order. Half a gang would keep its peers waiting and deadlock them."""

from __future__ import annotations

from collections.abc import Iterator

from services.scheduler.core.cycle_state import MAX_PLACEMENT_WORK, CycleState, Placement
from services.scheduler.core.decisions import MAX_PLACEMENTS_PER_CYCLE, PlaceRun
from services.scheduler.core.place.placer import members_of
from services.scheduler.core.place.resource_request import ResourceRequest, avoided, resource_request_of, useful
from services.scheduler.core.place.snapshot import NodeSlots
from services.scheduler.core.policy_features import Shortcut
from services.scheduler.core.reasons import Why
from services.scheduler.core.state.run import Run
from services.scheduler.core.state.suspects import note_suspect
from services.scheduler.core.steps.lend import IdleLoans
from services.scheduler.core.steps.nominate import is_hopeless, is_known_misfit, maintenance_reason, rule_out
from services.scheduler.core.steps.order import queued_runs
from services.scheduler.core.steps.reserve import Reservations, reserve_or_explain, reserves_slots

#: After how many runs that do not fit it is asked whether any other can.
MAX_EXAMINED_RUNS = 200
#: The reason of most, made once.
FOR_SLOTS = Why("slots")


class PlacementStep:
    """The placements of one cycle."""

    def __init__(self, cycle: CycleState, loans: IdleLoans) -> None:
        self.cycle, self.loans = cycle, loans
        #: Slots kept for runs that wait, where others may go ahead of them.
        self.reservations: Reservations | None = None
        if reserves_slots(cycle):
            cycle.features = cycle.features.with_reservations()
            self.reservations = Reservations(cycle.cluster, cycle.now, cycle.policy, cycle.placer)
        #: Node -> the first run that waits for it, where no run may overtake.
        self._closed: dict[str, str] = {}
        #: Whether all that decides is what is free, so that most of a long queue is passed over at once.
        self._only_slots_count = cycle.features.allows(Shortcut.PASSED_OVER)

    def place_queue(self) -> None:
        """Place what fits. Where no run may overtake, a run that does not fit closes the nodes that it waits for.

        Every run first gets what it needs. What is left then goes to the first in order, up to its maximum
        (``widen``): an elastic run does not shut out the one behind it, and fills the cluster alone.
        """
        cycle, passed = self.cycle, 0
        for run in self._in_turn(queued_runs(cycle)):
            if len(cycle.placements) >= MAX_PLACEMENTS_PER_CYCLE:
                break
            if cycle.entitlements.borrowing:
                self.loans.hold_back()
            if passed and passed % MAX_EXAMINED_RUNS == 0 and self._is_hopeless():
                break
            try:
                if self._only_slots_count and not run.setbacks and is_known_misfit(cycle, run):
                    passed += 1
                    cycle.blocked.append(run)
                    cycle.result.waits[run.run_id] = FOR_SLOTS
                elif not self._place(run):
                    passed += 1
                    if self.reservations is not None and passed >= cycle.policy.reserve.depth:
                        break
            except Exception as error:
                note_suspect(error, run_id=run.run_id)
                raise

    def _in_turn(self, runs: Iterator[Run]) -> Iterator[Run]:
        """Iterate over the runs that this cycle has time for; the next one goes on with the first that is left over.

        A cycle that goes on spends half of its work on the first runs in order, so that no other overtakes them
        meanwhile. Where no run may overtake, nodes that are closed limit the work, and with backfill its depth.
        """
        cycle, go_on = self.cycle, self.cycle.left_over.place
        if not cycle.features.may_leave_over:
            yield from runs
            return
        limit = MAX_PLACEMENT_WORK // 2 if go_on is not None else MAX_PLACEMENT_WORK
        for run in runs:
            if cycle.placement_work >= limit and run.run_id != go_on:
                resumed = next((each for each in runs if each.run_id == go_on), None)
                if limit == MAX_PLACEMENT_WORK or resumed is None:
                    cycle.result.left_over = cycle.result.left_over._replace(place=run.run_id)
                    break
                run = resumed
            if run.run_id == go_on:
                limit = MAX_PLACEMENT_WORK
            yield run
        about = cycle.cluster.runs.get(cycle.about or "")
        examined = cycle.result.waits.keys() | {each.run.run_id for each in cycle.placements}
        if about is not None and about.run_id in cycle.cluster.queued and about.run_id not in examined:
            cycle.result.is_left_over = True
            yield about

    def _is_hopeless(self) -> bool:
        return is_hopeless(self.cycle, self._closed, only_slots_count=self._only_slots_count)

    def _place(self, run: Run) -> bool:
        """Place the run if it fits; False if it waits for slots."""
        cycle, request = self.cycle, resource_request_of(self.cycle.cluster, run)
        why, shut = rule_out(cycle, run, request)
        if why is None:
            slots = self._fit(run, request, run.least, shut)
            if slots is not None:
                cycle.snapshot.allocate(request.slot_spec, slots)
                cycle.entitlements.charge(run, slots)
                cycle.placements.append(Placement(run, request, slots))
                return True
            why = maintenance_reason(cycle, run, request) if cycle.placer.windows else None
        if why is not None:
            # More slots would not help it: no run waits behind it, and none is preempted for it.
            cycle.result.waits[run.run_id] = why
            return True
        cycle.blocked.append(run)
        if self.reservations is None:
            cycle.result.waits[run.run_id] = self._close(run, cycle.placer.waits_for(run, request) - shut)
        else:
            cycle.result.waits[run.run_id] = reserve_or_explain(cycle, self.reservations, run, request)
        return False

    def _fit(self, run: Run, request: ResourceRequest, count: int, shut: frozenset[str]) -> list[NodeSlots] | None:
        """Return slots for the run, if they are free and no run before it waits for them."""
        cycle = self.cycle
        avoid = avoided(cycle.cluster, run, cycle.policy) if run.strikes or run.excluded_nodes else ()
        # What is free only shrinks, and more nodes are closed: what did not fit will not fit.
        is_plain = not shut and cycle.features.allows(Shortcut.MISFITS)
        if is_plain and cycle.misfits.get(request, count + 1) <= count:
            return None
        cycle.placement_work += len(cycle.placer.eligible(request))
        closed = {**dict.fromkeys(shut, ""), **self._closed} if shut else self._closed
        if self.reservations is not None:
            return self.reservations.find(run, count, request, cycle.snapshot, avoid, closed)
        slots = cycle.placer.find(cycle.snapshot, run, count, request, avoid, closed)
        if slots is None and is_plain:
            cycle.misfits[request] = min(count, cycle.misfits.get(request, count))
        return slots

    def _close(self, run: Run, nodes: frozenset[str]) -> Why:
        """Return why the run waits. Unless others may overtake it, it closes the nodes that it waits for."""
        # The run that closed any of them first is ahead.
        ahead = next((first for node_id, first in self._closed.items() if node_id in nodes), None)
        if not self.cycle.policy.order.skip:
            for node_id in nodes:
                self._closed.setdefault(node_id, run.run_id)
        return Why("priority" if ahead else "slots", ahead=ahead)

    def widen(self) -> None:
        """Give what is left to the runs that were placed, the first in order first, and decide the placements."""
        cycle = self.cycle
        for placement in cycle.placements:
            try:
                chosen = self._widen(*placement)
                run = placement.run
                placed = PlaceRun(run.run_id, run.next_generation, members_of(chosen), run.resume)
            except Exception as error:
                note_suspect(error, run_id=placement.run.run_id)
                raise
            cycle.result.decisions.append(placed)

    def _widen(self, run: Run, request: ResourceRequest, slots: list[NodeSlots]) -> list[NodeSlots]:
        """Return the slots of the run, as many as it can use."""
        cycle, most = self.cycle, run.spec.slots.max
        if most <= run.spec.slots.min or len(cycle.placements) >= MAX_PLACEMENTS_PER_CYCLE:
            return slots
        with cycle.transaction() as trial:
            trial.release(run, slots)
            chosen = self._widest(run, request, most) or slots
            trial.allocate(run, chosen)
            trial.commit()
        return chosen

    def _widest(self, run: Run, request: ResourceRequest, most: int) -> list[NodeSlots] | None:
        """Return as many slots as make it faster, up to ``most``; None if that is no more than it needs."""
        cycle, placer = self.cycle, self.cycle.placer
        # More slots gain nothing on nodes where it fails.
        avoid = avoided(cycle.cluster, run, cycle.policy)
        most, shut = cycle.entitlements.most(run, request, most)
        if most <= run.spec.slots.min:
            return None
        kept = self.reservations
        snapshot = cycle.snapshot if kept is None else kept.snapshot_for(run, cycle.snapshot)
        count = useful(run, min(most, placer.most(snapshot, run, request, avoid | shut)))
        return placer.find(snapshot, run, count, request, avoid, shut) if count > run.spec.slots.min else None
