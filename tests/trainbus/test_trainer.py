"""The loop in one process: resume, checkpoints, early stopping, exact metrics."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau
from torch.utils.data import default_collate

from contracts.ranks import CheckpointLine, MetricsLine
from contracts.spec.training import Training
from tests.trainbus.support import (
    LINEAR_TASK,
    REPOSITORY,
    digits_dataset,
    journal,
    linear_dataset,
    linear_samples,
    text_dataset,
)
from trainbus.agent_link.channels import Control
from trainbus.data.dataset import Dataset
from trainbus.task import Task, TaskError, load_task
from trainbus.trainer import checkpoint, checkpoint_manager, optimizer_state
from trainbus.trainer.checkpoint import CheckpointError
from trainbus.trainer.checkpoint.writer import CheckpointWriter
from trainbus.trainer.checkpoint_manager import CheckpointManager
from trainbus.trainer.optimizer_state import StateMismatch
from trainbus.trainer.start_point import StartPoint
from trainbus.trainer.step_data import TrainingData
from trainbus.trainer.trainer import Outcome, Trainer, TrainerSettings
from trainbus.trainer.validation import measure_split
from trainbus.trainer.world import World, limit_threads

pytestmark = pytest.mark.shell

namespace: dict[str, Any] = {}
exec(LINEAR_TASK, namespace)  # noqa: S102  (the same source that the rank processes import)
Linear = namespace["Linear"]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    limit_threads({})


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return linear_dataset(tmp_path / "data")


def train(folder: Path, dataset: Dataset, task: Task | None = None, **options: Any) -> tuple[Trainer, Outcome]:
    control, resume = options.pop("control", None), options.pop("resume_folder", None)
    run_id = options.pop("run_id", "rtest")
    settings = options.pop("settings", None) or TrainerSettings(folder, about={"run_id": run_id})
    training = Training.model_validate({"epochs": 3, "global_batch": 16, **options})
    task = task or Linear(dropout=0.2)
    trainer = Trainer(
        task,
        TrainingData(task, dataset, training),
        training,
        settings,
        start=StartPoint(World(), run_id=run_id, resume_folder=resume),
        control=control,
    )
    return trainer, trainer.fit()


def digest(folder: Path) -> str:
    """Return the hash of everything that training resumes from."""
    return hashlib.sha256((folder / "digests-0.json").read_bytes()).hexdigest()


def checkpoints(folder: Path) -> list[CheckpointLine]:
    return [line for line in journal(folder) if isinstance(line, CheckpointLine)]


def losses(folder: Path) -> dict[int, float]:
    lines = [line for line in journal(folder) if isinstance(line, MetricsLine)]
    return {line.step: line.values["train/loss"] for line in lines if "train/loss" in line.values}


class StopIn(Linear):  # type: ignore[misc,valid-type]
    """A task that requests a stop in the middle of the step after ``steps``."""

    def __init__(self, control: Control, steps: int) -> None:
        super().__init__(dropout=0.2)
        self.control, self.left = control, steps

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if model.training:
            self.left -= 1
            if self.left < 0:
                self.control.request_stop("the test")
        found: Tensor = super().loss(model, batch)
        return found


@pytest.mark.parametrize("stop_after", [0, 1, 5, 10])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    dataset: Dataset, tmp_path: Path, stop_after: int
) -> None:
    """Dropout, AdamW, a schedule and a batch that crosses epoch ends: all of it continues."""
    _, whole = train(tmp_path / "whole", dataset)
    control = Control()
    _, first = train(tmp_path / "g1", dataset, StopIn(control, stop_after), control=control)
    assert first.outcome == "stopped"
    assert first.step == stop_after + 1  # a single rank hears itself at once
    last = checkpoints(tmp_path / "g1")[-1]
    assert (last.step, last.final) == (first.step, False)  # the training is not over
    _, second = train(tmp_path / "g2", dataset, resume_folder=Path(last.folder))
    assert second.outcome == "succeeded"
    assert second.metrics == whole.metrics
    assert digest(Path(checkpoints(tmp_path / "g2")[-1].folder)) == digest(
        Path(checkpoints(tmp_path / "whole")[-1].folder)
    )
    assert losses(tmp_path / "g1") | losses(tmp_path / "g2") == losses(tmp_path / "whole")


class Plateau(Linear):  # type: ignore[misc,valid-type]
    """Halves the rate after each validation that is not much better than the best one."""

    def schedule(self, optimizer: Optimizer, total_steps: int) -> LRScheduler:
        return ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)


class GroupRates(Linear):  # type: ignore[misc,valid-type]
    """Two parameter groups, each with a schedule of its own."""

    def optimizer(self, model: nn.Module) -> Optimizer:
        layers = [{"params": model[number].parameters()} for number in (0, 3)]  # type: ignore[index]
        return torch.optim.AdamW(layers, lr=self.lr)

    def schedule(self, optimizer: Optimizer, total_steps: int) -> LRScheduler:
        return LambdaLR(optimizer, [lambda step: 1 / (1 + step), lambda step: min(1.0, step / 5)])


@pytest.mark.parametrize("task", [Plateau, GroupRates])
def test_a_schedule_goes_on_where_it_was(dataset: Dataset, tmp_path: Path, task: type[Task]) -> None:
    often = {"validate_every_steps": 3}
    whole, _ = train(tmp_path / "whole", dataset, task(dropout=0.2), **often)
    for step in (2, 6, 11):
        control = Control()
        interrupted = type("Interrupted", (StopIn, task), {})(control, step - 1)
        train(tmp_path / f"first{step}", dataset, interrupted, control=control, **often)
        last = Path(checkpoints(tmp_path / f"first{step}")[-1].folder)
        train(tmp_path / f"then{step}", dataset, task(dropout=0.2), resume_folder=last, **often)
        ends = [Path(checkpoints(tmp_path / name)[-1].folder) for name in (f"then{step}", "whole")]
        assert digest(ends[0]) == digest(ends[1])
    rates = [group["lr"] for group in whole.strategy.optimizer.param_groups]
    assert rates[-1] != rates[0] if task is GroupRates else rates[0] < 0.02


def test_a_plateau_of_another_metric_is_refused(dataset: Dataset, tmp_path: Path) -> None:
    settings = TrainerSettings(tmp_path, best_metric="validation/recall")
    with pytest.raises(TaskError, match=r"monitors retention.metric 'validation/recall'.*it has: validation/accuracy"):
        train(tmp_path, dataset, Plateau(), settings=settings)
    settings = TrainerSettings(tmp_path, best_metric="validation/accuracy", best_mode="max")
    with pytest.raises(TaskError, match="has mode 'min'"):
        train(tmp_path, dataset, Plateau(), settings=settings)


class OneCycle(Linear):  # type: ignore[misc,valid-type]
    """A task whose schedule refuses to go beyond the end that it was made for."""

    def schedule(self, optimizer: Optimizer, total_steps: int) -> LRScheduler:
        return OneCycleLR(optimizer, max_lr=0.1, total_steps=total_steps + 1)


def test_another_run_that_goes_on_for_longer_has_the_schedule_of_its_own_end(dataset: Dataset, tmp_path: Path) -> None:
    train(tmp_path / "short", dataset, OneCycle(dropout=0.2))
    last = Path(checkpoints(tmp_path / "short")[-1].folder)
    longer, outcome = train(
        tmp_path / "longer", dataset, OneCycle(dropout=0.2), resume_folder=last, run_id="other", epochs=6
    )
    assert (outcome.outcome, outcome.step) == ("succeeded", longer.total_steps)
    train(tmp_path / "whole", dataset, OneCycle(dropout=0.2), epochs=6)

    def rates(folder: Path) -> dict[int, float]:
        lines = [line for line in journal(folder) if isinstance(line, MetricsLine)]
        return {line.step: line.values["train/lr"] for line in lines if "train/lr" in line.values}

    found = rates(tmp_path / "longer")
    assert found
    assert found == pytest.approx({step: rate for step, rate in rates(tmp_path / "whole").items() if step in found})


def test_checkpoints_are_saved_periodically_at_the_best_and_at_the_end(dataset: Dataset, tmp_path: Path) -> None:
    trainer, outcome = train(tmp_path, dataset, checkpoint_every_steps=4, validate_every_steps=6)
    lines = checkpoints(tmp_path)
    steps = [line.step for line in lines]
    assert steps == sorted(set(steps))
    assert {4, 8, 12, 16, outcome.step} <= set(steps)
    assert outcome.step == trainer.total_steps == 19
    assert [line.final for line in lines] == [False] * (len(lines) - 1) + [True]
    # A checkpoint records the metrics of its own weights, and no others.
    assert all(("validation/loss" in line.metrics) == (line.step % 6 == 0 or line.final) for line in lines)
    measured = [line for line in lines if "validation/loss" in line.metrics]
    best = min(measured, key=lambda line: line.metrics["validation/loss"])
    model = Linear().model()
    checkpoint.load_model(Path(best.folder), model)
    found = measure_split(Linear(), model, dataset.split("validation"), World(), "fp32")
    assert found["loss"] == pytest.approx(best.metrics["validation/loss"])
    state = json.loads((Path(best.folder) / "state.json").read_text())
    assert (state["step"], state["samples_consumed"], state["epoch"]) == (best.step, best.samples_consumed, best.epoch)
    # Readable without trainbus.
    plain = Linear().model()
    plain.load_state_dict(load_file(Path(best.folder) / "model-0.safetensors"))


def test_early_stopping_saves_a_checkpoint_and_is_final(dataset: Dataset, tmp_path: Path) -> None:
    rules = {"early_stopping": {"patience": 2, "min_delta": 10.0}, "validate_every_steps": 2}
    _, outcome = train(tmp_path / "g1", dataset, **rules)
    assert outcome == Outcome("succeeded", 6, 96, outcome.metrics)  # the first counts as a best one
    last = checkpoints(tmp_path / "g1")[-1]
    assert last.final
    _, again = train(tmp_path / "g2", dataset, resume_folder=Path(last.folder), **rules)
    assert (again.outcome, again.step) == ("succeeded", 6)


def test_metrics_are_exact_means_over_samples(dataset: Dataset) -> None:
    """By scalar means and by values a sample, in batches that do not divide the split."""

    class Both(Linear):  # type: ignore[misc, valid-type]
        def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
            each = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
            return {"each": each, "mean": each.mean()}

    task = Both()
    torch.manual_seed(0)
    model = task.model()
    split = dataset.split("validation")
    whole = measure_split(task, model, split, World(), "fp32", batch_size=1000)
    parts = measure_split(task, model, split, World(), "fp32", batch_size=7)
    assert parts["each"] == pytest.approx(whole["each"], rel=1e-6)
    assert parts["mean"] == pytest.approx(whole["mean"], rel=1e-6)


def test_bf16_trains(dataset: Dataset, tmp_path: Path) -> None:
    _, fp32 = train(tmp_path / "a", dataset, Linear(), epochs=5)
    _, bf16 = train(tmp_path / "b", dataset, Linear(), epochs=5, precision="bf16")
    assert bf16.metrics["validation/loss"] == pytest.approx(fp32.metrics["validation/loss"], rel=0.1)
    assert bf16.metrics != fp32.metrics


def test_a_mismatched_model_is_refused_by_name(dataset: Dataset, tmp_path: Path) -> None:
    train(tmp_path / "g1", dataset, max_steps=2)
    folder = Path(checkpoints(tmp_path / "g1")[-1].folder)
    model = Linear().model()
    for other, message in (
        (Linear(width=8).model(), r"'0.weight' is \(16, 8\).* in the checkpoint but \(8, 8\)"),
        (nn.Sequential(*model, nn.Linear(3, 3)), r"the model has '4.weight', which the checkpoint lacks"),
        (model[:3], r"the checkpoint has '3.\w+', which the model lacks"),
    ):
        with pytest.raises(StateMismatch, match=message):
            checkpoint.load_model(folder, other)


def test_unsafe_or_torn_checkpoints_are_refused(dataset: Dataset, tmp_path: Path) -> None:
    train(tmp_path / "g1", dataset, max_steps=2)
    folder = Path(checkpoints(tmp_path / "g1")[-1].folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "digests-0.json",
        "model-0.safetensors",
        "optimizer-0.safetensors",
        "state.json",
    ]
    (folder / "extra.pt").write_bytes(b"pickle")
    with pytest.raises(CheckpointError, match=r"'extra.pt' .* neither safetensors nor JSON"):
        checkpoint.check_safe(folder)
    (folder / "extra.pt").unlink()
    (folder / "link.json").symlink_to("/etc/hostname")
    with pytest.raises(CheckpointError, match="is not a plain file"):
        checkpoint.check_safe(folder)
    (folder / "link.json").unlink()
    data = (folder / "model-0.safetensors").read_bytes()
    (folder / "model-0.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.load_model(folder, Linear().model())
    (folder / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"state.json"):
        checkpoint.load(folder)


def test_a_failed_write_fails_the_run_and_removes_its_folder(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left"):
        train(tmp_path, dataset, max_steps=2)
    assert list((tmp_path / "checkpoints").iterdir()) == []
    assert checkpoints(tmp_path) == []


def test_a_failure_waits_for_the_checkpoint_that_is_being_written(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_failed = threading.Event()

    class FailingTask(Linear):  # type: ignore[misc,valid-type]
        steps = 0

        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            self.steps += model.training
            if self.steps == 3:
                raise ValueError("no such class")
            loss: Tensor = super().loss(model, batch)
            return loss

    def write_late(*args: Any) -> None:
        has_failed.wait(60)
        write(*args)

    def settle(writer: CheckpointWriter, timeout_s: float) -> None:
        has_failed.set()
        wait_for_end(writer, timeout_s)

    write, wait_for_end = checkpoint_manager.write, CheckpointWriter.settle
    monkeypatch.setattr(CheckpointWriter, "settle", settle)
    monkeypatch.setattr(checkpoint_manager, "write", write_late)
    with pytest.raises(ValueError, match="no such class"):
        train(tmp_path, dataset, FailingTask(), checkpoint_at_steps=[2])
    assert [line.step for line in checkpoints(tmp_path)] == [2]


def test_a_checkpoint_that_is_due_by_the_clock_is_saved_after_the_step(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = itertools.chain([True], itertools.repeat(False))
    monkeypatch.setattr(CheckpointManager, "is_due_by_clock", lambda _: next(answers))
    train(tmp_path, dataset, checkpoint_every_steps=1000, validate_every_steps=1000)
    assert [line.step for line in checkpoints(tmp_path)] == [1, 19]


def test_importing_trainbus_is_light() -> None:
    import subprocess
    import sys

    code = "import trainbus, sys; print([m for m in ('torch', 'numpy', 'pydantic') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    assert found.stdout.strip() == "[]"


def test_the_digits_example_reaches_97_percent(tmp_path: Path) -> None:
    dataset = digits_dataset(tmp_path / "data")
    spec = json.loads((REPOSITORY / "examples/digits/train.json").read_text())
    task = load_task(spec["task"], spec["params"], REPOSITORY / "examples/digits")
    task.classes = dataset.classes
    # Twice as long: after the example's epochs a scan more or less, of 270, is a matter of the order of samples.
    longer = {**spec["training"], "epochs": 2 * spec["training"]["epochs"]}
    trainer, outcome = train(tmp_path / "g1", dataset, task, **longer)
    assert outcome.metrics["validation/accuracy"] > 0.96
    found = measure_split(task, trainer.strategy.model, dataset.split("test"), World(), "fp32")
    assert found["accuracy"] > 0.96


def test_the_gpt_example_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import argparse
    import sys

    monkeypatch.delitem(sys.modules, "task", raising=False)
    text = Path(argparse.__file__).read_bytes()
    dataset = text_dataset(tmp_path / "data", text)
    spec = json.loads((REPOSITORY / "examples/gpt/train.json").read_text())
    task = load_task(spec["task"], spec["params"], REPOSITORY / "examples/gpt")
    _, outcome = train(tmp_path / "g1", dataset, task, **{"epochs": None, **spec["training"], "max_steps": 60})
    assert outcome.metrics["validation/bits_per_byte"] < 4.5
    assert outcome.metrics["validation/bits_per_byte"] == pytest.approx(outcome.metrics["validation/loss"] / 0.6931472)


class CountedLinear(Linear):  # type: ignore[misc,valid-type]
    """A mean over the samples of the first class alone, of which some micro-batches have none."""

    def loss_weight(self, batch: Any) -> Tensor:
        return (batch[1] == 0).sum()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        found: Tensor = super().loss(model, [part[batch[1] == 0] for part in batch])
        return found

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"loss": self.loss(model, batch), "first": (batch[1] == 0).float()}


class ZeroWeightLinear(CountedLinear):
    def loss_weight(self, batch: Any) -> float:
        return 0.0


def test_a_step_is_the_mean_over_what_counts(dataset: Dataset, tmp_path: Path) -> None:
    """However its samples are divided: a mean of the slices' means would be another."""
    rules = {"epochs": 1, "global_batch": 20}
    whole, _ = train(tmp_path / "whole", dataset, CountedLinear(), **rules)
    trainer, outcome = train(tmp_path / "sliced", dataset, CountedLinear(), **rules, accumulate=20)
    assert losses(tmp_path / "sliced") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    for ours, theirs in zip(trainer.strategy.model.parameters(), whole.strategy.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
    batch = default_collate([CountedLinear().decode(sample) for _, sample in linear_samples(23, 10_000)])
    with torch.no_grad():
        expected = CountedLinear().loss(trainer.strategy.model.eval(), batch)
    assert outcome.metrics["validation/loss"] == pytest.approx(float(expected), rel=1e-5)
    assert outcome.metrics["validation/first"] == pytest.approx(float((batch[1] == 0).float().mean()))
    with pytest.raises(TaskError, match="is 0 for all samples"):
        train(tmp_path / "none", dataset, ZeroWeightLinear(), **rules)


def test_an_older_checkpoint_lists_frozen_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    state = optimizer_state.pack(optimizer, model)
    assert state.groups[0]["params"] == ["1.weight", "1.bias"]
    state.groups[0]["params"] = [name for name, _ in model.named_parameters()]
    optimizer_state.unpack(state, optimizer, model)
    state.groups[0]["params"].remove("1.bias")
    with pytest.raises(StateMismatch, match=r"1\.bias"):
        optimizer_state.unpack(state, optimizer, model)
