"""Runs that begin with another's weights: which are accepted, what placements say, what a deletion means."""

from __future__ import annotations

from typing import Any

from contracts.events.checkpoint import CheckpointDeleted
from contracts.events.run import RunFailed, RunPlaced
from contracts.events.train import RestoreRequested, TrainRequested
from contracts.spec.run import RunSpec
from services.scheduler.core.admission import answer_restore, answer_train
from services.scheduler.core.decisions import AcceptRun, RejectRun
from tests.scheduler.world import World, spec


def trained() -> tuple[World, str]:
    """A world in which run ``base`` has committed a checkpoint and ended on a machine of its own kind."""
    world = World()
    world.join("a1", 2, machine="a")
    world.accept("base", spec(2, training={"epochs": 1, "logical_ranks": 2}))
    world.settle()
    world.start("base")
    uri = world.commit("base", 5)
    world.commit("base", 9, final=True)
    world.exit("base")
    world.settle()
    return world, uri


def delete(world: World, uri: str) -> None:
    world.publish(CheckpointDeleted(run_id="base", uri=uri, step=5, reason="not among the last 1"))


def tuned(uri: str, **more: Any) -> Any:
    return spec(1, init_from=uri, init_exclude=["head.*"], **more)


def request(uri: str) -> TrainRequested:
    return TrainRequested.model_validate(tuned(uri).model_dump(mode="json", exclude_unset=True))


def beginnings(world: World) -> list[tuple[str | None, str | None]]:
    """(resumed, begun with) of each placement of the run ``tuned``."""
    return [(fact.resume and fact.resume.uri, fact.init and fact.init.uri) for fact in world.facts(RunPlaced, "tuned")]


def test_it_begins_with_the_weights_until_it_has_a_checkpoint_of_its_own() -> None:
    world, uri = trained()
    world.accept("tuned", tuned(uri))
    world.settle()
    world.start("tuned")
    # Killed before it has saved anything: the weights again.
    world.lose("a1")
    world.join("a2", 2)
    world.settle()
    world.start("tuned")
    own = world.commit("tuned", 3)
    world.lose("a2")
    world.join("a3", 2)
    world.settle()
    assert beginnings(world) == [(None, uri), (None, uri), (own, None)]
    first = world.facts(RunPlaced, "tuned")[0]
    # Who loads them can tell whether they still are what was committed.
    assert first.init.manifest_sha256 == world.run("base").checkpoints[uri].ref.manifest_sha256
    assert first.init.step == 5


def test_a_command_finds_the_files_that_it_began_with_in_every_start() -> None:
    world, uri = trained()
    world.accept("tuned", RunSpec.model_validate({"name": "tuned", "command": ["true"], "init_from": uri}))
    world.settle()
    world.start("tuned")
    own = world.commit("tuned", 3)
    world.lose("a1")
    world.join("a2", 2)
    world.settle()
    assert beginnings(world) == [(None, uri), (own, uri)]


def test_a_new_run_is_placed_on_any_kind_of_machine() -> None:
    world, uri = trained()
    world.lose("a1")
    world.join("b1", 2, machine="b")
    world.accept("tuned", tuned(uri, training={"epochs": 1, "logical_ranks": 2}))
    world.settle()
    assert beginnings(world) == [(None, uri)]
    assert world.run("tuned").exact


def test_only_what_is_committed_and_still_there_is_accepted() -> None:
    world, uri = trained()
    assert isinstance(answer_train(world.cluster, "r1", request(uri)), AcceptRun)
    delete(world, uri)
    for missing in (uri, "s3://models/none.json"):
        answer = answer_train(world.cluster, "r1", request(missing))
        assert isinstance(answer, RejectRun)
        [problem] = answer.problems
        assert problem.field == "init_from"
        assert f"no committed checkpoint has the manifest {missing}, or it was deleted" in problem.message


def test_a_run_whose_checkpoint_is_deleted_as_it_is_accepted_fails_with_the_reason() -> None:
    world, uri = trained()
    delete(world, uri)
    world.accept("tuned", tuned(uri))
    world.settle()
    [failed] = world.facts(RunFailed, "tuned")
    assert failed.reason == f"the checkpoint to start from does not exist (any more): {uri}"


def test_a_restored_run_resumes_from_the_checkpoint_of_its_parent() -> None:
    world, uri = trained()
    world.accept("tuned", tuned(uri))
    world.settle()
    world.start("tuned")
    own = world.commit("tuned", 3)
    answer = answer_restore(world.run("tuned"), "again", RestoreRequested(run_id="tuned", step=3))
    assert isinstance(answer, AcceptRun)
    assert (answer.spec.resume_from, answer.spec.init_from, answer.spec.init_exclude) == (own, None, ())
    # What is published must be readable.
    assert type(answer.spec).model_validate(answer.spec.model_dump()) == answer.spec
