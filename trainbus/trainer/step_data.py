"""The samples of each step: which leaves a rank computes, and their micro-batches, loaded ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from contracts.spec.training import Training
from trainbus.data.batch_timings import BatchTimings
from trainbus.data.dataset import Dataset
from trainbus.data.loader import BatchLoader, MicroBatch, Prefetcher, pipeline_results
from trainbus.data.order import LaneOrder
from trainbus.data.read_plan import ReadAhead, ReadPlan
from trainbus.data.sampler import Sampler, slice_bounds
from trainbus.data.workers import WorkerPool
from trainbus.task import Task


@dataclass(frozen=True, slots=True)
class LeafData:
    """The samples of one leaf in one step: a function of the step and the leaf, the same on every rank."""

    leaf: int
    micro_batches: tuple[MicroBatch, ...]


@dataclass(frozen=True, slots=True)
class StepData:
    """One rank's part of one step."""

    samples_consumed: int  # before the step
    global_samples: int
    leaves: tuple[LeafData, ...]
    #: A micro-batch of some leaf, of this rank or another, has no samples.
    has_empty: bool = False

    @property
    def own_samples(self) -> int:
        return sum(micro.samples for leaf in self.leaves for micro in leaf.micro_batches)


@dataclass(frozen=True, slots=True)
class StepLoader:
    """Loads the samples of a rank that computes ``leaves`` of ``leaf_count``."""

    loading: BatchLoader
    sampler: Sampler
    training: Training
    leaves: range
    leaf_count: int

    def steps(self, samples_consumed: int, count: int) -> Iterator[StepData]:
        """Load the next ``count`` steps, one after the other; as many at once as keep the workers busy."""
        workers = self.loading.workers
        at_once = 0 if workers is None else -(-(len(workers) + 1) // max(1, len(self.leaves) * self._pieces()))
        return pipeline_results(self._start_steps(samples_consumed, count), at_once)

    def _start_steps(self, samples_consumed: int, count: int) -> Iterator[Callable[[], StepData]]:
        for _ in range(count):
            batch = self.sampler.batch_size(samples_consumed)
            yield self._start(samples_consumed, batch)
            samples_consumed += batch

    def _start(self, samples_consumed: int, batch: int) -> Callable[[], StepData]:
        leaves = [(leaf, self._start_leaf(leaf, samples_consumed, batch)) for leaf in self.leaves]
        has_empty = self._pieces(batch) > batch // self.leaf_count

        def result() -> StepData:
            done = tuple(LeafData(leaf, tuple(micro() for micro in micros)) for leaf, micros in leaves)
            return StepData(samples_consumed, batch, done, has_empty)

        return result

    def _start_leaf(self, leaf: int, samples_consumed: int, batch: int) -> list[Callable[[], MicroBatch]]:
        start, stop = slice_bounds(batch, self.leaf_count, leaf)
        # As many micro-batches in every leaf, since some strategies communicate in each.
        pieces = self._pieces(batch)
        bounds = [slice_bounds(stop - start, pieces, piece) for piece in range(pieces)]
        return [
            self.loading.start(part.ids, part.epochs, self.training.seed)
            for part in (self.sampler.select(samples_consumed, start + a, start + b) for a, b in bounds)
        ]

    def _pieces(self, batch: int | None = None) -> int:
        """Return how many micro-batches a leaf's part is cut into."""
        largest = slice_bounds(self.training.global_batch if batch is None else batch, self.leaf_count, 0)[1]
        return max(1, min(self.training.accumulate, largest))


class TrainingData:
    """The samples that a run trains on and those it is measured with, in the run's order."""

    def __init__(
        self,
        task: Task,
        dataset: Dataset,
        training: Training,
        *,
        workers: WorkerPool | None = None,
        waits: BatchTimings | None = None,
        arrival: ReadAhead | None = None,
    ) -> None:
        """Load nothing yet.

        Args:
            workers: processes that decode; None: as many as ``training.loading.workers`` says are forked here.
            waits: counts the time that making batches takes.
            arrival: brings the shards here that this rank will need; None: they are all here.
        """
        self._task, self._dataset, self._training, self._arrival = task, dataset, training, arrival
        self.workers = workers or WorkerPool(training.loading.workers, lambda: task)
        self.waits = waits or BatchTimings()
        self.train_split, self.validation_split = dataset.split("train"), dataset.split("validation")
        self.order = self._make_order()
        end = None if training.epochs is None else training.epochs * len(self.train_split)
        self.sampler = Sampler(self.order, training.global_batch, end)

    def total_steps(self, step: int, samples_consumed: int) -> int:
        """Return the step at which training ends, counted over all generations, of a run that has got so far."""
        ends = []
        if self.sampler.end is not None:
            left = max(0, self.sampler.end - samples_consumed)
            ends.append(step + -(-left // self._training.global_batch))
        if self._training.max_steps is not None:
            ends.append(self._training.max_steps)
        return min(ends)

    def load_steps(
        self, leaves: range, leaf_count: int, samples_consumed: int, count: int, *, pin_for: torch.device | None
    ) -> Prefetcher[StepData]:
        """Begin to load the next ``count`` steps of a rank that computes ``leaves`` of ``leaf_count``.

        ``pin_for``: the GPU for which they are put into pinned memory, from where it copies while it computes.
        """
        if self._arrival is not None:
            # The plan has an order of its own, since the arrival asks it from another thread than the loader's.
            plan = ReadPlan(self._make_order(), self._training.global_batch, leaf_count, leaves, self.sampler.end)
            self._arrival.set_plan("train", plan.needs)
            self._arrival.set_position(samples_consumed)
        loading = BatchLoader(self._task, self.train_split, workers=self.workers, waits=self.waits, pin_for=pin_for)
        loader = StepLoader(loading, self.sampler, self._training, leaves, leaf_count)
        return Prefetcher(loader.steps(samples_consumed, count), self._training.loading.ahead)

    def report_position(self, samples_consumed: int) -> None:
        """Report how far training has got to what brings the shards."""
        if self._arrival is not None:
            self._arrival.set_position(samples_consumed)

    def _make_order(self) -> LaneOrder:
        loading = self._training.loading
        return LaneOrder(
            self._dataset.dataset_id,
            self._dataset.shard_samples("train"),
            self._training.seed,
            lanes=loading.lanes,
            window=loading.window,
        )
