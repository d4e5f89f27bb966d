"""Each stop says why: one small world for each reason."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import get_args

import pytest

from contracts.events.run import RunFailed, RunPlaced, RunQueued, RunStopping, StopReason, queue_reason_of
from contracts.scheduling import Admit, Faults, Maintenance, Policy, Quota
from services.scheduler.core.decide import decide
from services.scheduler.core.decisions import fact_of
from tests.scheduler.world import START, World, spec


def running(policy: Policy | None = None, slots: object = 2, **more: object) -> World:
    """A world in which the run r1 trains on two nodes of one slot each."""
    world = World(policy)
    world.join("n1", 1)
    world.join("n2", 1)
    world.accept("r1", spec(slots, **more))
    world.settle()
    world.start("r1")
    world.commit("r1", 5)
    return world


def preempted() -> World:
    world = running()
    world.accept("r2", spec(2, priority=5))
    return world


def resized() -> World:
    world = running(slots={"min": 1, "max": 2})
    world.accept("r2", spec(1, priority=5))
    return world


def cancelled() -> World:
    world = running()
    world.cancel("r1")
    return world


def run_over() -> World:
    """A former leader places a run that has been cancelled meanwhile."""
    world = World()
    world.join("n1", 1)
    world.join("n2", 1)
    world.accept("r1", spec(2))
    facts = [fact_of(each, world.cluster, world.now) for each in decide(world.cluster, world.now, world.policy)]
    [placed] = [fact for fact in facts if isinstance(fact, RunPlaced)]
    world.publish(next(fact for fact in facts if isinstance(fact, RunQueued)))
    world.cancel("r1")
    world.settle()
    world.publish(placed)
    return world


def time_limit() -> World:
    world = running(scheduling={"limit_s": 100})
    world.wait(101)
    return world


def quota_spent() -> World:
    quota = Quota(team="a", slot_hours=8, period_h=24)
    world = running(Policy(admit=Admit(quotas=(quota,))), team="a")
    world.wait(4 * 3600)
    return world


def drained() -> World:
    world = running()
    world.drain("n1")
    return world


def maintenance() -> World:
    world = running()
    world.policy = Policy(maintenance=(Maintenance(start=START, end=START + timedelta(hours=1)),))
    return world


def notice() -> World:
    world = running()
    world.notice("n1", 60)
    return world


def released() -> World:
    world = running()
    world.release("r1", "n1")
    return world


def unfit() -> World:
    world = running()
    world.unfit("n1")
    return world


def stalled() -> World:
    world = running()
    world.stall("r1", "n1", "restart")
    return world


def start_deadline() -> World:
    world = World(Policy(faults=Faults(start_deadline_s=100)))
    world.join("n1", 2)
    world.accept("r1", spec(2))
    world.settle()
    world.wait(101)
    return world


def node_lost() -> World:
    world = running()
    world.lose("n1")
    return world


def infrastructure() -> World:
    world = running()
    world.exit("r1", "failed", "n1", infrastructure_failure=True)
    return world


def crashed() -> World:
    world = running()
    world.exit("r1", "failed", "n1")
    return world


WORLDS: dict[StopReason, Callable[[], World]] = {
    "preempted": preempted,
    "resized": resized,
    "cancelled": cancelled,
    "run_over": run_over,
    "time_limit": time_limit,
    "quota_spent": quota_spent,
    "drained": drained,
    "maintenance": maintenance,
    "notice": notice,
    "released": released,
    "unfit": unfit,
    "stalled": stalled,
    "start_deadline": start_deadline,
    "node_lost": node_lost,
    "infrastructure": infrastructure,
    "crashed": crashed,
}
ENDS = {"cancelled": "cancelled", "run_over": "cancelled", "time_limit": "failed"}


def test_every_reason_has_a_world() -> None:
    assert set(WORLDS) == set(get_args(StopReason))


@pytest.mark.parametrize("reason", WORLDS)
def test_a_stop_says_why(reason: StopReason) -> None:
    world = WORLDS[reason]()
    world.step()
    [stop] = world.facts(RunStopping, "r1")
    assert stop.reason == reason
    assert stop.message
    world.release("r1")
    world.step()
    if reason in ENDS:
        assert world.phase("r1") == ENDS[reason]
        assert bool(world.facts(RunFailed, "r1")) is (reason == "time_limit")
    else:
        assert world.facts(RunQueued, "r1")[-1].reason == queue_reason_of(reason)
