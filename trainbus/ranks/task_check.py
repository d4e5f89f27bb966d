"""The check of a Task before it is submitted: ``python -m trainbus.ranks.task_check ANSWER``, in a process of its own.

It reads what to check from its input, imports the Task, binds its params and decodes one sample, and writes into the
file ANSWER what is wrong. Output of the user's code goes where output goes.
"""

from __future__ import annotations

import base64
import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contracts.metric_names import KIND_METRICS, find_unknown_metric
from contracts.project_paths import find_import_folders

#: What ``decode`` may use and only the prepared dataset has.
FROM_DATASET = frozenset({"classes", "statistics"})


def check_task(
    folder: Path,
    name: str,
    params: dict[str, Any],
    sample: dict[str, bytes] | None,
    trained: Sequence[str] = (),
    measured: Sequence[str] = (),
) -> dict[str, str]:
    """Return ``{"problem": ...}``, ``{"skipped": ...}`` with what could not be checked, or ``{}``.

    ``trained`` and ``measured`` are metrics that training and evaluation are to report.
    """
    try:
        from trainbus.task import TaskError, describe, load_task
    except ModuleNotFoundError as error:
        return {"skipped": f"{error.name} is not installed here, so the Task was not imported"}
    try:
        task = load_task(name, params, folder)
    except TaskError as error:
        if missing := _missing_package(error, name, folder):
            return {"skipped": f"{missing} is not installed here, so the Task was not imported"}
        return {"problem": str(error)}
    if problem := _find_unknown_metric(task, trained, measured):
        return {"problem": problem}
    if sample is None:
        return {}
    code = getattr(type(task).decode, "__code__", None)
    if code is not None and FROM_DATASET.intersection(code.co_names):
        return {"skipped": "decode() uses the prepared dataset, so no sample was decoded"}
    try:
        task.decode(sample)
    except TaskError as error:
        return {"problem": str(error)}
    except ModuleNotFoundError as error:
        return {"skipped": f"{error.name} is not installed here, so no sample was decoded"}
    except Exception as error:
        from trainbus.data.workers import describe_fields

        traceback.print_exception(error)
        fields = describe_fields(sample) if isinstance(error, KeyError) else ""
        return {"problem": f"{describe(error, folder)}: {type(task).__name__}.decode() failed{fields}"}
    return {}


def _find_unknown_metric(task: Any, trained: Sequence[str], measured: Sequence[str]) -> str:
    """Return which metric the Task cannot report. What methods of its own return is known once it has trained."""
    from trainbus.task import Task

    own = type(task)
    validated = ["loss"] if own.metrics is Task.metrics else None
    computed = KIND_METRICS.get(task.kind or "", ()) if own.summarize is Task.summarize else None
    return find_unknown_metric(trained, measured, validated=validated, computed=computed)


def _missing_package(error: Exception, name: str, folder: Path) -> str:
    """Return the package, of which the node may have what this machine lacks; '' for a module of the project."""
    missing = error.__cause__
    if not isinstance(missing, ModuleNotFoundError) or not missing.name:
        return ""
    top = missing.name.partition(".")[0]
    own = {
        name.partition(":")[0].partition(".")[0],
        *(path.stem for each in find_import_folders(folder) for path in each.iterdir()),
    }
    return "" if top in own else missing.name


def main() -> None:
    """Check what the input describes."""
    given = json.load(sys.stdin)
    sample = given["sample"]
    decoded = None if sample is None else {name: base64.b64decode(value) for name, value in sample.items()}
    metrics = given["trained"], given["measured"]
    answer = check_task(Path(given["folder"]), given["task"], given["params"], decoded, *metrics)
    Path(sys.argv[1]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
