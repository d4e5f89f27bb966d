"""The check of a Task before it is submitted: ``python -m trainbus.ranks.task_check ANSWER``, in a process of its own.

It imports torch, reads what to check from its input, imports the Task, binds its params and tries one step, and writes
into the file ANSWER what is wrong. Output of the user's code goes where output goes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from contracts.metric_names import KIND_METRICS, LATENCY_MS, find_unknown_metric
from contracts.project_paths import find_import_folders


def check_task(given: Mapping[str, Any], answer: Path) -> None:
    """Write into ``answer`` a ``problem``, what was ``skipped`` and why, and ``notes``.

    ``given`` has the ``folder`` of the code, ``task``, ``params``, ``training``, what is known here of the ``data``
    (SampledData), and the metrics that training (``trained``) and evaluation (``measured``) are to report.
    """
    folder, name = Path(given["folder"]), str(given["task"])
    try:
        from trainbus.ranks.trial_step import TrialData, find_misnamed_methods, try_step
        from trainbus.task import TaskError, load_task
    except ModuleNotFoundError as error:
        return _write(answer, skipped=f"{error.name} is not installed here, so the Task was not imported")
    try:
        task = load_task(name, given["params"], folder)
    except TaskError as error:
        if missing := _missing_package(error, name, folder):
            return _write(answer, skipped=f"{missing} is not installed here, so the Task was not imported")
        return _write(answer, problem=str(error))
    notes = find_misnamed_methods(task)
    if problem := _find_unknown_metric(task, given["trained"], given["measured"]):
        return _write(answer, problem=problem, notes=notes)
    # It stands if the step takes too long.
    _write(answer, skipped="a step takes too long on this machine, so none was tried", notes=notes)
    found = try_step(task, TrialData.from_plain(given["data"]), given["training"], folder)
    return _write(answer, notes=notes, **found)


def _write(path: Path, *, problem: str = "", skipped: str = "", notes: Sequence[str] = ()) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"problem": problem, "skipped": skipped, "notes": list(notes)}))
    partial.replace(path)


def _find_unknown_metric(task: Any, trained: Sequence[str], measured: Sequence[str]) -> str:
    """Return which metric the Task cannot report. What methods of its own return is known once it has trained."""
    from trainbus.task import Task

    own = type(task)
    validated = ["loss"] if own.metrics is Task.metrics else None
    computed = (*KIND_METRICS.get(task.kind or "", ()), LATENCY_MS) if own.summarize is Task.summarize else None
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
    with suppress(ImportError):
        import torch  # noqa: F401  the slowest part; meanwhile the project is packed
    given = json.load(sys.stdin)
    os.environ.update(given["env"])
    os.chdir(given["folder"])
    check_task(given, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
