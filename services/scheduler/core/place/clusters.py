"""Which of several clusters a run goes to. A run lies in one of them; it may name those that will do.

What counts is when it would train: with its slots free, or behind what waits there already, and with its data at hand
or fetched first. Among clusters where that is about as soon, the cheapest one is taken.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

#: Seconds that count for nothing, and the part of the run's work that does.
ABOUT_S, ABOUT_SHARE = 60.0, 0.02
#: How long fetching a dataset is assumed to take where its size is unknown.
FETCH_S = 300.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A cluster as one run sees it: its own queue, and what would do for the run."""

    name: str
    #: Slots that would do for the run: free ones, and all in all.
    free: int
    capacity: int
    #: Slots that runs before it wait for, or are bound to, here.
    queued: int = 0
    #: Part of the free slots' nodes that have the run's data, 0 to 1.
    local: float = 0.0
    #: What the run would cost there, or how far down its order of pools that is; compared alone.
    cost: float = 0.0

    def starts_in_s(self, slots: int, turn_s: float) -> float:
        """Return the seconds until the cluster has these slots for the run: 0, or the turns that its queue takes."""
        if self.free - self.queued >= slots:
            return 0.0
        return (self.queued + slots - self.free) / self.capacity * turn_s


def choose_cluster(
    candidates: Iterable[Candidate], slots: int, work_s: float, turn_s: float, fetch_s: float = FETCH_S
) -> list[Candidate]:
    """The clusters that can ever hold the run, the best one first.

    Args:
        slots: the least that the run can use.
        work_s: how long it is expected to take; what a little later means for it follows from that.
        turn_s: how long runs hold their slots as a rule.
        fetch_s: how long it takes to fetch its data where they are not; 0 for a run without.
    """
    fitting = [each for each in candidates if each.capacity >= slots]
    ready_s = {each.name: each.starts_in_s(slots, turn_s) + (1 - each.local) * fetch_s for each in fitting}
    about_s = min(ready_s.values(), default=0.0) + max(ABOUT_S, ABOUT_SHARE * work_s)

    def key(each: Candidate) -> tuple[bool, float, float, str]:
        soon = ready_s[each.name] <= about_s
        return not soon, each.cost if soon else 0.0, ready_s[each.name], each.name

    return sorted(fitting, key=key)
