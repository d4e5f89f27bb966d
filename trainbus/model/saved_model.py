"""Loads the model of a fetched folder: ``model = trainbus.load_model("digits-step59")``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from torch import nn

from contracts.datasets import FieldStatistics
from trainbus.task import Task, TaskError, load_task
from trainbus.trainer.checkpoint.files import CheckpointError
from trainbus.trainer.checkpoint.task_artifacts import load_artifacts
from trainbus.trainer.checkpoint.tensor_file import open_tensor_file
from trainbus.trainer.checkpoint.weights import load_weights, match_weights

WEIGHTS, DESCRIPTION, CODE = "model.safetensors", "model.json", "code"
#: Folders of code from which tasks were imported here.
_code_folders: set[str] = set()


def load_model(folder: Path | str) -> nn.Module:
    """Return the model of a folder that ``trainbus fetch`` wrote, in evaluation mode, on the CPU.

    It imports the Task from the folder's code, which runs that code.

    Raises:
        TaskError: the folder has no model of a Task, or its code cannot be imported here.
    """
    model, _ = load_model_and_task(Path(folder))
    return model


def load_model_and_task(folder: Path) -> tuple[nn.Module, Task]:
    """Return the model and the Task that made it."""
    try:
        description: dict[str, Any] = json.loads((folder / DESCRIPTION).read_bytes())
        saved = open_tensor_file(folder / WEIGHTS)
    except (OSError, ValueError, CheckpointError) as error:
        raise TaskError(
            f"{folder} has no model of a Task: fetch one with `trainbus fetch RUN FOLDER` ({error})"
        ) from error
    code = folder / CODE
    _forget_other_code(code)
    task = load_task(description["task"], description["params"], code.resolve() if code.is_dir() else None)
    task.classes = tuple(description["classes"])
    task.statistics = {name: FieldStatistics.model_validate(each) for name, each in description["statistics"].items()}
    task.target = task.target or description.get("target") or ()
    load_artifacts(task, folder, description.get("artifacts", {}))
    model = task.model()
    load_weights(match_weights(saved, model), model)
    return model.eval(), task


def _forget_other_code(code: Path) -> None:
    """Make the modules of other fetched folders importable anew: two projects often have a module of one name."""
    present = str(code.resolve())
    others = _code_folders - {present}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and any(Path(file).is_relative_to(other) for other in others):
            del sys.modules[name]
    sys.path[:] = [path for path in sys.path if not any(Path(path).is_relative_to(other) for other in others)]
    _code_folders.add(present)
