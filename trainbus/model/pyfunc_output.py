"""What an MLflow model returns, as named outputs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

#: The output of a model that names none.
PREDICTION = "prediction"


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


def to_array(values: Any) -> Any:
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
