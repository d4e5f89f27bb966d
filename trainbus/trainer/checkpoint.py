"""Checkpoints: safetensors for tensors, JSON for the rest, readable without trainbus.

``step_<s>-rank_0/`` holds ``model.safetensors``, ``optimizer.safetensors`` and ``state.json``; the other
ranks hold nothing that rank 0 does not, and say with one small file that they were at that step. A folder is written
under another name, fsynced and renamed, so one that exists is whole. The tensors are copied to the host while training
waits; writing happens in a thread while it goes on.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from trainbus.trainer.optimizer_state import OptimizerState, StateMismatch

VERSION = 1
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
#: More than any state without tensors needs; a larger file is not one of ours.
MAX_STATE_BYTES = 64 * 2**20


class CheckpointError(Exception):
    """A checkpoint cannot be written or used; the text names the file or the tensor."""


@dataclass(slots=True)
class Progress:
    """Where training stands, beside the tensors. All of it is in ``state.json``."""

    step: int = 0
    samples_consumed: int = 0
    epoch: int = 0
    schedule: dict[str, Any] | None = None
    #: The best value so far, by purpose: for checkpoints and for early stopping.
    best: dict[str, float] = field(default_factory=dict)
    validations_without_improvement: int = 0
    #: What the state belongs to and came from; for people and for checks, not needed to go on.
    about: dict[str, Any] = field(default_factory=dict)


def frozen_copy(progress: Progress) -> Progress:
    """Return a copy that training cannot change while it is being written."""
    return copy.deepcopy(progress)


@dataclass(slots=True)
class Snapshot:
    """A checkpoint on the host, ready to be written."""

    model: dict[str, Tensor]
    optimizer: OptimizerState
    progress: Progress


def write(folder: Path, snapshot: Snapshot) -> None:
    """Write rank 0's folder; when this returns it is whole and on disk, and it was never half there."""

    def fill(temporary: Path) -> None:
        save_file(snapshot.model, temporary / MODEL, metadata={"format": "pt"})
        save_file(snapshot.optimizer.tensors, temporary / OPTIMIZER, metadata={"format": "pt"})
        progress = snapshot.progress
        state = {
            "version": VERSION,
            "step": progress.step,
            "samples_consumed": progress.samples_consumed,
            "epoch": progress.epoch,
            "schedule": progress.schedule,
            "best": progress.best,
            "validations_without_improvement": progress.validations_without_improvement,
            "optimizer": {"groups": snapshot.optimizer.groups, "values": snapshot.optimizer.values},
            "about": progress.about,
        }
        try:
            text = json.dumps(state, indent=1, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"the optimizer's or the schedule's state holds something that JSON cannot: {error}"
            ) from error
        (temporary / STATE).write_text(text)

    _write_folder(folder, fill)


def write_presence(folder: Path, rank: int, about: Mapping[str, Any]) -> None:
    """Write the folder of a rank that keeps nothing of its own."""
    _write_folder(folder, lambda temporary: _write_json(temporary / f"rank_{rank}.json", {"rank": rank, **about}))


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, sort_keys=True))


def _write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        fill(temporary)
        for path in (*temporary.iterdir(), temporary):
            _fsync(path)
        # Whatever stands there was never reported, or the rank would not write this step again.
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
        _fsync(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Writer:
    """Writes checkpoints one after the other in a thread. An error shows at the next ``submit`` or ``join``."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def submit(self, work: Callable[[], None]) -> None:
        """Start ``work`` once the one before it is done; two at a time would need twice the memory."""
        self.join()

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, name="trainbus-checkpoint", daemon=False)
        self._thread.start()

    def join(self) -> None:
        """Wait until everything is on disk."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise CheckpointError(f"the checkpoint could not be written: {error}") from error


def check_safe(folder: Path) -> None:
    """Refuse a folder with anything but plain safetensors and JSON files: pickles run code when they are loaded."""
    if not folder.is_dir():
        raise CheckpointError(f"there is no checkpoint folder {folder.name!r}")
    for path in folder.rglob("*"):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise CheckpointError(f"{path.name!r} in the checkpoint is no plain file")
        if path.is_file() and path.suffix not in (".safetensors", ".json"):
            raise CheckpointError(f"{path.name!r} in the checkpoint is neither safetensors nor JSON; it is not loaded")


def load_progress(folder: Path) -> tuple[Progress, OptimizerState]:
    """Read ``state.json``; the optimizer state comes without its tensors."""
    path = folder / STATE
    try:
        if path.stat().st_size > MAX_STATE_BYTES:
            raise CheckpointError(f"{STATE} is too large to be ours")
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
            about=dict(state["about"]),
        )
        optimizer = state["optimizer"]
        return progress, OptimizerState({}, dict(optimizer["values"]), list(optimizer["groups"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{STATE} of the checkpoint cannot be read: {error!r}") from error


def load_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path.name} of the checkpoint cannot be read: {error}") from error


def load_model(folder: Path, model: nn.Module) -> None:
    """Put the checkpoint's weights and buffers into ``model``.

    Raises:
        StateMismatch: a tensor is missing, unknown, or of another shape or type; the text names it.
    """
    check_safe(folder)
    saved = load_tensors(folder / MODEL)
    wanted = model.state_dict()
    for name, present in wanted.items():
        if name not in saved:
            raise StateMismatch(f"the model has {name!r}, which the checkpoint lacks: was the task changed?")
        tensor = saved[name]
        if tensor.shape != present.shape or tensor.dtype != present.dtype:
            raise StateMismatch(
                f"{name!r} is {tuple(tensor.shape)} {tensor.dtype} in the checkpoint but "
                f"{tuple(present.shape)} {present.dtype} in the model: do the params differ?"
            )
    for name in saved:
        if name not in wanted:
            raise StateMismatch(f"the checkpoint has {name!r}, which the model lacks: was the task changed?")
    with torch.no_grad():
        model.load_state_dict(saved)


def load_optimizer(folder: Path, state: OptimizerState) -> OptimizerState:
    """Return ``state`` (of ``load_progress``) with its tensors."""
    return OptimizerState(load_tensors(folder / OPTIMIZER), state.values, state.groups)
