"""What a restart costs and what it gains, in slot-seconds: one measure for preemption, reclaim and growth."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from contracts.scheduling import Policy
from services.scheduler.core.state.cluster import Cluster
from services.scheduler.core.state.remaining_time import left_s
from services.scheduler.core.state.run import Run
from services.scheduler.core.state.suspects import note_suspect


class Price(NamedTuple):
    """Slot-seconds that a restart costs, and those that it gains."""

    cost_slot_s: float
    gain_slot_s: float

    @property
    def is_worth_it(self) -> bool:
        return self.gain_slot_s > self.cost_slot_s


def lost_slot_s(run: Run, now: datetime) -> float:
    """Return the slot-seconds since the work of the run was last safe.

    A run that cannot resume loses all of its present generation.
    """
    safe_at = max(run.committed_at, run.placed_at) if run.is_resumable else run.placed_at
    return run.slot_count * max((now - safe_at).total_seconds(), 0.0)


def restart_cost_slot_s(run: Run, now: datetime, policy: Policy) -> float:
    """Return what it costs to restart the run: the work lost, and the time until it is under way again."""
    try:
        return lost_slot_s(run, now) + run.slot_count * policy.preemption.resume_cost_s
    except Exception as error:
        note_suspect(error, run_id=run.run_id)
        raise


def preemption_price(cluster: Cluster, victim: Run, preemptor: Run, now: datetime, policy: Policy) -> Price:
    """Return what the preemption of one victim costs, and what its preemptor gains by all of its victims."""
    try:
        gain = preemptor.spec.slots.min * left_s(cluster, preemptor, now, policy, 0.5)
    except Exception as error:
        note_suspect(error, run_id=preemptor.run_id)
        raise
    return Price(round(restart_cost_slot_s(victim, now, policy), 1), round(gain, 1))


def growth_price(cluster: Cluster, run: Run, slots: int, now: datetime, policy: Policy) -> Price:
    """Return the cost of restarting the run on ``slots`` slots, and the gain of more slots until it is done.

    A run that has outlived its expected time is expected to need as long again as it has run. In its grace period it
    makes a checkpoint, so that no work is lost.
    """
    remaining_s = left_s(cluster, run, now, policy, 0.5) or run.ran_s(now)
    lost = 0.0 if run.spec.grace_s > 0 else lost_slot_s(run, now)
    cost, gain = lost + run.slot_count * policy.preemption.resume_cost_s, (slots - run.slot_count) * remaining_s
    return Price(round(cost, 1), round(gain, 1))
