"""A checkpoint is measured on one rank: metrics of each kind, and scores whose mean is the metric."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from contracts.predictions import Predictions
from contracts.ranks import Launch
from tests.trainbus.support import linear_dataset, request
from trainbus.data.dataset import Dataset
from trainbus.evaluation import latency
from trainbus.evaluation.evaluate import evaluate
from trainbus.task import Task, TaskError
from trainbus.trainer.world import World

Columns = dict[str, Any]


class EightNumbers(Task):
    """A model of eight numbers, and a ``predict`` that each test chooses."""

    def __init__(self, kind: Any, columns: Callable[[Tensor, Tensor], Any]) -> None:
        self.kind, self._columns = kind, columns

    def model(self) -> nn.Module:
        return nn.Linear(8, 1)

    def decode(self, sample: dict[str, bytes]) -> Any:
        return torch.from_numpy(np.frombuffer(sample["bin"], dtype=np.float32).copy()), int(sample["cls"])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0]).mean()

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"size": batch[0].square().sum(1)}

    def predict(self, model: nn.Module, batch: Any) -> Any:
        return self._columns(model(batch[0])[:, 0], batch[1])


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return linear_dataset(tmp_path / "data")


def measure(
    task: Task, dataset: Dataset, tmp_path: Path, metric: str | None = None, mode: str = "max"
) -> tuple[dict[str, float], Predictions]:
    checkpoint, folder = tmp_path / "checkpoint", tmp_path / "g1"
    checkpoint.mkdir()
    folder.mkdir()
    torch.manual_seed(1)
    save_file(task.model().state_dict(), checkpoint / "model-0.safetensors")
    task.classes = dataset.classes
    target = {"run_id": "r", "checkpoint_uri": "s3://m/c", "metric": metric, "mode": mode}
    spec = request(kind="evaluate", evaluate=target)
    launch = Launch(
        run_id="r", generation=1, node_id="n", world_size=1, spec=spec, folder=folder, socket=folder / "s",
        resume_folder=checkpoint,
    )  # fmt: skip
    metrics, artifacts = evaluate(launch, task, dataset, World())
    assert artifacts == ("predictions.parquet",)
    return metrics, Predictions(folder / "predictions.parquet")


def test_a_regression(dataset: Dataset, tmp_path: Path) -> None:
    task = EightNumbers("regression", lambda value, label: (value, label))
    metrics, predictions = measure(task, dataset, tmp_path, "test/rmse")
    table = predictions.table()
    assert predictions.info.score_of == "mse"
    assert (str(table["target"].type), str(table["prediction"].type)) == ("double", "double")
    assert math.sqrt(-np.mean(table["score"].to_pylist())) == pytest.approx(metrics["test/rmse"])
    assert {"test/rmse", "test/mae", "test/r2", "test/size", "test/latency_ms"} == set(metrics)


class TimedEightNumbers(EightNumbers):
    """Takes the given times for the answers of which the latency is measured, and notes their batches' sizes."""

    def __init__(self, clock: list[float], durations_s: Iterator[float], **summary: float) -> None:
        super().__init__("regression", lambda value, label: (value, label))
        self._clock, self._durations_s, self._summary = clock, durations_s, summary
        self.sizes: list[int] = []

    def predict(self, model: nn.Module, batch: Any) -> Any:
        if torch.is_inference_mode_enabled():
            self.sizes.append(len(batch[1]))
            self._clock[0] += next(self._durations_s)
        return super().predict(model, batch)

    def summarize(self, predictions: Any) -> dict[str, float]:
        return self._summary


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that pass when a test says so."""
    now = [0.0]
    monkeypatch.setattr(latency.time, "perf_counter", lambda: now[0])
    return now


def test_the_latency_is_the_median_of_single_samples_after_a_warm_up(
    dataset: Dataset, tmp_path: Path, clock: list[float]
) -> None:
    # The first answers take long, and a third of the others are disturbed.
    answers = itertools.cycle([0.002, 0.003, 0.020])
    task = TimedEightNumbers(clock, itertools.chain([0.1] * latency.WARM_UP_ANSWERS, answers))
    metrics, _ = measure(task, dataset, tmp_path)
    assert metrics["test/latency_ms"] == pytest.approx(3)
    assert task.sizes == [1] * (latency.WARM_UP_ANSWERS + len(dataset.split("test")))


def test_a_slow_model_is_measured_within_the_bound(dataset: Dataset, tmp_path: Path, clock: list[float]) -> None:
    task = TimedEightNumbers(clock, itertools.repeat(2 * latency.MAX_S))
    metrics, _ = measure(task, dataset, tmp_path)
    assert metrics["test/latency_ms"] == pytest.approx(2000 * latency.MAX_S)
    assert task.sizes == [1]


def test_a_latency_of_the_tasks_own_stands(dataset: Dataset, tmp_path: Path, clock: list[float]) -> None:
    task = TimedEightNumbers(clock, itertools.repeat(0.001), latency_ms=7.0)
    metrics, _ = measure(task, dataset, tmp_path)
    assert (metrics["test/latency_ms"], task.sizes) == (7.0, [])


def test_a_model_that_takes_no_single_sample_is_measured_all_the_same(dataset: Dataset, tmp_path: Path) -> None:
    def refuse_one(value: Tensor, label: Tensor) -> Any:
        if torch.is_inference_mode_enabled():
            raise ValueError("more than one value is needed")
        return value, label

    metrics, _ = measure(EightNumbers("regression", refuse_one), dataset, tmp_path)
    assert set(metrics) == {"test/rmse", "test/mae", "test/r2", "test/size"}


def test_a_ranking_has_one_score_a_query(dataset: Dataset, tmp_path: Path) -> None:
    task = EightNumbers(
        "ranking",
        lambda value, label: {"prediction": value, "target": label, "query": [f"q{int(n) % 3}" for n in label]},
    )
    metrics, predictions = measure(task, dataset, tmp_path, "ndcg")
    scores = [score for score in predictions.table()["score"].to_pylist() if score is not None]
    # The documents of query 0 are all irrelevant.
    assert len(scores) == 2
    assert np.mean(scores) == pytest.approx(metrics["test/ndcg"])
    assert predictions.info.score_of == "ndcg"
    assert "query" in predictions.slice_columns


def test_language_modelling(dataset: Dataset, tmp_path: Path) -> None:
    task = EightNumbers(
        "language-modelling",
        lambda value, label: {"nll": 8 + value.abs(), "tokens": torch.full_like(label, 8), "correct": label},
    )
    metrics, predictions = measure(task, dataset, tmp_path, "test/perplexity", "min")
    table = predictions.table()
    assert predictions.columns[:2] == ("id", "score")
    assert math.exp(-np.mean(table["score"].to_pylist())) == pytest.approx(metrics["test/perplexity"])
    assert metrics["test/token_accuracy"] == pytest.approx(
        sum(table["correct"].to_pylist()) / sum(table["tokens"].to_pylist())
    )


@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_score_is_of_the_metric_that_counts_where_it_is_one_of_samples(
    mode: str, dataset: Dataset, tmp_path: Path
) -> None:
    task = EightNumbers(None, lambda value, label: (label, label))
    metrics, predictions = measure(task, dataset, tmp_path, "validation/size", mode)
    sign = 1 if mode == "max" else -1
    assert predictions.info.score_of == "size"
    assert sign * np.mean(predictions.table()["score"].to_pylist()) == pytest.approx(metrics["test/size"])


def test_a_score_of_its_own_is_kept(dataset: Dataset, tmp_path: Path) -> None:
    task = EightNumbers("regression", lambda value, label: {"prediction": value, "target": label, "score": label})
    _, predictions = measure(task, dataset, tmp_path, "test/rmse")
    table = predictions.table()
    assert table["score"].to_pylist() == table["target"].to_pylist()


BAD: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "not a number": (lambda value, label: (value * math.nan, value), "'score' of .* no finite number"),
    "mixed types": (lambda value, label: {"prediction": ["a"] * len(label), "target": label}, "must have one type"),
    "no row of its own": (lambda value, label: (value[:1], label), r"has shape \[1\]"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_kept_fails_with_the_tasks_name(case: str, dataset: Dataset, tmp_path: Path) -> None:
    columns, words = BAD[case]
    with pytest.raises(TaskError, match=rf"EightNumbers\.predict\(\).*{words}"):
        measure(EightNumbers(None, columns), dataset, tmp_path)
    assert not list((tmp_path / "g1").iterdir())
