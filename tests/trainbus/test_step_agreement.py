"""Ranks meet before a step only where one of them may have no samples for it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from contracts.spec.training import Training
from tests.trainbus.support import LINEAR_TASK, linear_dataset
from trainbus.agent_link.channels import Control
from trainbus.data.loader import Prefetcher
from trainbus.trainer import step_data
from trainbus.trainer.step_agreement import StepAgreement, StepBarrier, StepSummary
from trainbus.trainer.step_data import TrainingData
from trainbus.trainer.trainer import Trainer, TrainerSettings
from trainbus.trainer.world import World, limit_threads

namespace: dict[str, Any] = {}
exec(LINEAR_TASK, namespace)  # noqa: S102  (the same source that the rank processes import)
Linear = namespace["Linear"]


class CountingAgreement(StepAgreement):
    """Counts how often ranks meet."""

    def __init__(self) -> None:
        super().__init__(World(), 1)
        self.meetings: list[tuple[bool, bool]] = []

    def agree(self, lacking: bool, stop: bool) -> tuple[bool, bool]:
        self.meetings.append((lacking, stop))
        return super().agree(lacking, stop)


def summary(step: int, *, lacks_data: bool) -> StepSummary:
    return StepSummary(
        step, 0.0, 0.0, stop=False, checkpoint_now=False, skipped=False, lacks_data=lacks_data, busy_s=()
    )


def test_ranks_meet_only_before_the_first_two_steps_and_after_a_shortage() -> None:
    agreement = CountingAgreement()
    barrier = StepBarrier(agreement, Control())
    steps = Prefetcher(range(100))
    for step in range(1, 50):
        assert barrier.wait(step, steps)
        if step > 1:
            barrier.record_summary(summary(step - 1, lacks_data=step == 20))
    assert len(agreement.meetings) == 3  # and once because a rank lacked samples
    steps.close()


def test_a_rank_without_samples_waits_for_them_or_for_a_stop() -> None:
    arrived, consumed = threading.Event(), threading.Event()

    def items() -> Any:
        yield 1
        arrived.wait(60)
        yield 2
        consumed.set()
        threading.Event().wait(60)  # what never comes

    control, agreement = Control(), CountingAgreement()
    clock = iter(float(number) for number in range(10_000))
    barrier, steps = StepBarrier(agreement, control, lambda: next(clock)), Prefetcher(items())
    ready: list[bool] = []
    assert barrier.wait(1, steps, lambda: ready.append(True))
    assert next(steps) == 1
    waiting = threading.Timer(0.3, arrived.set)
    waiting.start()
    assert barrier.wait(2, steps)
    assert next(steps) == 2
    assert consumed.wait(60)
    threading.Timer(0.3, control.request_stop, ("room",)).start()
    assert not barrier.wait(3, steps, lambda: ready.append(True))
    assert ready == [True]
    assert agreement.meetings[-1] == (True, True)
    steps.close()


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_run_with_prefetched_samples_meets_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    limit_threads({})
    prefetchers: list[Prefetcher[Any]] = []

    class Steady(Linear):  # type: ignore[misc, valid-type]
        """Trains no faster than its samples arrive."""

        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            assert not model.training or prefetchers[0].has(2, 60)
            found: Tensor = super().loss(model, batch)
            return found

    monkeypatch.setattr(
        step_data, "Prefetcher", lambda *given: prefetchers.append(Prefetcher(*given)) or prefetchers[0]
    )
    meetings: list[bool] = []
    monkeypatch.setattr(StepAgreement, "agree", lambda self, lacking, stop: (meetings.append(lacking) or lacking, stop))
    training = Training.model_validate({"max_steps": 20, "loading": {"ahead": depth}})
    task = Steady()
    data = TrainingData(task, linear_dataset(tmp_path / "data"), training)
    Trainer(task, data, training, TrainerSettings(tmp_path / "run")).fit()
    assert len([lacking for lacking in meetings if not lacking]) == 1
