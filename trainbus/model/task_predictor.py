"""A Task's model in a model process: ``decode`` and ``collate`` as in training, then ``serve`` or ``predict``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from contracts.model_process import ModelLaunch, Tensor
from trainbus.data.batch_tensors import to_device
from trainbus.model.missing_field import find_missing_field
from trainbus.model.predictor import InputError, to_tensor
from trainbus.model.saved_model import load_model_and_task
from trainbus.model.targets import fill_targets, list_targets
from trainbus.task import CLASS_FIELD, ROW_FIELD, Task, TaskError, describe

#: What of ``Task.predict`` is an answer; the rest is for evaluation.
ANSWERED = ("prediction", "probabilities")


class TaskPredictor:
    """A loaded model and its Task: samples in, named tensors out."""

    def __init__(self, model: nn.Module, task: Task, device: torch.device, code: Path | None = None) -> None:
        self._model, self._task, self._device, self._code = model.to(device).eval(), task, device, code
        self.classes, self.targets = tuple(task.classes), list_targets(task)

    @classmethod
    def load(cls, launch: ModelLaunch) -> TaskPredictor:
        """Load the model of a folder.

        Raises:
            TaskError: it cannot be loaded or served.
        """
        model, task = load_model_and_task(launch.folder)
        if type(task).serve is Task.serve and type(task).predict is Task.predict:
            raise TaskError(
                f"{type(task).__name__} cannot be served: give it predict(self, model, batch), or serve(self, model, "
                "batch) that returns tensors by name"
            )
        name = launch.device
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        return cls(model, task, torch.device(name), (launch.folder / "code").resolve())

    def predict(self, samples: Sequence[Mapping[str, bytes]]) -> tuple[Tensor, ...]:
        """Return the outputs for some samples, each with one row a sample.

        Raises:
            InputError: a sample cannot be decoded, or the samples do not fit together.
            Exception: what the model raises.
        """
        examples, problems = [], []
        for row, sample in enumerate(samples):
            try:
                examples.append(self._task.decode(fill_targets(self._task, sample)))
            except Exception as error:
                problems.append(self._describe_problem(row, sample, error))
        if problems:
            raise InputError(problems)
        try:
            batch = self._task.collate(examples)
        except Exception as error:
            text = f"the rows do not fit into one batch: {describe(error, self._code)}"
            raise InputError([{"row": 0, "field": "", "text": text}]) from error
        with torch.inference_mode():
            answer = self._answer(to_device(batch, lambda tensor: tensor.to(self._device)))
        outputs = tuple(to_tensor(name, value) for name, value in answer.items())
        for each in outputs:
            if not each.shape or each.shape[0] != len(samples):
                raise TaskError(
                    f"{type(self._task).__name__}: the output {each.name!r} has shape {list(each.shape)}: its first "
                    f"dimension must be the {len(samples)} samples of the batch"
                )
        return outputs

    def _answer(self, batch: Any) -> Mapping[str, Any]:
        found = self._task.serve(self._model, batch)
        if isinstance(found, Mapping):
            return found
        if found is not None:
            return {"prediction": found}
        predicted = self._task.predict(self._model, batch)
        columns = predicted if isinstance(predicted, Mapping) else {"prediction": predicted and predicted[0]}
        answer = {name: columns[name] for name in ANSWERED if columns.get(name) is not None}
        if "prediction" not in answer:
            raise TaskError(
                f"{type(self._task).__name__}.predict() gives no prediction: give it serve(self, model, batch), which "
                "returns tensors by name"
            )
        classes, chosen = self._task.classes, answer["prediction"]
        if classes and isinstance(chosen, torch.Tensor) and not chosen.is_floating_point():
            answer["class"] = [classes[int(each)] for each in chosen.tolist()]
        return answer

    def _describe_problem(self, row: int, sample: Mapping[str, bytes], error: Exception) -> dict[str, Any]:
        present = list(json.loads(sample[ROW_FIELD])) if ROW_FIELD in sample else list(sample)
        if (name := find_missing_field(error, present)) is not None:
            return {"row": row, "field": name, "text": f"the field {name!r} is missing", "present": present}
        fields = [name for name in sample if name != CLASS_FIELD]
        field = fields[0] if len(fields) == 1 and fields[0] != ROW_FIELD else ""
        return {"row": row, "field": field, "text": f"cannot be decoded: {describe(error, self._code)}"}
