"""Requests that are sound by the contract and can yet never run."""

from __future__ import annotations

import pytest

from contracts.envelope import MAX_BODY_BYTES
from contracts.events.train import TrainRequested
from contracts.spec.resources import Slots
from contracts.spec.run import RunSpec
from services.scheduler.core.admission import answer_train
from services.scheduler.core.decisions import AcceptRun, RejectRun, decision_record
from services.scheduler.core.quarantine import run_cycle
from services.scheduler.publisher import pending_facts
from tests.scheduler.world import World


def test_a_launcher_on_several_slots_is_refused_with_the_right_line() -> None:
    request = RunSpec(name="a", command=["torchrun", "train.py"], slots=Slots(min=1, max=2))
    answer = answer_train(World().cluster, "r1", request)
    assert isinstance(answer, RejectRun)
    assert [problem.field for problem in answer.problems] == ["command"]
    assert "python train.py" in answer.problems[0].message


@pytest.mark.parametrize("key", ["params", "env"])
def test_request_that_no_placement_can_hold_is_rejected(key: str) -> None:
    """Accepted, it would wait for ever: no reader decodes a longer placement."""
    request = TrainRequested.model_validate({"name": "a", "command": ["true"], key: {"x": "y" * 100_000}})
    assert isinstance(answer_train(World().cluster, "r1", request), AcceptRun)
    large = {f"x{number}": "y" * 100_000 for number in range(6)}
    answer = answer_train(World().cluster, "r1", request.model_copy(update={key: large}))
    assert isinstance(answer, RejectRun)
    assert "the object store" in answer.problems[0].message


def test_run_whose_placement_is_too_long_is_quarantined_and_stops_no_other() -> None:
    """An older version has accepted it."""
    world = World()
    world.join("n1", 2)
    for run_id, params in (("large", {"x": "y" * MAX_BODY_BYTES}), ("small", {})):
        world.accept(run_id, RunSpec.model_validate({"name": "a", "command": ["true"], "params": params}))
    placements = []
    for _ in range(5):
        decisions = run_cycle(world.cluster, world.now, world.policy).decisions
        made = decision_record(world.cluster, world.now, world.policy)
        pending = pending_facts(world.cluster, decisions, world.now, made)
        placements += [each.run_id for each in pending if each.places]
        for each in pending:
            world.publish(each.fact)
    assert placements == ["small"]
    assert "more than the 1,048,576" in world.cluster.quarantined_runs["large"].reason
