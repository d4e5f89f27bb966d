"""Short runs first; the long ones share the wait evenly.

A run counts with the slot-seconds that it takes: with what it has had, or is expected to take yet, whichever is more.
The less it counts the sooner it goes, so that short runs pass. But what a long run counts falls with its wait, from a
part of the longest wait on, down to nothing: it then goes like a short one. No setting gives the
longest wait: it is the longest wait of the runs that have slots, plus a margin. So the load sets it for all long runs.

Slots are taken only from runs that count for several times as much, since starting again costs. What a run counts is
rounded to powers of two: its place in line then changes a few times in its life, and it is known beforehand when.

What goes in: the wait, the size and the time that a run has had slots; never how long it will take.
"""

from __future__ import annotations

import math
from datetime import datetime
from typing import NamedTuple

from contracts.scheduling import EvenWait, Policy
from services.scheduler.core.state.cluster import Cluster
from services.scheduler.core.state.run import Run
from services.scheduler.core.state.suspects import note_suspect

#: The longest wait is rounded up to this part of the margin; the queue is sorted again when it changes.
STEP = 0.25
#: Seconds after which a change has certainly taken effect, despite rounding.
AFTER_S = 1e-3


class WaitGroup(NamedTuple):
    """Runs that compete for the same slots on the same terms: they share one longest wait."""

    team: str
    accelerators: frozenset[str]
    priority: int


def group_of(run: Run) -> WaitGroup:
    """Return the group whose longest wait the run is measured by."""
    return WaitGroup(run.spec.team or "", run.slot_spec.accelerators, run.spec.priority)


def limit_s(cluster: Cluster, run: Run, config: EvenWait) -> float:
    """Return the longest wait of the run's group, and the margin.

    It looks at runs that have slots: their waits stand still, and so does this until something happens.
    """
    step_s = STEP * config.margin_s
    return math.ceil(_longest_waits(cluster).get(group_of(run), 0.0) / step_s) * step_s + config.margin_s


def limits(cluster: Cluster, config: EvenWait) -> frozenset[tuple[WaitGroup, int]]:
    """Return the limits of all groups, in steps; the queue is sorted again when one changes."""
    step_s = STEP * config.margin_s
    return frozenset((group, math.ceil(longest_s / step_s)) for group, longest_s in _longest_waits(cluster).items())


def _longest_waits(cluster: Cluster) -> dict[WaitGroup, float]:
    """Return the longest wait of the runs with slots, by their groups."""
    known = cluster.index.longest_waits
    if known is not None and known[0] == cluster.sequence:
        return known[1]
    found: dict[WaitGroup, float] = {}
    run_id = ""
    try:
        for run_id in cluster.active:
            run = cluster.runs[run_id]
            # (One that has ended and is not settled yet has its last slots counted among what it had before.)
            waited_s = (run.placed_at - run.ready_at).total_seconds() - run.run_s
            if waited_s > 0:
                group = group_of(run)
                found[group] = max(found.get(group, 0.0), waited_s)
    except Exception as error:
        note_suspect(error, run_id=run_id)
        raise
    cluster.index.longest_waits = (cluster.sequence, found)
    return found


def key(cluster: Cluster, run: Run, now: datetime, policy: Policy) -> float:
    """What the run counts, in powers of two of what is short."""
    config = policy.order.even_wait
    left = part_left(run.waited_s(now), limit_s(cluster, run, config), config)
    return _power(_weight(run, now, config) * left)


def changes_at(cluster: Cluster, run: Run, now: datetime, policy: Policy) -> float:
    """When a waiting run comes to count less, if nothing happens, in seconds since the epoch; inf: never."""
    config = policy.order.even_wait
    weight, waited_s = _weight(run, now, config), run.waited_s(now)
    longest_s = limit_s(cluster, run, config)
    power = _power(weight * part_left(waited_s, longest_s, config))
    if power <= 0:
        return math.inf
    # It counts less once so little of it is left.
    left = math.pow(2.0, power) / weight
    due_s = longest_s * (config.from_part + (1 - config.from_part) * (1 - left))
    return now.timestamp() + max(due_s - waited_s, 0.0) + AFTER_S


def attained_for_more(cluster: Cluster, run: Run, now: datetime, policy: Policy) -> float:
    """The slot-seconds at which a run that has slots comes to count more."""
    config = policy.order.even_wait
    left = part_left(run.waited_s(now), limit_s(cluster, run, config), config)
    power = _power(_weight(run, now, config) * left)
    return config.short_slot_s * math.pow(2.0, power + 1) / left if left > 0 else math.inf


def advantage(config: EvenWait) -> float:
    """By how much the keys of two runs must differ, for slots to be taken from the one for the other."""
    return math.log2(config.advantage)


def part_left(waited_s: float, longest_s: float, config: EvenWait) -> float:
    """Which part of its length still counts for a run that has waited so long."""
    return min(max((1 - waited_s / longest_s) / (1 - config.from_part), 0.0), 1.0)


def _weight(run: Run, now: datetime, config: EvenWait) -> float:
    """Slot-seconds, in units of what is short."""
    foreseen = run.predicted_s * run.spec.slots.min if config.foresee else 0.0
    return max(run.attained_slot_s(now), foreseen) / config.short_slot_s


def _power(weight: float) -> float:
    return float(max(math.frexp(weight)[1] - 1, 0))
