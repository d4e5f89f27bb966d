"""Named situations, and what the scheduler must make of each."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import pytest
from prometheus_client import REGISTRY

from contracts.events.checkpoint import CheckpointCommitted, CheckpointStaged
from contracts.events.run import (
    RunAccepted,
    RunExited,
    RunFailed,
    RunHeldUp,
    RunPlaced,
    RunQueued,
    RunStarted,
    RunStopping,
    RunWaiting,
)
from contracts.scheduling import Elastic, Faults, Maintenance, Policy
from contracts.state.node import NodeStatement
from services.scheduler.cluster_cache import observe
from services.scheduler.core.decide import decide, disputed_parts, unresponsive_nodes
from services.scheduler.core.decisions import fact_of
from services.scheduler.core.explain.why import answer
from services.scheduler.core.fold import apply
from services.scheduler.core.place.snapshot import NodeCapacity
from services.scheduler.core.place.strategies import pack
from services.scheduler.core.state.cluster import Cluster, Node
from services.scheduler.core.state.codec import restore, save
from services.scheduler.core.state.slot_spec import SlotSpec
from tests.scheduler.world import START, World, spec

ELASTIC = {"min": 1, "max": 4}


def two_nodes(policy: Policy | None = None) -> World:
    world = World(policy)
    world.join("n1", 2)
    world.join("n2", 2)
    return world


def training(world: World, run_id: str = "r1", **more: object) -> None:
    """An elastic run on all four slots, under way, with a checkpoint at step 5."""
    world.accept(run_id, spec(ELASTIC, **more))  # type: ignore[arg-type]
    world.settle()
    world.start(run_id)
    world.commit(run_id, 5)


def layout(world: World, run_id: str) -> dict[str, tuple[int, ...]]:
    return {part.node_id: part.slots for part in world.run(run_id).live}


def test_a_higher_priority_shrinks_an_elastic_run_which_grows_back() -> None:
    """The demo's record, decision by decision."""
    world = two_nodes()
    training(world)
    assert layout(world, "r1") == {"n1": (0, 1), "n2": (0, 1)}
    world.accept("r2", spec(2, priority=10))
    world.settle()
    stop = world.facts(RunStopping)[-1]
    assert (stop.run_id, stop.reason, stop.grace_s) == ("r1", "resized", 30)
    world.commit("r1", 7)
    world.release("r1")
    made = [type(decision).__name__ for decision in world.step()]  # all of it in one cycle
    assert made == ["QueueRun", "PlaceRun", "PlaceRun"]
    assert world.run("r2").slot_count == 2
    assert world.run("r1").slot_count == 2
    again = world.facts(RunPlaced, "r1")[-1]
    assert (again.generation, again.resume.step, again.wanted_slots) == (2, 7, 4)
    world.start("r1")
    world.wait(60)
    assert world.settle() == []  # nothing is idle: nothing grows
    world.exit("r2")
    world.commit("r2", 9, final=True)
    world.settle()
    assert world.phase("r2") == "completed"
    # Its evaluation takes a slot for a moment: growing meanwhile would mean growing twice.
    world.wait(1)
    world.accept("e", spec(1, command=True))
    world.settle()
    world.wait(2.5)
    world.exit("e")
    world.settle()
    world.wait(2)
    assert world.settle() == []
    world.wait(1)
    world.settle()
    assert world.phase("r1") == "stopping"
    world.release("r1")
    world.settle()
    assert world.run("r1").slot_count == 4
    assert world.run("r1").generation == 3


def test_slots_that_stay_free_are_grown_into_however_busy_the_others_are() -> None:
    world = World(Policy(elastic=Elastic(resize_interval_s=5.0, grow_anyway_s=60.0)))
    world.join("n1", 2)
    training(world)
    world.join("n2", 2)
    world.accept("other", spec(1, command=True))
    world.settle()
    for number in range(30):  # short runs come and go on one slot and are never at rest
        if world.run("r1").generation > 1 or world.phase("r1") == "stopping":
            break
        world.wait(4)
        world.exit(f"short{number - 1}" if number else "other")
        world.accept(f"short{number}", spec(1, command=True))
        world.settle()
    assert world.phase("r1") == "stopping"
    assert world.now - START >= timedelta(seconds=60)


@pytest.mark.parametrize("started", [False, True])
def test_a_placement_that_never_starts_is_revoked_and_counts_no_failure(started: bool) -> None:
    world = World(Policy(faults=Faults(start_deadline_s=100)))
    world.join("n1", 2)
    world.join("n2", 2)
    world.accept("r1", spec(4))
    world.settle()
    world.publish(RunStarted(run_id="r1", generation=1, node_id="n1"))
    if started:
        world.publish(RunStarted(run_id="r1", generation=1, node_id="n2"))
    world.wait(99)
    assert world.settle() == []
    world.wait(1)
    # Nobody is blamed for the time in which it could not have been heard.
    assert decide(world.cluster, world.now, world.policy, reachable_since=START + timedelta(seconds=50)) == []
    world.settle()
    if started:
        assert world.phase("r1") == "running"
        return
    stop = world.facts(RunStopping)[-1]
    assert (stop.grace_s, stop.reason, "n2" in stop.message) == (0, "start_deadline", True)
    world.release("r1")
    world.settle()
    assert (world.run("r1").generation, world.run("r1").failures) == (2, 0)


def test_a_node_that_does_not_release_a_run_is_lost() -> None:
    world = two_nodes()
    training(world, grace_s=30)
    world.cancel("r1")
    world.settle()
    world.release("r1", "n1")
    limit_s = 30 + world.policy.faults.release_deadline_s
    assert unresponsive_nodes(world.cluster, world.now + timedelta(seconds=limit_s - 1), world.policy, START) == []
    late = world.now + timedelta(seconds=limit_s)
    assert unresponsive_nodes(world.cluster, late, world.policy, reachable_since=late) == []
    (unresponsive,) = unresponsive_nodes(world.cluster, late, world.policy, START)
    assert unresponsive.node_id == "n2"
    world.lose("n2")
    world.settle()
    assert world.phase("r1") == "cancelled"


def test_a_node_that_fails_a_run_is_avoided_by_it_until_it_does_well() -> None:
    world = two_nodes()
    world.accept("r1", spec({"min": 1, "max": 2}))
    world.accept("other", spec(1, command=True))
    world.settle()
    (bad,) = layout(world, "r1")
    for _ in range(2):
        assert layout(world, "r1").keys() == {bad}
        world.exit("r1", "failed", infrastructure_failure=True, reason="the disk is full")
        world.settle()
        world.wait(1)
        world.settle()
    # One slot of the good node is more than two of the bad one, and it does not grow back into it.
    assert layout(world, "r1").keys() == {"n1", "n2"} - {bad}
    assert world.run("r1").slot_count == 1
    world.start("r1")
    world.commit("r1", 3)
    world.wait(600)
    assert world.settle() == []
    # With nothing else left it is better than nothing, and forgiven once it has done well.
    world.lose(*layout(world, "r1"))
    world.settle()
    assert layout(world, "r1").keys() == {bad}
    world.start("r1")
    world.commit("r1", 9)
    assert not world.run("r1").strikes


def test_a_run_that_no_node_can_keep_going_fails_with_the_reason() -> None:
    world = World(Policy(faults=Faults(max_infrastructure_failures=5)))
    world.join("n1", 2)
    world.accept("r1", spec(1, max_attempts=2))
    world.settle()
    for number in range(8):
        assert world.phase("r1") == "placed"
        if number == 3:
            world.commit("r1", 1)  # it gets somewhere: counted from the beginning
        world.exit("r1", "failed", infrastructure_failure=True, reason="the store is away")
        world.settle()
        world.wait(60)
        world.settle()
    failed = world.facts(RunFailed)[-1]
    assert failed.reason == (
        "gave up after 5 generations in a row were broken by their nodes or the store without a new checkpoint; "
        "the last: the store is away"
    )


def test_growing_waits_for_its_interval_and_for_all_waiting_runs() -> None:
    world = World(Policy(elastic=Elastic(resize_interval_s=2.0)))
    world.join("n1", 2)
    training(world)
    world.join("n2", 2)
    world.wait(1.0)
    assert world.settle() == []
    world.wait(2.0)
    world.accept("r2", spec(3))
    world.settle()
    assert world.phase("r1") == "running"
    assert world.run("r2").waiting_code == "slots"
    world.cancel("r2")
    world.settle()
    assert world.phase("r1") == "stopping"
    assert world.run("r1").stopping.reason == "resized"


def test_shrinking_precedes_preemption_and_the_lowest_priority_is_first() -> None:
    world = World()
    world.join("n1", 6)
    world.accept("low", spec(2, priority=0))
    world.accept("mid", spec({"min": 1, "max": 4}, priority=5))
    world.settle()
    world.accept("high", spec(3, priority=9))
    world.settle()
    assert [stop.run_id for stop in world.facts(RunStopping)] == ["mid"]  # shrinks by 3, nobody is stopped
    world.accept("higher", spec(3, priority=10))
    world.settle()
    stops = {stop.run_id: stop.reason for stop in world.facts(RunStopping)}
    assert stops == {"mid": "resized", "low": "preempted"}


def test_no_run_is_preempted_in_vain() -> None:
    world = two_nodes()
    world.accept("same", spec(3, priority=5))
    world.accept("low", spec(1, priority=0))
    world.settle()
    world.accept("r2", spec(2, priority=5))  # even without `low` only one slot would be free
    world.settle()
    assert world.facts(RunStopping) == []
    assert world.run("r2").waiting_code == "slots"


def test_a_run_larger_than_the_cluster_waits_with_a_reason_and_blocks_no_run() -> None:
    world = two_nodes()
    world.accept("huge", spec(100, priority=100))
    world.accept("small", spec(1))
    world.settle()
    assert world.phase("huge") == "queued"
    assert world.phase("small") == "placed"
    said = world.facts(RunWaiting, "huge")
    assert len(said) == 1
    assert said[0].code == "infeasible"
    assert "96 more" in said[0].message
    for number in range(49):
        world.join(f"m{number}", 2)
    world.exit("small")
    world.commit("small", 1, final=True)
    world.settle()
    assert world.phase("huge") == "placed"


def test_a_large_run_is_not_starved_by_small_ones_behind_it() -> None:
    world = two_nodes()
    world.accept("a", spec(3, command=True))
    world.accept("large", spec(4))
    world.accept("small", spec(1))
    world.settle()
    assert world.phase("small") == "queued"
    assert world.run("small").waiting_code == "priority"
    world.exit("a")
    world.settle()
    assert world.phase("large") == "placed"
    assert world.phase("small") == "queued"


@pytest.mark.parametrize("kill", ["crash", "lose"])
def test_a_broken_gang_is_stopped_and_placed_again_from_its_checkpoint(kill: str) -> None:
    world = two_nodes()
    training(world)
    if kill == "crash":
        world.exit("r1", "failed", "n2", reason="signal 9", rank=2)
    else:
        world.lose("n2")
    world.settle()
    assert world.facts(RunStopping)[-1].grace_s == 0
    world.exit("r1", "failed", "n1", reason="connection reset by peer", rank=0)  # its peers fail as well
    assert [type(decision).__name__ for decision in world.step()] == ["QueueRun", "PlaceRun"]  # at once
    queued = world.facts(RunQueued)[-1]
    assert (queued.reason, queued.failures) == (("crashed", 1) if kill == "crash" else ("node lost", 0))
    assert world.facts(RunPlaced)[-1].resume.step == 5
    assert world.run("r1").slot_count == (4 if kill == "crash" else 2)


def test_a_placement_contains_the_failures_and_the_run_time() -> None:
    """From it the ranks choose how often to save, and tell the committed checkpoint from any other."""
    world = World()
    world.join("n1", 1)
    world.accept("r1", spec(1, max_attempts=9))
    endings: list[Callable[[], None]] = [
        lambda: world.exit("r1", "failed", reason="a bug"),
        lambda: world.lose("n1"),
        lambda: world.release("r1"),
        lambda: world.leave("n1"),
    ]
    seen = []
    for number, ending in enumerate(endings):
        world.settle()
        world.start("r1")
        world.commit("r1", 5 + number)
        world.wait(100)
        ending()
        world.settle()
        if not world.run("r1").live:
            world.wait(1000)  # waiting for slots is not running
            world.join("n1", 1, life=str(number + 2))
            world.settle()
        placed = world.facts(RunPlaced, "r1")[-1]
        assert placed.resume.step == 5 + number
        assert placed.resume.manifest_sha256 == world.facts(CheckpointCommitted, "r1")[-1].manifest_sha256
        seen.append((placed.generation, placed.failures_seen, placed.run_s))
    # Its own failures and lost nodes count; a requested release does not.
    assert seen == [(2, 1, 100.0), (3, 2, 200.0), (4, 2, 300.0), (5, 3, 400.0)]


def test_failures_of_its_own_end_a_run_with_its_last_words_and_those_of_nodes_do_not() -> None:
    world = two_nodes()
    world.accept("r1", spec(1, max_attempts=2))
    world.settle()
    for _ in range(4):
        world.exit("r1", "failed", infrastructure_failure=True, reason="the store is away")
        world.settle()
        world.wait(60)
        world.settle()
    assert world.phase("r1") == "placed"
    assert world.run("r1").failures == 0
    for _ in range(2):
        world.exit("r1", "failed", rank=0, exit_code=1, reason="ValueError: no", log_tail=("Traceback", "ValueError"))
        world.settle()
        world.wait(60)
        world.settle()
    failed = world.facts(RunFailed)[-1]
    assert failed.log_tail == ("Traceback", "ValueError")
    assert "2 attempts (max_attempts 2)" in failed.reason
    assert failed.reason.startswith("ValueError: no; after 2 attempts (max_attempts 2), rank 0 on ")


def test_what_no_attempt_can_change_fails_at_once_and_says_so() -> None:
    world = two_nodes()
    world.accept("r1", spec(1, max_attempts=5))
    world.settle()
    world.exit("r1", "failed", rank=0, exit_code=1, reason="init_from does not fit the model", permanent=True)
    world.settle()
    failed = world.facts(RunFailed)[-1]
    assert "1 attempt (another would end the same way)" in failed.reason
    assert failed.reason.startswith("init_from does not fit the model; after 1 attempt")


def test_the_same_failure_twice_before_the_first_step_is_final() -> None:
    world = two_nodes()
    world.accept("r1", spec(1, max_attempts=5))
    world.settle()
    for reason in ("KeyError: 'f0'", "OSError: gone", "OSError: gone"):
        assert world.phase("r1") == "placed"
        world.exit("r1", "failed", rank=0, exit_code=1, reason=reason, made_no_step=True)
        world.settle()
        world.wait(60)
        world.settle()
    failed = world.facts(RunFailed)[-1]
    assert failed.reason.startswith("OSError: gone; after 3 attempts (twice the same before the first step)")


def test_the_same_failure_twice_at_one_step_is_final_though_a_checkpoint_lies_between() -> None:
    """As a loss that is not finite, again, after exact training."""
    world = two_nodes()
    world.accept("r1", spec(1, max_attempts=9))
    world.settle()
    for step in (30, 40, 40):
        world.commit("r1", step - 5)
        world.exit("r1", "failed", rank=0, exit_code=1, reason="the loss is nan", step=step)
        world.settle()
        world.wait(60)
        world.settle()
    failed = world.facts(RunFailed)[-1]
    assert failed.reason.startswith("the loss is nan; after 3 attempts (twice the same at step 40)")


@pytest.mark.parametrize("code", [-9, 137])
def test_a_process_that_a_signal_ends_twice_at_one_step_is_tried_again(code: int) -> None:
    world = two_nodes()
    world.accept("r1", spec(1, max_attempts=5))
    world.settle()
    for _ in range(3):
        world.exit("r1", "failed", rank=0, exit_code=code, reason="killed by SIGKILL", step=40)
        world.settle()
        world.wait(60)
        world.settle()
    assert world.phase("r1") == "placed"


def test_the_same_failure_is_tried_again_where_steps_or_a_preemption_lie_between() -> None:
    world = two_nodes()
    world.accept("r1", spec(1, max_attempts=5))
    world.settle()
    for made_no_step in (True, False, True):
        world.exit("r1", "failed", rank=0, exit_code=1, reason="OSError: gone", made_no_step=made_no_step)
        world.settle()
        world.wait(60)
        world.settle()
    assert world.phase("r1") == "placed"


def test_a_run_that_breaks_at_once_again_and_again_does_not_spin() -> None:
    world = World()
    world.join("n1", 2)
    world.accept("r1", spec(1, max_attempts=100))
    world.accept("r2", spec(1, command=True))
    world.settle()
    for _ in range(2):
        world.exit("r1", "failed")
        world.settle()
    assert world.phase("r1") == "queued"
    assert world.run("r1").waiting_code == "paused"
    world.wait(1.0)
    world.settle()
    assert world.phase("r1") == "placed"
    world.commit("r1", 1)  # it gets somewhere: the next time is the first again
    world.exit("r1", "failed")
    world.settle()
    assert world.phase("r1") == "placed"


def test_a_run_is_complete_once_what_its_ranks_staged_last_is_committed() -> None:
    world = two_nodes()
    training(world)
    world.stage("r1", 8)
    world.exit("r1", metrics={"validation/accuracy": 0.9}, step=8)
    world.settle()
    # Most often it is there in a moment.
    assert world.facts(RunWaiting, "r1") == []
    # However long it takes: the service is behind, or the store is away.
    world.wait(100_000)
    world.settle()
    assert world.settle() == []
    assert world.phase("r1") == "running"
    assert world.run("r1").slot_count == 0
    [waiting] = world.facts(RunWaiting, "r1")
    assert waiting.code == "uncommitted"
    assert "step 8 is committed (the newest committed one is of step 5)" in waiting.message
    assert "step 8" in answer(world.cluster, "r1", world.now, world.policy)["message"]
    uri = world.commit("r1", 8, final=True)
    world.settle()
    completed = world.log[-1][0]
    assert completed.checkpoint.uri == uri
    assert completed.metrics == {"validation/accuracy": 0.9}


def test_what_is_said_to_be_staged_neither_ends_nor_prolongs_the_wait_for_what_was() -> None:
    world = two_nodes()
    training(world)
    lie = CheckpointStaged(
        run_id="r1", generation=1, node_id="n1", ranks=(0, 1), world_size=4, step=9000, epoch=9, samples_consumed=1,
        files=(),
    )  # fmt: skip
    lies = [
        lie,
        lie.model_copy(update={"ranks": (0, 1, 2, 3), "is_whole": True}),
        lie.model_copy(update={"world_size": 2}),
    ]
    for each in lies:
        world.publish(each)
    world.stage("r1", 8)
    world.exit("r1", step=8)
    assert world.run("r1").awaited_steps == [8]
    world.commit("r1", 8, final=True)
    world.settle()
    assert world.phase("r1") == "completed"


def test_the_gauges_say_how_far_commits_are_behind() -> None:
    world = two_nodes()
    training(world)
    for step in (8, 12):
        world.stage("r1", step, final=False)
        world.wait(30)
    observe(world.cluster, world.now)
    assert REGISTRY.get_sample_value("trainbus_scheduler_commit_lag_seconds") == 60
    assert REGISTRY.get_sample_value("trainbus_scheduler_commit_lag_steps") == 7
    for step in (8, 12):
        world.commit("r1", step)
    observe(world.cluster, world.now)
    assert REGISTRY.get_sample_value("trainbus_scheduler_commit_lag_seconds") == 0
    assert REGISTRY.get_sample_value("trainbus_scheduler_commit_lag_steps") == 0


def test_why_says_for_whom_a_gang_waits_until_it_has_begun() -> None:
    world = two_nodes()
    world.accept("r1", spec(4))
    world.settle()
    missing = {"missing_ranks": (2, 3), "missing_nodes": ("n2",), "waited_s": 5.0}
    world.publish(RunHeldUp(run_id="r1", generation=1, node_id="n1", address="10.0.0.1:29500", **missing))  # type: ignore[arg-type]
    why = answer(world.cluster, "r1", world.now, world.policy)
    assert "it cannot begin: ranks 2, 3 on n2 have not come to 10.0.0.1:29500 yet" in why["message"]
    world.start("r1")
    assert "cannot begin" not in answer(world.cluster, "r1", world.now, world.policy)["message"]


def test_what_an_agent_said_before_its_ranks_ended_is_no_dispute() -> None:
    world = two_nodes()
    training(world)
    incarnation = world.cluster.nodes["n1"].incarnation

    def disputed(*running: tuple[str, int]) -> list[tuple[str, int]]:
        return disputed_parts(world.cluster, "n1", incarnation, NodeStatement(world.cluster.sequence, running))

    assert disputed(("r1", 1)) == []
    assert disputed() == [("r1", 1)]
    world.commit("r1", 8, final=True)
    world.exit("r1", step=8)
    world.settle()
    assert world.phase("r1") == "completed"
    assert disputed(("r1", 1)) == []
    assert disputed(("r1", 2), ("nobody", 1)) == [("r1", 2), ("nobody", 1)]


def test_a_final_checkpoint_that_never_comes_is_not_waited_for() -> None:
    world = two_nodes()
    training(world)
    world.exit("r1")
    assert world.settle() == []
    world.wait(61)
    world.settle()
    assert world.phase("r1") == "completed"


@pytest.mark.parametrize("part", ["refused", "staged by one node of two"])
def test_a_last_state_that_is_lost_is_trained_again(part: str) -> None:
    world = two_nodes()
    training(world)
    world.stage("r1", 8, *(() if part == "refused" else ("n1",)))
    world.exit("r1", step=8)
    world.settle()
    if part == "refused":
        world.refuse("r1", 8)
    else:
        world.wait(61)
    world.settle()
    assert (world.phase("r1"), world.run("r1").generation) == ("placed", 2)
    assert world.run("r1").failures == 1
    assert world.run("r1").resume.step == 5  # type: ignore[union-attr]
    world.stage("r1", 8)
    world.exit("r1", step=8)
    world.commit("r1", 8, final=True)
    world.settle()
    assert world.phase("r1") == "completed"
    assert world.log[-1][0].checkpoint.step == 8


def test_a_first_state_that_is_lost_is_trained_again() -> None:
    world = two_nodes()
    world.accept("r1", spec(ELASTIC))
    world.settle()
    world.start("r1")
    world.exit("r1", step=8)
    world.wait(61)
    world.settle()
    assert (world.phase("r1"), world.run("r1").generation, world.run("r1").failures) == ("placed", 2, 1)


def test_a_last_state_that_is_lost_again_and_again_fails_the_run_with_the_reason() -> None:
    world = two_nodes()
    training(world)
    for _ in range(3):
        world.stage("r1", 8)
        world.refuse("r1", 8, "two ranks wrote different contents to 'x'")
        world.exit("r1", step=8)
        world.settle()
        world.wait(2)
        world.settle()
    assert world.phase("r1") == "failed"
    assert "step 8, was refused: two ranks wrote different contents to 'x'" in world.run("r1").outcome
    assert "after 3 attempts" in world.run("r1").outcome


def test_a_last_state_that_the_store_lost_is_no_attempt() -> None:
    world = two_nodes()
    training(world)
    for generation in range(1, 6):
        assert world.run("r1").generation == generation
        world.stage("r1", 8)
        world.refuse("r1", 8, "'rank_0.bin' is not in the store", infrastructure_failure=True)
        world.exit("r1", step=8)
        for _ in range(2):
            world.settle()
            world.wait(11)
    assert world.run("r1").failures == 0
    assert not world.run("r1").strikes, "its nodes did what they should"


def test_a_store_that_loses_every_last_state_fails_the_run_in_the_end() -> None:
    world = two_nodes(Policy(faults=Faults(max_infrastructure_failures=2)))
    training(world)
    for _ in range(2):
        world.stage("r1", 8)
        world.refuse("r1", 8, "'rank_0.bin' is not in the store", infrastructure_failure=True)
        world.exit("r1", step=8)
        world.settle()
    assert world.phase("r1") == "failed"
    assert "gave up after 2 generations in a row" in world.run("r1").outcome
    assert "step 8, was refused: 'rank_0.bin' is not in the store" in world.run("r1").outcome


def test_older_checkpoints_count_too_one_of_them_may_be_the_best() -> None:
    world = two_nodes()
    training(world)
    for step in (6, 7):
        world.stage("r1", step, final=False)
    world.stage("r1", 8)
    world.exit("r1", step=8)
    world.commit("r1", 8, final=True)
    world.wait(10)
    world.settle()
    assert "step 7 is committed and 1 older" in world.facts(RunWaiting, "r1")[0].message
    world.commit("r1", 7)
    world.refuse("r1", 6, superseded=True)
    world.settle()
    assert world.phase("r1") == "completed"
    assert world.log[-1][0].checkpoint.step == 8


def cancel_queued(world: World) -> None:
    world.accept("r1", spec(9))
    world.settle()


def cancel_preparing(world: World) -> None:
    world.accept("r1", spec(1, data={"source": "s3://lake/x", "format": "images"}))


def cancel_running(world: World) -> None:
    training(world)


def cancel_while_resizing(world: World) -> None:
    training(world)
    world.accept("r2", spec(2, priority=1))
    world.settle()


@pytest.mark.parametrize("before", [cancel_queued, cancel_preparing, cancel_running, cancel_while_resizing])
def test_a_cancelled_run_ends_cancelled(before: Callable[[World], None]) -> None:
    world = two_nodes()
    before(world)
    world.cancel("r1")
    world.settle()
    if world.run("r1").live:
        assert world.phase("r1") == "stopping"
        world.release("r1")
        world.settle()
    assert world.phase("r1") == "cancelled"
    assert world.run("r1").slot_count == 0
    assert world.run("r1").outcome == "cancelled by request"


def test_draining_moves_runs_away_until_the_node_is_undrained() -> None:
    world = two_nodes()
    world.accept("r1", spec(2))
    world.settle()
    (home,) = layout(world, "r1")
    world.drain(home)
    world.settle()
    assert world.facts(RunStopping)[-1].grace_s == 30
    world.release("r1")
    world.settle()
    assert layout(world, "r1").keys() == {"n1", "n2"} - {home}
    world.accept("r2", spec(2))
    world.settle()
    assert world.run("r2").waiting_code == "slots"
    world.join(home, 2, "2")
    world.settle()
    assert world.phase("r2") == "queued"
    world.undrain(home)
    world.settle()
    assert world.phase("r2") == "placed"


def drain_node(world: World) -> None:
    world.drain("n1")


def drain_machine(world: World) -> None:
    world.drain("n1", "incarnation", "trainbus/autoscaler")


def lose_node(world: World) -> None:
    world.lose("n1")


def leave(world: World) -> None:
    world.leave("n1")


def rejoin(world: World) -> None:
    world.join("n1", 2, "2")


#: What becomes of a node around its drain.
DRAINED_LIVES: dict[str, tuple[Callable[[World], None], ...]] = {
    "its agent starts again": (drain_node, rejoin),
    "its machine starts again": (drain_node, lose_node, rejoin),
    "it leaves and comes back": (drain_node, leave, rejoin),
    "it is drained while it is away": (lose_node, drain_node, rejoin),
    "its machine is to be stopped besides": (drain_node, drain_machine, rejoin),
    "its machine was to be stopped": (drain_machine, drain_node, rejoin),
}


@pytest.mark.parametrize("life", DRAINED_LIVES.values(), ids=DRAINED_LIVES)
def test_a_drain_is_bound_to_the_node(life: tuple[Callable[[World], None], ...]) -> None:
    world = World()
    world.join("n1", 2)
    for happen in life:
        happen(world)
    world.accept("r1", spec(1))
    world.settle()
    assert (world.phase("r1"), world.run("r1").waiting_code) == ("queued", "draining")
    restored = restore(save(world.cluster))
    assert restored.nodes["n1"].last_drain == world.cluster.nodes["n1"].last_drain
    world.undrain("n1")
    world.undrain("n1")
    world.settle()
    assert world.phase("r1") == "placed"


def test_a_drain_of_a_machine_that_is_stopped_ends_with_its_incarnation() -> None:
    world = World()
    world.join("n1", 1)
    drain_machine(world)
    assert not world.cluster.nodes["n1"].is_schedulable
    world.join("n1", 1, "2")
    assert world.cluster.nodes["n1"].is_schedulable


def test_of_two_decisions_on_a_drain_the_later_request_holds() -> None:
    world = World()
    world.join("n1", 1)
    world.drain("n1")
    drained = world.log[-1][0]
    world.wait(10)
    world.undrain("n1")
    world.publish(drained)  # a late delivery answers the request once more
    assert world.cluster.nodes["n1"].is_schedulable
    world.wait(10)
    world.drain("n1")
    assert not world.cluster.nodes["n1"].is_schedulable


def test_maintenance_is_bound_to_the_node() -> None:
    world = World()
    window = Maintenance(start=world.now, end=world.now + timedelta(hours=1), node_ids=("n1",))
    world.policy = Policy(maintenance=(window,))
    world.join("n1", 1)
    world.join("n1", 1, "2")
    world.accept("r1", spec(1))
    world.settle()
    assert world.phase("r1") == "queued"


def test_news_of_the_past_change_nothing() -> None:
    """A stale exit, a release of a node taken for lost, an old life's loss, a second acceptance."""
    world = two_nodes()
    world.accept("r1", spec(2, command=True))
    world.settle()
    old = layout(world, "r1")
    (home,) = old
    world.lose(home)
    world.settle()
    assert world.run("r1").generation == 2
    before = (world.phase("r1"), layout(world, "r1"))
    world.publish(RunExited(run_id="r1", generation=1, node_id=home, outcome="succeeded"))
    world.publish(world.log[0][0])  # n1 joined, again
    world.join(home, 2, "2")
    world.publish(next(fact for fact, _, _ in world.log if fact.event_id == f"node/{home}/lost/{home}-1"))
    world.accept("r1", spec(4, priority=9))
    assert (world.phase("r1"), layout(world, "r1")) == before
    assert world.cluster.nodes[home].alive
    assert world.settle() == []


def test_a_restarted_agent_keeps_what_it_has_taken_up_and_loses_the_rest() -> None:
    world = World()
    world.join("n1", 4)
    world.accept("r1", spec(2, command=True))
    world.accept("r2", spec(2, command=True))
    world.settle()
    world.join("n1", 4, "2", running=(("r1", 1),))
    assert world.run("r1").slot_count == 2
    world.settle()
    assert (world.run("r1").generation, world.run("r2").generation) == (1, 2)


def test_a_preemption_that_its_node_does_not_outlive_ends_all_the_same() -> None:
    world = two_nodes()
    training(world)
    world.accept("r2", spec(2, priority=1))
    world.settle()
    world.release("r1", "n1")
    world.lose("n2")
    world.settle()
    assert world.phase("r2") == "placed"
    assert world.run("r1").phase == "queued"


def test_a_scheduler_that_dies_between_two_decisions_continues_with_the_rest() -> None:
    world = two_nodes()
    for number in range(3):
        world.accept(f"r{number}", spec(1))
    while world.step(limit=1):
        pass
    assert [world.run(f"r{number}").generation for number in range(3)] == [1, 1, 1]
    assert len(world.facts(RunPlaced)) == 3


def test_a_placement_of_a_run_that_is_over_is_taken_back() -> None:
    """A leader too late has placed what was cancelled meanwhile: the agents act on it, so it holds slots."""
    world = two_nodes()
    world.accept("r1", spec(4))
    world.step(limit=1)
    late = fact_of(decide(world.cluster, world.now, world.policy)[0], world.cluster, world.now)
    world.cancel("r1")
    world.settle()
    world.publish(late)
    assert world.phase("r1") == "cancelled"
    assert world.cluster.slots_used == 4
    world.settle()
    assert world.facts(RunStopping)[-1].grace_s == 0
    world.release("r1")
    assert world.settle() == []
    assert world.cluster.slots_used == 0


@pytest.mark.parametrize(
    ("free", "count", "expected"),
    [
        ({"a": 2, "b": 4, "c": 3}, 3, {"c": 3}),
        ({"a": 2, "b": 4, "c": 3}, 2, {"a": 2}),
        ({"a": 2, "b": 4, "c": 3}, 5, {"b": 4, "a": 1}),
        ({"a": 2, "b": 4, "c": 3}, 9, {"b": 4, "c": 3, "a": 2}),
        ({"b": 2, "a": 2}, 1, {"a": 1}),
    ],
)
def test_gangs_go_on_few_nodes_and_fill_the_tightest(
    free: dict[str, int], count: int, expected: dict[str, int]
) -> None:
    rooms = [NodeCapacity.of(Node(node_id, "1", slots, 3.0)) for node_id, slots in free.items()]
    assert {node_id: len(slots) for node_id, slots in pack(rooms, SlotSpec(), count)} == expected


def test_why_names_what_would_start_the_run() -> None:
    world = two_nodes()
    world.accept("r1", spec(3))
    world.accept("r2", spec({"min": 2, "max": 4}))
    world.accept("r3", spec(1))
    world.settle()
    said = answer(world.cluster, "r2", world.now, world.policy)
    assert said["message"] == (
        "needs at least 2 slots, 1 of 4 are free; run r1 holds the rest; it starts when 1 more get free; "
        "with slots.min 1 it would start now, or with priority 1 it would start as soon as r1 has released its slots"
    )
    assert [change["fields"] for change in said["changes"]] == [{"slots.min": 1}, {"priority": 1}]
    assert [(each["run_id"], each["slots"], each["until_is"]) for each in said["holders"]] == [("r1", 3, "expected")]
    assert "run r2 is ahead" in answer(world.cluster, "r3", world.now, world.policy)["message"]


def test_the_published_reason_has_the_true_numbers() -> None:
    world = two_nodes()
    world.accept("r1", spec(3))
    world.accept("r2", spec({"min": 2, "max": 4}))
    world.settle()
    (waiting,) = world.facts(RunWaiting, "r2")
    assert waiting.message.startswith("needs at least 2 slots, 1 of 4 are free; run r1 holds the rest")


def test_ten_thousand_runs_are_folded_and_decided_on() -> None:
    """The time it takes is printed and not judged: a machine's speed is no property of the code."""
    cluster, policy, sequence = Cluster(), Policy(), 0
    world = World()
    for number in range(100):
        world.join(f"n{number}", 8)
    log = [fact for fact, _, _ in world.log]
    one = spec({"min": 1, "max": 2}, command=True)
    log += [
        RunAccepted(run_id=f"r{number}", spec=one, request_id=f"r{number}", request_source="t")
        for number in range(10_000)
    ]
    started = time.process_time()
    for fact in log:
        apply(cluster, fact, sequence := sequence + 1, START)
    folded_s = time.process_time() - started
    took: list[float] = []
    for _ in range(3):
        started = time.process_time()
        decisions = decide(cluster, START, policy)
        took.append(time.process_time() - started)
        for decision in decisions:
            apply(cluster, fact_of(decision, cluster, START), sequence := sequence + 1, START)
    assert cluster.slots_used == 800
    assert len(cluster.queued) == 9200
    print(f"folded 10,000 in {folded_s:.2f} s, decided in {[round(s, 3) for s in took]} s")
