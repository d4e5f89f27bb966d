"""Searches for victims that failed are remembered from cycle to cycle, only as long as they would fail again.

``World.step`` compares each cycle with one that remembers nothing.
"""

from __future__ import annotations

from typing import Any

from contracts.events.run import RunStopping
from contracts.scheduling import EvenWait, Order, Policy, Preemption
from services.scheduler.core.decide import run_steps
from tests.scheduler.world import World, spec

#: Everything is short in these worlds: a second counts.
EVEN = EvenWait(short_slot_s=1, margin_s=1_000_000, foresee=False, advantage=2)


def full_world(slots: int, policy: Policy | None = None, **more: Any) -> World:
    """A world whose slots are all held, each by a run of its own."""
    world = World(policy)
    world.join("n1", slots)
    for number in range(slots):
        world.accept(f"holder{number}", spec(1, **more))
    world.settle()
    for number in range(slots):
        world.start(f"holder{number}")
    return world


def queue(world: World, run_id: str, slots: int = 1, priority: int = 0) -> None:
    """Submit a run and queue it, and decide nothing about it yet."""
    world.accept(run_id, spec(slots, priority))
    world.step(limit=1)
    assert world.phase(run_id) == "queued"


def stopped(world: World) -> list[str]:
    return [fact.run_id for fact in world.facts(RunStopping)]


def test_a_search_that_failed_beside_a_preemption_is_made_again_when_that_did_not_happen() -> None:
    """A decision becomes no fact when its fence has passed."""
    world = full_world(1)
    queue(world, "first", priority=1)
    queue(world, "second", priority=1)
    # The one holder gives way to the first run: there is none for the second.
    world.step(limit=0)
    world.settle()
    assert stopped(world) == ["holder0"]


def test_a_search_that_failed_beside_a_placement_is_made_again_when_that_did_not_happen() -> None:
    world = full_world(2)
    world.exit("holder0")
    queue(world, "first", priority=1)
    queue(world, "second", slots=2, priority=1)
    # The first run gets the free slot: the second finds one more, and needs two.
    world.step(limit=0)
    world.cancel("first")
    world.settle()
    assert stopped(world) == ["holder1"]


def test_a_search_is_made_again_when_slots_are_no_longer_awaited_by_another() -> None:
    world = full_world(2)
    queue(world, "first", priority=1)
    world.settle()
    (one,) = stopped(world)
    queue(world, "second", slots=2, priority=1)
    # What will be free is for the first run.
    world.settle()
    assert stopped(world) == [one]
    world.cancel("first")
    world.settle()
    assert sorted(stopped(world)) == ["holder0", "holder1"]


def test_a_search_is_made_again_when_a_run_may_be_preempted_since_its_first_checkpoint() -> None:
    """Without a grace period its work would be destroyed only to change the order."""
    policy = Policy(
        order=Order(by=("even-wait",), skip=True, even_wait=EVEN), preemption=Preemption(by=("even-wait",), quantum_s=1)
    )
    world = full_world(1, policy, grace_s=0)
    world.wait(5)
    queue(world, "short")
    world.settle()
    assert stopped(world) == []
    world.commit("holder0", 1)
    world.settle()
    assert stopped(world) == ["holder0"]


def test_a_search_is_made_again_when_the_clock_makes_two_runs_equal_by_a_key_before_the_one_that_preempts() -> None:
    """No run is preempted by what it has attained, but priority decides only between runs that are equal in that."""
    policy = Policy(order=Order(by=("least-attained", "priority"), skip=True), preemption=Preemption(by=("priority",)))
    world = World(policy)
    world.join("n1", 1)
    world.accept("urgent", spec(1, 1))
    world.settle()
    world.start("urgent")
    world.wait(4_000)
    world.drain("n1")
    world.settle()
    world.release("urgent")
    world.accept("holder", spec(1))
    world.settle()
    world.undrain("n1")
    world.settle()
    world.start("holder")
    assert world.phase("holder") == "running"
    world.wait(3_500)
    world.settle()
    wake = run_steps(world.cluster, world.now, policy).wake_at
    assert wake is not None
    world.now = wake
    world.settle()
    assert world.run("holder").stopping is not None
