"""What ``Task.predict`` returns, as columns of the predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from contracts.predictions import ID, PREDICTION, PROBABILITIES, SCORE, TARGET
from trainbus.task import Task, TaskError

Columns = dict[str, Any]
#: What ``predict`` must return for tasks of a kind.
REQUIRED = {
    "": (PREDICTION, TARGET),
    "classification": (PREDICTION, TARGET),
    "regression": (PREDICTION, TARGET),
    "ranking": (PREDICTION, TARGET, "query"),
    "language-modelling": ("nll", "tokens"),
}
CLASS = "class"


def make_columns(task: Task, returned: Any, keys: Sequence[str]) -> Columns:
    """Return the columns of a batch, in the order of its samples, on the host.

    Raises:
        TaskError: ``returned`` is not what ``predict`` must return; the text names the column.
    """
    name = f"{type(task).__name__}.predict()"
    if isinstance(returned, tuple) and len(returned) == 2:
        returned = {PREDICTION: returned[0], TARGET: returned[1]}
    if not isinstance(returned, Mapping):
        raise TaskError(f"{name} must return a dict of columns, or the pair (predicted, true), not {_like(returned)}")
    kind = task.kind or ""
    if kind not in REQUIRED:
        known = ", ".join(repr(each) for each in REQUIRED if each)
        raise TaskError(f"{type(task).__name__}.kind is {task.kind!r}: it must be one of {known}, or None")
    missing = [column for column in REQUIRED[kind] if column not in returned and not (not kind and SCORE in returned)]
    if missing:
        raise TaskError(f"{name} lacks {', '.join(map(repr, missing))}, which a {kind or 'Task'} needs")
    columns: Columns = {ID: list(keys)}
    for column, values in returned.items():
        if column == ID:
            raise TaskError(f"{name} must not return {ID!r}: that is the sample's key in the dataset")
        columns[column] = _to_host(name, column, values, len(keys))
    if kind == "language-modelling":
        columns["nll"] = np.asarray(columns["nll"], dtype=np.float64)
        columns["tokens"] = np.asarray(columns["tokens"], dtype=np.int64)
    if kind == "regression":
        for column in (PREDICTION, TARGET):
            columns[column] = np.asarray(columns[column], dtype=np.float64)
    if CLASS not in columns and task.classes and _is_class_numbers(columns.get(TARGET), len(task.classes)):
        columns[CLASS] = [task.classes[number] for number in columns[TARGET]]
    return columns


def _to_host(name: str, column: str, values: Any, samples: int) -> Any:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = (values.float() if values.is_floating_point() else values).numpy()
    dimensions = 2 if column == PROBABILITIES else 1
    shape = np.shape(values)
    if len(shape) != dimensions or shape[0] != samples:
        wanted = f"[{samples}, classes]" if dimensions == 2 else f"[{samples}]"
        raise TaskError(f"{name}[{column!r}] has shape {list(shape)}: it must be {wanted}, one row a sample")
    if isinstance(values, np.ndarray) and values.dtype == np.float32 and column != PROBABILITIES:
        return values.astype(np.float64)
    return values if isinstance(values, np.ndarray) or column == PROBABILITIES else list(values)


def _is_class_numbers(target: NDArray[Any] | list[Any] | None, classes: int) -> bool:
    array = np.asarray(() if target is None else target)
    is_whole = array.dtype.kind in "iu" and array.size > 0
    return bool(is_whole and array.min() >= 0 and array.max() < classes)


def _like(value: Any) -> str:
    if isinstance(value, tuple):
        return f"{len(value)} values"
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
