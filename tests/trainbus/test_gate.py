"""Ranks meet before a step only where one of them may have no samples for it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from contracts.spec.training import Training
from tests.trainbus.support import LINEAR_TASK, linear_dataset
from trainbus.agent_link import Control
from trainbus.data.loader import Prefetcher, prefetch
from trainbus.trainer import step_data
from trainbus.trainer.step_agreement import StepAgreement, StepBarrier, StepSummary
from trainbus.trainer.step_data import TrainingData
from trainbus.trainer.trainer import Trainer, TrainerSettings
from trainbus.trainer.world import World, limit_threads

namespace: dict[str, Any] = {}
exec(LINEAR_TASK, namespace)  # noqa: S102  (the same source that the rank processes import)
Linear = namespace["Linear"]


class Counted(StepAgreement):
    """Counts how often ranks ask each other."""

    def __init__(self) -> None:
        super().__init__(World(), 1)
        self.asked: list[tuple[bool, bool]] = []

    def agree(self, lacking: bool, stop: bool) -> tuple[bool, bool]:
        self.asked.append((lacking, stop))
        return super().agree(lacking, stop)


def summary(step: int, *, lacks_data: bool) -> StepSummary:
    return StepSummary(
        step, 0.0, 0.0, stop=False, checkpoint_now=False, skipped=False, lacks_data=lacks_data, busy_s=()
    )


def test_ranks_that_are_heard_of_a_step_later_meet_before_the_first_two_steps_alone() -> None:
    agreement = Counted()
    barrier = StepBarrier(agreement, Control())
    steps = prefetch(range(100))
    for step in range(1, 50):
        assert barrier.wait(step, steps)
        if step > 1:
            barrier.record_summary(summary(step - 1, lacks_data=step == 20))
    assert len(agreement.asked) == 3  # and where one of them was short
    steps.close()


def test_a_rank_without_samples_waits_for_them_or_for_a_stop() -> None:
    come, made = threading.Event(), threading.Event()

    def items() -> Any:
        yield 1
        come.wait(60)
        yield 2
        made.set()
        threading.Event().wait(60)  # what never comes

    control, agreement = Control(), Counted()
    clock = iter(float(number) for number in range(10_000))
    barrier, steps = StepBarrier(agreement, control, lambda: next(clock)), prefetch(items())
    ready: list[bool] = []
    assert barrier.wait(1, steps, lambda: ready.append(True))
    assert next(steps) == 1
    waiting = threading.Timer(0.3, come.set)
    waiting.start()
    assert barrier.wait(2, steps)
    assert next(steps) == 2
    assert made.wait(60)
    threading.Timer(0.3, control.request_stop, ("room",)).start()
    assert not barrier.wait(3, steps, lambda: ready.append(True))
    assert ready == [True]
    assert agreement.asked[-1] == (True, True)
    steps.close()


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_run_whose_samples_are_there_in_time_does_not_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    limit_threads({})
    made: list[Prefetcher[Any]] = []

    class Steady(Linear):  # type: ignore[misc, valid-type]
        """Trains no faster than its samples come."""

        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            assert not model.training or made[0].has(2, 60)
            found: Tensor = super().loss(model, batch)
            return found

    monkeypatch.setattr(step_data, "prefetch", lambda *given: made.append(prefetch(*given)) or made[0])
    asked: list[bool] = []
    monkeypatch.setattr(StepAgreement, "agree", lambda self, lacking, stop: (asked.append(lacking) or lacking, stop))
    training = Training.model_validate({"max_steps": 20, "loading": {"ahead": depth}})
    task = Steady()
    data = TrainingData(task, linear_dataset(tmp_path / "data"), training)
    Trainer(task, data, training, TrainerSettings(tmp_path / "run")).fit()
    assert len([lacking for lacking in asked if not lacking]) == 1
