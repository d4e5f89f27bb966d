"""The target columns of a row: a request for a prediction has none, and ``decode`` of a training sample reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trainbus.task import CLASS_FIELD, ROW_FIELD, Task


def list_targets(task: Task) -> tuple[str, ...]:
    """Return the columns that the Task declares as its target."""
    return (task.target,) if isinstance(task.target, str) else tuple(task.target)


def fill_targets(task: Task, sample: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return a sample with a class where it has none, and a value in each target column that its row lacks."""
    filled = {CLASS_FIELD: b"0", **sample}
    targets = list_targets(task)
    if targets and ROW_FIELD in sample:
        row = json.loads(sample[ROW_FIELD])
        missing = [name for name in targets if row.get(name) is None]
        if missing:
            filled[ROW_FIELD] = json.dumps({**row, **{name: _plausible_value(task, name) for name in missing}}).encode()
    return filled


def _plausible_value(task: Task, name: str) -> Any:
    """Return a value that the training data has in a column: its smallest number, or the first class."""
    if (statistics := task.statistics.get(name)) is not None:
        return int(statistics.min) if float(statistics.min).is_integer() else statistics.min
    if not task.classes:
        return 0
    try:
        return json.loads(task.classes[0])
    except ValueError:
        return task.classes[0]
