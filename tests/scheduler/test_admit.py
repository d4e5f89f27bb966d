"""Requests that are sound by the contract and can yet never run."""

from __future__ import annotations

import pytest

from contracts.spec.run import RunSpec
from services.scheduler.core.admission import answer_train
from services.scheduler.core.decisions import RejectRun
from tests.scheduler.world import World


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("command", RunSpec(name="a", command=["echo", "a\0b"])),
        ("env", RunSpec(name="a", command=["true"], env={"A": "\0"})),
    ],
)
def test_no_program_can_be_given_nul(field: str, request_: RunSpec) -> None:
    answer = answer_train(World().cluster, "r1", request_)
    assert isinstance(answer, RejectRun)
    assert [problem.field for problem in answer.problems] == [field]
    assert "remove it" in answer.problems[0].message
