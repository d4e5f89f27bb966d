"""The order of samples in a Trainer: it goes with the checkpoint, and another one is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from contracts.ranks import CheckpointLine
from contracts.spec.training import Training
from tests.trainbus.support import LINEAR_TASK, journal, keys_by_step, linear_dataset
from trainbus.data.dataset import Dataset
from trainbus.data.order import OrderMismatch
from trainbus.data.read_plan import ShardNeed
from trainbus.trainer.start_point import StartPoint
from trainbus.trainer.step_data import TrainingData
from trainbus.trainer.trainer import Trainer, TrainerSettings
from trainbus.trainer.world import World, limit_threads

pytestmark = pytest.mark.shell

namespace: dict[str, Any] = {}
exec(LINEAR_TASK, namespace)  # noqa: S102  (the same source that the rank processes import)
Linear = namespace["Linear"]


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    limit_threads({})
    return linear_dataset(tmp_path / "data", train=120)


def train(folder: Path, dataset: Dataset, resume: Path | None = None, **training: Any) -> None:
    rules = Training.model_validate({"epochs": 2, "global_batch": 16, **training})
    task, settings = Linear(), TrainerSettings(folder, record_samples=True)
    start = StartPoint(World(), resume_folder=resume)
    Trainer(task, TrainingData(task, dataset, rules), rules, settings, start=start).fit()


def half(folder: Path, dataset: Dataset, **training: Any) -> Path:
    """A checkpoint in the middle of the first epoch."""
    train(folder, dataset, max_steps=5, **training)
    last = [line for line in journal(folder) if isinstance(line, CheckpointLine)][-1]
    return Path(last.folder)


def trained(folder: Path) -> list[str]:
    steps = keys_by_step(folder, 1)
    return [key for step in sorted(steps) for key in steps[step]]


@pytest.mark.parametrize("loading", [{}, {"lanes": 5, "window": 1}])
def test_another_batch_size_after_a_checkpoint_loses_and_repeats_no_sample(
    tmp_path: Path, dataset: Dataset, loading: dict[str, int]
) -> None:
    train(tmp_path / "whole", dataset, loading=loading)
    checkpoint = half(tmp_path / "g1", dataset, loading=loading)
    train(tmp_path / "g2", dataset, checkpoint, global_batch=8, loading=loading)
    first, second = trained(tmp_path / "g1"), trained(tmp_path / "g2")
    assert len(first) == 80
    assert sorted(first + second[:40]) == sorted(f"s{number:06}" for number in range(120))
    whole = trained(tmp_path / "whole")
    assert first == whole[:80]
    # The layout within a batch follows the batch; what has been trained after each of them does not.
    assert sorted(first + second) == sorted(whole)


def test_the_checkpoint_records_its_order(tmp_path: Path, dataset: Dataset) -> None:
    state = json.loads((half(tmp_path / "g1", dataset, seed=5) / "state.json").read_text())
    assert state["about"]["order"] == {
        "algorithm": 1,
        "dataset_id": dataset.dataset_id,
        "seed": 5,
        "lanes": 1,
        "window": None,
        "window_samples": 120,
    }
    assert len(json.dumps({"samples_consumed": state["samples_consumed"], "order": state["about"]["order"]})) < 1024


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, r"set training\.seed to 0"),
        ({"loading": {"lanes": 2}}, r"set training\.loading\.lanes to 1"),
        ({"loading": {"window": 1}}, r"set training\.loading\.window to null"),
    ],
)
def test_a_run_in_another_order_cannot_resume_the_checkpoint(
    tmp_path: Path, dataset: Dataset, change: dict[str, Any], message: str
) -> None:
    checkpoint = half(tmp_path / "g1", dataset)
    with pytest.raises(OrderMismatch, match=message):
        train(tmp_path / "g2", dataset, checkpoint, **change)


def test_another_dataset_cannot_resume_the_checkpoint(tmp_path: Path, dataset: Dataset) -> None:
    checkpoint = half(tmp_path / "g1", dataset)
    other = linear_dataset(tmp_path / "other", train=130)
    with pytest.raises(OrderMismatch, match=f"give the run data.dataset_id {dataset.dataset_id}"):
        train(tmp_path / "g2", other, checkpoint)


def test_a_checkpoint_without_an_order_resumes_with_a_warning(
    tmp_path: Path, dataset: Dataset, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = half(tmp_path / "g1", dataset)
    state = json.loads((checkpoint / "state.json").read_text())
    del state["about"]["order"]
    (checkpoint / "state.json").write_text(json.dumps(state))
    train(tmp_path / "g2", dataset, checkpoint)
    assert "older than the record of its order" in capsys.readouterr().out


def test_the_prefetcher_gets_the_plan_and_the_position(tmp_path: Path, dataset: Dataset) -> None:
    class ReadAhead:
        def __init__(self) -> None:
            self.needs: list[ShardNeed] = []
            self.positions: list[int] = []

        def set_plan(self, split: str, needs: Any) -> None:
            assert split == "train"
            self.needs = needs(0, 240)

        def set_position(self, samples_consumed: int) -> None:
            self.positions.append(samples_consumed)

    follower = ReadAhead()
    rules = Training.model_validate({"epochs": 2, "global_batch": 16})
    task = Linear()
    data = TrainingData(task, dataset, rules, arrival=follower)
    Trainer(task, data, rules, TrainerSettings(tmp_path / "run")).fit()
    assert {need.shard for need in follower.needs} == {0, 1, 2}
    assert follower.positions == [*range(0, 240, 16), 240]
