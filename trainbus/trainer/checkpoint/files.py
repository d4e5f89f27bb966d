"""Names and contents of a checkpoint's files.

Every rank writes whole tensors, about as many bytes each: ``model-<rank>.safetensors``,
``optimizer-<rank>.safetensors`` and, where there is a moving average, ``ema-<rank>.safetensors``; and
``digests-<rank>.json``, a hash for each of them.
Rank 0 adds ``state.json``, and ``artifacts/`` with what the Task needs besides.
All ranks' files together are one checkpoint, for any number of ranks that loads it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contracts.manifest import ARTIFACTS_FOLDER
from trainbus.trainer.checkpoint.digest import json_digest

VERSION = 2
STATE = "state.json"
#: More than any state without tensors needs; a larger file is not one of ours.
MAX_STATE_BYTES = 64 * 2**20


class CheckpointError(Exception):
    """A checkpoint cannot be written or used; the text names the file or the tensor."""


@dataclass(slots=True)
class Progress:
    """The progress of training, without tensors; ``state.json`` holds all of it."""

    step: int = 0
    samples_consumed: int = 0
    epoch: int = 0
    schedule: dict[str, Any] | None = None
    #: The best value so far, by purpose: for checkpoints and for early stopping.
    best: dict[str, float] = field(default_factory=dict)
    validations_without_improvement: int = 0
    #: Samples consumed before the last step, where what follows a step (validation, checkpoint) is still to be done.
    unfinished: int | None = None
    #: What the state belongs to and came from; for people and for checks, not needed to go on.
    about: dict[str, Any] = field(default_factory=dict)


def digests_file(rank: int) -> str:
    return f"digests-{rank}.json"


def state_json(
    progress: Progress, groups: list[dict[str, Any]], values: dict[str, dict[str, Any]], scaler: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the contents of ``state.json``, copied, so that training may go on."""
    return copy.deepcopy(
        {
            "version": VERSION,
            "step": progress.step,
            "samples_consumed": progress.samples_consumed,
            "epoch": progress.epoch,
            "schedule": progress.schedule,
            "best": progress.best,
            "validations_without_improvement": progress.validations_without_improvement,
            "unfinished": progress.unfinished,
            "scaler": scaler,
            "optimizer": {"groups": groups, "values": values},
            "about": progress.about,
        }
    )


def state_digest(state: dict[str, Any]) -> str:
    """Return the hash of everything in ``state.json`` that training resumes from."""
    try:
        return json_digest({name: value for name, value in state.items() if name not in ("about", "version")})
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the optimizer's or the schedule's state holds something that JSON cannot: {error}"
        ) from error


def check_safe(folder: Path) -> None:
    """Refuse a folder with anything but plain safetensors and JSON files: pickles run code when they are loaded.

    Artifacts are the Task's own files, which it alone reads.
    """
    if not folder.is_dir():
        raise CheckpointError(f"there is no checkpoint folder {folder.name!r}")
    for path in folder.rglob("*"):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise CheckpointError(f"{path.name!r} in the checkpoint is not a plain file")
        is_artifact = path.relative_to(folder).parts[0] == ARTIFACTS_FOLDER
        if path.is_file() and not is_artifact and path.suffix not in (".safetensors", ".json"):
            raise CheckpointError(f"{path.name!r} in the checkpoint is neither safetensors nor JSON; it is not loaded")
