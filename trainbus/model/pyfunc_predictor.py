"""An MLflow model in a model process, loaded by ``mlflow.pyfunc``: rows become what its signature names."""

from __future__ import annotations

import base64
import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import mlflow.pyfunc
import numpy as np
import pandas as pd
from mlflow.exceptions import MlflowException
from mlflow.types import DataType, Schema

from contracts.model_process import MLFLOW_FOLDER, UNNAMED_INPUT, ModelLaunch, Tensor
from contracts.project_paths import find_import_folders
from trainbus.model.predictor import InputError, to_tensor
from trainbus.task import ROW_FIELD, describe

#: The output of a model that names none.
PREDICTION = "prediction"
#: How MLflow's refusal of an input begins, the cause in it, and the column that the cause is about.
SCHEMA_REFUSAL = "Failed to enforce schema"
CAUSE, COLUMN = re.compile(r"Error: (.*)", re.DOTALL), re.compile(r"column '?([^'\s]+?)'?[.,]? ")


class PyfuncPredictor:
    """A loaded MLflow model."""

    classes: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()

    def __init__(self, model: mlflow.pyfunc.PyFuncModel) -> None:
        self._model = model
        self._schema: Schema | None = model.metadata.get_input_schema()

    @classmethod
    def load(cls, launch: ModelLaunch) -> PyfuncPredictor:
        """Load the model of a folder. The project's modules can be imported, as where it was trained.

        Raises:
            Exception: what loading it raises.
        """
        code = launch.folder / "code"
        if code.is_dir():
            sys.path[:0] = map(str, find_import_folders(code.resolve()))
        return cls(mlflow.pyfunc.load_model(str(launch.folder / MLFLOW_FOLDER)))

    def predict(self, samples: Sequence[Mapping[str, bytes]]) -> tuple[Tensor, ...]:
        """Return the outputs for some samples, each with one row a sample. See ``Predictor.predict``."""
        rows = [json.loads(sample[ROW_FIELD]) for sample in samples]
        try:
            found = self._model.predict(self._to_input(rows))
        except MlflowException as error:
            if not str(error).startswith(SCHEMA_REFUSAL):
                raise
            raise InputError([_describe_refusal(error)]) from error
        outputs = tuple(to_tensor(name, _to_array(values)) for name, values in name_outputs(found, len(rows)).items())
        for each in outputs:
            if not each.shape or each.shape[0] != len(rows):
                raise ValueError(
                    f"the output {each.name!r} of the model has shape {list(each.shape)}: its first dimension must be "
                    f"the {len(rows)} rows of the batch"
                )
        return outputs

    def _to_input(self, rows: Sequence[Mapping[str, Any]]) -> Any:
        """Return the rows as the signature describes them; as a DataFrame without one."""
        if self._schema is None:
            return pd.DataFrame(rows)
        names = self._schema.input_names() if self._schema.has_input_names() else []
        self._check_required(rows)
        if self._schema.is_tensor_spec():
            tensors = {
                name or UNNAMED_INPUT: _to_typed(rows, name or UNNAMED_INPUT, spec.type)
                for name, spec in zip(names or [None], self._schema.inputs, strict=True)
            }
            return tensors if names else tensors[UNNAMED_INPUT]
        if not names:
            return pd.DataFrame({number: _column(rows, name) for number, name in enumerate(self._list_inputs())})
        columns = {}
        for name, spec in zip(names, self._schema.inputs, strict=True):
            if spec.required or any(row.get(name) is not None for row in rows):
                columns[name] = _to_column(rows, name, spec.type)
        return pd.DataFrame(columns)

    def _list_inputs(self) -> list[str]:
        """Return the names of the inputs, with a name for each that has none."""
        assert self._schema is not None
        if self._schema.has_input_names():
            return list(self._schema.input_names())
        count = len(self._schema.inputs)
        return [UNNAMED_INPUT] if count == 1 else [f"{UNNAMED_INPUT}-{number}" for number in range(count)]

    def _check_required(self, rows: Sequence[Mapping[str, Any]]) -> None:
        assert self._schema is not None
        problems = [
            {"row": number, "field": name, "text": f"the field {name!r} is missing", "present": list(row)}
            for number, row in enumerate(rows)
            for name, spec in zip(self._list_inputs(), self._schema.inputs, strict=True)
            if spec.required and row.get(name) is None
        ]
        if problems:
            raise InputError(problems)


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    return [row.get(name) for row in rows]


def _to_column(rows: Sequence[Mapping[str, Any]], name: str, kind: Any) -> Any:
    """Return a column in the type of the signature: JSON has one kind of number, and no bytes and times."""
    values = _column(rows, name)
    if kind is DataType.string:
        return [None if value is None else _convert(row, name, _check_text, value) for row, value in enumerate(values)]
    if kind is DataType.binary:
        return [None if value is None else _convert(row, name, _decode, value) for row, value in enumerate(values)]
    if kind is DataType.datetime:
        return [None if value is None else _convert(row, name, pd.Timestamp, value) for row, value in enumerate(values)]
    if kind in (DataType.float, DataType.double):
        return _to_typed([{name: np.nan if value is None else value} for value in values], name, kind.to_numpy())
    if kind in (DataType.integer, DataType.long, DataType.boolean) and None not in values:
        return _to_typed(rows, name, kind.to_numpy())
    return pd.Series(values, dtype=object)


def _check_text(value: Any) -> str:
    # In a column of objects MLflow lets other values pass.
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _decode(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _to_typed(rows: Sequence[Mapping[str, Any]], name: str, dtype: Any) -> Any:
    """Return the values as one array; a value that does not fit is the problem of its row."""
    dtype = object if np.dtype(dtype).kind in "USO" else dtype
    arrays = [_convert(row, name, lambda value: np.asarray(value, dtype), each[name]) for row, each in enumerate(rows)]
    sizes = {each.shape for each in arrays}
    if len(sizes) > 1:
        shapes = ", ".join(str(list(each)) for each in sorted(sizes))
        text = f"the rows of a batch must have one shape, not {shapes}"
        raise InputError([{"row": 0, "field": name, "text": text}])
    return np.stack(arrays)


def _convert(row: int, name: str, convert: Any, value: Any) -> Any:
    try:
        return convert(value)
    except (ValueError, TypeError, OverflowError) as error:
        text = f"cannot be converted to what the model takes: {error}"
        raise InputError([{"row": row, "field": name, "text": text}]) from error


def _describe_refusal(error: MlflowException) -> dict[str, Any]:
    """Return MLflow's refusal of an input as a problem; it names no row."""
    cause = CAUSE.search(str(error))
    text = cause[1].strip() if cause is not None else describe(error)
    column = COLUMN.search(text)
    return {"row": 0, "field": column[1] if column is not None else "", "text": text}


def name_outputs(found: Any, rows: int) -> dict[str, Any]:
    """Return what a model predicted by name; what has no name is the prediction."""
    if isinstance(found, pd.DataFrame):
        if all(isinstance(name, (int, np.integer)) for name in found.columns):
            values = found.to_numpy()
            return {PREDICTION: values[:, 0] if values.shape[1] == 1 else values}
        return {str(name): found[name] for name in found.columns}
    if isinstance(found, Mapping):
        return {str(name): values for name, values in found.items()}
    if isinstance(found, (list, tuple)) and found and all(isinstance(each, Mapping) for each in found):
        return name_outputs(pd.DataFrame(list(found)), rows)
    if isinstance(found, (str, bytes, bool, int, float)) and rows == 1:
        return {PREDICTION: [found]}
    return {PREDICTION: found.toarray() if hasattr(found, "toarray") else found}


def _to_array(values: Any) -> Any:
    """Return values as numbers, or as texts where they are none; a value that is neither becomes JSON."""
    array = _stack(values) if isinstance(values, (list, tuple)) else np.array(values)
    if array.dtype.kind in "biuf":
        return array
    if array.dtype.kind in "mM":
        return [str(each) for each in array]
    elements = array.tolist()
    if array.ndim == 1 and all(isinstance(each, (str, bytes)) for each in elements):
        return elements
    numbers = _stack(elements)
    if numbers.dtype.kind in "biuf":
        return numbers
    return [each if isinstance(each, (str, bytes)) else json.dumps(each, default=_to_plain) for each in elements]


def _stack(values: Sequence[Any]) -> Any:
    """Return a list as an array; as one of objects where its elements differ in shape."""
    try:
        return np.asarray([np.nan if each is None else each for each in values])
    except ValueError:
        array = np.empty(len(values), dtype=object)
        array[:] = list(values)
        return array


def _to_plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)
