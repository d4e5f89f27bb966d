"""The Trainer of transformers keeps, stops and goes on: the epochs and steps of a run without a disturbance."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.conftest import ScriptRun

pytestmark = pytest.mark.shell
pytest.importorskip("transformers", reason="the extra trainbus[integrations] is not installed")
pytest.importorskip("accelerate", reason="the extra trainbus[integrations] is not installed")

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from trainbus.integrations.huggingface import TrainbusCallback, resume_path

EPOCHS, STEPS_PER_EPOCH = 3, 4


class Rows(Dataset[dict[str, Tensor]]):
    """Random numbers, the same in every start."""

    def __init__(self) -> None:
        self.x = torch.randn(STEPS_PER_EPOCH * 2, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.x[index].sum(0, keepdim=True)}


class Regression(nn.Module):
    """Two layers, with the outputs that the Trainer asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        predicted = self.net(x)
        return {"loss": nn.functional.mse_loss(predicted, labels), "logits": predicted}


class AfterSteps(TrainerCallback):  # type: ignore[misc]
    """Do something once a number of steps is done, in this process."""

    def __init__(self, steps: int, action: Callable[[], None]) -> None:
        self.steps, self.action = steps, action

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.steps:
            self.action()


def train(folder: Path, *callbacks: TrainerCallback) -> Trainer:
    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=str(folder / "scratch"),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=2,
        save_strategy="epoch",
        eval_strategy="epoch",
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    rows = Rows()
    trainer = Trainer(
        Regression(), arguments, train_dataset=rows, eval_dataset=rows, callbacks=[*callbacks, TrainbusCallback()]
    )
    trainer.train(resume_from_checkpoint=resume_path())
    return trainer


def test_an_undisturbed_run_keeps_what_the_trainer_saves_and_reports(run: ScriptRun, tmp_path: Path) -> None:
    run.start()
    train(tmp_path)
    assert [(line.step, line.epoch) for line in run.keeps()] == [(4, 1), (8, 2), (12, 3)]
    for line in run.keeps():
        assert (Path(line.path) / "trainer_state.json").is_file()
        assert line.metrics is not None
        assert {"loss", "eval_loss"} <= set(line.metrics)
    assert {line.total_steps for line in run.reports()} == {12}
    assert [line.step for line in run.reports() if "loss" in line.values] == list(range(1, 13))


@pytest.mark.parametrize("stop_after", [1, 4, 6, 11])
def test_a_run_that_stops_goes_on_to_the_same_end(run: ScriptRun, tmp_path: Path, stop_after: int) -> None:
    run.start()
    with pytest.raises(SystemExit) as ended:
        train(tmp_path / "first", AfterSteps(stop_after, run.ask_to_stop))
    assert ended.value.code == 0
    assert run.keeps()[-1].step == stop_after
    run.start()
    trainer = train(tmp_path / "second")
    assert (trainer.state.epoch, trainer.state.global_step) == (EPOCHS, EPOCHS * STEPS_PER_EPOCH)
    assert (run.keeps()[-1].step, run.keeps()[-1].epoch) == (12, 3)
    trained = [line.step for line in run.reports() if "loss" in line.values]
    assert trained == list(range(1, 13)), "a step was trained twice, or left out"


def test_outside_a_run_it_does_no_harm(run: ScriptRun, tmp_path: Path) -> None:
    assert train(tmp_path).state.global_step == 12
    assert run.lines() == []
