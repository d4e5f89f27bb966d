"""Backfill: which runs may overtake a run that waits for many slots, without delaying it.

EASY (Lifka 1995) reserves for the first run that does not fit; conservative backfill for each of them, up to a number.
A reservation says when enough slots will be free, by the limits or the predicted ends of those that hold them, and
which ones. A run that comes later gets slots that are not reserved, or ends before they are needed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from datetime import UTC, datetime
from typing import NamedTuple

from contracts.scheduling import Policy
from services.scheduler.core.cycle_state import CycleState
from services.scheduler.core.decisions import ReserveRun
from services.scheduler.core.place.placer import Placer
from services.scheduler.core.place.resource_request import ResourceRequest
from services.scheduler.core.place.snapshot import ClusterSnapshot, NodeCapacity, NodeSlots
from services.scheduler.core.policy_features import Feature, has_wait_limit
from services.scheduler.core.reasons import Why
from services.scheduler.core.state.cluster import Cluster
from services.scheduler.core.state.remaining_time import expected_end_s, expected_s
from services.scheduler.core.state.run import Run
from services.scheduler.core.state.slot_spec import SLOT_MILLI, SlotSpec
from services.scheduler.core.state.suspects import note_suspect


class Reservation(NamedTuple):
    """Slots that a run will have from a time on."""

    run: Run
    start_s: float
    end_s: float
    taken: list[NodeSlots]
    #: Whether only limits were counted on, so that it can be promised.
    firm: bool


class _Future(NamedTuple):
    """What will be free once one more run has released its slots, if no run is placed meanwhile."""

    at_s: float
    run: Run | None
    #: Thousandths in all; whether all of these releases rely on limits; and the whole slots, a bit for each.
    milli: int
    firm: bool
    whole: int


class _Bits:
    """Whole slots of all nodes as the bits of one number: a quick test before the full search.

    A slot of which any share is taken is no longer whole. So the whole slots beside reservations follow from the bits
    alone, and a run that needs more of them need not be tried.
    """

    def __init__(self, snapshot: ClusterSnapshot) -> None:
        self._first: dict[str, int] = {}
        count = 0
        for node_id, capacity in snapshot.nodes.items():
            self._first[node_id] = count
            count += len(capacity.free_milli)

    def of_capacity(self, capacity: NodeCapacity) -> int:
        bits = sum(1 << slot for slot, milli in enumerate(capacity.free_milli) if milli == SLOT_MILLI)
        return bits << self._first[capacity.node.node_id]

    def of_node(self, capacity: NodeCapacity) -> int:
        return ((1 << len(capacity.free_milli)) - 1) << self._first[capacity.node.node_id]

    def of_space(self, snapshot: ClusterSnapshot) -> int:
        return sum(map(self.of_capacity, snapshot.nodes.values()))

    def of_taken(self, slot_spec: SlotSpec, taken: Iterable[NodeSlots]) -> int:
        if not slot_spec.milli:
            return 0
        return sum(1 << self._first[node_id] + slot for node_id, slots in taken for slot in slots)


class Reservations:
    """The reservations of one cycle, in the order of the queue."""

    def __init__(self, cluster: Cluster, now: datetime, policy: Policy, placer: Placer) -> None:
        self.cluster, self.now, self.policy, self.placer = cluster, now, policy, placer
        self.made: list[Reservation] = []
        self._most = 1 if policy.reserve.backfill == "easy" else policy.reserve.reservations
        ends = []
        run_id = ""
        try:
            for run_id in cluster.active:
                run = cluster.runs[run_id]
                if run.live:
                    at_s, firm = expected_end_s(cluster, run, now, policy)
                    ends.append((at_s, run, firm))
        except Exception as error:
            note_suspect(error, run_id=run_id)
            raise
        self._ends = sorted(ends, key=lambda each: (each[0], each[1].run_id))
        self._expected_s: dict[str, tuple[float, bool]] = {}
        self._bits: _Bits | None = None
        #: The whole slots of each reservation.
        self._kept: list[int] = []
        #: What is to come, and of which state of which space it is.
        self._futures: tuple[ClusterSnapshot, int, list[_Future]] | None = None
        self._spaces: dict[int, ClusterSnapshot] = {}

    def reserve(self, run: Run, request: ResourceRequest, snapshot: ClusterSnapshot) -> Reservation | None:
        """Reserve for a run that does not fit now, if its turn has come for a reservation."""
        if len(self.made) >= self._most or run.spec.slots.min < self.policy.reserve.from_slots:
            return None
        if has_wait_limit(self.policy) and run.run_id not in self.cluster.index.overdue:
            return None
        count, needs = run.spec.slots.min, run.slot_spec.milli * run.spec.slots.min
        length_s = max(self._expected(run)[0] - run.ran_s(self.now), 1.0)
        futures, seen = self._to_come(snapshot), 0
        # Slots come back as those that have them end, and those for which they are kept.
        times = {each[0] for each in self._ends} | {each.end_s for each in self.made}
        times |= {window.end.timestamp() for window in self.placer.windows}
        for start_s in sorted(times):
            while seen + 1 < len(futures) and futures[seen + 1].at_s <= start_s:
                seen += 1
            if futures[seen].milli < needs:
                continue
            numbers = [
                number
                for number, each in enumerate(self.made)
                if each.start_s < start_s + length_s and start_s < each.end_s
            ]
            if request.slot_spec.milli == SLOT_MILLI and self._whole(futures[seen].whole, numbers) < count:
                continue
            future = self._space_at(seen)
            out = self.placer.shut_from(run, as_time(start_s))
            if not self.placer.fits(future, run, count, request, closed=out, respect_maintenance=False):
                continue
            there = _without(future, [self.made[number] for number in numbers]) if numbers else future
            if (
                taken := self.placer.find(there, run, count, request, closed=out, respect_maintenance=False)
            ) is not None:
                firm = futures[seen].firm and all(each.firm for each in self.made)
                return self._add(Reservation(run, start_s, start_s + length_s, taken, firm))
        return None

    def _add(self, made: Reservation) -> Reservation:
        assert self._bits is not None
        self.made.append(made)
        self._kept.append(self._bits.of_taken(made.run.slot_spec, made.taken))
        return made

    def _to_come(self, snapshot: ClusterSnapshot) -> list[_Future]:
        """Return what is free now, and after each release by an allocated run, the earliest first."""
        if self._futures is not None and self._futures[0] is snapshot and self._futures[1] == snapshot.state_id:
            return self._futures[2]
        bits = self._bits = self._bits or _Bits(snapshot)
        future = snapshot.copy()
        found = [_Future(-math.inf, None, future.milli, True, bits.of_space(future))]
        for at_s, holder, firm in self._ends:
            future.release_run(holder)
            whole = found[-1].whole
            for node_id in {part.node_id for part in holder.live} & future.nodes.keys():
                capacity = future.nodes[node_id]
                whole = whole & ~bits.of_node(capacity) | bits.of_capacity(capacity)
            found.append(_Future(at_s, holder, future.milli, found[-1].firm and firm, whole))
        self._futures, self._spaces = (snapshot, snapshot.state_id, found), {0: snapshot.copy()}
        return found

    def _space_at(self, seen: int) -> ClusterSnapshot:
        """Return the snapshot after the first ``seen`` releases; it is never changed."""
        assert self._futures is not None
        found = self._spaces.get(seen)
        if found is None:
            before = max(number for number in self._spaces if number < seen)
            found = self._spaces[seen] = self._spaces[before].copy()
            for each in self._futures[2][before + 1 : seen + 1]:
                assert each.run is not None
                found.release_run(each.run)
        return found

    def _whole(self, whole: int, numbers: Iterable[int]) -> int:
        """How many of these whole slots are left beside the reservations."""
        for number in numbers:
            whole &= ~self._kept[number]
        return whole.bit_count()

    def find(
        self,
        run: Run,
        count: int,
        request: ResourceRequest,
        snapshot: ClusterSnapshot,
        avoid: Collection[str],
        closed: Collection[str],
    ) -> list[NodeSlots] | None:
        """``Placer.find`` in what the run may have of what is free now."""
        binding = self.binding(run)
        if binding and not self._may_fit(run, count, request, snapshot, binding, closed):
            return None
        return self.placer.find(self._without_reserved(snapshot, binding), run, count, request, avoid, closed)

    def _may_fit(
        self,
        run: Run,
        count: int,
        request: ResourceRequest,
        snapshot: ClusterSnapshot,
        binding: list[int],
        closed: Collection[str],
    ) -> bool:
        """Test quickly whether the run may fit; False if it certainly does not."""
        if not self.placer.fits(snapshot, run, count, request, closed):
            return False
        return request.slot_spec.milli != SLOT_MILLI or self._whole(self._to_come(snapshot)[0].whole, binding) >= count

    def snapshot_for(self, run: Run, snapshot: ClusterSnapshot) -> ClusterSnapshot:
        """What the run may have of what is free now."""
        return self._without_reserved(snapshot, self.binding(run))

    def kept_on_nodes(self, run: Run) -> dict[str, list[tuple[SlotSpec, tuple[int, ...]]]]:
        """What is reserved on each node that the run may not have."""
        found: dict[str, list[tuple[SlotSpec, tuple[int, ...]]]] = {}
        run_id = ""
        try:
            for each in [self.made[number] for number in self.binding(run)]:
                run_id = each.run.run_id
                for node_id, slots in each.taken:
                    found.setdefault(node_id, []).append((each.run.slot_spec, slots))
        except Exception as error:
            note_suspect(error, run_id=run_id)
            raise
        return found

    def binding(self, run: Run) -> list[int]:
        """Return the numbers of the reservations whose slots the run may not have."""
        return [number for number, each in enumerate(self.made) if not self._done_by(run, each)]

    def _without_reserved(self, snapshot: ClusterSnapshot, binding: list[int]) -> ClusterSnapshot:
        return _without(snapshot, [self.made[number] for number in binding]) if binding else snapshot

    def _expected(self, run: Run) -> tuple[float, bool]:
        """Return how long it has slots at most, and whether that is a limit; the same in all of the cycle."""
        found = self._expected_s.get(run.run_id)
        if found is None:
            found = self._expected_s[run.run_id] = expected_s(self.cluster, run, self.now, self.policy)
        return found

    def _done_by(self, run: Run, each: Reservation) -> bool:
        """Whether the run, started now, has released the slots by the time that they are needed."""
        if each.run is run:
            return True
        if self.policy.preemption.overtakers and run.spec.scheduling.preemptible and run.is_resumable:
            # It is preempted when the slots are needed.
            return True
        expected, firm = self._expected(run)
        if each.firm and not firm:
            # A firm reservation cannot rely on a prediction.
            return False
        return self.now.timestamp() + max(expected - run.run_s, 0.0) + run.spec.grace_s <= each.start_s

    def kept_from(self, run: Run, request: ResourceRequest, snapshot: ClusterSnapshot) -> Reservation | None:
        """The reservation for which the run may not have what is free."""
        if not self.made or not self.placer.fits(snapshot, run, run.spec.slots.min, request):
            return None
        return next((each for each in self.made if not self._done_by(run, each)), None)


def _without(snapshot: ClusterSnapshot, reservations: Iterable[Reservation]) -> ClusterSnapshot:
    """Return the snapshot without the slots of the reservations."""
    left, run_id = snapshot.copy(), ""
    try:
        for each in reservations:
            run_id = each.run.run_id
            for node_id, slots in each.taken:
                capacity = left.nodes.get(node_id)
                if capacity is not None:
                    free = tuple(
                        slot
                        for slot in slots
                        if slot >= len(capacity.free_milli) or capacity.free_milli[slot] >= each.run.slot_spec.milli
                    )
                    left.allocate(each.run.slot_spec, [(node_id, free)])
    except Exception as error:
        note_suspect(error, run_id=run_id)
        raise
    return left


def as_time(at_s: float) -> datetime:
    return datetime.fromtimestamp(at_s, UTC)


def reserves_slots(cycle: CycleState) -> bool:
    """Whether a run may get a reservation: any, or under an order with a wait limit those that have reached it."""
    features, overdue = cycle.features, cycle.cluster.index.overdue
    return features.has(Feature.BACKFILL) and (not features.has(Feature.WAIT_LIMIT) or bool(overdue))


def reserve_or_explain(cycle: CycleState, reservations: Reservations, run: Run, request: ResourceRequest) -> Why:
    """Reserve slots for a run that does not fit, if it is its turn; return why it waits."""
    made = reservations.reserve(run, request, cycle.snapshot)
    if made is None:
        kept_for = reservations.kept_from(run, request, cycle.snapshot)
        if kept_for is None:
            return Why("slots")
        return Why("reserved", ahead=kept_for.run.run_id, start_by=as_time(kept_for.start_s))
    least = cycle.policy.reserve.promise_slots
    start_by = as_time(made.start_s)
    is_promised = made.firm and least is not None and run.spec.slots.min >= least
    # A promise is published once: the run can only start earlier.
    if is_promised and run.reserved is None and run.run_id in cycle.cluster.queued:
        node_ids = tuple(sorted({node_id for node_id, _ in made.taken}))
        cycle.result.decisions.append(ReserveRun(run.run_id, run.next_generation, start_by, node_ids))
    return Why("slots", start_by=start_by, firm=made.firm)
