"""Requests that are sound by the contract and can yet never run."""

from __future__ import annotations

from contracts.spec.resources import Slots
from contracts.spec.run import RunSpec
from services.scheduler.core.admission import answer_train
from services.scheduler.core.decisions import RejectRun
from tests.scheduler.world import World


def test_a_launcher_on_several_slots_is_refused_with_the_right_line() -> None:
    request = RunSpec(name="a", command=["torchrun", "train.py"], slots=Slots(min=1, max=2))
    answer = answer_train(World().cluster, "r1", request)
    assert isinstance(answer, RejectRun)
    assert [problem.field for problem in answer.problems] == ["command"]
    assert "python train.py" in answer.problems[0].message
