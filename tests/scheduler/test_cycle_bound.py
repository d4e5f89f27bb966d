"""A cycle does a bounded amount of work: the next one goes on with the rest, and a replay decides the same."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contracts.events.run import RunPlaced, RunStopping
from contracts.scheduling import Order, Policy, Preemption
from services.scheduler.core.decide import run_steps
from services.scheduler.core.explain.why import answer
from services.scheduler.core.steps import place, preempt
from tests.operate.test_past import lively, log_of
from tests.scheduler.world import World, spec
from trainbus.operate.history.verification import verify_log

SKIPPING = Policy(order=Order(by=("priority",), skip=True), preemption=Preemption(by=("priority",)))


@pytest.fixture
def small_cycles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a cycle evaluate few nodes."""
    monkeypatch.setattr(place, "MAX_PLACEMENT_WORK", 6)
    monkeypatch.setattr(preempt, "MAX_SEARCH_WORK", 5)


@pytest.mark.usefixtures("small_cycles")
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10_000))
def test_a_bounded_cycle_is_decided_again_without_a_difference(seed: int) -> None:
    """``World.step`` also compares each cycle with one that has no caches; ``calm`` checks that no run starves."""
    counts, found = verify_log(log_of(lively(seed, policy=SKIPPING)))
    assert found == []
    assert counts.decisions == counts.same


def crowded(runs: int, **more: Any) -> World:
    """A node with two free slots, and runs of different requests that wait for four."""
    world = World(SKIPPING)
    world.join("n1", 4)
    world.join("n2", 2)
    world.accept("holder", spec(4, priority=9))
    world.settle()
    for number in range(runs):
        world.accept(f"r{number:02}", spec(4, resources={"cpus": 1 + number, "share": 1}, **more))
    return world


@pytest.mark.usefixtures("small_cycles")
def test_a_run_at_the_end_of_a_long_queue_is_placed_by_a_later_cycle() -> None:
    world = crowded(20)
    world.step()  # queues them
    world.step()
    world.accept("last", spec(2, resources={"cpus": 100, "share": 1}))
    cycles = 0
    while not world.facts(RunPlaced, "last"):
        world.step()
        cycles += 1
        assert cycles < 20, "the run starves"
    assert cycles > 2
    assert any(fact.decision.place_from for fact in world.facts(RunPlaced, "last"))


@pytest.mark.usefixtures("small_cycles")
def test_victims_are_searched_for_a_run_behind_many_fruitless_searches() -> None:
    world = World(SKIPPING)
    for name in ("n1", "n2"):
        world.join(name, 4)
        world.accept(f"pinned-{name}", spec(1, scheduling={"preemptible": False}))
        world.accept(f"low-{name}", spec(3))
        world.settle()
    for number in range(12):
        whole_node = {"resources": {"cpus": 1 + number, "share": 1}, "gang": {"bundle": 4}}
        world.accept(f"r{number:02}", spec(4, priority=5, **whole_node))
    world.accept("last", spec(3, priority=1))
    cycles = 0
    while not world.facts(RunStopping):
        world.step()
        cycles += 1
        assert cycles < 40, "the run starves"
    assert world.facts(RunStopping)[0].decision.preempt_from is not None


@pytest.mark.usefixtures("small_cycles")
def test_why_names_a_run_that_was_left_over_and_examines_it() -> None:
    world = crowded(20)
    world.settle()
    result = run_steps(world.cluster, world.now, world.policy)
    assert result.left_over.place is not None
    assert result.wake_at is not None
    message = answer(world.cluster, "r19", world.now, world.policy)["message"]
    assert "one cycle does not examine all runs" in message
    assert "one cycle does not examine all runs" not in answer(world.cluster, "r00", world.now, world.policy)["message"]
