"""An unmodified script that logs with MLflow, in a run: everything is in the journal and the output folder, once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from contracts.ranks import ArtifactLine, JournalLine, MetricsLine, ParamsLine, TagsLine
from services.worker.core.journal import JournalSource, parse_lines, progress_events
from services.worker.launch.mlflow_plugin import find_mlflow_uri

pytestmark = pytest.mark.shell

SCRIPT = """
import pathlib
import mlflow
import numpy
from sklearn.linear_model import LogisticRegression

mlflow.sklearn.autolog(log_datasets=False, log_input_examples=False)
mlflow.set_experiment("mine")
with mlflow.start_run(run_name="outer") as run:
    mlflow.log_param("width", 3)
    mlflow.set_tag("color", "blue")
    for step in range(3):
        mlflow.log_metric("loss", 1 / (step + 1), step=step)
    mlflow.log_metrics({"nan": float("nan"), "ok": 1.0}, step=7)
    pathlib.Path("note.txt").write_text("hello")
    mlflow.log_artifact("note.txt", "notes")
    model = LogisticRegression(C=0.5).fit(numpy.array([[0.0], [1.0]]), [0, 1])
    with mlflow.start_run(run_name="inner", nested=True):
        mlflow.log_metric("loss", 0.25, step=1)
assert mlflow.get_run(run.info.run_id).data.params["width"] == "3"
loaded = mlflow.pyfunc.load_model(f"models:/{mlflow.last_logged_model().model_id}")
assert loaded.predict(numpy.array([[9.0]])).tolist() == [1]
"""


def run_script(folder: Path, script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TRAINBUS", "MLFLOW"))}
    environment = {
        **kept,
        "MLFLOW_TRACKING_URI": find_mlflow_uri(),
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "TRAINBUS_LAUNCH": str(folder / "launch.json"),
        "TRAINBUS_OUTPUT_DIR": str(folder / "outputs"),
        **variables,
    }
    return subprocess.run(
        [sys.executable, "-c", script], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )


def read_journal(folder: Path) -> list[tuple[int, JournalLine]]:
    lines, problems = parse_lines((folder / "rank_0.jsonl").read_bytes(), 0)
    assert problems == []
    return lines


def test_what_a_script_logs_is_in_the_journal_once(tmp_path: Path) -> None:
    done = run_script(tmp_path, SCRIPT)
    assert done.returncode == 0, done.stderr[-4000:]
    numbered = read_journal(tmp_path)
    lines = [line for _, line in numbered]
    metrics = [(line.step, line.values) for line in lines if isinstance(line, MetricsLine)]
    assert [(step, values["loss"]) for step, values in metrics if "loss" in values] == [(0, 1.0), (1, 0.5), (2, 1 / 3)]
    assert [str(values) for step, values in metrics if step == 7] == ["{'nan': nan, 'ok': 1.0}"]
    assert (1, {"inner/loss": 0.25}) in metrics
    params: dict[str, str] = {}
    for line in lines:
        if isinstance(line, ParamsLine):
            assert not params.keys() & line.values.keys()
            params |= line.values
    assert (params["width"], params["C"]) == ("3", "0.5")  # by hand, and by autolog
    tags = [line.values for line in lines if isinstance(line, TagsLine)]
    assert {"color": "blue"} in tags
    assert not [name for values in tags for name in values if name.startswith("mlflow.")]
    assert any("training_accuracy_score" in values for _, values in metrics)
    artifacts = [line.path for line in lines if isinstance(line, ArtifactLine)]
    assert "mlflow/notes/note.txt" in artifacts
    assert (tmp_path / "outputs" / "mlflow" / "notes" / "note.txt").read_text() == "hello"
    assert len(list((tmp_path / "outputs" / "mlflow").rglob("MLmodel"))) == 1

    events = list(progress_events(JournalSource("r1", 1, "n1"), 0, numbered))
    assert {name for event in events for name in event.params} == params.keys()
    assert {name: value for event in events for name, value in event.tags.items()}["color"] == "blue"


def test_other_ranks_report_nothing(tmp_path: Path) -> None:
    done = run_script(tmp_path, 'import mlflow; mlflow.log_metric("loss", 1.0)', RANK="1")
    assert done.returncode == 0, done.stderr[-4000:]
    assert not (tmp_path / "rank_1.jsonl").exists()
    assert not (tmp_path / "outputs" / "mlflow").exists()


def test_outside_a_run_the_address_is_explained(tmp_path: Path) -> None:
    done = run_script(tmp_path, 'import mlflow; mlflow.log_metric("loss", 1.0)', TRAINBUS_LAUNCH="")
    assert done.returncode != 0
    assert "set MLFLOW_TRACKING_URI to your MLflow" in done.stderr
