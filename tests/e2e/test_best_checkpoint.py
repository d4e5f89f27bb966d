"""What is judged, through the whole stack: the best checkpoint of a task that overfits, with its artifacts."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from contracts.events.checkpoint import CheckpointCommitted
from contracts.events.model import ModelPromoted
from contracts.predictions import Predictions
from tests.e2e.support import PROJECT, Stack
from trainbus.model.saved_model import load_model_and_task

pytestmark = [pytest.mark.e2e]

REQUEST = {
    "name": "overfits",
    "data": {
        "source": "s3://lake/overfits/",
        "format": "jsonl",
        "split": {"train": 0.64, "validation": 0.18, "test": 0.18},
    },
    "training": {"epochs": 10, "global_batch": 16, "early_stopping": {"patience": 2}},
    # Too few for the best one: it stays because it is judged.
    "retention": {"last": 1, "best": 0},
    "model": "overfits",
    "evaluation": {"metric": "test/loss", "mode": "min", "threshold": 0.0001},
}


async def test_a_task_that_overfits_is_judged_promoted_and_fetched_at_its_best_epoch(
    stack: Stack, tmp_path: Path
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    shutil.copy(PROJECT / "overfits.py", project)
    rows = "".join(json.dumps({"x": n}) + "\n" for n in range(1, 101))
    await stack.objects.put("s3://lake/overfits/rows.jsonl", rows.encode())
    (tmp_path / "request.json").write_text(json.dumps(REQUEST))
    request = ("--request", str(tmp_path / "request.json"))
    done = await stack.cli("submit", str(project), "overfits:Overfits", *request, "--follow")
    assert done.code == 0, done.text
    run_id = next(line.split()[0] for line in done.text.splitlines() if "packed)" in line)
    facts = [received.event for received in await stack.facts(run_id)]
    staged = sorted(fact.step for fact in facts if fact.fact == "checkpoint_staged")
    assert staged == [4, 8, 12, 15], "early stopping ends it in its fourth epoch"
    [evaluated] = [fact for fact in facts if fact.fact == "evaluated"]
    measured = {name: value for name, value in evaluated.metrics.items() if name != "test/latency_ms"}
    assert measured == {"test/loss": 0, "test/rmse": 0, "test/mae": 0, "test/r2": 1}
    [promoted] = [r.event for r in await stack.bus.read_history("model.overfits.promoted")]
    assert isinstance(promoted, ModelPromoted)
    best = next(fact for fact in facts if isinstance(fact, CheckpointCommitted) and fact.checkpoint.step == 8)
    assert (promoted.run_id, promoted.checkpoint_uri) == (run_id, best.checkpoint.uri)
    assert promoted.artifacts == {"vocabulary.txt": hashlib.sha256(b"one two").hexdigest()}
    completed = next(r.event for r in await stack.facts(evaluated.evaluation_run_id) if r.event.fact == "completed")
    [artifact] = completed.artifacts
    predictions = Predictions(await stack.objects.get(artifact.uri))
    assert predictions.slice_columns == ("half",)
    assert predictions.info.score_of == "loss"
    assert set(predictions.table()["score"].to_pylist()) == {0.0}
    fetched = await stack.cli("fetch", "models:/overfits@champion", str(tmp_path / "model"))
    assert fetched.code == 0, fetched.text
    model, _ = load_model_and_task(tmp_path / "model")
    assert model.state_dict()["weight"].item() == 2.0
    assert (tmp_path / "model" / "artifacts" / "vocabulary.txt").read_text() == "one two"
