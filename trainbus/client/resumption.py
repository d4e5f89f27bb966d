"""A new run that goes on from a checkpoint of another: for longer, or with other params. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from contracts.events.train import TrainRequested
from contracts.spec.data import DatasetRef
from contracts.spec.run import RunSpec
from trainbus.client.checkpoints import StoredCheckpoint
from trainbus.client.errors import UsageError, invalid_request

#: The longest name of a run.
MAX_NAME_CHARS = 200


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


def plan_resumption(
    spec: RunSpec,
    stored: StoredCheckpoint,
    *,
    dataset_id: str | None,
    completed: bool,
    epochs: int | None = None,
    max_steps: int | None = None,
    params: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> TrainRequested:
    """Return the request of a run that goes on from a checkpoint. ``epochs`` and ``max_steps`` count from the start.

    Raises:
        UsageError: nothing would be left to train, or the request cannot be resumed so; the text says what to give.
    """
    ref = stored.commit.checkpoint
    parent = stored.commit.run_id
    if spec.kind != "train":
        raise UsageError(f"run {parent} is an evaluation: resume the run that it measures")
    changes: dict[str, Any] = {}
    if spec.training is None:
        if epochs is not None or max_steps is not None:
            raise UsageError(
                f"run {parent} is a script, which counts its own epochs and steps: give it a parameter instead "
                "(--param epochs=20, read by trainbus.params())"
            )
    else:
        if epochs is not None and epochs <= ref.epoch:
            raise UsageError(
                f"the checkpoint of step {ref.step} has trained epoch {ref.epoch}, and --epochs counts from the start: "
                f"give {ref.epoch + 1} or more, or an earlier checkpoint with --from"
            )
        if max_steps is not None and max_steps <= ref.step:
            raise UsageError(
                f"the checkpoint is of step {ref.step}, and --max-steps counts from the start: give more than that, or "
                "an earlier checkpoint with --from"
            )
        if epochs is not None or max_steps is not None:
            changes["training"] = spec.training.model_copy(update={"epochs": epochs, "max_steps": max_steps})
        elif stored.commit.final and completed:
            raise UsageError(
                f"run {parent} has trained all that it was asked for ({_describe_end(spec)}): give --epochs or "
                "--max-steps to go on for longer, or an earlier checkpoint with --from"
            )
    if params:
        changes["params"] = {**spec.params, **params}
    if dataset_id is not None:
        # The very data, in the very order: what the source holds by now may be another dataset.
        changes["data"] = DatasetRef(dataset_id=dataset_id)
    begins = {"resume_from": ref.uri, "init_from": None, "init_exclude": ()}
    named = {"name": name or f"{spec.name} (resumed)"[:MAX_NAME_CHARS]}
    body = spec.model_copy(update={**changes, **begins, **named}).model_dump()
    try:
        return TrainRequested.model_validate(body)
    except ValidationError as error:
        raise invalid_request(error, body, TrainRequested) from error


def describe_changes(spec: RunSpec, request: TrainRequested, stored: StoredCheckpoint) -> str:
    """Return what differs from the parent, and how exact the new run is."""
    names = sorted(
        name for name in {*spec.params, *request.params} if spec.params.get(name) != request.params.get(name)
    )
    changed = [f"{name}={request.params.get(name)!r} instead of {spec.params.get(name)!r}" for name in names]
    if spec.training is not None and request.training is not None and spec.training != request.training:
        changed.append(f"{_describe_end(request)} instead of {_describe_end(spec)}")
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


def _describe_end(spec: RunSpec | TrainRequested) -> str:
    training = spec.training
    assert training is not None
    ends = [f"{training.epochs} epochs"] if training.epochs is not None else []
    ends += [f"{training.max_steps} steps"] if training.max_steps is not None else []
    return " and at most ".join(ends)
