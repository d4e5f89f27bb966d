"""Where exact runs go, and what becomes of runs on machines that are going, broken or silent."""

from __future__ import annotations

from typing import Any

import pytest

from contracts.events.run import RunFailed, RunPlaced, RunQueued, RunStopping, RunWaiting
from contracts.scheduling import Faults, Policy
from services.scheduler.core.place.resource_request import useful
from services.scheduler.core.reasons import summary
from tests.scheduler.world import World, spec


def exact(slots: Any, logical_ranks: int = 4, **more: Any) -> Any:
    training = {"epochs": 1, "logical_ranks": logical_ranks, **more.pop("training", {})}
    return spec(slots, training=training, **more)


def unlike() -> World:
    """Three slots of one kind of machine, two of another."""
    world = World()
    world.join("a1", 2, machine="a")
    world.join("a2", 1, machine="a")
    world.join("b1", 2, machine="b")
    return world


def nodes(world: World, run_id: str) -> list[str]:
    return sorted(part.node_id for part in world.run(run_id).live)


@pytest.mark.parametrize(
    ("logical", "slots", "least", "given"),
    [(4, 3, 1, 2), (4, 4, 1, 4), (7, 3, 1, 3), (7, 5, 1, 4), (7, 6, 1, 4), (12, 5, 1, 4), (4, 3, 3, 3), (4, 9, 1, 4)],
)
def test_a_slot_that_brings_nothing_is_not_taken(logical: int, slots: int, least: int, given: int) -> None:
    world = World()
    wanted = exact({"min": least, "max": min(slots, logical)}, logical)
    world.accept("r1", wanted)
    assert useful(world.run("r1"), slots) == given
    world.join("n1", 1)
    world.join("n2", slots - 1)
    world.settle()
    assert world.run("r1").slot_count == useful(world.run("r1"), min(slots, logical))
    world.start("r1")
    world.wait(100)
    assert world.settle() == []  # and it is not restarted to grow into it


def test_an_exact_run_stays_on_one_kind_of_machine_and_waits_with_a_reason() -> None:
    world = unlike()
    world.accept("free", spec({"min": 1, "max": 1}, command=True))
    world.accept("r1", exact({"min": 2, "max": 4}))
    world.settle()
    assert nodes(world, "free") == ["b1"]  # the large hole is left to the run that needs likes
    assert nodes(world, "r1") == ["a1"]  # two of three: the third brings nothing
    world.start("r1")
    world.commit("r1", 5)
    world.exit("free")
    world.commit("free", 1, final=True)
    for lost in ("a1", "a2"):
        world.lose(lost)
    world.settle()
    waiting = world.facts(RunWaiting, "r1")[-1]
    assert waiting.code == "fragmented"
    assert "there are 0" in waiting.message
    assert "heterogeneous_nodes 'allow'" in waiting.message
    world.accept("other", spec(2, command=True))
    world.settle()
    assert nodes(world, "other") == ["b1"]  # whoever can use the others is not held up
    world.join("a3", 2, machine="a")
    world.settle()
    assert nodes(world, "r1") == ["a3"]


@pytest.mark.parametrize("why", ["allowed", "inexact", "nothing kept", "fast"])
def test_an_exact_run_is_placed_anywhere_when_that_loses_nothing(why: str) -> None:
    world = World()
    world.join("a1", 2, machine="a")
    wanted = exact(2, training={"heterogeneous_nodes": "allow"} if why == "allowed" else {})
    world.accept("r1", spec(2) if why == "fast" else wanted)
    world.settle()
    world.start("r1", "samples-exact" if why == "inexact" else "exact")
    if why != "nothing kept":
        world.commit("r1", 5)
    world.lose("a1")
    world.join("b1", 2, machine="b")
    world.settle()
    assert nodes(world, "r1") == ["b1"]


def test_without_a_checkpoint_a_run_prefers_its_kind_of_machine() -> None:
    """What its ranks left in memory is there; on another kind it would no longer be exact."""
    world = unlike()
    world.join("b2", 9, machine="b")
    world.lose("b2")
    world.accept("r1", exact(2))
    world.settle()
    assert nodes(world, "r1") == ["a1"]
    world.start("r1")
    world.join("b2", 9, "2", machine="b")
    world.join("a3", 2, machine="a")
    world.lose("a1")
    world.settle()
    assert nodes(world, "r1") == ["a3"]


def test_a_run_from_a_checkpoint_is_placed_on_the_checkpoints_kind_of_machine() -> None:
    world = unlike()
    world.accept("r1", exact(2))
    world.settle()
    world.start("r1")
    uri = world.commit("r1", 5)
    world.exit("r1")
    world.commit("r1", 9, final=True)
    world.accept("again", exact(1, resume_from=uri))
    world.accept("larger", exact(4, resume_from=uri))
    world.settle()
    assert world.cluster.nodes[nodes(world, "again")[0]].machine == "a"
    assert world.run("larger").waiting_code == "fragmented"
    world.join("b2", 4, machine="b")
    world.settle()
    assert nodes(world, "larger") == ["b2"]


def test_slots_of_the_right_kind_are_preempted_and_no_others() -> None:
    world = unlike()
    world.accept("on_b", spec(2, command=True))  # the tightest that fits
    world.accept("on_a", spec({"min": 1, "max": 3}))
    world.settle()
    assert nodes(world, "on_b") == ["b1"]
    world.start("on_a")
    world.accept("r1", exact(2, priority=5, logical_ranks=2))
    world.settle()
    assert [stop.run_id for stop in world.facts(RunStopping)] == ["on_a"]
    world.release("on_a")
    world.settle()
    assert nodes(world, "r1") == ["a1"]
    assert nodes(world, "on_a") == ["a2"]
    world.start("r1")
    world.commit("r1", 1)
    # Another one of the kind waits; one that can go anywhere takes what is free elsewhere.
    world.accept("r2", exact(3, priority=4))
    world.exit("on_b")
    world.settle()
    world.accept("r3", spec(2, command=True))
    world.settle()
    assert world.run("r2").waiting_code == "slots"
    assert nodes(world, "r3") == ["b1"]


@pytest.mark.parametrize(
    ("said_s", "late_s", "given_s"), [(None, 0.0, 30), (120.0, 0.0, 30), (20.0, 5.0, 13), (5.0, 60.0, 1)]
)
def test_a_notice_moves_what_runs_there_in_the_time_that_is_left(
    said_s: float | None, late_s: float, given_s: float
) -> None:
    world = World()
    world.join("n1", 2)
    world.accept("r1", spec(2, grace_s=30))
    world.settle()
    world.notice("n1", said_s)
    world.wait(late_s)
    world.settle()
    stop = world.facts(RunStopping)[-1]
    assert (stop.grace_s, stop.reason, "spot: terminate" in stop.message) == (given_s, "notice", True)
    world.join("n2", 2)
    world.release("r1")
    world.settle()
    assert nodes(world, "r1") == ["n2"]
    assert summary(world.cluster)["nodes"][0] | {"slots": 0} == {
        "node_id": "n1", "state": "notice", "reason": "spot: terminate", "slots": 0, "used": 0, "free": 0,
        "accelerator": "cpu",
    }  # fmt: skip


def test_an_unfit_node_leaves_the_pool_until_it_joins_again() -> None:
    world = World()
    world.join("n1", 2)
    world.accept("broken", spec(1))
    world.accept("sound", spec(1))
    world.settle()
    world.start("broken")
    world.start("sound")
    slot = world.run("broken").live[0].slots[0]
    world.unfit("n1", slot)
    world.settle()
    stops = world.facts(RunStopping)
    assert [(stop.run_id, stop.grace_s, stop.reason) for stop in stops] == [("broken", 0, "unfit")]
    world.release("broken")
    world.settle()
    assert world.phase("broken") == "queued"
    assert "n1" in world.facts(RunWaiting, "broken")[-1].message
    assert world.phase("sound") == "running"
    world.join("n1", 2, "2", running=(("sound", 1),))
    world.settle()
    assert nodes(world, "broken") == ["n1"]


@pytest.mark.parametrize(("on_stall", "goes_to"), [("restart", "n1"), ("exclude", "n2"), ("observe", "n1")])
def test_a_stalled_run_restarts_as_its_policy_requires(on_stall: str, goes_to: str) -> None:
    world = World()
    world.join("n1", 1)
    world.join("n2", 2)
    world.accept("r1", spec(1))
    world.settle()
    assert nodes(world, "r1") == ["n1"]
    world.start("r1")
    world.commit("r1", 5)
    world.stall("r1", "n1", on_stall)
    world.settle()
    if on_stall == "observe":
        assert world.facts(RunStopping) == []
        return
    stop = world.facts(RunStopping)[-1]
    assert (stop.grace_s, stop.reason, "no step for 61 s after step 7" in stop.message) == (0, "stalled", True)
    world.exit("r1", "failed", reason="killed")  # told to stop: no fault of the run
    world.settle()
    world.wait(1)
    world.settle()
    placed = world.facts(RunPlaced, "r1")[-1]
    assert (nodes(world, "r1"), placed.generation, placed.resume.step) == ([goes_to], 2, 5)
    assert world.facts(RunQueued, "r1")[-1].reason == "node lost"


def test_a_node_that_a_run_excludes_stays_excluded_when_its_agent_starts_again() -> None:
    world = World()
    world.join("n1", 1)
    world.join("n2", 2)
    world.accept("r1", spec(1))
    world.settle()
    world.start("r1")
    world.stall("r1", "n1", "exclude")
    world.settle()
    world.join("n1", 1, "2")
    world.settle()
    world.wait(1)
    world.settle()
    assert nodes(world, "r1") == ["n2"]


def test_a_run_that_stalls_again_and_again_is_given_up() -> None:
    world = World(Policy(faults=Faults(max_infrastructure_failures=4)))
    world.join("n1", 1)
    world.accept("r1", spec(1))
    world.settle()
    for _ in range(4):
        world.start("r1")
        world.stall("r1", "n1", "exclude")  # with no other node it is better than nothing
        world.settle()
        world.release("r1")
        world.settle()
        world.wait(60)
        world.settle()
    (failed,) = world.facts(RunFailed)
    assert "gave up after 4 generations" in failed.reason
    assert "no step for 61 s" in failed.reason
