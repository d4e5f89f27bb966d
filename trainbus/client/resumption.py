"""What is told of a run that goes on from a checkpoint of another. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from contracts.events.train import TrainRequested
from contracts.ranks import LAUNCH_VARIABLE, PARAMS_VARIABLE
from contracts.resumption import describe_end
from contracts.spec.run import RunSpec
from trainbus.client.checkpoints import StoredCheckpoint


@dataclass(frozen=True, slots=True)
class ResumedRun:
    """A run that was requested to go on from a checkpoint of another."""

    run_id: str
    name: str
    parent_run_id: str
    step: int
    epoch: int
    #: What the checkpoint is of, for people: a step, or a version of an output folder.
    point: str
    #: What differs from the parent, and what that means for its exactness.
    note: str
    #: The scheduler's answer; None if it has not come yet.
    answer: str | None = None
    #: Why it may end at once, and what to give instead; '' if nothing speaks for that.
    warning: str = ""


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
        changed.append(f"{describe_end(request)} instead of {describe_end(spec)}")
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
