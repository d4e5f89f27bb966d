"""The training loop."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from contracts.events.checkpoint import Exactness
from contracts.ranks import StartedLine
from contracts.spec.training import Training, Watch
from trainbus.agent_link.channels import Control, Journal
from trainbus.data.batch_tensors import to_device
from trainbus.data.loader import Prefetcher
from trainbus.task import Task
from trainbus.trainer import environment
from trainbus.trainer.checkpoint import FailureHistory
from trainbus.trainer.checkpoint.schedule import is_due
from trainbus.trainer.checkpoint.task_artifacts import collect_artifacts
from trainbus.trainer.checkpoint_manager import CheckpointManager
from trainbus.trainer.divergence import TrainingDiverged
from trainbus.trainer.drift import CHECK_EVERY_STEPS, RanksDrifted, checksum
from trainbus.trainer.environment import enable_determinism
from trainbus.trainer.loss_weights import weigh_step
from trainbus.trainer.observers import CompletedStep, MetricsReporter, SampleRecorder, StepObserver
from trainbus.trainer.rate_schedule import RateSchedule
from trainbus.trainer.start_point import UNREPORTED, StartPoint
from trainbus.trainer.starvation import StarvationDetector
from trainbus.trainer.step_agreement import MIN_PREFETCHED_STEPS, StepAgreement, StepBarrier, StepSummary
from trainbus.trainer.step_data import LeafData, StepData, TrainingData
from trainbus.trainer.straggler import StragglerObserver
from trainbus.trainer.strategies import make_strategy
from trainbus.trainer.strategies.base import LossScaleUnderflow, StepResult
from trainbus.trainer.survivor_state import SurvivorStore
from trainbus.trainer.validation import BestMetricTracker, MetricMode, measure_split
from trainbus.trainer.world import World, seed_all


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """What the trainer needs to know beside what it trains: where its files go, and what it reports and keeps."""

    #: Where the journal, ``checkpoints/`` and records go.
    folder: Path
    #: What ``state.json`` says about the run.
    about: Mapping[str, Any] = field(default_factory=dict)
    #: What the agent knows of the node that decides the last bits.
    machine: Mapping[str, str] = field(default_factory=dict)
    #: A validation that improves this metric is followed by a checkpoint.
    best_metric: str = "validation/loss"
    best_mode: MetricMode = "min"
    #: When rank 0 names a straggler; None: never.
    watch: Watch | None = None
    #: How often the run has failed: how often to save its state follows from that.
    history: FailureHistory = field(default_factory=FailureHistory)
    #: Append the keys that each step trains on to ``samples_rank_<n>.jsonl``.
    record_samples: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """How training ended. ``metrics`` are those of the final weights."""

    outcome: Literal["succeeded", "stopped"]
    step: int
    samples_consumed: int
    metrics: dict[str, float]


class Trainer:
    """Trains a task: one object a rank, the same calls on every rank.

    All collective calls happen at points that are functions of the step and of what all ranks agreed on.
    """

    def __init__(
        self,
        task: Task,
        data: TrainingData,
        training: Training,
        settings: TrainerSettings,
        *,
        start: StartPoint | None = None,
        world: World | None = None,
        control: Control | None = None,
        journal: Journal | None = None,
        survivors: SurvivorStore | None = None,
    ) -> None:
        """Build the model and everything around it, as ``start`` has it.

        Args:
            start: the state, or the weights, that training begins with; None: with those of ``task.model()``.
            survivors: where state is saved that outlives the ranks.
        """
        self.task, self.data, self.training, self.settings = task, data, training, settings
        self.world = world or World()
        self.control = control or Control()
        self.journal = journal or Journal(settings.folder / f"rank_{self.world.rank}.jsonl")
        start = start or StartPoint(self.world)
        self.progress, self.resumed_from, self._unreported = start.progress, start.resumed_from, start.unreported
        start.check_order(data.order)
        self.total_steps = data.total_steps(self.progress.step, self.progress.samples_consumed)

        if training.logical_ranks is not None:
            enable_determinism()
        if training.precision == "fp16":
            # A step whose gradient overflowed is left out; the schedule counts it all the same.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        seed_all(training.seed, "model")
        self.strategy = make_strategy(task, training, self.world, start.find_weights)
        scheduler = task.schedule(self.strategy.optimizer, self.total_steps)
        self.schedule = RateSchedule(scheduler, settings.best_metric, settings.best_mode)
        changed = start.has_other_settings(settings.about, self.total_steps)
        start.load_optimizer(self.strategy, self.schedule, has_other_settings=changed)
        self.ema = start.moving_average(self.strategy, training.ema_decay)

        self.environment = environment.describe(self.world.device, settings.machine, self.strategy.model)
        about = start.describe_run(settings.about, training.logical_ranks, self.environment)
        # The model of the task may depend on the dataset: what loads it elsewhere has only this file.
        statistics = {name: each.model_dump() for name, each in task.statistics.items()}
        dataset = {"classes": list(task.classes), "statistics": statistics}
        self.progress.about = about | {"order": data.order.state(), "total_steps": self.total_steps} | dataset
        self.exactness: Exactness = about["exactness"]

        self._best = BestMetricTracker(self.progress, settings.best_metric, settings.best_mode, training.early_stopping)
        self._agreement = StepAgreement(self.world, self.strategy.leaf_count)
        self._barrier = StepBarrier(self._agreement, self.control)
        self._checkpoints = CheckpointManager(
            settings.folder / "checkpoints",
            self.strategy,
            training,
            world=self.world,
            journal=self.journal,
            exactness=self.exactness,
            survivors=survivors or SurvivorStore(),
            history=settings.history,
            artifacts=collect_artifacts(task) if self.world.is_first else {},
        )
        self._checkpointed_step = start.committed_step
        self._metrics = MetricsReporter(
            self.journal, self.world, data.sampler, training.log_every_steps, self.total_steps
        )
        self._starvation = StarvationDetector(training.loading, data.waits, self.world.rank, self.journal.append)
        self._straggler: StragglerObserver | None = None
        self._observers: list[StepObserver] = [self._metrics, self._starvation]
        if settings.watch is not None:
            self._straggler = StragglerObserver(settings.watch, self.strategy.model, self.world, self.journal)
            self._observers.append(self._straggler)
        if settings.record_samples:
            path = settings.folder / f"samples_rank_{self.world.rank}.jsonl"
            self._observers.append(SampleRecorder(path))
        #: The step of the last validation, and what it found.
        self._validated: tuple[int, dict[str, float]] = (-1, {})
        #: Of the state after the last step; posted with the next one.
        self._checksum: Tensor | None = None
        self._stop_agreed = False
        self._checkpoint_requested = False

    def fit(self) -> Outcome:
        """Train to the end, or to a stop that all ranks agreed on. Every checkpoint is on disk when this ends."""
        try:
            return self._train()
        except Exception:
            self._checkpoints.finish_writes()
            raise

    def _train(self) -> Outcome:
        progress = self.progress
        self.strategy.model.train()
        self._report_start()
        steps = self.data.load_steps(
            self.strategy.leaves,
            self.strategy.leaf_count,
            progress.samples_consumed,
            self.total_steps - progress.step,
            pin_for=self.world.gpu,
        )
        early = self._best.is_patience_over  # a run that stopped early and was then placed again
        try:
            if progress.unfinished is not None:
                early = self._finish_step(progress.unfinished)
            with closing(steps), self._starvation.watching(progress.step):
                while not (early or self._stop_agreed):
                    data, waited_s = self._next_batch(steps)
                    if data is None:
                        break
                    self._train_step(data, waited_s, steps)
                    self._checkpoints.prepare(self._averages)
                    early = self._finish_step(data.samples_consumed)
            return self._end_training(early)
        except RuntimeError:  # what a collective raises when a rank is gone
            if self.world.size > 1:
                self._save_survivor_state()
            raise

    # --- one step ---------------------------------------------------------------------------

    def _next_batch(self, steps: Prefetcher[StepData]) -> tuple[StepData | None, float]:
        """Return the samples of the next step, None if no step follows, and the seconds that this rank waited."""
        started = time.perf_counter()
        ready: list[float] = []

        def note_ready() -> None:
            ready.append(time.perf_counter())
            for observer in self._observers:
                observer.on_data_ready()

        for observer in self._observers:
            observer.on_data_wait()
        if not self._barrier.wait(self.progress.step + 1, steps, note_ready):
            self._stop_agreed = True
            return None, 0.0
        data = next(steps, None)
        return data, (ready[0] if ready else time.perf_counter()) - started

    def _train_step(self, data: StepData, waited_s: float, steps: Prefetcher[StepData]) -> None:
        """Take one step: forward and backward of this rank's leaves, the optimizer, and agreement with all ranks."""
        started = time.perf_counter()
        for observer in self._observers:
            observer.on_step_begin(self.progress.step + 1, data)
        copied_s = self._forward_backward(data, steps)
        learning_rate = float(self.strategy.optimizer.param_groups[0]["lr"])
        result = self._optimizer_step()
        self._advance(data)
        if self.progress.step % CHECK_EVERY_STEPS == 0:
            self._checksum = self._checksum_copies()
        step_s = time.perf_counter() - started
        progress = self.progress
        completed = CompletedStep(
            progress.step, data, progress.samples_consumed, learning_rate, step_s, waited_s, copied_s
        )
        for observer in self._observers:
            observer.on_step_end(completed)
        self._apply_summary(self._agreement.complete(result.grad_norm, skipped=result.skipped))
        self.journal.heartbeat(progress.step)

    def _forward_backward(self, data: StepData, steps: Prefetcher[StepData]) -> float:
        """Add the gradients of this rank's leaves, and post their losses; return the seconds of copying to the device.

        Another rank can complete this step as soon as it has this rank's gradients, even if this rank is killed then.
        So the losses are posted before the last backward pass, which sends the last gradients.
        """
        losses: dict[int, Tensor] = {}
        copied_s = 0.0

        def add_loss(leaf: int, loss: Tensor) -> None:
            losses[leaf] = loss
            if leaf == data.leaves[-1].leaf:
                self._post(losses, lacks_data=not steps.has(MIN_PREFETCHED_STEPS))

        weights = weigh_step(self.task, data, self._agreement)
        self.strategy.begin_step(has_empty=weights.has_empty, counted=weights.find_counted(data))
        for leaf in data.leaves:
            copied_s += self._forward_backward_leaf(leaf, weights.shares[leaf.leaf], add_loss)
        return copied_s

    def _forward_backward_leaf(
        self, data: LeafData, shares: Sequence[float], add_loss: Callable[[int, Tensor], None]
    ) -> float:
        """Add the gradient of one leaf; return the seconds of copying to the device.

        ``shares`` are those of its micro-batches in the mean loss; what has none goes through no pass.
        ``add_loss`` gets the leaf's share of the mean loss over the global batch, before the leaf's last backward pass.
        """
        device = self.world.device
        self.journal.heartbeat(self.progress.step)
        # What dropout draws is a function of (seed, step, leaf), on whatever rank and however often it is computed.
        seed_all(self.training.seed, self.progress.step, data.leaf)
        losses: list[Tensor] = []
        copied_s, count = 0.0, len(data.micro_batches)

        def add_micro_loss(loss: Tensor) -> None:
            losses.append(loss)
            if len(losses) == count:
                add_loss(data.leaf, torch.stack(losses).sum())

        for index, (micro, weight) in enumerate(zip(data.micro_batches, shares, strict=True)):
            started = time.perf_counter()
            batch = to_device(micro.batch if weight else None, lambda tensor: tensor.to(device, non_blocking=True))
            copied_s += time.perf_counter() - started
            last = index == count - 1
            self.strategy.backward(batch, weight, leaf=data.leaf, first=index == 0, last=last, on_loss=add_micro_loss)
        return copied_s

    def _optimizer_step(self) -> StepResult:
        """Update the weights, their moving average and the schedule."""
        self._checkpoints.wait_for_staging()
        # A rank may die between the two sends, of its numbers and of its gradients. Without its numbers this step would
        # have no loss: then it fails here, where nothing has changed and the state of the step before is whole.
        self._agreement.wait()
        try:
            result = self.strategy.step(self.training.clip_norm)
        except LossScaleUnderflow as error:
            raise TrainingDiverged(f"step {self.progress.step + 1}: {error}") from error
        if not self.strategy.holds_whole_state:
            self.world.confirm_arrival()  # such an update communicates, and its norm must not pass for divergence
        if self.ema is not None and not result.skipped:
            self.ema.update()
        self.schedule.step()
        return result

    def _advance(self, data: StepData) -> None:
        """Count the step. From here on its state is whole and may be saved."""
        progress = self.progress
        progress.step += 1
        progress.samples_consumed = data.samples_consumed + data.global_samples
        progress.epoch = self.data.sampler.epoch(progress.samples_consumed)
        progress.unfinished = data.samples_consumed
        progress.schedule = self.schedule.state_dict()
        self._checkpoints.record_step(progress, self._averages)
        self.data.report_position(progress.samples_consumed)

    def _post(self, losses: Mapping[int, Tensor], *, lacks_data: bool) -> None:
        """Send the numbers of the step under way to all ranks, and act on the summary of the step before."""
        summary = self._agreement.post(
            self.progress.step + 1,
            losses,
            stop=self.control.stop_requested,
            checkpoint_now=self._checkpoints.is_due_by_clock(),
            lacks_data=lacks_data,
            busy_s=0.0 if self._straggler is None else self._straggler.busy_s,
            checksum=self._checksum,
        )
        self._checksum = None
        self._apply_summary(summary)

    def _checksum_copies(self) -> Tensor | None:
        """Return the checksum of what every rank has a copy of; None where there are no copies."""
        copies = self.strategy.copied_tensors() if self.world.size > 1 else []
        return checksum(copies, self.world.device) if copies else None

    def _check_copies(self) -> None:
        """Compare the ranks' copies of the state: each rank saves a part of it.

        Raises:
            RanksDrifted: they differ.
        """
        own = self._checksum_copies()
        if own is not None and (drifted := self._agreement.compare(own)):
            raise RanksDrifted(self.progress.step, drifted, self.world.size)

    def _apply_summary(self, summary: StepSummary | None) -> None:
        """Pass on what all ranks reported at the end of a step, and note what it asks for."""
        if summary is None:
            return
        if summary.drifted:
            raise RanksDrifted(summary.step - 1, summary.drifted, self.world.size)
        self._barrier.record_summary(summary)
        for name, value in (("train/loss", summary.loss), ("train/grad_norm", summary.grad_norm)):
            if not math.isfinite(value) and not summary.skipped:
                raise TrainingDiverged(
                    f"{name} is {value} at step {summary.step}: lower the learning rate or set training.clip_norm"
                )
        for observer in self._observers:
            observer.on_step_summary(summary)
        self._checkpoint_requested |= summary.checkpoint_now
        self._stop_agreed |= summary.stop

    # --- between steps ------------------------------------------------------------------------

    def _finish_step(self, consumed_before: int) -> bool:
        """Validate and save a checkpoint where they are due; return whether training should end early."""
        training, progress = self.training, self.progress
        samples, improved = len(self.data.train_split), False
        epoch_ended = progress.samples_consumed // samples > consumed_before // samples
        if is_due(progress.step, training.validate_every_steps, epoch_ended=epoch_ended):
            improved = self._validate()
        due = self._checkpoints.schedule.is_due_at_step(progress.step, epoch_ended=epoch_ended)
        progress.unfinished = None
        early = self._best.is_patience_over
        # The last step's checkpoint is the final one, so none is taken here.
        if (due or improved or self._checkpoint_requested) and progress.step < self.total_steps and not early:
            self._save_checkpoint()
        return early

    def _validate(self) -> bool:
        """Measure the validation split; return whether the best metric improved."""
        self._apply_summary(self._agreement.collect())
        self.strategy.sync_buffers()
        if self.ema is not None:
            self._checkpoints.wait_for_staging()
        with self.ema.swapped_in() if self.ema is not None else nullcontext():
            found = measure_split(
                self.task,
                self.strategy.model,
                self.data.validation_split,
                self.world,
                self.training.precision,
                on_chunk=lambda *_: self.journal.heartbeat(self.progress.step),
                workers=self.data.workers,
            )
        metrics = {f"validation/{name}": value for name, value in found.items()}
        progress = self.progress
        self._validated = (progress.step, metrics)
        if metrics:
            self._metrics.report(progress.step, progress.samples_consumed, metrics)
        self.schedule.record_validation(metrics)
        progress.schedule = self.schedule.state_dict()
        return self._best.update(metrics)

    def _save_checkpoint(self, *, last: bool = False, final: bool = False) -> None:
        """Start to write the state in the background.

        ``last``: no further step follows in this process; ``final``: training is over, for good.
        """
        self._apply_summary(self._agreement.collect())
        progress = self.progress
        if progress.step == self._checkpointed_step or (self._stop_agreed and not last):
            return  # nothing is new, or the last checkpoint, of this very step, is about to be taken
        self._checkpointed_step, self._checkpoint_requested = progress.step, False
        self.strategy.sync_buffers()
        self._check_copies()
        progress.about |= {"world_size": self.world.size, "strategy": self.training.strategy}
        self._checkpoints.save(
            progress,
            epoch=self.data.sampler.epoch_of_step(progress.samples_consumed),
            ema=self._averages,
            metrics=self._current_metrics(),
            last=last,
            final=final,
            hurry=last and not final,
        )

    def _end_training(self, early: bool) -> Outcome:
        progress = self.progress
        stopped = self._stop_agreed and not early and progress.step < self.total_steps
        if not stopped and self._validated[0] != progress.step:
            self._validate()
        if progress.step or not stopped:  # a run that stopped before its first step has nothing to save
            self._save_checkpoint(last=True, final=not stopped)
        self._checkpoints.wait_for_writes()
        outcome: Literal["succeeded", "stopped"] = "stopped" if stopped else "succeeded"
        return Outcome(outcome, progress.step, progress.samples_consumed, self._current_metrics())

    def _save_survivor_state(self) -> None:
        """Save the last whole step's state in memory, with its metrics: the rank that reports them may be gone.

        Raises:
            TrainingDiverged: that is why the other rank is gone.
        """
        with suppress(RuntimeError):  # on CUDA, a rank may have been gone before it sent anything
            self._apply_summary(self._agreement.collect())
        metrics = self._metrics.latest
        if metrics is not None and metrics.step == self.progress.step:
            self.progress.about[UNREPORTED] = asdict(metrics)
        self._checkpoints.save_survivor_state(self._averages)

    # --- reporting ------------------------------------------------------------------------------

    def _report_start(self) -> None:
        progress = self.progress
        self.journal.append(
            StartedLine(
                time=time.time(),
                step=progress.step,
                samples_consumed=progress.samples_consumed,
                resumed_from=self.resumed_from,
                environment=self.environment,
                environment_digest=environment.digest(self.environment),
                exactness=self.exactness,
            )
        )
        if self._unreported is not None:
            self._metrics.report(progress.step, progress.samples_consumed, self._unreported)

    @property
    def _averages(self) -> Mapping[str, Tensor] | None:
        return None if self.ema is None else self.ema.tensors

    def _current_metrics(self) -> dict[str, float]:
        """Return what is known about the weights as they are now."""
        step, validated = self._validated
        train = {} if self._metrics.train_loss is None else {"train/loss": self._metrics.train_loss}
        return {**train, **(validated if step == self.progress.step else {})}
