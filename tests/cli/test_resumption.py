"""What is requested to go on from a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from contracts.events.checkpoint import CheckpointCommitted
from contracts.events.run import CheckpointRef
from contracts.spec.run import RunSpec
from trainbus.client.checkpoints import StoredCheckpoint
from trainbus.client.errors import UsageError
from trainbus.client.resumption import describe_changes, plan_resumption

URI = "s3://models/default/r1/checkpoints/epoch_2/step_00000040.g1.json"
CODE = {"uri": "s3://code/c.tar.gz", "sha256": "0" * 64}
SPEC = RunSpec.model_validate(
    {"name": "digits", "task": "task:Digits", "code": CODE, "params": {"lr": 0.1}, "training": {"epochs": 2}}
)
SCRIPT = RunSpec.model_validate({"name": "script", "command": ["true"]})


def stored(*, final: bool = True, exactness: Any = "exact") -> StoredCheckpoint:
    ref = CheckpointRef(uri=URI, step=40, epoch=2, samples_consumed=2560)
    return StoredCheckpoint(
        CheckpointCommitted(run_id="r1", generation=1, checkpoint=ref, size_bytes=1, final=final, exactness=exactness)
    )


def plan(spec: RunSpec = SPEC, **options: Any) -> Any:
    return plan_resumption(spec, stored(), **{"dataset_id": "d" * 64, "completed": True, **options})


def test_a_run_goes_on_for_longer_on_the_same_data() -> None:
    request = plan(epochs=5, params={"lr": 0.01, "width": 3})
    assert (request.resume_from, request.name, request.params) == (URI, "digits (resumed)", {"lr": 0.01, "width": 3})
    assert (request.training.epochs, request.training.max_steps) == (5, None)
    assert request.data.dataset_id == "d" * 64
    note = describe_changes(SPEC, request, stored())
    assert "lr=0.01 instead of 0.1" in note
    assert "5 epochs instead of 2 epochs; exact to the bit from step 40 on" in note
    assert "exact in its samples" in describe_changes(SPEC, request, stored(exactness="samples-exact"))
    assert plan(max_steps=41).training.model_dump(include={"epochs", "max_steps"}) == {"epochs": None, "max_steps": 41}


def test_a_script_goes_on_with_other_params() -> None:
    request = plan(SCRIPT, params={"epochs": 20})
    assert (request.command, request.params, request.resume_from) == (["true"], {"epochs": 20}, URI)


@pytest.mark.parametrize(
    ("spec", "options", "words"),
    [
        (SPEC, {}, r"has trained all that it was asked for \(2 epochs\)"),
        (SPEC, {"epochs": 2}, "give 3 or more"),
        (SPEC, {"max_steps": 40}, "give more than that"),
        (SCRIPT, {"epochs": 20}, "trainbus.params"),
        (SPEC.model_copy(update={"kind": "evaluate"}), {"epochs": 9}, "is an evaluation"),
    ],
)
def test_what_would_train_nothing_is_refused(spec: RunSpec, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        plan(spec, **options)


def test_a_run_that_was_stopped_goes_on_as_it_was() -> None:
    assert plan(completed=False).training == SPEC.training
