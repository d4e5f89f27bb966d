"""Growing is priced: the restart against the slot-seconds that more slots gain."""

from __future__ import annotations

import pytest

from services.scheduler import policies
from services.scheduler.core import price
from services.scheduler.core.decisions import StopRun
from tests.scheduler.world import World, spec


def test_a_run_that_outlived_its_expected_time_gains_as_long_again_as_it_has_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    world.join("a", 4)
    world.accept("r", spec({"min": 1, "max": 2}))
    world.settle()
    world.start("r")
    run = world.run("r")
    world.wait(100)
    monkeypatch.setattr(price, "left_s", lambda *_: 0.0)
    growth = price.growth_price(world.cluster, run, run.slot_count + 2, world.now, world.policy)
    assert growth.gain_slot_s == 2 * run.ran_s(world.now) > 0


@pytest.mark.parametrize(("grace_s", "lost_s"), [(30.0, 0), (0.0, 100)])
def test_growing_loses_no_work_that_a_run_commits_in_its_grace_period(grace_s: float, lost_s: float) -> None:
    world = World()
    world.join("a", 4)
    world.accept("r", spec({"min": 1, "max": 2}, grace_s=grace_s))
    world.settle()
    world.start("r")
    run = world.run("r")
    world.wait(100)
    growth = price.growth_price(world.cluster, run, run.slot_count + 2, world.now, world.policy)
    assert growth.cost_slot_s == run.slot_count * (lost_s + world.policy.preemption.resume_cost_s)


@pytest.mark.parametrize(
    ("grace_s", "is_committed", "is_preempted"), [(30, False, True), (0, False, False), (0, True, True)]
)
def test_an_order_preempts_only_a_run_that_has_a_checkpoint_to_come_back_to(
    grace_s: float, is_committed: bool, is_preempted: bool
) -> None:
    world = World(policies.load("least-attained"))
    world.join("n", 2)
    world.accept("first", spec(2, grace_s=grace_s))
    world.settle()
    world.start("first")
    if is_committed:
        world.commit("first", 1)
    world.wait(100_000)
    world.accept("second", spec(2))
    # Without a grace period the preempted ranks make no checkpoint.
    stops = [decision.run_id for decision in world.settle() if isinstance(decision, StopRun)]
    assert stops == (["first"] if is_preempted else [])
