"""A new run that goes on from a checkpoint of another: for longer, or with other settings. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from contracts.events.train import TrainRequested
from contracts.ranks import LAUNCH_VARIABLE, PARAMS_VARIABLE
from contracts.spec.data import DatasetRef
from contracts.spec.run import RunSpec
from trainbus.client.checkpoints import StoredCheckpoint
from trainbus.client.errors import UsageError, invalid_request
from trainbus.client.submission import check_launcher, parse_command

#: The longest name of a run.
MAX_NAME_CHARS = 200
#: The argument or variable of a script that is its number of epochs or steps: --num-epochs, trainer.max_steps, EPOCHS.
LENGTH_NAME = {unit: re.compile(rf"[\w.+-]*{unit}s?", re.IGNORECASE) for unit in ("epoch", "step")}


@dataclass(frozen=True, slots=True)
class ResumedRun:
    """A run that was requested to go on from a checkpoint of another."""

    run_id: str
    name: str
    parent_run_id: str
    step: int
    epoch: int
    #: What differs from the parent, and what that means for its exactness.
    note: str
    #: The scheduler's answer; None if it has not come yet.
    answer: str | None = None
    #: Why it may end at once, and what to give instead; '' if nothing speaks for that.
    warning: str = ""


@dataclass(frozen=True, slots=True)
class ResumptionChanges:
    """What a new run has other than the run that it goes on from; None and empty: as there."""

    #: Count from the parent's start.
    epochs: int | None = None
    max_steps: int | None = None
    #: Merged over the parent's.
    params: Mapping[str, Any] | None = None
    env: Mapping[str, str] | None = None
    #: A command line or its arguments.
    command: str | Sequence[str] | None = None
    name: str | None = None


def plan_resumption(
    spec: RunSpec, stored: StoredCheckpoint, changes: ResumptionChanges, *, dataset_id: str | None, completed: bool
) -> TrainRequested:
    """Return the request of a run that goes on from a checkpoint.

    Raises:
        UsageError: nothing would be left to train, or the request cannot be resumed so; the text says what to give.
    """
    parent = stored.commit.run_id
    if spec.kind != "train":
        raise UsageError(f"run {parent} is an evaluation: resume the run that it measures")
    fields: dict[str, Any] = {}
    if spec.command is not None:
        _check_script_length(spec, parent, changes)
    else:
        _check_training(spec, stored, changes, completed=completed)
    if spec.training is not None and (changes.epochs is not None or changes.max_steps is not None):
        length = {"epochs": changes.epochs, "max_steps": changes.max_steps}
        fields["training"] = spec.training.model_copy(update=length)
    if changes.command is not None:
        if spec.command is None:
            raise UsageError(f"run {parent} trains a Task ({spec.task}): --command is for a run that has a command")
        fields["command"] = parse_command(changes.command)
    if changes.params:
        fields["params"] = {**spec.params, **changes.params}
    if changes.env:
        fields["env"] = {**spec.env, **changes.env}
    if dataset_id is not None:
        # The very data, in the very order: what the source holds by now may be another dataset.
        fields["data"] = DatasetRef(dataset_id=dataset_id)
    begins = {"resume_from": stored.uri, "init_from": None, "init_exclude": ()}
    named = {"name": changes.name or f"{spec.name} (resumed)"[:MAX_NAME_CHARS]}
    body = spec.model_copy(update={**fields, **begins, **named}).model_dump()
    try:
        request = TrainRequested.model_validate(body)
    except ValidationError as error:
        raise invalid_request(error, body, TrainRequested) from error
    check_launcher(request)
    return request


def _check_training(spec: RunSpec, stored: StoredCheckpoint, changes: ResumptionChanges, *, completed: bool) -> None:
    """Check that a Task has something left to train.

    Raises:
        UsageError: it has not.
    """
    ref = stored.commit.checkpoint
    if changes.epochs is not None and changes.epochs <= ref.epoch:
        raise UsageError(
            f"the checkpoint of step {ref.step} has trained epoch {ref.epoch}, and --epochs counts from the start: "
            f"give {ref.epoch + 1} or more, or an earlier checkpoint with --from"
        )
    if changes.max_steps is not None and changes.max_steps <= ref.step:
        raise UsageError(
            f"the checkpoint is of step {ref.step}, and --max-steps counts from the start: give more than that, or "
            "an earlier checkpoint with --from"
        )
    is_as_long = changes.epochs is None and changes.max_steps is None
    if is_as_long and stored.commit.final and completed:
        raise UsageError(
            f"run {stored.commit.run_id} has trained all that it was asked for ({_describe_end(spec)}): give --epochs "
            "or --max-steps to go on for longer, or an earlier checkpoint with --from"
        )


def _check_script_length(spec: RunSpec, parent: str, changes: ResumptionChanges) -> None:
    """Check that a script can see how long it is to train.

    Raises:
        UsageError: it counts its own epochs and steps; the text says how it would see the new number.
    """
    for unit, option, number in (("epoch", "--epochs", changes.epochs), ("step", "--max-steps", changes.max_steps)):
        # A run that was submitted with a number of epochs has it in launch.json.
        if number is not None and spec.training is None:
            raise UsageError(
                f"run {parent} is a script, which counts its own epochs and steps and cannot see {option}: "
                f"{_describe_length_option(spec, unit, number)}"
            )


def _describe_length_option(spec: RunSpec, unit: str, number: int) -> str:
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


def describe_changes(spec: RunSpec, request: TrainRequested, stored: StoredCheckpoint) -> str:
    """Return what differs from the parent, and how exact the new run is."""
    changed = _list_changes(spec, request)
    text = ", ".join(changed) or "nothing changed"
    if spec.task is None:
        return text
    if stored.commit.exactness != "exact":
        return f"{text}; exact in its samples, as the checkpoint is"
    if changed:
        return (
            f"{text}; exact to the bit from step {stored.step} on, but not equal to a run that began with these "
            "settings"
        )
    return f"{text}; exact to the bit, as the checkpoint is"


def _list_changes(spec: RunSpec, request: TrainRequested) -> list[str]:
    changed = []
    if spec.command is not None and request.command is not None and spec.command != request.command:
        changed.append(f"{shlex.join(request.command)} instead of {shlex.join(spec.command)}")
    for name in _changed_names(spec.env, request.env):
        changed.append(f"{name}={request.env[name]} instead of {spec.env.get(name)}")
    for name in _changed_names(spec.params, request.params):
        changed.append(f"{name}={request.params[name]!r} instead of {spec.params.get(name)!r}")
    if spec.training is not None and request.training is not None and spec.training != request.training:
        changed.append(f"{_describe_end(request)} instead of {_describe_end(spec)}")
    return changed


def _changed_names(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return sorted(name for name in after if name not in before or before[name] != after[name])


def describe_unseen_changes(spec: RunSpec, request: TrainRequested, *, has_ended_well: bool) -> str:
    """Return why a script may find nothing to do, and what to give instead; '' if nothing speaks for that.

    Args:
        has_ended_well: it goes on from the last checkpoint of a run that completed.
    """
    if spec.command is None or (request.command, request.env) != (spec.command, spec.env):
        return ""
    command = shlex.join(spec.command)
    # A parameter that the parent had already is one that its script reads.
    params = ", ".join(f"{name}={value}" for name, value in request.params.items() if name not in spec.params)
    unseen = [f"{params} only if it reads trainbus.params() or {PARAMS_VARIABLE}"] if params else []
    if spec.training != request.training:
        unseen.append(f"the new end only if it reads spec.training in the file that {LAUNCH_VARIABLE} names")
    if unseen:
        return (
            f"the command is still {command!r}, which sees {', and '.join(unseen)}. To change its arguments give "
            "--command, to change its variables --env"
        )
    if has_ended_well and spec.params == request.params:
        return (
            f"nothing that the script can see differs: if {command!r} finds its work done, it ends at once. Give "
            "--command or --env to change that, or an earlier checkpoint with --from"
        )
    return ""


def _describe_end(spec: RunSpec | TrainRequested) -> str:
    training = spec.training
    assert training is not None
    ends = [f"{training.epochs} epochs"] if training.epochs is not None else []
    ends += [f"{training.max_steps} steps"] if training.max_steps is not None else []
    return " and at most ".join(ends)
