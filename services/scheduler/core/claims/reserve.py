"""Backfill: who may go ahead of a run that waits for many slots, without holding it up.

EASY (Lifka 1995) reserves for the first run that does not fit; conservative backfill for each of them, up to a number.
A reservation says when enough slots will be free, by the limits or the predicted ends of those that hold them, and
which ones. Whoever comes later gets slots that are not reserved, or ends before they are needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import NamedTuple

from contracts.scheduling import Policy
from services.scheduler.core.place.placer import Placer
from services.scheduler.core.place.space import Space, Taken
from services.scheduler.core.place.wants import Wants
from services.scheduler.core.state.cluster import Cluster, Run
from services.scheduler.core.state.expected import ends_s, expected_s, left_s


def resumable(run: Run) -> bool:
    """Whether it goes on where it was when it gets slots again, rather than begin anew."""
    return run.spec.task is not None and run.spec.kind == "train"


class Reservation(NamedTuple):
    """Slots that a run will have from a time on."""

    run: Run
    start_s: float
    end_s: float
    taken: list[Taken]
    #: Whether only limits were counted on, so that it can be promised.
    firm: bool


class Reserve:
    """Reservations of one pass, in the order of the line."""

    def __init__(self, cluster: Cluster, now: datetime, policy: Policy, placer: Placer) -> None:
        self.cluster, self.now, self.policy, self.placer = cluster, now, policy, placer
        self.made: list[Reservation] = []
        self._most = 1 if policy.reserve.backfill == "easy" else policy.reserve.reservations
        ends = []
        for run_id in cluster.active:
            run = cluster.runs[run_id]
            if run.live:
                at_s, firm = ends_s(cluster, run, now, policy)
                ends.append((at_s, run, firm))
        self._ends = sorted(ends, key=lambda each: (each[0], each[1].run_id))

    def hold(self, run: Run, wants: Wants, space: Space) -> Reservation | None:
        """Reserve for a run that does not fit now, if its turn has come for a reservation."""
        if len(self.made) >= self._most or run.spec.slots.min < self.policy.reserve.from_slots:
            return None
        count, needs = run.spec.slots.min, run.demand.milli * run.spec.slots.min
        length_s = max(left_s(self.cluster, run, self.now, self.policy), 1.0)
        future, firm, ends = space.copy(), True, iter(self._ends)
        at_s, holder, is_firm = next(ends, (math.inf, None, True))
        # Slots come back as those that have them end, and those for which they are kept.
        times = {each[0] for each in self._ends} | {each.end_s for each in self.made}
        times |= {window.end.timestamp() for window in self.placer.windows}
        for start_s in sorted(times):
            while holder is not None and at_s <= start_s:
                future.release(holder)
                firm = firm and is_firm
                at_s, holder, is_firm = next(ends, (math.inf, None, True))
            if future.milli < needs:
                continue
            between = [each for each in self.made if each.start_s < start_s + length_s and start_s < each.end_s]
            there = _without(future, between) if between else future
            out = self.placer.shut_from(run, as_time(start_s))
            if (taken := self.placer.find(there, run, count, wants, closed=out, heed=False)) is not None:
                firm = firm and all(each.firm for each in self.made)
                self.made.append(Reservation(run, start_s, start_s + length_s, taken, firm))
                return self.made[-1]
        return None

    def space_for(self, run: Run, space: Space) -> Space:
        """What the run may have of what is free now."""
        binding = [each for each in self.made if not self._done_by(run, each)]
        if not binding:
            return space
        return _without(space, binding)

    def _done_by(self, run: Run, each: Reservation) -> bool:
        """Whether the run, started now, has let go by the time that the slots are needed."""
        if each.run is run:
            return True
        if self.policy.reclaim.overtakers and run.spec.scheduling.preemptible and resumable(run):
            # It lets go again when the slots are needed.
            return True
        expected, firm = expected_s(self.cluster, run, self.now, self.policy)
        if each.firm and not firm:
            # What relies on limits cannot rely on a guess.
            return False
        return self.now.timestamp() + max(expected - run.run_s, 0.0) + run.spec.grace_s <= each.start_s

    def kept_from(self, run: Run, wants: Wants, space: Space) -> Reservation | None:
        """The reservation for which the run may not have what is free."""
        if not self.made or self.placer.find(space, run, run.spec.slots.min, wants) is None:
            return None
        return next((each for each in self.made if not self._done_by(run, each)), None)


def _without(space: Space, reservations: Iterable[Reservation]) -> Space:
    """What is left beside what is kept for others."""
    left = space.copy()
    for each in reservations:
        for node_id, slots in each.taken:
            room = left.rooms.get(node_id)
            if room is not None:
                free = tuple(
                    slot for slot in slots if slot >= len(room.left) or room.left[slot] >= each.run.demand.milli
                )
                left.take(each.run.demand, [(node_id, free)])
    return left


def as_time(at_s: float) -> datetime:
    return datetime.fromtimestamp(at_s, UTC)
