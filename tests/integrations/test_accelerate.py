"""Accelerate's own save_state and load_state, in a training loop that stops and goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integrations.conftest import ScriptRun

pytestmark = pytest.mark.shell
pytest.importorskip("accelerate", reason="the extra trainbus[integrations] is not installed")

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from torch import nn

from trainbus.integrations.accelerate import TrainbusTracker, load_checkpoint, save_checkpoint, should_stop

STEPS = 6


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Each start of the script is a process of its own; here the library's singletons stand for it."""
    yield
    AcceleratorState._reset_state()
    PartialState._reset_state()


def train(run: ScriptRun, stop_after: int | None = None) -> list[float]:
    """Train to the end or the stop; return the weights."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, log_with=TrainbusTracker())
    accelerator.init_trackers("tests", config={"lr": 0.01})
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(load_checkpoint(accelerator), STEPS):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(step))
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        accelerator.log({"loss": loss, "note": "not a number"}, step=step)
        if step + 1 == stop_after:
            run.ask_to_stop()
        if should_stop(accelerator):
            save_checkpoint(accelerator, step + 1, {"loss": loss.item()})
            break
    else:
        save_checkpoint(accelerator, STEPS)
    accelerator.end_training()
    return [float(value) for parameter in model.parameters() for value in parameter.detach().flatten()]


def test_an_undisturbed_run_reports_and_keeps(run: ScriptRun) -> None:
    run.start()
    train(run)
    assert [line.step for line in run.keeps()] == [STEPS]
    assert [(line.step, set(line.values)) for line in run.reports()] == [(step, {"loss"}) for step in range(STEPS)]


@pytest.mark.parametrize("stop_after", [1, 4])
def test_a_run_that_stops_goes_on_to_the_same_weights(run: ScriptRun, stop_after: int) -> None:
    run.start()
    train(run, stop_after)
    assert [(line.step, set(line.metrics or {})) for line in run.keeps()] == [(stop_after, {"loss"})]
    run.start()
    resumed = train(run)
    assert [line.step for line in run.reports()] == list(range(STEPS))
    assert run.keeps()[-1].step == STEPS
    assert (Path(run.keeps()[-1].path) / "model.safetensors").is_file()
    run.monkeypatch.delenv("TRAINBUS_LAUNCH")
    run.monkeypatch.delenv("TRAINBUS_RESUME_DIR")
    run.monkeypatch.delenv("TRAINBUS_RESUME_STEP")
    assert train(run) == resumed, "the weights differ from those of a run that never stopped"
