"""What is requested to go on from a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from contracts.events.checkpoint import CheckpointCommitted
from contracts.events.run import CheckpointRef
from contracts.resumption import ResumptionChanges, ResumptionError, plan_resumption
from contracts.spec.data import DatasetRef
from contracts.spec.resources import Slots
from contracts.spec.run import RunSpec
from trainbus.client.checkpoints import StoredCheckpoint
from trainbus.client.resumption import describe_changes, describe_unseen_changes

URI = "s3://models/default/r1/checkpoints/epoch_2/step_00000040.g1.json"
CODE = {"uri": "s3://code/c.tar.gz", "sha256": "0" * 64}
SPEC = RunSpec.model_validate(
    {"name": "digits", "task": "task:Digits", "code": CODE, "params": {"lr": 0.1}, "training": {"epochs": 2}}
)
SCRIPT = RunSpec.model_validate({"name": "script", "command": ["python", "train.py"], "params": {"lr": 0.1}})


def stored(*, final: bool = True, exactness: Any = "exact") -> StoredCheckpoint:
    ref = CheckpointRef(uri=URI, step=40, epoch=2, samples_consumed=2560)
    return StoredCheckpoint(
        CheckpointCommitted(run_id="r1", generation=1, checkpoint=ref, size_bytes=1, final=final, exactness=exactness)
    )


def plan(spec: RunSpec = SPEC, *, completed: bool = True, **changes: Any) -> Any:
    point = stored().as_resumption_point(is_completed=completed)
    return plan_resumption(spec, point, ResumptionChanges.model_validate(changes), "d" * 64)


def script(*command: str, **fields: Any) -> RunSpec:
    return SCRIPT.model_copy(update={"command": list(command), **fields} if command else fields)


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
    assert (request.command, request.params) == (SCRIPT.command, {"lr": 0.1, "epochs": 20})
    assert request.resume_from == URI


def test_a_script_of_several_datasets_keeps_their_names() -> None:
    datasets = {name: DatasetRef(dataset_id=name * 64) for name in "ab"}
    request = plan(script(datasets=datasets))
    assert (request.data, request.datasets) == (None, datasets)


def test_a_script_goes_on_with_another_command_line_and_environment() -> None:
    parent = script(env={"A": "1", "B": "2"})
    request = plan(parent, command=["python", "train.py", "--epochs", "20"], env={"B": "3", "C": "4"})
    assert request.command == ["python", "train.py", "--epochs", "20"]
    assert request.env == {"A": "1", "B": "3", "C": "4"}
    assert describe_changes(parent, request, stored()) == (
        "python train.py --epochs 20 instead of python train.py, B=3 instead of 2, C=4 instead of None"
    )
    assert describe_unseen_changes(parent, request, has_ended_well=True) == ""


@pytest.mark.parametrize(
    ("parent", "changes", "words"),
    [
        (SCRIPT, {"params": {"epochs": 20}}, "sees epochs=20 only if it reads trainbus.params()"),
        (SCRIPT, {"params": {"lr": 0.2}}, ""),
        (SCRIPT, {}, "if 'python train.py' finds its work done, it ends at once"),
        (script(training=SPEC.training), {"epochs": 20}, "only if it reads spec.training"),
        (SPEC, {"epochs": 20, "params": {"width": 1}}, ""),
    ],
)
def test_what_a_script_may_not_see_is_told(parent: RunSpec, changes: dict[str, Any], words: str) -> None:
    text = describe_unseen_changes(parent, plan(parent, **changes), has_ended_well=True)
    assert words in text
    assert bool(text) == bool(words)


@pytest.mark.parametrize(
    ("spec", "options", "words"),
    [
        (SPEC, {}, r"has trained all that it was asked for \(2 epochs\)"),
        (SPEC, {"epochs": 2}, "give 3 or more"),
        (SPEC, {"max_steps": 40}, "give more than that"),
        (SCRIPT, {"epochs": 20}, r"trainbus.params\(\) \(--param epochs=20\)"),
        (script("sh", "t.sh", "--num_epochs=3"), {"epochs": 20}, "give --command 'sh t.sh --num_epochs=20'"),
        (script("t", "--max-steps", "9", "-x"), {"max_steps": 20}, "give --command 't --max-steps 20 -x'"),
        (script("t", "--epochs"), {"epochs": 20}, "the whole command with another number"),
        (script("t", "--warmup-epochs", "1", "trainer.max_epochs=3"), {"epochs": 20}, "1 trainer.max_epochs=20'"),
        (script("t", "--save_steps", "9", "--max_train_steps", "9"), {"max_steps": 20}, "9 --max_train_steps 20'"),
        (script(env={"EPOCHS": "3"}), {"epochs": 20}, "give --env EPOCHS=20"),
        (script(params={"n_epochs": 3}), {"epochs": 20}, "give --param n_epochs=20"),
        (script(slots=Slots(min=2, max=2)), {"command": ["torchrun", "train.py"]}, "command: torchrun would start"),
        (SPEC, {"epochs": 3, "command": ["python", "train.py"]}, "trains a Task"),
        (SPEC.model_copy(update={"kind": "evaluate"}), {"epochs": 9}, "is an evaluation"),
    ],
)
def test_what_would_train_nothing_is_refused(spec: RunSpec, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ResumptionError, match=words):
        plan(spec, **options)


def test_a_run_that_was_stopped_goes_on_as_it_was() -> None:
    assert plan(completed=False).training == SPEC.training
