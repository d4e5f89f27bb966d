"""The data of a script is on its nodes before it is queued: where, until when, and that it is queued in any case."""

from __future__ import annotations

import random
from typing import Any

import pytest

from contracts.events.node import NodeJoined, NodeStaged
from contracts.events.run import RunPlaced, RunPrepared, RunQueued, RunStaging, RunWaiting
from contracts.scheduling import Place, Policy
from services.scheduler.core.decide import run_steps
from services.scheduler.core.explain.why import answer
from services.scheduler.core.fold import fold
from tests.scheduler.world import World, spec

PETS, BIRDS = "a" * 64, "b" * 64


def dataset(run_id: str, dataset_id: str = PETS) -> RunPrepared:
    return RunPrepared(run_id=run_id, dataset_id=dataset_id, manifest_uri="s3://datasets/m.json", train_samples=9)


def submit(
    world: World, run_id: str, slots: Any = 1, *, dataset_id: str = PETS, command: bool = True, **more: Any
) -> None:
    world.accept(run_id, spec(slots, command=command, data={"dataset_id": dataset_id}, **more))
    world.publish(dataset(run_id, dataset_id))


def staged(world: World, run_id: str, node_id: str, *, life: str = "1", **more: Any) -> None:
    datasets = () if more.get("error") else tuple(world.run(run_id).dataset_ids)
    fact = {"node_id": node_id, "incarnation": f"{node_id}-{life}", "run_id": run_id, "dataset_ids": datasets, **more}
    world.publish(NodeStaged.model_validate(fact))


def staging_of(world: World, run_id: str) -> RunStaging:
    (fact,) = world.facts(RunStaging, run_id)
    return fact  # type: ignore[no-any-return]


@pytest.fixture
def world() -> World:
    world = World(Policy())
    for node_id in ("n1", "n2"):
        world.join(node_id, 1)
    return world


def test_a_script_is_queued_once_its_files_are_on_the_node_that_it_gets(world: World) -> None:
    submit(world, "r1")
    world.settle()
    assert staging_of(world, "r1").node_ids == ("n1",)
    assert (world.phase("r1"), world.cluster.slots_used) == ("preparing", 0)
    said = answer(world.cluster, "r1", world.now, world.policy)
    assert said["message"] == (
        "the files of dataset aaaaaaaaaaaa are being copied to n1 (since 2026-01-01 00:00:00 UTC; for 600 s at most), "
        "then it is queued"
    )
    # Another run gets the slot meanwhile; the script then goes where else there is room.
    world.accept("other", spec())
    world.settle()
    assert world.phase("other") == "placed"
    staged(world, "r1", "n1")
    world.settle()
    assert world.phase("r1") == "placed"
    assert world.cluster.nodes["n1"].data_folders == {PETS}


def test_it_goes_to_the_node_that_has_its_files_rather_than_to_the_fullest(world: World) -> None:
    world.join("n3", 4)
    world.publish(NodeJoined(node_id="n4", incarnation="4", address="h", slots=4, lease_ttl_s=3, data_folders=(PETS,)))
    submit(world, "r1")
    world.settle()
    assert world.facts(RunStaging) == []
    (placed,) = world.facts(RunPlaced, "r1")
    assert [member.node_id for member in placed.members] == ["n4"]
    # A Task reads shards: plain files do not help it.
    submit(world, "task", command=False)
    world.settle()
    assert world.phase("task") == "placed"
    assert world.facts(RunStaging) == []


def test_a_gang_waits_for_each_of_its_nodes_that_lacks_the_files(world: World) -> None:
    submit(world, "first")
    world.settle()
    staged(world, "first", "n1")
    world.settle()
    world.exit("first")
    submit(world, "gang", 2)
    world.settle()
    assert staging_of(world, "gang").node_ids == ("n2",)
    staged(world, "gang", "n2", error="the disk is full")
    world.settle()
    assert world.phase("gang") == "placed"
    assert world.cluster.nodes["n2"].data_folders == set()


def test_an_elastic_run_is_staged_on_all_nodes_that_it_can_use(world: World) -> None:
    submit(world, "r1", {"min": 1, "max": 3})
    world.settle()
    assert staging_of(world, "r1").node_ids == ("n1", "n2")
    staged(world, "r1", "n1")
    staged(world, "r1", "n2")
    world.settle()
    assert world.run("r1").slot_count == 2


def test_runs_that_are_staged_at_a_time_get_nodes_of_their_own(world: World) -> None:
    submit(world, "r1")
    submit(world, "r2", dataset_id=BIRDS)
    world.settle()
    submit(world, "r3", dataset_id=BIRDS)
    world.settle()
    assert {staging_of(world, run_id).node_ids for run_id in ("r1", "r2")} == {("n1",), ("n2",)}
    # All is taken: what it would get of an empty cluster.
    assert len(staging_of(world, "r3").node_ids) == 1


def test_a_run_that_does_not_fit_is_staged_where_it_would_lie_in_an_empty_cluster(world: World) -> None:
    for number in range(2):
        world.accept(f"busy{number}", spec())
    world.settle()
    submit(world, "r1")
    world.settle()
    assert len(staging_of(world, "r1").node_ids) == 1
    submit(world, "large", 7)
    world.settle()
    assert world.facts(RunStaging, "large") == []
    assert world.phase("large") == "queued"


@pytest.mark.parametrize("how", ["limit", "lost", "left", "drained", "noticed", "unfit", "joined", "adopted"])
def test_a_node_that_does_not_answer_holds_no_run_up(world: World, how: str) -> None:
    submit(world, "r1")
    world.settle()
    node_id = staging_of(world, "r1").node_ids[0]
    match how:
        case "limit":
            assert run_steps(world.cluster, world.now, world.policy).wake_at is not None
            world.wait(599)
            world.settle()
            assert world.phase("r1") == "preparing"
            world.wait(1)
        case "lost":
            world.lose(node_id)
        case "left":
            world.leave(node_id)
        case "drained":
            world.drain(node_id)
        case "noticed":
            world.notice(node_id)
        case "unfit":
            world.unfit(node_id)
        case "joined":
            world.join(node_id, 1, "2")
        case "adopted":
            world.adopt(Policy(place=Place(staging_limit_s=0)))
    world.settle()
    assert world.phase("r1") == "placed"
    assert len(world.facts(RunQueued, "r1")) == 1


def test_answers_that_nobody_asked_for_change_nothing(world: World) -> None:
    submit(world, "r1")
    world.settle()
    before = str(world.run("r1").awaited_nodes)
    staged(world, "r1", "n2")
    staged(world, "r1", "n1", life="9")
    world.publish(NodeStaged(node_id="n1", incarnation="n1-1", run_id="nobody", dataset_ids=(PETS,)))
    world.publish(NodeStaged(node_id="ghost", incarnation="g", run_id="r1", dataset_ids=(PETS,)))
    assert str(world.run("r1").awaited_nodes) == before
    assert all(node.data_folders == set() for node in world.cluster.nodes.values())
    # Of what it has the node counts what it was asked for.
    world.publish(NodeStaged(node_id="n1", incarnation="n1-1", run_id="r1", dataset_ids=(PETS, BIRDS)))
    assert world.cluster.nodes["n1"].data_folders == {PETS}


def test_a_staged_run_is_cancelled_at_once_and_a_second_staging_or_preparation_is_none(world: World) -> None:
    submit(world, "r1")
    world.settle()
    world.publish(dataset("r1", BIRDS))
    world.publish(RunStaging(run_id="r1", node_ids=("n2",), dataset=dataset("r1"), limit_s=1e300))
    assert (world.run("r1").dataset_ids, list(world.run("r1").awaited_nodes)) == ({PETS}, ["n1"])
    world.cancel("r1")
    world.settle()
    assert world.phase("r1") == "cancelled"


def test_no_place_in_the_queue_is_lost(world: World) -> None:
    submit(world, "staged")
    world.settle()
    world.accept("later", spec(2))
    world.accept("last", spec(2))
    world.settle()
    assert world.phase("later") == "placed"
    staged(world, "staged", "n1")
    world.settle()
    world.exit("later")
    world.settle()
    assert (world.phase("staged"), world.phase("last")) == ("placed", "queued")


def test_an_agent_of_an_earlier_version_is_not_asked(world: World) -> None:
    for node_id in ("n1", "n2"):
        world.publish(NodeJoined(node_id=node_id, incarnation="earlier", address="h", slots=1, lease_ttl_s=3))
    submit(world, "r1")
    world.settle()
    assert (world.phase("r1"), world.facts(RunStaging)) == ("placed", [])


def test_no_limit_means_no_staging() -> None:
    world = World(Policy(place=Place(staging_limit_s=0)))
    world.join("n1", 1)
    submit(world, "r1")
    world.settle()
    assert (world.phase("r1"), world.facts(RunStaging)) == ("placed", [])


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_each_run_is_queued_in_the_end_and_holds_no_slot_before(seed: int) -> None:
    rng = random.Random(seed)
    world = World(Policy(place=Place(staging_limit_s=rng.choice([5.0, 60.0]))))
    lives = dict.fromkeys(("n1", "n2", "n3"), 1)
    for node_id in lives:
        world.join(node_id, 2)

    def act() -> None:
        node_id, run_id = rng.choice(sorted(lives)), f"r{rng.randrange(8)}"
        node = world.cluster.nodes[node_id]
        match rng.randrange(9):
            case 0 if run_id not in world.cluster.runs:
                submit(world, run_id, rng.choice([1, 2, 4]), dataset_id=rng.choice([PETS, BIRDS]))
            case 1 | 2 if run_id in world.cluster.runs:
                life = str(rng.choice([1, lives[node_id]]))
                staged(world, run_id, node_id, life=life, error=rng.choice(["", "", "no room"]))
            case 3 if node.alive:
                rng.choice([world.lose, world.leave, world.drain, world.notice, world.unfit])(node_id)
            case 4:
                lives[node_id] += 1
                world.join(node_id, 2, str(lives[node_id]))
            case 5 if world.log:
                world.publish(rng.choice(world.log)[0])
            case 6:
                world.wait(rng.choice([0.1, 3.0]))
            case 7 if run_id in world.cluster.runs and rng.random() < 0.1:
                world.cancel(run_id)
            case _:
                world.step(rng.choice([None, 1, 2]))

    for _ in range(150):
        act()
        for run in world.cluster.runs.values():
            # A run has slots only after it was queued, and it is queued once.
            assert not run.live or world.facts(RunQueued, run.run_id)
    for _ in range(20):
        world.wait(60)
        world.settle()
    for run_id in world.cluster.runs.ids():
        assert world.facts(RunQueued, run_id) or world.phase(run_id) == "cancelled", world.facts(RunWaiting, run_id)
        assert len({fact.event_id for fact in world.facts(RunStaging, run_id)}) <= 1
    assert fold(world.log) == world.cluster
