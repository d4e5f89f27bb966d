"""A new run that goes on from a checkpoint of another: for longer, or with other settings. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from contracts.events.train import TrainRequested
from contracts.spec.base import Argument, SpecPart
from contracts.spec.data import DatasetRef
from contracts.spec.launchers import describe_launcher
from contracts.spec.run import RunFields

#: The longest name of a run.
MAX_NAME_CHARS = 200
#: The argument or variable of a script that is its number of epochs or steps: --num-epochs, trainer.max_steps, EPOCHS.
#: Not --warmup-epochs or --save_steps.
LENGTH_NAME = {
    unit: re.compile(rf"(--?|[\w.+-]*\.)?((max|num|nb|n|total|train)[_-]?)*{unit}s?", re.IGNORECASE)
    for unit in ("epoch", "step")
}


class ResumptionError(ValueError):
    """A run cannot go on so; the text says what to give."""


class ResumptionChanges(SpecPart):
    """What a new run has other than the run that it goes on from; what is left out is as there."""

    #: Count from the parent's start.
    epochs: int | None = Field(None, ge=1)
    max_steps: int | None = Field(None, ge=1)
    #: Merged over the parent's.
    params: dict[str, Any] = Field(default_factory=dict)
    env: dict[str, str] = Field(default_factory=dict, max_length=200)
    command: Annotated[list[Argument], Field(min_length=1, max_length=1000)] | None = None
    name: str | None = Field(None, min_length=1, max_length=MAX_NAME_CHARS)


@dataclass(frozen=True, slots=True)
class ResumptionPoint:
    """The committed checkpoint that a new run goes on from."""

    #: The run that committed it, and whether that has completed.
    run_id: str
    is_completed: bool
    uri: str
    step: int
    epoch: int
    #: Nothing was left to train after it.
    is_final: bool


def plan_resumption(
    spec: RunFields, point: ResumptionPoint, changes: ResumptionChanges, dataset_id: str | None
) -> TrainRequested:
    """Return the request of a run that goes on from a checkpoint, on the dataset that its parent trained on.

    Raises:
        ResumptionError: nothing would be left to train, or the request cannot be resumed so.
        ValidationError: a change is not valid; the input is a train.requested.
    """
    if spec.kind != "train":
        raise ResumptionError(f"run {point.run_id} is an evaluation: resume the run that it measures")
    fields: dict[str, Any] = {}
    if spec.command is not None:
        _check_script_length(spec, point, changes)
    else:
        _check_training(spec, point, changes)
    if spec.training is not None and (changes.epochs is not None or changes.max_steps is not None):
        length = {"epochs": changes.epochs, "max_steps": changes.max_steps}
        fields["training"] = spec.training.model_copy(update=length)
    if changes.command is not None:
        fields["command"] = changes.command
    if changes.params:
        fields["params"] = {**spec.params, **changes.params}
    if changes.env:
        fields["env"] = {**spec.env, **changes.env}
    if dataset_id is not None and not spec.datasets:
        # The very data, in the very order: what the source holds by now may be another dataset.
        fields["data"] = DatasetRef(dataset_id=dataset_id)
    begins = {"resume_from": point.uri, "init_from": None, "init_exclude": ()}
    named = {"name": changes.name or f"{spec.name} (resumed)"[:MAX_NAME_CHARS]}
    request = TrainRequested.model_validate(spec.model_copy(update={**fields, **begins, **named}).model_dump())
    if request.command is not None and (problem := describe_launcher(request.command, request.slots.max)):
        raise ResumptionError(f"command: {problem}")
    return request


def _check_training(spec: RunFields, point: ResumptionPoint, changes: ResumptionChanges) -> None:
    """Check that a Task has something left to train.

    Raises:
        ResumptionError: it has not.
    """
    if changes.command is not None:
        raise ResumptionError(
            f"run {point.run_id} trains a Task ({spec.task}): --command is for a run that has a command"
        )
    if changes.epochs is not None and changes.epochs <= point.epoch:
        raise ResumptionError(
            f"the checkpoint of step {point.step} has trained epoch {point.epoch}, and --epochs counts from the start: "
            f"give {point.epoch + 1} or more, or an earlier checkpoint with --from"
        )
    if changes.max_steps is not None and changes.max_steps <= point.step:
        raise ResumptionError(
            f"the checkpoint is of step {point.step}, and --max-steps counts from the start: give more than that, or "
            "an earlier checkpoint with --from"
        )
    is_as_long = changes.epochs is None and changes.max_steps is None
    if is_as_long and point.is_final and point.is_completed:
        raise ResumptionError(
            f"run {point.run_id} has trained all that it was asked for ({describe_end(spec)}): give --epochs or "
            "--max-steps to go on for longer, or an earlier checkpoint with --from"
        )


def _check_script_length(spec: RunFields, point: ResumptionPoint, changes: ResumptionChanges) -> None:
    """Check that a script can see how long it is to train.

    Raises:
        ResumptionError: it counts its own epochs and steps; the text says how it would see the new number.
    """
    for unit, option, number in (("epoch", "--epochs", changes.epochs), ("step", "--max-steps", changes.max_steps)):
        # A run that was submitted with a number of epochs has it in launch.json.
        if number is not None and spec.training is None:
            raise ResumptionError(
                f"run {point.run_id} is a script, which counts its own epochs and steps and cannot see {option}: "
                f"{_describe_length_option(spec, unit, number)}"
            )


def _describe_length_option(spec: RunFields, unit: str, number: int) -> str:
    """Return the option by which a script sees its number of epochs or steps."""
    if (command := _replace_length(spec.command or (), unit, number)) is not None:
        return f"give --command {shlex.quote(shlex.join(command))}"
    pattern = LENGTH_NAME[unit]
    for option, names in (("--env", spec.env), ("--param", spec.params)):
        if (name := next(filter(pattern.fullmatch, names), None)) is not None:
            return f"give {option} {name}={number}"
    return (
        "give the whole command with another number (--command), a variable (--env NAME=VALUE), or a parameter that it "
        f"reads by trainbus.params() (--param {unit}s={number})"
    )


def _replace_length(command: Sequence[str], unit: str, number: int) -> list[str] | None:
    """Return a command with another number of epochs or steps; None where no argument of it is that number."""
    words = list(command)
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if not LENGTH_NAME[unit].fullmatch(name):
            continue
        if equals and value.isdigit():
            return [*words[:place], f"{name}={number}", *words[place + 1 :]]
        if name.startswith("-") and "".join(words[place + 1 : place + 2]).isdigit():
            return [*words[: place + 1], str(number), *words[place + 2 :]]
    return None


def describe_end(spec: RunFields) -> str:
    """Return how long a Task trains."""
    training = spec.training
    assert training is not None
    ends = [f"{training.epochs} epochs"] if training.epochs is not None else []
    ends += [f"{training.max_steps} steps"] if training.max_steps is not None else []
    return " and at most ".join(ends)
