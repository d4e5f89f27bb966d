"""A Task's model as ``mlflow.pyfunc.load_model`` returns it. MLflow imports this module and calls ``_load_pyfunc``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from trainbus.data.batch_tensors import to_device
from trainbus.model.missing_field import find_missing_field
from trainbus.model.saved_model import load_model_and_task
from trainbus.model.targets import fill_targets
from trainbus.task import ROW_FIELD, Task, TaskError


class PyfuncModel:
    """Predicts on the rows of a table by the Task's ``decode`` and ``collate``, on arrays as they are."""

    def __init__(self, model: nn.Module, task: Task, device: torch.device) -> None:
        self._model, self._task, self._device = model.to(device), task, device

    def get_raw_model(self) -> nn.Module:
        """Return the model itself."""
        return self._model

    def predict(self, data: Any, params: Mapping[str, Any] | None = None) -> Any:
        """Return the predictions for n samples.

        Args:
            data: a table with named columns, or a list of rows: samples as the dataset has them; the columns of
                ``Task.target`` may be left out. A row is a dict of its values, or a dict of the sample's fields as
                bytes (``{"png": b"..."}``). Arrays, or a dict of arrays, go into the model as tensors.

        Raises:
            TaskError: a row lacks a field that ``decode`` reads, or the Task does not predict.
        """
        import pandas as pd

        with torch.no_grad():
            if isinstance(data, pd.DataFrame):
                if not _is_matrix(data):
                    found = self._predict_rows(data.to_dict("records"))
                    return pd.DataFrame(found, index=data.index)
                data = data.to_numpy(dtype=np.float32)
                return pd.DataFrame(self._run_model(data).reshape(len(data), -1))
            if isinstance(data, (list, tuple)) and data and isinstance(data[0], Mapping):
                return self._predict_rows(data)
            return self._run_model(data)

    def _run_model(self, data: Any) -> Any:
        if isinstance(data, Mapping):
            output = self._model(**{name: self._to_tensor(value) for name, value in data.items()})
        else:
            output = self._model(self._to_tensor(data))
        return _to_plain(output)

    def _to_tensor(self, value: Any) -> torch.Tensor:
        array = np.asarray(value)
        return torch.from_numpy(array.astype(np.float32) if array.dtype == np.float64 else array).to(self._device)

    def _decode(self, number: int, row: Mapping[str, Any]) -> Any:
        try:
            return self._task.decode(fill_targets(self._task, _to_sample(row)))
        except KeyError as error:
            if (name := find_missing_field(error, row)) is None:
                raise
            sent = ", ".join(map(repr, row)) or "no fields"
            raise TaskError(f"row {number}: the field {name!r} is missing; the row has {sent}") from error

    def _predict_rows(self, rows: Any) -> dict[str, Any]:
        examples = [self._decode(number, row) for number, row in enumerate(rows)]
        batch = to_device(self._task.collate(examples), lambda tensor: tensor.to(self._device))
        predicted = self._task.predict(self._model, batch)
        if predicted is None:
            raise TaskError(
                f"{type(self._task).__name__} does not predict from rows: give it predict(self, model, batch), or call "
                "the model itself (get_raw_model())"
            )
        columns = predicted if isinstance(predicted, Mapping) else {"prediction": predicted[0]}
        found = {name: _to_plain(value) for name, value in columns.items() if name != "target"}
        numbers = np.asarray(found.get("prediction", ()))
        if self._task.classes and np.issubdtype(numbers.dtype, np.integer):
            found["class"] = np.array([self._task.classes[int(number)] for number in numbers])
        return {name: list(value) if np.ndim(value) > 1 else value for name, value in found.items()}


def _is_matrix(table: Any) -> bool:
    """Return whether a table is only numbers without names for its columns."""
    return all(isinstance(name, (int, np.integer)) for name in table.columns)


def _to_sample(row: Mapping[str, Any]) -> dict[str, bytes]:
    """Return a row as a sample of a dataset."""
    if all(isinstance(value, bytes) for value in row.values()):
        return dict(row)
    plain = {name: value.item() if hasattr(value, "item") else value for name, value in row.items()}
    return {ROW_FIELD: json.dumps(plain).encode()}


def _to_plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().numpy()
    if isinstance(value, Mapping):
        return {name: _to_plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_plain(each) for each in value]
    return value


def _load_pyfunc(path: str, model_config: Mapping[str, Any] | None = None) -> PyfuncModel:
    """Return the model of an MLflow model's folder. ``device`` of the configuration is where it computes."""
    name = (model_config or {}).get("device") or ("cuda" if torch.cuda.is_available() else "cpu")
    model, task = load_model_and_task(Path(path))
    return PyfuncModel(model, task, torch.device(name))
