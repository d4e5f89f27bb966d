"""Backfill: who goes ahead of a run that waits for many slots, and what a promise is worth."""

from __future__ import annotations

import random
from datetime import timedelta

import pytest

from contracts.events.run import RunFailed, RunPlaced, RunReserved, RunStopping
from contracts.scheduling import Maintenance, Order, Policy, Preemption, Reserve
from services.scheduler.core.explain.why import answer
from services.scheduler.core.steps.reserve import Reservations
from tests.scheduler.world import START, World, spec


def limited(slots: int, limit_s: float | None = None, priority: int = 0) -> object:
    scheduling = {"limit_s": limit_s} if limit_s else {}
    return spec(slots, priority, command=True, scheduling=scheduling, grace_s=0)


def world_of(backfill: str, slots: int = 4, promise_slots: int | None = None) -> World:
    world = World(Policy(reserve=Reserve(backfill=backfill, promise_slots=promise_slots)))  # type: ignore[arg-type]
    world.join("n1", slots)
    return world


def submit(world: World, run_id: str, slots: int, limit_s: float | None = None, priority: int = 0) -> str:
    world.accept(run_id, limited(slots, limit_s, priority))  # type: ignore[arg-type]
    world.settle()
    return world.phase(run_id)


def test_runs_that_end_in_time_go_ahead_and_others_wait() -> None:
    world = world_of("easy")
    assert submit(world, "first", 3, 100) == "placed"
    assert submit(world, "large", 4, 100) == "queued"
    assert submit(world, "long", 1, 101) == "queued"
    assert world.run("long").waiting_code == "reserved"
    said = answer(world.cluster, "long", world.now, world.policy)
    assert "1 of 4 are free but kept for run large" in said["message"]
    assert said["changes"][0] == {"fields": {"scheduling.limit_s": 100.0}, "starts": "now", "victims": []}
    assert submit(world, "short", 1, 99) == "placed"
    world.wait(100)
    world.exit("first")
    world.exit("short")
    world.settle()
    assert world.phase("large") == "placed"


def test_slots_that_the_reservation_does_not_need_may_be_held_for_long() -> None:
    world = world_of("easy", slots=2)
    world.join("n2", 4)
    assert submit(world, "first", 3, 100) == "placed"
    assert submit(world, "large", 4, 100) == "queued"
    # Four of the six are kept; one of the three that are free now is not among them.
    assert submit(world, "long", 1, 100_000) == "placed"
    assert submit(world, "longer", 2, 100_000) == "queued"
    world.exit("first")
    world.settle()
    assert world.phase("large") == "placed"


@pytest.mark.parametrize(("backfill", "third"), [("easy", "placed"), ("conservative", "queued")])
def test_conservative_backfill_delays_no_run_ahead(backfill: str, third: str) -> None:
    world = world_of(backfill, slots=4)
    submit(world, "a", 2, 100)
    submit(world, "b", 1, 200)
    assert submit(world, "first", 4, 100) == "queued"
    assert submit(world, "second", 3, 50) == "queued"
    # It is done before the first is to start at 200, but would hold up the second, which starts at 100.
    assert submit(world, "third", 1, 150) == third


def test_a_promise_is_kept_against_newcomers_of_any_priority() -> None:
    world = world_of("easy", promise_slots=4)
    submit(world, "a", 3, 100)
    submit(world, "large", 4, 100)
    (promise,) = world.facts(RunReserved)
    assert promise.start_by == START + timedelta(seconds=100)
    assert promise.node_ids == ("n1",)
    assert submit(world, "urgent", 1, 500, priority=100) == "queued"
    assert submit(world, "quick", 1, 50, priority=100) == "placed"
    world.wait(60)
    world.exit("quick")
    world.settle()
    assert world.phase("urgent") == "queued"
    world.wait(40)
    world.settle()  # `a` has had its time: it is stopped, and fails
    assert world.phase("a") == "stopping"
    world.release("a")
    world.settle()
    assert world.phase("large") == "placed"
    assert world.facts(RunPlaced, "large")[-1].decided_at <= promise.start_by
    assert len(world.facts(RunReserved)) == 1
    assert "limit (scheduling.limit_s) is 100 s" in world.facts(RunFailed, "a")[-1].reason


def test_nothing_is_promised_that_relies_on_a_guess() -> None:
    world = world_of("easy", promise_slots=4)
    submit(world, "a", 3)
    submit(world, "large", 4, 100)
    assert world.facts(RunReserved) == []
    text = answer(world.cluster, "large", world.now, world.policy)["message"]
    assert "if others take as long as is expected of them" in text


def test_a_promise_ends_with_the_run_that_has_it() -> None:
    world = world_of("easy", promise_slots=4)
    submit(world, "a", 3, 100)
    submit(world, "large", 4, 100)
    assert submit(world, "late", 1, 500) == "queued"
    world.cancel("large")
    world.settle()
    assert world.phase("late") == "placed"
    assert not world.cluster.promised


def test_a_backfilled_run_is_preempted_when_the_run_ahead_fits_with_its_slots() -> None:
    policy = Policy(order=Order(skip=True), preemption=Preemption(overtakers=True, min_run_s=10))
    world = World(policy)
    world.join("n1", 4)
    world.accept("first", spec(3))
    world.settle()
    world.wait(1)
    world.accept("large", spec(4))
    world.settle()
    world.wait(1)
    world.accept("small", spec(1))
    world.settle()
    assert world.phase("small") == "placed"  # nothing is idle for the sake of the large one
    world.exit("first")
    world.commit("first", 1, final=True)
    world.settle()
    assert world.phase("small") == "placed"  # it has not had its slots for as long as it is granted
    world.wait(10)
    world.settle()
    stop = world.facts(RunStopping)[-1]
    assert (stop.run_id, stop.preemptor, stop.message) == (
        "small",
        "large",
        "gives way to run large of which it went ahead",
    )
    world.release("small")
    world.settle()
    assert (world.phase("large"), world.phase("small")) == ("placed", "queued")


def test_nothing_is_promised_into_a_maintenance_window() -> None:
    window = Maintenance(start=START + timedelta(seconds=150), end=START + timedelta(seconds=1000), node_ids=("n1",))
    world = World(Policy(reserve=Reserve(backfill="easy", promise_slots=4), maintenance=(window,)))
    world.join("n1", 4)
    submit(world, "a", 3, 100)
    submit(world, "large", 4, 100)
    (promise,) = world.facts(RunReserved)
    assert promise.start_by == window.end


def lived(seed: int) -> World:
    """Runs of all sizes and shares come and go, beside maintenance, where some may go ahead of others."""
    rng = random.Random(seed)
    window = Maintenance(start=START + timedelta(seconds=300), end=START + timedelta(seconds=500), node_ids=("n1",))
    reserve = Reserve(backfill=rng.choice(["easy", "conservative", "conservative"]), reservations=rng.choice([2, 32]))
    world = World(
        Policy(
            reserve=reserve,
            maintenance=(window,) if rng.random() < 0.3 else (),
            preemption=Preemption(overtakers=rng.random() < 0.3),
        )
    )
    for number in range(3):
        world.join(f"n{number}", 4)
    for number in range(40):
        share = rng.choice([1, 1, 1, 0.5, 0.3])
        slots = rng.randint(1, 2) if share < 1 else rng.randint(1, 9)
        limit = {"limit_s": rng.choice([20, 90, 400])} if rng.random() < 0.7 else {}
        gang = {"bundle": 2} if share == 1 and slots % 2 == 0 and rng.random() < 0.3 else {}
        world.accept(
            f"r{number}",
            spec(slots, rng.randint(0, 1), scheduling=limit, resources={"share": share}, gang=gang, grace_s=5),
        )
        world.settle()
        world.wait(rng.choice([1.0, 15.0, 60.0]))
        for run_id in list(world.cluster.active):
            if world.run(run_id).stopping is not None:
                world.release(run_id)
            elif rng.random() < 0.4:
                world.exit(run_id)
        world.settle()
    return world


@pytest.mark.parametrize("seed", range(12))
def test_the_quick_search_misses_nothing_that_the_full_one_finds(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    quick = lived(seed)
    monkeypatch.setattr(Reservations, "_whole", lambda *_: 1_000_000)
    monkeypatch.setattr(Reservations, "_may_fit", lambda *_: True)
    assert lived(seed).log == quick.log
    assert quick.facts(RunPlaced)
