"""What watches training without taking part in it: one call before, after and one step after each step."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainbus.agent_link.channels import Journal
from trainbus.data.sampler import Sampler
from trainbus.trainer.step_agreement import StepSummary
from trainbus.trainer.step_data import StepData
from trainbus.trainer.world import World


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """What one rank knows of a step that it has taken."""

    step: int
    data: StepData
    #: Consumed by all ranks together, after the step.
    samples_consumed: int
    learning_rate: float
    step_s: float
    #: Seconds that this rank waited for its samples, and that copying them to the device took.
    waited_s: float
    copied_s: float


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """The metrics of one step, as they are reported."""

    step: int
    samples_consumed: int
    values: dict[str, float]


class StepObserver:
    """Sees every step of one rank. Each method does nothing until a subclass overrides it."""

    def on_data_wait(self) -> None:
        """The training loop begins to wait for the samples of its next step."""

    def on_data_ready(self) -> None:
        """This rank has its samples, though the step may still wait for other ranks."""

    def on_step_begin(self, step: int, data: StepData) -> None:
        """The forward pass is about to begin."""

    def on_step_end(self, step: CompletedStep) -> None:
        """The weights are updated."""

    def on_step_summary(self, summary: StepSummary) -> None:
        """All ranks have exchanged their numbers of a step: before the end of the step after it."""


class SampleRecorder(StepObserver):
    """Writes down what a rank trains on: one JSON line a leaf, with the keys of its samples in their order.

    It records a step before the step begins, because other ranks can complete the step once they have this rank's
    gradients. So the last step on record may be one that no rank completed.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    def on_step_begin(self, step: int, data: StepData) -> None:
        for leaf in data.leaves:
            keys = [key for micro in leaf.micro_batches for key in micro.keys]
            self._file.write(json.dumps({"step": step, "leaf": leaf.leaf, "keys": keys}) + "\n")
        self._file.flush()


class MetricsReporter(StepObserver):
    """Puts the metrics of training into the journal of rank 0, every ``log_every_steps`` and at the last step."""

    def __init__(
        self, journal: Journal, world: World, sampler: Sampler, log_every_steps: int, total_steps: int
    ) -> None:
        self._journal, self._world, self._sampler = journal, world, sampler
        self._log_every_steps, self._total_steps = log_every_steps, total_steps
        #: The mean loss over the global batch in the last step whose summary is known.
        self.train_loss: float | None = None
        #: The metrics of the last step whose summary is known.
        self.latest: StepMetrics | None = None
        #: (samples consumed, rates) of the steps whose summary is still to come.
        self._pending: dict[int, tuple[int, dict[str, float]]] = {}

    def on_step_end(self, step: CompletedStep) -> None:
        values = {
            "train/lr": step.learning_rate,
            "train/samples_per_s": step.data.global_samples / max(step.step_s, 1e-9),
            "train/data_wait_s": step.waited_s,
        }
        self._pending[step.step] = (step.samples_consumed, values)

    def on_step_summary(self, summary: StepSummary) -> None:
        consumed, rates = self._pending.pop(summary.step)
        values = {"train/loss": summary.loss, "train/grad_norm": summary.grad_norm, **rates}
        self.latest = StepMetrics(summary.step, consumed, values)
        if math.isfinite(summary.loss):
            self.train_loss = summary.loss
        if summary.step % self._log_every_steps == 0 or summary.step == self._total_steps:
            self.report(summary.step, consumed, values)

    def report(self, step: int, samples_consumed: int, values: Mapping[str, float]) -> None:
        """Put metrics into the journal; of rank 0 alone, since they are the same on every rank."""
        if self._world.is_first:
            self._journal.metrics(
                step,
                values,
                epoch=self._sampler.epoch_of_step(samples_consumed),
                samples_consumed=samples_consumed,
                total_steps=self._total_steps,
            )
