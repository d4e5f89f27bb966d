"""Rows of JSON as an MLflow model takes them: a DataFrame or tensors, in the types of its signature."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from mlflow.types import DataType, Schema
from mlflow.types.schema import Array

from contracts.model_process import UNNAMED_INPUT
from trainbus.model.predictor import InputError

FLOATS = (DataType.float, DataType.double)
NUMBERS = (*FLOATS, DataType.integer, DataType.long, DataType.boolean)


def to_input(rows: Sequence[Mapping[str, Any]], schema: Schema | None) -> Any:
    """Return the rows as the signature describes them; as a DataFrame without one.

    Raises:
        InputError: a row lacks a value that the model needs, or has one of another type.
    """
    if schema is None:
        return pd.DataFrame(list(rows))
    specs = dict(zip(list_inputs(schema), schema.inputs, strict=True))
    _check_required(rows, specs)
    if schema.is_tensor_spec():
        tensors = {name: _stack(rows, name, spec.type) for name, spec in specs.items()}
        return tensors if schema.has_input_names() else tensors[UNNAMED_INPUT]
    columns = {
        name: _to_column(rows, name, spec.type)
        for name, spec in specs.items()
        # MLflow takes an optional column as absent, but not as one without any value.
        if spec.required or any(row.get(name) is not None for row in rows)
    }
    return pd.DataFrame(columns if schema.has_input_names() else dict(enumerate(columns.values())))


def list_inputs(schema: Schema) -> list[str]:
    """Return the names of the inputs, with a name for each that has none."""
    if schema.has_input_names():
        return list(schema.input_names())
    count = len(schema.inputs)
    return [UNNAMED_INPUT] if count == 1 else [f"{UNNAMED_INPUT}-{number}" for number in range(count)]


def _check_required(rows: Sequence[Mapping[str, Any]], specs: Mapping[str, Any]) -> None:
    problems = [
        {"row": number, "field": name, "text": f"the field {name!r} is missing", "present": list(row)}
        for number, row in enumerate(rows)
        for name, spec in specs.items()
        if spec.required and row.get(name) is None
    ]
    if problems:
        raise InputError(problems)


def _to_column(rows: Sequence[Mapping[str, Any]], name: str, kind: Any) -> Any:
    """Return a column in the type of the signature: JSON has one kind of number, and no bytes and times."""
    values = [row.get(name) for row in rows]
    if kind in FLOATS:
        values = [np.nan if value is None else value for value in values]
    if kind in NUMBERS and None not in values:
        return _stack([{name: value} for value in values], name, kind.to_numpy())
    if (convert := _find_conversion(kind)) is not None:
        values = [None if value is None else _convert(row, name, convert, value) for row, value in enumerate(values)]
    return pd.Series(values, dtype="datetime64[ns]" if kind is DataType.datetime else object)


def _find_conversion(kind: Any) -> Callable[[Any], Any] | None:
    """Return what makes a value of JSON one of this type; None if it is one already."""
    if kind is DataType.string:
        return _check_text
    if kind is DataType.binary:
        return lambda text: base64.b64decode(text, validate=True)
    if kind is DataType.datetime:
        return lambda text: pd.Timestamp(text)
    if isinstance(kind, Array) and (element := _find_element(kind)) in NUMBERS:
        return lambda values: np.asarray(values, element.to_numpy()).tolist()
    return None


def _find_element(kind: Any) -> Any:
    while isinstance(kind, Array):
        kind = kind.dtype
    return kind


def _check_text(value: Any) -> str:
    # In a column of objects MLflow lets other values pass.
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _stack(rows: Sequence[Mapping[str, Any]], name: str, dtype: Any) -> Any:
    """Return the values of a column as one array; a value that does not fit is the problem of its row."""
    dtype = object if np.dtype(dtype).kind in "USO" else dtype
    arrays = [_convert(row, name, lambda value: np.asarray(value, dtype), each[name]) for row, each in enumerate(rows)]
    shapes = sorted({each.shape for each in arrays})
    if len(shapes) > 1:
        text = f"the rows of a request must have one shape, not {', '.join(str(list(each)) for each in shapes)}"
        raise InputError([{"row": 0, "field": name, "text": text}])
    return np.stack(arrays)


def _convert(row: int, name: str, convert: Callable[[Any], Any], value: Any) -> Any:
    try:
        return convert(value)
    except (ValueError, TypeError, OverflowError) as error:
        text = f"cannot be converted to what the model takes: {error}"
        raise InputError([{"row": row, "field": name, "text": text}]) from error
