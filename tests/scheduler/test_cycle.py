"""A scheduling cycle: what it remembers, what it weighs, and where it may be cut."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from contracts.events.run import RunStopping, RunWaiting
from contracts.scheduling import Elastic, Maintenance, Order, Policy, Preemption
from services.scheduler.core.cycle_state import CycleState
from services.scheduler.core.decide import run_steps
from services.scheduler.core.explain.why import answer
from services.scheduler.core.place.snapshot import ClusterSnapshot
from services.scheduler.core.quota.transaction import Transaction
from services.scheduler.core.steps import preempt
from tests.scheduler.world import START, World, spec

DEADLINE = {"scheduling": {"deadline": START.isoformat()}}


def one_node(policy: Policy | None = None, slots: int = 4) -> World:
    world = World(policy)
    world.join("n1", slots)
    return world


@pytest.mark.parametrize(("command", "is_preempted"), [(True, False), (False, True)])
def test_an_ordering_policy_preempts_only_what_has_a_checkpoint_to_come_back_to(
    command: bool, is_preempted: bool
) -> None:
    world = one_node(Policy(order=Order(by=("deadline",)), preemption=Preemption(by=("deadline",))))
    world.accept("late", spec(4, command=command))
    world.settle()
    world.start("late")
    world.accept("soon", spec(4, **DEADLINE))
    world.settle()
    assert bool(world.facts(RunStopping)) is is_preempted


def test_a_higher_priority_preempts_what_has_no_checkpoint() -> None:
    world = one_node()
    world.accept("low", spec(4, command=True))
    world.settle()
    world.accept("high", spec(4, priority=5))
    world.settle()
    assert [stop.run_id for stop in world.facts(RunStopping)] == ["low"]


@pytest.mark.parametrize(("left_s", "grows"), [(50.0, False), (5000.0, True)])
def test_a_run_grows_only_if_that_gains_more_than_the_restart_costs(left_s: float, grows: bool) -> None:
    world = one_node(Policy(elastic=Elastic(resize_interval_s=2.0)), slots=2)
    world.accept("r1", spec({"min": 1, "max": 4}, scheduling={"limit_s": 100.0 + left_s}))
    world.settle()
    world.start("r1")
    world.wait(95)
    world.commit("r1", 5)
    world.join("n2", 2)
    world.wait(5)
    world.settle()
    stops = world.facts(RunStopping)
    assert bool(stops) is grows
    if grows:
        assert stops[0].cost_slot_s == pytest.approx(2 * 60)
        assert stops[0].gain_slot_s == pytest.approx(2 * left_s)


def test_the_price_of_a_preemption_stands_in_the_fact_and_in_why() -> None:
    world = one_node()
    world.accept("low", spec(4))
    world.settle()
    world.start("low")
    world.wait(100)
    world.commit("low", 5)
    world.wait(10)
    world.accept("high", spec(2, priority=5, scheduling={"limit_s": 600}))
    world.settle()
    stop = world.facts(RunStopping)[0]
    assert (stop.cost_slot_s, stop.gain_slot_s) == (4 * (10 + 60), 2 * 600)
    assert "costs 280 slot-seconds and gains 1200" in answer(world.cluster, "low", world.now, world.policy)["message"]


def full_but_one_bundle() -> World:
    """Two nodes, each with a run that may not be preempted, and a bundle that waits for a whole node."""
    world = one_node()
    world.join("n2", 4)
    for number in range(8):
        pinned = {"scheduling": {"preemptible": number not in (0, 4)}}
        world.accept(f"r{number}", spec(1, **pinned))
    world.settle()
    world.accept("bundle", spec(4, priority=5, gang={"bundle": 4}))
    return world


def test_a_search_in_vain_is_remembered_until_what_it_depends_on_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    world = full_but_one_bundle()
    searches: list[Any] = []
    search = preempt.select_victims
    monkeypatch.setattr(preempt, "select_victims", lambda problem: searches.append(problem) or search(problem))

    def cycle() -> int:
        searches.clear()
        run_steps(world.cluster, world.now, world.policy)
        return len(searches)

    assert cycle() == 1
    for _ in range(3):
        world.wait(100)
        assert cycle() == 0
    world.commit("r1", 1)  # nothing that a search depends on
    assert cycle() == 0
    world.exit("r0")
    world.commit("r0", 1, final=True)
    monkeypatch.setattr(preempt, "select_victims", search)
    world.settle()
    assert len(world.facts(RunStopping)) == 3


def test_a_search_that_failed_is_repeated_once_victims_leave_slots_over() -> None:
    """``World.step`` compares with a scheduler that remembers nothing."""
    world = one_node(Policy(order=Order(by=("deadline", "priority"), skip=True)), slots=2)
    world.join("n2", 2)
    early, late = ({"scheduling": {"deadline": (START + timedelta(hours=hours)).isoformat()}} for hours in (1, 2))
    world.accept("a", spec(2, **early))
    world.accept("b", spec(2, **late))
    world.settle()
    world.accept("big", spec(3, priority=1, **late))
    world.settle()
    assert not world.facts(RunStopping)
    world.accept("small", spec(1, priority=1, **early))
    world.settle()
    assert {(stop.run_id, stop.preemptor) for stop in world.facts(RunStopping)} == {("a", "small"), ("b", "big")}


def test_a_transaction_that_is_not_committed_leaves_no_trace() -> None:
    world = one_node()
    world.accept("r1", spec(3))
    world.settle()
    cycle = CycleState(world.cluster, world.now, world.policy)
    run = world.run("r1")

    def state(snapshot: ClusterSnapshot) -> Any:
        return {
            node_id: (each.free_milli, each.whole_slots, each.total_milli) for node_id, each in snapshot.nodes.items()
        }

    before, state_id = state(cycle.snapshot), cycle.snapshot.state_id
    with cycle.transaction() as trial:
        trial.release_run(run)
        trial.allocate(run, [("n1", (0,))])
        assert state(cycle.snapshot) != before
    assert (state(cycle.snapshot), cycle.snapshot.state_id) == (before, state_id)
    with Transaction(cycle.snapshot, cycle.entitlements) as trial:
        trial.release(run, [("n1", (2,))])
        trial.commit()
    assert cycle.snapshot.nodes["n1"].whole_slots == 2


def full_before_maintenance() -> World:
    """Two nodes with a run each, soon in maintenance; a long run waits, and behind it one that is over before."""
    window = Maintenance(start=START + timedelta(seconds=100), end=START + timedelta(seconds=5000))
    world = one_node(Policy(order=Order(by=("priority",), skip=True), maintenance=(window,)), slots=1)
    world.join("n2", 1)
    for name in ("low", "other"):
        world.accept(name, spec(1, scheduling={"limit_s": 20}))
    world.settle()
    world.accept("long", spec(1, priority=5))
    world.accept("short", spec(1, priority=5, scheduling={"limit_s": 20}))
    return world


def test_a_run_that_is_over_before_maintenance_is_searched_for_behind_one_that_is_not() -> None:
    world = full_before_maintenance()
    world.settle()
    assert [stop.preemptor for stop in world.facts(RunStopping)] == ["short"]


def test_a_run_that_is_over_before_maintenance_gets_what_will_be_free() -> None:
    world = full_before_maintenance()
    world.cancel("low")
    world.settle()
    assert "run low asked to release" in world.facts(RunWaiting, "short")[0].message
