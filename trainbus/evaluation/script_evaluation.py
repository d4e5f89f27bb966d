"""Measures the checkpoint of a script: ``python -m trainbus.script_evaluation COMMAND...``, as a rank of its own run.

COMMAND finds the checkpoint in TRAINBUS_RESUME_DIR and writes into TRAINBUS_OUTPUT_DIR: ``metrics.json``, one object of
numbers, and if it can ``predictions.parquet`` (``.csv``, ``.jsonl``; see ``contracts/predictions.py``). What it wrote
is checked here, and becomes the result of the run.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from contracts.predictions import PREDICTIONS_FILE, Predictions, PredictionsError, PredictionsInfo, PredictionsWriter
from contracts.ranks import (
    JOURNAL_VARIABLE,
    LAUNCH_VARIABLE,
    OUTPUT_DIR_VARIABLE,
    RESUME_DIR_VARIABLE,
    Launch,
    ResultLine,
    json_line,
)

METRICS_FILE = "metrics.json"
#: What a script may write its predictions as; the first that is there counts.
PREDICTION_FILES = (PREDICTIONS_FILE, "predictions.csv", "predictions.jsonl")
#: More metrics than this are no result but a table.
MAX_METRICS = 1000


class ResultError(Exception):
    """What the command wrote is no result; the text says what to change."""


def main(command: Sequence[str], env: Mapping[str, str]) -> int:
    """Run the command, and report what it wrote; return the exit code."""
    output_dir = Path(env[OUTPUT_DIR_VARIABLE])
    # Training may have written files of these names; they lie here again.
    for name in (METRICS_FILE, *PREDICTION_FILES):
        (output_dir / name).unlink(missing_ok=True)
    if not env.get(RESUME_DIR_VARIABLE):
        print("trainbus: there is no checkpoint to evaluate", file=sys.stderr)
        return 1
    try:
        code = run_command(command)
    except OSError as error:
        print(f"trainbus: evaluation.command cannot be started: {error}", file=sys.stderr)
        return 1
    if code != 0 or int(env.get("RANK", "0")) != 0:
        return code
    launch = Launch.model_validate_json(Path(env[LAUNCH_VARIABLE]).read_bytes())
    split = launch.spec.evaluate.split if launch.spec.evaluate else "test"
    try:
        metrics = read_metrics(output_dir / METRICS_FILE, split)
        artifacts = keep_predictions(
            output_dir, launch.folder, PredictionsInfo(dataset_id=launch.dataset_id, split=split)
        )
    except (ResultError, PredictionsError) as error:
        print(f"trainbus: {error}", file=sys.stderr)
        return 1
    line = json_line(ResultLine(time=time.time(), metrics=metrics, artifacts=artifacts))
    with open(env[JOURNAL_VARIABLE], "ab", buffering=0) as journal:
        journal.write(line)
    return 0


def run_command(command: Sequence[str]) -> int:
    """Run the command to its end; SIGTERM is passed on to it."""
    process = subprocess.Popen(list(command))
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    code = process.wait()
    return code if code >= 0 else 128 - code


def read_metrics(path: Path, split: str) -> dict[str, float]:
    """Return the metrics that a script wrote, named ``<split>/<name>`` unless they have such a name.

    Raises:
        ResultError: there are none, or they are no numbers.
    """
    try:
        found: Any = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ResultError(
            f"evaluation.command wrote no {METRICS_FILE} into TRAINBUS_OUTPUT_DIR: write an object of numbers there, "
            'for example {"accuracy": 0.97}'
        ) from error
    except (OSError, ValueError) as error:
        raise ResultError(f"{METRICS_FILE} of evaluation.command is not JSON: {error}") from error
    if not isinstance(found, dict) or not 0 < len(found) <= MAX_METRICS:
        raise ResultError(f"{METRICS_FILE} of evaluation.command must be an object of 1 to {MAX_METRICS:,} numbers")
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ResultError(f"{METRICS_FILE} of evaluation.command: {name!r} is {value!r}, and no finite number")
    return {name if "/" in name else f"{split}/{name}": float(value) for name, value in found.items()}


def keep_predictions(output_dir: Path, folder: Path, info: PredictionsInfo) -> tuple[str, ...]:
    """Write the predictions of a script into ``folder``, in the format; return the file's name, or nothing.

    Raises:
        PredictionsError: the script wrote some that are not valid.
    """
    source = next((path for name in PREDICTION_FILES if (path := output_dir / name).is_file()), None)
    if source is None:
        return ()
    if source.name == PREDICTIONS_FILE:
        own = Predictions(source)
        info = info.model_copy(update=own.info.model_dump(include={"classes", "kind", "score_of"}))
        batches = own.batches()
    else:
        batches = _read_text(source)
    with PredictionsWriter(folder / PREDICTIONS_FILE, info) as writer:
        for batch in batches:
            writer.write({name: batch.column(name) for name in batch.schema.names})
    return (PREDICTIONS_FILE,)


def _read_text(path: Path) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.json

    try:
        if path.suffix == ".csv":
            yield from pa.csv.read_csv(path).to_batches()
        else:
            yield from pa.json.read_json(path).to_batches()
    except pa.ArrowException as error:
        raise PredictionsError(f"{path.name} cannot be read: {error}") from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
