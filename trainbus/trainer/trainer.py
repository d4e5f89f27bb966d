"""The training loop."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from contracts.events.train import Training
from trainbus.agent_link import Control, Journal
from trainbus.data.dataset import Dataset
from trainbus.data.loader import MicroBatch, ahead, load, to_device
from trainbus.data.sampler import Sampler, ShuffledOrder, slice_bounds
from trainbus.task import Task
from trainbus.trainer import checkpoint
from trainbus.trainer.checkpoint import Progress, Snapshot, Writer
from trainbus.trainer.measure import measure
from trainbus.trainer.stop import Consensus, Said
from trainbus.trainer.strategies import make_strategy
from trainbus.trainer.strategies.base import State
from trainbus.trainer.world import World, seed_all


class TrainingDiverged(Exception):
    """The loss or the gradient is no number any more."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How training ended. ``metrics`` are those of the final weights."""

    outcome: Literal["succeeded", "stopped"]
    step: int
    samples_consumed: int
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class StepData:
    """One rank's part of one step."""

    samples_consumed: int  # before the step
    global_samples: int
    micro_batches: tuple[MicroBatch, ...]


class Trainer:
    """Trains a task on a dataset: one object a rank, the same calls on every rank.

    All collective calls happen at points that are functions of the step and of what all ranks agreed on.
    """

    def __init__(
        self,
        task: Task,
        dataset: Dataset,
        training: Training,
        *,
        folder: Path,
        world: World | None = None,
        control: Control | None = None,
        journal: Journal | None = None,
        resume_folder: Path | None = None,
        best_metric: str = "validation/loss",
        best_mode: Literal["min", "max"] = "min",
        about: Mapping[str, Any] | None = None,
        record_samples: bool = False,
    ) -> None:
        """Build the model and take up ``resume_folder``.

        Args:
            folder: where the journal, ``checkpoints/`` and records go.
            best_metric: a checkpoint is taken whenever a validation improves this.
            about: what ``state.json`` says about the run.
            record_samples: append the keys each step trains on to ``samples_rank_<n>.jsonl``.
        """
        self.task, self.dataset, self.training, self.folder = task, dataset, training, folder
        self.world = world or World()
        self.control = control or Control()
        self.journal = journal or Journal(folder / f"rank_{self.world.rank}.jsonl")
        self.train_split, self.validation_split = dataset.split("train"), dataset.split("validation")
        order = ShuffledOrder(dataset.dataset_id, len(self.train_split), training.seed)
        end = None if training.epochs is None else training.epochs * len(self.train_split)
        self.sampler = Sampler(order, training.global_batch, end)

        self.progress, packed = Progress(), None
        if resume_folder is not None:
            checkpoint.check_safe(resume_folder)
            self.progress, packed = checkpoint.load_progress(resume_folder)
        self.total_steps = self._total_steps()
        seed_all(training.seed, "model")
        model = task.model()
        if resume_folder is not None:
            checkpoint.load_model(resume_folder, model)
        self.strategy = make_strategy(task, model, training, self.world)
        self.schedule = task.schedule(self.strategy.optimizer, self.total_steps)
        if resume_folder is not None and packed is not None:
            self.strategy.load_state(State(optimizer=checkpoint.load_optimizer(resume_folder, packed)))
            if self.schedule is not None and self.progress.schedule is not None:
                self.schedule.load_state_dict(self.progress.schedule)
        same_run = self.progress.about.get("run_id") == (about or {}).get("run_id")
        self._checkpointed_step = self.progress.step if resume_folder is not None and same_run else -1
        self.progress.about = dict(about or {})

        self._best = (best_metric, best_mode)
        self._consensus = Consensus(self.world)
        self._writer = Writer()
        self._record = (folder / f"samples_rank_{self.world.rank}.jsonl").open("a") if record_samples else None
        #: (samples consumed, rates) of the steps whose loss is still on its way.
        self._posted: dict[int, tuple[int, dict[str, float]]] = {}
        self._measured: tuple[int, dict[str, float]] = (-1, {})
        self._train_loss: float | None = None
        self._stop_agreed = False
        self._checkpoint_asked = False

    def fit(self) -> Outcome:
        """Train to the end, or to a stop that all ranks agreed on. Every checkpoint is on disk when this returns."""
        progress = self.progress
        self.strategy.model.train()
        self.journal.started(progress.step, progress.samples_consumed)
        early = self._patience_is_over()  # a run that stopped early and was then placed again
        with closing(ahead(self._steps())) as steps:
            while not (early or self._stop_agreed) and (data := next(steps, None)) is not None:
                self._train_step(data)
                early = self._after_step(data)
        stopped = self._stop_agreed and not early and progress.step < self.total_steps
        if not stopped and self._measured[0] != progress.step:
            self._validate()
        self._checkpoint(last=True, final=not stopped)
        self._writer.join()
        outcome: Literal["succeeded", "stopped"] = "stopped" if stopped else "succeeded"
        return Outcome(outcome, progress.step, progress.samples_consumed, self._metrics_here())

    # --- one step ---------------------------------------------------------------------------

    def _train_step(self, data: StepData) -> None:
        training, progress, device = self.training, self.progress, self.world.device
        started = time.perf_counter()
        # Dropout and augmentation are functions of (seed, step, rank): a resumed run draws what it would have drawn.
        seed_all(training.seed, progress.step, self.world.rank)
        losses = []
        for index, micro in enumerate(data.micro_batches):
            batch = to_device(micro.batch, lambda tensor: tensor.to(device, non_blocking=True))
            weight, last = micro.samples / data.global_samples, index == len(data.micro_batches) - 1
            losses.append(self.strategy.backward(batch, weight, leaf=self.world.rank, first=index == 0, last=last))
        rate = float(self.strategy.optimizer.param_groups[0]["lr"])
        norm = self.strategy.step(training.clip_norm).grad_norm
        if self.schedule is not None:
            self.schedule.step()
        progress.step += 1
        progress.samples_consumed = data.samples_consumed + data.global_samples
        progress.epoch = self.sampler.epoch(progress.samples_consumed)
        self._record_keys(data)
        said = self._consensus.exchange(
            progress.step,
            torch.stack(losses).sum(),
            norm,
            stop=self.control.stop_requested,
            checkpoint_now=self.control.take_checkpoint_request(),
        )
        per_second = data.global_samples / max(time.perf_counter() - started, 1e-9)
        self._posted[progress.step] = (progress.samples_consumed, {"train/lr": rate, "train/samples_per_s": per_second})
        self._heed(said)

    def _after_step(self, data: StepData) -> bool:
        """Validate and checkpoint where they are due; return whether training should end early."""
        training, progress = self.training, self.progress
        epochs_before, epochs_now = (
            consumed // len(self.train_split) for consumed in (data.samples_consumed, progress.samples_consumed)
        )
        improved = False
        if _due(progress.step, training.validate_every_steps, epochs_now > epochs_before):
            improved = self._validate()
        due = _due(progress.step, training.checkpoint_every_steps, epochs_now > epochs_before)
        early = self._patience_is_over()
        # The last step's checkpoint is the final one; two of one step would be one too many.
        if (due or improved or self._checkpoint_asked) and progress.step < self.total_steps and not early:
            self._checkpoint()
        return early

    def _heed(self, said: Said | None) -> None:
        """Journal what all ranks said at the end of a step, and note what it asks for."""
        if said is None:
            return
        consumed, values = self._posted.pop(said.step)
        values = {"train/loss": said.loss, "train/grad_norm": said.grad_norm, **values}
        for name in ("train/loss", "train/grad_norm"):
            if not math.isfinite(values[name]):
                raise TrainingDiverged(
                    f"{name} is {values[name]} at step {said.step}: lower the learning rate or set training.clip_norm"
                )
        self._train_loss = said.loss
        if said.step % self.training.log_every_steps == 0 or said.step == self.total_steps:
            self._journal_metrics(said.step, consumed, values)
        self._checkpoint_asked |= said.checkpoint_now
        self._stop_agreed |= said.stop

    # --- validation and checkpoints -----------------------------------------------------------

    def _validate(self) -> bool:
        """Measure the validation split and return whether the best metric improved."""
        self._heed(self._consensus.settle())
        self.strategy.sync_buffers()
        found = measure(self.task, self.strategy.model, self.validation_split, self.world, self.training.precision)
        metrics = {f"validation/{name}": value for name, value in found.items()}
        progress = self.progress
        self._measured = (progress.step, metrics)
        if metrics:
            self._journal_metrics(progress.step, progress.samples_consumed, metrics)
        improved = self._improves(metrics, *self._best)
        stopping = self.training.early_stopping
        if stopping is not None and stopping.metric in metrics:
            better = self._improves(metrics, stopping.metric, stopping.mode, stopping.min_delta, "early_stopping")
            count = 0 if better else progress.validations_without_improvement + 1
            progress.validations_without_improvement = count
        return improved

    def _improves(
        self, metrics: Mapping[str, float], metric: str, mode: str, min_delta: float = 0.0, purpose: str = "best"
    ) -> bool:
        """Return whether the metric is the best so far, and remember it if it is."""
        value = metrics.get(metric)
        if value is None or not math.isfinite(value):
            return False
        best = self.progress.best.get(purpose)
        gain = math.inf if best is None else (best - value if mode == "min" else value - best)
        if gain <= min_delta:
            return False
        self.progress.best[purpose] = value
        return True

    def _patience_is_over(self) -> bool:
        stopping = self.training.early_stopping
        return stopping is not None and self.progress.validations_without_improvement >= stopping.patience

    def _checkpoint(self, *, last: bool = False, final: bool = False) -> None:
        """Copy everything to the host and have it written in the background.

        ``last``: the last one of this process; ``final``: training is over, for good.
        """
        self._heed(self._consensus.settle())
        progress = self.progress
        if progress.step == self._checkpointed_step or (self._stop_agreed and not last):
            return  # nothing new, or the last one, of this very step, is about to be taken
        self._checkpointed_step, self._checkpoint_asked = progress.step, False
        self.strategy.sync_buffers()
        progress.schedule = None if self.schedule is None else self.schedule.state_dict()
        progress.about |= {"world_size": self.world.size, "strategy": self.training.strategy}
        snapshot = Snapshot(
            self.strategy.model_state(), self.strategy.optimizer_state(), checkpoint.frozen_copy(progress)
        )
        metrics = self._metrics_here()
        place = {"step": progress.step, "epoch": progress.epoch, "samples_consumed": progress.samples_consumed}
        folder = self.folder / "checkpoints" / f"step_{progress.step:08d}-rank_{self.world.rank}"

        def work() -> None:
            if self.world.is_first:
                checkpoint.write(folder, snapshot)
            else:
                checkpoint.write_presence(folder, self.world.rank, {**place, "world_size": self.world.size})
            self.journal.checkpoint(folder, **place, metrics=metrics, final=final)

        self._writer.submit(work)

    def _metrics_here(self) -> dict[str, float]:
        """What is known about the weights as they are now."""
        step, measured = self._measured
        train = {} if self._train_loss is None else {"train/loss": self._train_loss}
        return {**train, **(measured if step == self.progress.step else {})}

    # --- data -----------------------------------------------------------------------------------

    def _total_steps(self) -> int:
        """The step at which training ends, counted over all generations."""
        ends = []
        if self.sampler.end is not None:
            left = max(0, self.sampler.end - self.progress.samples_consumed)
            ends.append(self.progress.step + -(-left // self.training.global_batch))
        if self.training.max_steps is not None:
            ends.append(self.training.max_steps)
        return min(ends)

    def _steps(self) -> Generator[StepData]:
        """Load this rank's part of every step that is left; runs ahead in a thread."""
        consumed = self.progress.samples_consumed
        for _ in range(self.progress.step, self.total_steps):
            batch = self.sampler.batch_size(consumed)
            ids = self.sampler.slice(consumed, self.world.size, self.world.rank).ids
            # The same number of micro-batches on every rank, since some strategies communicate in each.
            largest = slice_bounds(batch, self.world.size, 0)[1]
            pieces = max(1, min(self.training.accumulate, largest))
            bounds = [slice_bounds(len(ids), pieces, piece) for piece in range(pieces)]
            micro = tuple(load(self.task, self.train_split, ids[start:stop]) for start, stop in bounds)
            yield StepData(consumed, batch, micro)
            consumed += batch

    def _journal_metrics(self, step: int, consumed: int, values: Mapping[str, float]) -> None:
        if self.world.is_first:
            self.journal.metrics(
                step,
                values,
                epoch=self.sampler.epoch(consumed),
                samples_consumed=consumed,
                total_steps=self.total_steps,
            )

    def _record_keys(self, data: StepData) -> None:
        if self._record is not None:
            keys = [key for micro in data.micro_batches for key in micro.keys]
            self._record.write(json.dumps({"step": self.progress.step, "keys": keys}) + "\n")
            self._record.flush()


def _due(step: int, every: int | None, epoch_ended: bool) -> bool:
    return epoch_ended if every is None else step % every == 0
