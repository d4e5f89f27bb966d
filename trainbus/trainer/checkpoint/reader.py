"""Reads a checkpoint that any number of ranks wrote. Strict: what does not fit is refused by name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from contracts.tensor_files import TENSOR_KINDS, parse_tensors_file, tensors_file
from trainbus.trainer.checkpoint.files import (
    MAX_STATE_BYTES,
    STATE,
    VERSION,
    CheckpointError,
    Progress,
    check_safe,
)
from trainbus.trainer.checkpoint.tensor_file import RequireRange, open_tensor_file
from trainbus.trainer.optimizer_state import OptimizerState
from trainbus.trainer.readable_tensor import ReadableTensor
from trainbus.trainer.training_state import State


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """A whole training state, whose tensors are read when they are needed."""

    progress: Progress
    state: State[ReadableTensor]


def load(folder: Path, require: RequireRange | None = None) -> LoadedCheckpoint:
    """Open everything that training resumes from. ``require``: see ``open_tensor_file``."""
    check_safe(folder)
    progress, state = read_state(folder)
    for rank in range(progress.about["parts"]):
        for kind in ("model", "optimizer"):
            if not (folder / tensors_file(kind, rank)).is_file():
                raise CheckpointError(f"{tensors_file(kind, rank)!r} of the checkpoint is missing")
    state.model, state.optimizer.tensors, state.ema = (open_tensors(folder, kind, require) for kind in TENSOR_KINDS)
    return LoadedCheckpoint(progress, state)


def read_state(folder: Path) -> tuple[Progress, State[ReadableTensor]]:
    """Read ``state.json`` alone; the other files may lie elsewhere."""
    path = folder / STATE
    try:
        if path.stat().st_size > MAX_STATE_BYTES:
            raise CheckpointError(f"{STATE} is too large for a checkpoint of trainbus")
        state = json.loads(path.read_bytes())
        if state["version"] != VERSION:
            raise CheckpointError(f"{STATE} has version {state['version']!r}; this trainbus reads {VERSION}")
        progress = Progress(
            step=int(state["step"]),
            samples_consumed=int(state["samples_consumed"]),
            epoch=int(state["epoch"]),
            schedule=state["schedule"],
            best=dict(state["best"]),
            validations_without_improvement=int(state["validations_without_improvement"]),
            unfinished=state["unfinished"],
            about={**state["about"], "parts": int(state["about"].get("parts", 1))},
        )
        saved = state["optimizer"]
        optimizer = OptimizerState[ReadableTensor]({}, dict(saved["values"]), list(saved["groups"]))
        return progress, State(optimizer=optimizer, scaler=state["scaler"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{STATE} of the checkpoint cannot be read: {error!r}") from error


def open_tensors(folder: Path, kind: str, require: RequireRange | None = None) -> dict[str, ReadableTensor]:
    """Return all ranks' tensors of a kind (``model``, ``optimizer``, ``ema``) by name; empty where there are none."""
    found: dict[str, ReadableTensor] = {}
    for path in sorted(folder.iterdir()):
        if (named := parse_tensors_file(path.name)) is None or named[0] != kind:
            continue
        tensors = open_tensor_file(path, require)
        if twice := found.keys() & tensors.keys():
            raise CheckpointError(f"{min(twice)!r} is in {path.name} of the checkpoint and in another file")
        found |= tensors
    return found
