"""The training loop."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from contracts.events.checkpoint import Exactness
from contracts.events.train import Training, Watch
from trainbus.agent_link import Control, Journal
from trainbus.data.batch_timings import BatchTimings
from trainbus.data.dataset import Dataset
from trainbus.data.loader import BatchLoader, Prefetcher, prefetch, to_device
from trainbus.data.order import LaneOrder
from trainbus.data.read_plan import ReadAhead, ReadPlan
from trainbus.data.sampler import Sampler
from trainbus.data.workers import WorkerPool
from trainbus.task import Task
from trainbus.trainer import environment
from trainbus.trainer.best_metric import BestMetricTracker, MetricMode
from trainbus.trainer.checkpoint import FailureHistory
from trainbus.trainer.checkpoint.schedule import due
from trainbus.trainer.checkpoint_manager import CheckpointManager
from trainbus.trainer.exact.determinism import enable_determinism
from trainbus.trainer.start_point import UNREPORTED, InitialWeights, StartPoint
from trainbus.trainer.starvation import StarvationDetector
from trainbus.trainer.step_agreement import StepAgreement, StepSummary
from trainbus.trainer.step_barrier import STOCK, StepBarrier
from trainbus.trainer.step_data import LeafData, SampleRecorder, StepData, StepLoader, total_steps_of
from trainbus.trainer.straggler import StragglerObserver
from trainbus.trainer.strategies import make_strategy
from trainbus.trainer.strategies.loss_scale import LossScaleUnderflow
from trainbus.trainer.survivor_store import SurvivorStore
from trainbus.trainer.validation import measure
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
        resume_step: int = 0,
        init: InitialWeights | None = None,
        best_metric: str = "validation/loss",
        best_mode: MetricMode = "min",
        about: Mapping[str, Any] | None = None,
        machine: Mapping[str, str] | None = None,
        watch: Watch | None = None,
        memory: SurvivorStore | None = None,
        history: FailureHistory | None = None,
        record_samples: bool = False,
        waits: BatchTimings | None = None,
        workers: WorkerPool | None = None,
        shards: ReadAhead | None = None,
    ) -> None:
        """Build the model and take up ``resume_folder``, or begin with the weights of ``init``.

        Args:
            folder: where the journal, ``checkpoints/`` and records go.
            resume_step: the step of ``resume_folder``: what was left on the nodes counts if it is as new.
            best_metric: a checkpoint is taken whenever a validation improves this.
            about: what ``state.json`` says about the run.
            machine: what the agent knows of the node that decides the last bits.
            watch: when a rank is named for holding the others up; None: never.
            memory: where generations before may have left a newer state than ``resume_folder``.
            history: what the run has been through: how often to save its state follows from that.
            record_samples: append the keys each step trains on to ``samples_rank_<n>.jsonl``.
            waits: where whoever makes the batches counts the time it takes.
            workers: processes that decode; None: as many as ``training.loading.workers`` says are forked here.
            shards: has those brought here that this rank will need; None: they are all here.
        """
        self.task, self.dataset, self.training, self.folder = task, dataset, training, folder
        self.world = world or World()
        self.control = control or Control()
        self.journal = journal or Journal(folder / f"rank_{self.world.rank}.jsonl")
        self.train_split, self.validation_split = dataset.split("train"), dataset.split("validation")
        order = self._order()
        end = None if training.epochs is None else training.epochs * len(self.train_split)
        self.sampler = Sampler(order, training.global_batch, end)

        about, memory = about or {}, memory or SurvivorStore()
        begun = StartPoint(self.world, memory, resume_folder, resume_step, about.get("run_id"), init)
        self._unreported = begun.unreported
        self.progress, self.resumed_from = begun.progress, begun.resumed_from
        begun.check_order(order)
        self.total_steps = total_steps_of(training, self.sampler, self.progress.step, self.progress.samples_consumed)
        if training.logical_ranks is not None:
            enable_determinism()
        if training.precision == "fp16":
            # A step whose gradient overflowed is left out; the schedule counts it all the same.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        seed_all(training.seed, "model")
        model = task.model()
        begun.put_weights(model)
        self.strategy = make_strategy(task, model, training, self.world)
        self.schedule = task.schedule(self.strategy.optimizer, self.total_steps)
        begun.put_rest(self.strategy, self.schedule)
        self.ema = begun.averages(self.strategy, training.ema_decay)
        self._checkpointed_step = begun.committed_step
        self.environment = environment.environment(self.world.device, machine)
        self.progress.about = begun.about(about, training.logical_ranks, self.environment) | {"order": order.state()}
        self.exactness: Exactness = self.progress.about["exactness"]

        self._best = BestMetricTracker(self.progress, best_metric, best_mode, training.early_stopping)
        self._agreement = StepAgreement(self.world, self.strategy.leaf_count)
        self._barrier = StepBarrier(self._agreement, self.control)
        self._checkpoints = CheckpointManager(
            folder / "checkpoints",
            self.strategy,
            training,
            world=self.world,
            journal=self.journal,
            exactness=self.exactness,
            memory=memory,
            history=history,
        )
        self._record = SampleRecorder(folder / f"samples_rank_{self.world.rank}.jsonl") if record_samples else None
        self._straggler = (
            None if watch is None else StragglerObserver(watch, self.strategy.model, self.world, self.journal)
        )
        self.waits = waits or BatchTimings()
        self._workers = workers or WorkerPool(training.loading.workers, lambda: task)
        self._starvation = StarvationDetector(training.loading, self.waits, self.world.rank, self.journal.starved)
        self._copied_s = 0.0
        self._shards = shards
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
        self.journal.started(
            progress.step,
            progress.samples_consumed,
            resumed_from=self.resumed_from,
            environment=self.environment,
            environment_digest=environment.digest(self.environment),
            exactness=self.exactness,
        )
        if self._unreported is not None:
            self._journal_metrics(progress.step, progress.samples_consumed, self._unreported)
        strategy = self.strategy
        pin = self.world.device.type == "cuda"
        loading = BatchLoader(self.task, self.train_split, workers=self._workers, waits=self.waits, pin=pin)
        feed = StepLoader(loading, self.sampler, self.training, strategy.leaves, strategy.leaf_count)
        if self._shards is not None:
            # With an order of its own, since it is asked from another thread than the feed's.
            plan = ReadPlan(self._order(), self.training.global_batch, feed.leaf_count, feed.leaves, self.sampler.end)
            self._shards.plan("train", plan.needs)
            self._shards.position(progress.samples_consumed)
        left = feed.steps(progress.samples_consumed, self.total_steps - progress.step)
        early = self._best.patience_is_over  # a run that stopped early and was then placed again
        prepared = False
        try:
            if progress.unfinished is not None:
                early = self._after_step(progress.unfinished)
            watching = self._starvation.watching(progress.step)
            with closing(prefetch(left, self.training.loading.ahead)) as steps, watching:
                while not (early or self._stop_agreed):
                    data, waited_s = self._next(steps)
                    if data is None:
                        break
                    self._train_step(data, waited_s, steps)
                    if not prepared:
                        self._checkpoints.prepare(self._averages)
                        prepared = True
                    early = self._after_step(data.samples_consumed)
            return self._end(early)
        except RuntimeError:  # what a collective raises when a rank is gone
            if self.world.size > 1:
                self._hear_the_last()
                self._checkpoints.leave_behind(self._averages)
            raise

    def _order(self) -> LaneOrder:
        loading = self.training.loading
        return LaneOrder(
            self.dataset.dataset_id,
            self.dataset.shard_samples("train"),
            self.training.seed,
            lanes=loading.lanes,
            window=loading.window,
        )

    def _hear_the_last(self) -> None:
        """Leave what was said at the last whole step with its state: the rank that reports it may be gone."""
        with suppress(RuntimeError, TrainingDiverged):  # or a rank was gone before it had said anything
            said = self._agreement.settle()
            if said is not None and said.step == self.progress.step:
                consumed, values = self._posted[said.step]
                values = {"train/loss": said.loss, "train/grad_norm": said.grad_norm, **values}
                self.progress.about[UNREPORTED] = {"step": said.step, "samples_consumed": consumed, "values": values}
                self._heed(said)

    def _end(self, early: bool) -> Outcome:
        progress = self.progress
        stopped = self._stop_agreed and not early and progress.step < self.total_steps
        if not stopped and self._measured[0] != progress.step:
            self._validate()
        if progress.step or not stopped:  # else there is nothing yet to go on from
            self._checkpoint(last=True, final=not stopped)
        self._checkpoints.join()
        outcome: Literal["succeeded", "stopped"] = "stopped" if stopped else "succeeded"
        return Outcome(outcome, progress.step, progress.samples_consumed, self._metrics_here())

    def _next(self, steps: Prefetcher[StepData]) -> tuple[StepData | None, float]:
        """Return the next step's samples, and the seconds that this rank waited for them; None: no step follows."""
        asked = time.perf_counter()
        self._starvation.waiting()
        got: list[float] = []

        def ready() -> None:
            self._starvation.got()
            got.append(time.perf_counter())

        if not self._barrier.opens(self.progress.step + 1, steps, ready):
            self._stop_agreed = True
            return None, 0.0
        data = next(steps, None)
        return data, (got[0] if got else time.perf_counter()) - asked

    # --- one step ---------------------------------------------------------------------------

    def _train_step(self, data: StepData, waited_s: float, following: Prefetcher[StepData]) -> None:
        """Take one step; ``waited_s`` is how long its samples were waited for."""
        training, progress = self.training, self.progress
        started, self._copied_s = time.perf_counter(), 0.0
        if self._straggler is not None:
            self._straggler.begin()
        losses = {leaf.leaf: self._leaf(leaf, data.global_samples) for leaf in data.leaves}
        rate = float(self.strategy.optimizer.param_groups[0]["lr"])
        self._checkpoints.before_update()
        try:
            result = self.strategy.step(training.clip_norm)
        except LossScaleUnderflow as error:
            raise TrainingDiverged(f"step {progress.step + 1}: {error}") from error
        if self.ema is not None and not result.skipped:
            self.ema.update()
        if self.schedule is not None:
            self.schedule.step()
        progress.step += 1
        progress.samples_consumed = data.samples_consumed + data.global_samples
        progress.epoch = self.sampler.epoch(progress.samples_consumed)
        progress.unfinished = data.samples_consumed
        progress.schedule = None if self.schedule is None else self.schedule.state_dict()
        self._checkpoints.after_update(progress, self._averages)
        if self._record is not None:
            self._record.append(progress.step, data)
        per_second = data.global_samples / max(time.perf_counter() - started, 1e-9)
        values = {"train/lr": rate, "train/samples_per_s": per_second, "train/data_wait_s": waited_s}
        self._posted[progress.step] = (progress.samples_consumed, values)
        self.waits.add("transfer", self._copied_s)
        self._starvation.saw(progress.step, waited_s + self._copied_s)
        if self._shards is not None:
            self._shards.position(progress.samples_consumed)
        said = self._agreement.exchange(
            progress.step,
            losses,
            result.grad_norm,
            stop=self.control.stop_requested,
            checkpoint_now=self.control.take_checkpoint_request() or self._checkpoints.by_clock(),
            skipped=result.skipped,
            short=not following.has(STOCK),
            busy_s=0.0 if self._straggler is None else self._straggler.busy_s(data, waited_s),
        )
        self._heed(said)
        self.journal.tick(progress.step)

    def _leaf(self, data: LeafData, global_samples: int) -> Tensor:
        """Add one leaf's gradient; return its share of the mean loss over the global batch."""
        device = self.world.device
        self.journal.tick(self.progress.step)
        # What dropout draws is a function of (seed, step, leaf): whoever computes it, and whenever, draws the same.
        seed_all(self.training.seed, self.progress.step, data.leaf)
        losses = []
        for index, micro in enumerate(data.micro_batches):
            copying = time.perf_counter()
            batch = to_device(micro.batch, lambda tensor: tensor.to(device, non_blocking=True))
            self._copied_s += time.perf_counter() - copying
            weight, last = micro.samples / global_samples, index == len(data.micro_batches) - 1
            losses.append(self.strategy.backward(batch, weight, leaf=data.leaf, first=index == 0, last=last))
        return torch.stack(losses).sum()

    def _after_step(self, consumed_before: int) -> bool:
        """Validate and checkpoint where they are due; return whether training should end early."""
        training, progress = self.training, self.progress
        samples, improved = len(self.train_split), False
        ended = progress.samples_consumed // samples > consumed_before // samples
        if due(progress.step, training.validate_every_steps, epoch_ended=ended):
            improved = self._validate()
        wanted = self._checkpoints.when.at(progress.step, epoch_ended=ended)
        progress.unfinished = None
        early = self._best.patience_is_over
        # The last step's checkpoint is the final one; two of one step would be one too many.
        if (wanted or improved or self._checkpoint_asked) and progress.step < self.total_steps and not early:
            self._checkpoint()
        return early

    def _heed(self, said: StepSummary | None) -> None:
        """Journal what all ranks said at the end of a step, and note what it asks for."""
        if said is None:
            return
        self._barrier.heed(said)
        consumed, values = self._posted.pop(said.step)
        values = {"train/loss": said.loss, "train/grad_norm": said.grad_norm, **values}
        for name in ("train/loss", "train/grad_norm"):
            if not math.isfinite(values[name]) and not said.skipped:
                raise TrainingDiverged(
                    f"{name} is {values[name]} at step {said.step}: lower the learning rate or set training.clip_norm"
                )
        if math.isfinite(said.loss):
            self._train_loss = said.loss
        if self._straggler is not None:
            self._straggler.heed(said)
        if said.step % self.training.log_every_steps == 0 or said.step == self.total_steps:
            self._journal_metrics(said.step, consumed, values)
        self._checkpoint_asked |= said.checkpoint_now
        self._stop_agreed |= said.stop

    # --- validation and checkpoints -----------------------------------------------------------

    def _validate(self) -> bool:
        """Measure the validation split and return whether the best metric improved."""
        self._heed(self._agreement.settle())
        self.strategy.sync_buffers()
        if self.ema is not None:
            self._checkpoints.finish_reading()
        with self.ema.swapped_in() if self.ema is not None else nullcontext():
            found = measure(
                self.task,
                self.strategy.model,
                self.validation_split,
                self.world,
                self.training.precision,
                each=lambda *_: self.journal.tick(self.progress.step),
                workers=self._workers,
            )
        metrics = {f"validation/{name}": value for name, value in found.items()}
        progress = self.progress
        self._measured = (progress.step, metrics)
        if metrics:
            self._journal_metrics(progress.step, progress.samples_consumed, metrics)
        return self._best.saw(metrics)

    def _checkpoint(self, *, last: bool = False, final: bool = False) -> None:
        """Have everything written in the background.

        ``last``: the last one of this process; ``final``: training is over, for good.
        """
        self._heed(self._agreement.settle())
        progress = self.progress
        if progress.step == self._checkpointed_step or (self._stop_agreed and not last):
            return  # nothing new, or the last one, of this very step, is about to be taken
        self._checkpointed_step, self._checkpoint_asked = progress.step, False
        self.strategy.sync_buffers()
        progress.about |= {"world_size": self.world.size, "strategy": self.training.strategy}
        self._checkpoints.save(
            progress,
            ema=self._averages,
            metrics=self._metrics_here(),
            last=last,
            final=final,
            hurry=last and not final,
        )

    @property
    def _averages(self) -> Mapping[str, Tensor] | None:
        return None if self.ema is None else self.ema.tensors

    def _metrics_here(self) -> dict[str, float]:
        """What is known about the weights as they are now."""
        step, measured = self._measured
        train = {} if self._train_loss is None else {"train/loss": self._train_loss}
        return {**train, **(measured if step == self.progress.step else {})}

    # --- reporting ------------------------------------------------------------------------------

    def _journal_metrics(self, step: int, consumed: int, values: Mapping[str, float]) -> None:
        if self.world.is_first:
            self.journal.metrics(
                step,
                values,
                epoch=self.sampler.epoch(consumed),
                samples_consumed=consumed,
                total_steps=self.total_steps,
            )
