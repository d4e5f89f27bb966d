"""Time: turns of runs that allow them, deadlines, granted time, limits; and whose slots are taken by share."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from contracts.events.run import RunFailed, RunStopping
from contracts.scheduling import FairShare, Order, Policy, Preemption
from services.scheduler.core.decide import run_steps
from tests.scheduler.test_quota import Teams
from tests.scheduler.world import START

SLICE_S = 600.0
TURNS = Policy(preemption=Preemption(time_slice_s=SLICE_S))


def takes_turns(world: Teams, run_id: str, slots: Any = 8, **more: Any) -> None:
    scheduling = {"time_slice": True, **more.pop("scheduling", {})}
    world.submit(run_id, more.pop("team", None), slots, scheduling=scheduling, **more)
    for run in world.placed():
        world.start(run)


def test_runs_that_allow_it_take_turns() -> None:
    world = Teams(TURNS)
    for run_id in ("r0", "r1", "r2"):
        takes_turns(world, run_id)
    order = []
    for _ in range(6):
        (running,) = world.placed()
        order.append(running)
        world.start(running)
        assert run_steps(world.cluster, world.now, TURNS).wake_at is not None
        world.wait(SLICE_S - 1)
        assert not world.settle()
        world.wait(1)
        world.settle()
        assert world.stopping() == {running}
        world.wait(5)
        world.let_go()
    assert order == ["r0", "r1", "r2"] * 2
    assert world.facts(RunStopping)[0].message == "gives way to run r1 whose turn it is after 600 s"


@pytest.mark.parametrize(
    ("first", "second", "gives_way"),
    [
        pytest.param({}, {}, True, id="both allow it"),
        pytest.param({"time_slice": False}, {}, False, id="who runs does not"),
        pytest.param({}, {"time_slice": False}, False, id="who waits would never give way itself"),
        pytest.param({"preemptible": False}, {}, False, id="nobody may take its slots"),
    ],
)
def test_runs_take_turns(first: dict[str, bool], second: dict[str, bool], gives_way: bool) -> None:
    world = Teams(TURNS)
    takes_turns(world, "r0", scheduling=first)
    takes_turns(world, "r1", scheduling=second)
    world.wait(SLICE_S)
    world.settle()
    assert world.stopping() == ({"r0"} if gives_way else set())


def test_only_runs_of_the_same_standing_take_turns() -> None:
    world = Teams(TURNS)
    takes_turns(world, "r0", priority=1)
    takes_turns(world, "r1")
    world.wait(SLICE_S)
    assert not world.settle()


def test_a_new_run_does_not_overtake_one_that_waits_for_its_turn() -> None:
    world = Teams(TURNS)
    takes_turns(world, "r0")
    takes_turns(world, "r1")
    world.wait(SLICE_S)
    world.settle()
    takes_turns(world, "r2")
    world.let_go()
    assert world.placed() == {"r1"}
    world.wait(SLICE_S)
    world.settle()
    world.let_go()
    # It was there before the first one had had its turn.
    assert world.placed() == {"r0"}


def at(minutes: float) -> dict[str, Any]:
    return {"scheduling": {"deadline": (START + timedelta(minutes=minutes)).isoformat()}}


@pytest.mark.parametrize(
    ("deadlines", "order"),
    [
        ({"r1": 90.0, "r2": 60.0, "r3": 120.0}, ["r2", "r1", "r3"]),
        ({"r1": None, "r2": 60.0}, ["r2", "r1"]),
        ({"r1": 60.0, "r2": 60.0}, ["r1", "r2"]),
        ({"r1": 60.0, "r2": -10.0}, ["r2", "r1"]),
    ],
)
def test_the_earliest_deadline_is_first(deadlines: dict[str, float | None], order: list[str]) -> None:
    world = Teams(Policy(order=Order(by=("deadline",))))
    world.submit("r0", None, 8)
    for run_id, minutes in deadlines.items():
        world.submit(run_id, None, 8, **({} if minutes is None else at(minutes)))
    assert not world.stopping()
    started = []
    for _ in deadlines:
        (running,) = world.placed()
        world.commit(running, 1, final=True)
        world.exit(running)
        world.settle()
        started += sorted(world.placed())
    assert started == order


def test_an_earlier_deadline_preempts_where_the_policy_allows_it() -> None:
    world = Teams(Policy(order=Order(by=("deadline",)), preemption=Preemption(by=("deadline",))))
    world.submit("r0", None, 8, **at(120))
    world.submit("r1", None, 8, **at(120))
    assert not world.stopping()
    world.submit("r2", None, 4, **at(60))
    assert world.stopping() == {"r0"}
    world.let_go()
    assert world.placed() == {"r2"}


def test_no_slots_are_taken_before_the_granted_time() -> None:
    policy = Policy(preemption=Preemption(min_run_s=300))
    world = Teams(policy)
    world.submit("r0", None, 8)
    world.start("r0")
    world.wait(100)
    world.submit("r1", None, 8, priority=5)
    assert not world.stopping()
    assert run_steps(world.cluster, world.now, policy).wake_at == world.now + timedelta(seconds=200)
    world.wait(200)
    world.settle()
    assert world.stopping() == {"r0"}


def test_a_run_over_its_limit_is_stopped_and_fails_with_the_reason() -> None:
    world = Teams(Policy())
    world.submit("r0", None, 8, scheduling={"limit_s": 600})
    world.start("r0")
    world.wait(400)
    world.submit("r1", None, 8, priority=5)
    world.let_go()
    world.wait(50)
    world.commit("r1", 1, final=True)
    world.exit("r1")
    world.settle()
    # What it had before counts, the time in which it had no slots does not.
    world.start("r0")
    world.wait(199)
    assert not world.settle()
    world.wait(1)
    world.settle()
    stop = world.facts(RunStopping, "r0")[-1]
    assert (stop.then, stop.grace_s) == ("fail", 30)
    world.let_go()
    (failed,) = world.facts(RunFailed)
    assert failed.reason == "it has had its slots for 600 s, and its limit (scheduling.limit_s) is 600 s"


SHARES = Policy(
    order=Order(by=("fair-share",), skip=True),
    fair_share=FairShare(weights={"research": 3}, half_life_s=3600),
)


def test_free_slots_are_shared_out_by_weight_at_once() -> None:
    world = Teams(SHARES, slots=8)
    world.submit("block", "other", 8)
    for index in range(12):
        world.submit(f"sales{index}", "sales")
        world.submit(f"vision{index}", "research/vision")
        world.submit(f"nlp{index}", "research/nlp")
    world.commit("block", 1, final=True)
    world.exit("block")
    world.settle()
    teams = [world.run(run_id).spec.team for run_id in world.placed()]
    assert {team: teams.count(team) for team in set(teams)} == {"sales": 2, "research/vision": 3, "research/nlp": 3}


def test_a_team_below_its_share_preempts_where_the_policy_allows_it() -> None:
    world = Teams(SHARES.model_copy(update={"preemption": Preemption(by=("fair-share",))}), slots=8)
    for index in range(8):
        world.submit(f"sales{index}", "sales")
    for index in range(8):
        world.submit(f"vision{index}", "research/vision")
    # Three quarters; one more would be taken back.
    assert len(world.stopping()) == 6
    assert "further below its share" in world.facts(RunStopping)[0].message
    world.let_go()
    assert sorted(run_id[:5] for run_id in world.placed()) == ["sales"] * 2 + ["visio"] * 6
    assert not world.settle()


def test_no_share_preempts_where_the_policy_does_not_allow_it() -> None:
    world = Teams(SHARES, slots=8)
    for index in range(8):
        world.submit(f"sales{index}", "sales", priority=index)
    world.submit("vision", "research/vision", priority=9)
    assert not world.stopping()
