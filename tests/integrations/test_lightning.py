"""Lightning's own Trainer keeps, stops and goes on: the epochs and steps of a run without a disturbance."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.conftest import ScriptRun

pytestmark = pytest.mark.shell
pytest.importorskip("lightning", reason="the extra trainbus[integrations] is not installed")

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trainbus.integrations.lightning import TrainbusCheckpoint, TrainbusLogger

EPOCHS, STEPS_PER_EPOCH = 3, 4


class Regression(LightningModule):
    """Two layers on random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(x), y))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class AfterSteps(Callback):
    """Do something once a number of batches is done, in this process."""

    def __init__(self, steps: int, action: Callable[[], None]) -> None:
        self.steps, self.action = steps, action

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.steps:
            self.action()


def train(folder: Path, *callbacks: Callback, keep: TrainbusCheckpoint | None = None, resume: bool = True) -> Trainer:
    seed_everything(0, verbose=False)
    x = torch.randn(STEPS_PER_EPOCH * 2, 4)
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=2)
    keep = keep or TrainbusCheckpoint()
    trainer = Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        devices=1,
        callbacks=[*callbacks, keep],
        logger=TrainbusLogger(),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(num_workers|not resumable|IterableDataset|sync_dist|LeafSpec).*")
        trainer.fit(Regression(), data, data, ckpt_path=keep.resume_path if resume else None)
    return trainer


def test_an_undisturbed_run_keeps_each_epoch_and_reports(run: ScriptRun, tmp_path: Path) -> None:
    run.start()
    train(tmp_path)
    assert [(line.step, line.epoch) for line in run.keeps()] == [(4, 1), (8, 2), (12, 3)]
    for line in run.keeps():
        assert (Path(line.path) / "last.ckpt").is_file()
        assert line.metrics is not None
        assert set(line.metrics) == {"loss", "val_loss"}
    assert {line.total_steps for line in run.reports()} == {12, None}
    assert sorted(line.step for line in run.reports() if "loss" in line.values) == list(range(1, 13))


@pytest.mark.parametrize("stop_after", [1, 3, 4, 6, 8, 11])
def test_a_run_that_stops_goes_on_to_the_same_end(run: ScriptRun, tmp_path: Path, stop_after: int) -> None:
    run.start()
    with pytest.raises(SystemExit) as ended:
        train(tmp_path, AfterSteps(stop_after, run.ask_to_stop))
    assert ended.value.code == 0
    assert run.keeps()[-1].step == stop_after
    run.start()
    trainer = train(tmp_path)
    assert (trainer.current_epoch, trainer.global_step) == (EPOCHS, EPOCHS * STEPS_PER_EPOCH)
    assert (run.keeps()[-1].step, run.keeps()[-1].epoch) == (12, 3)
    trained = [line.step for line in run.reports() if "loss" in line.values]
    assert sorted(trained) == list(range(1, 13)), "a step was trained twice, or left out"


def test_sigterm_is_a_request_that_lightning_does_not_take_away(run: ScriptRun, tmp_path: Path) -> None:
    run.start()
    with pytest.raises(SystemExit) as ended:
        train(tmp_path, AfterSteps(6, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert ended.value.code == 0
    assert [line.step for line in run.keeps()] == [4, 6]


def test_steps_between_epochs_are_kept_on_request(run: ScriptRun, tmp_path: Path) -> None:
    run.start()
    train(tmp_path, keep=TrainbusCheckpoint(every_n_epochs=2, every_n_steps=3))
    assert [line.step for line in run.keeps()] == [3, 6, 8, 9, 12]
    with pytest.raises(ValueError, match="1 or more"):
        TrainbusCheckpoint(every_n_epochs=0)


def test_the_last_state_is_kept_whatever_the_interval(run: ScriptRun, tmp_path: Path) -> None:
    run.start()
    train(tmp_path, keep=TrainbusCheckpoint(every_n_epochs=2))
    assert [(line.step, line.epoch) for line in run.keeps()] == [(8, 2), (12, 3)]
    run.start()
    assert train(tmp_path).global_step == 12  # nothing is left to train


def test_a_forgotten_ckpt_path_is_told(run: ScriptRun, tmp_path: Path) -> None:
    run.start()
    with pytest.raises(SystemExit):
        train(tmp_path, AfterSteps(4, run.ask_to_stop))
    run.start()
    with pytest.warns(UserWarning, match="a checkpoint of step 4 is kept, but training begins at step 0"):
        train(tmp_path, resume=False)


def test_outside_a_run_it_does_no_harm(run: ScriptRun, tmp_path: Path) -> None:
    assert train(tmp_path).global_step == 12
    assert run.lines() == []
