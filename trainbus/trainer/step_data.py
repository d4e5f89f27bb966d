"""What a rank is to compute in each step: the leaves it has, and their samples, loaded ahead."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from contracts.events.train import Training
from trainbus.data.loader import BatchLoader, MicroBatch, pipeline_results
from trainbus.data.sampler import Sampler, slice_bounds


@dataclass(frozen=True, slots=True)
class LeafData:
    """One leaf's samples in one step: a function of the step and the leaf, whoever computes it."""

    leaf: int
    micro_batches: tuple[MicroBatch, ...]


@dataclass(frozen=True, slots=True)
class StepData:
    """One rank's part of one step."""

    samples_consumed: int  # before the step
    global_samples: int
    leaves: tuple[LeafData, ...]

    @property
    def own_samples(self) -> int:
        return sum(micro.samples for leaf in self.leaves for micro in leaf.micro_batches)


def total_steps_of(training: Training, sampler: Sampler, step: int, samples_consumed: int) -> int:
    """Return the step at which training ends, counted over all generations, of a run that has got so far."""
    ends = []
    if sampler.end is not None:
        left = max(0, sampler.end - samples_consumed)
        ends.append(step + -(-left // training.global_batch))
    if training.max_steps is not None:
        ends.append(training.max_steps)
    return min(ends)


@dataclass(frozen=True, slots=True)
class StepLoader:
    """Loads the parts of a rank that computes ``leaves`` of ``leaf_count``."""

    loading: BatchLoader
    sampler: Sampler
    training: Training
    leaves: range
    leaf_count: int

    def steps(self, samples_consumed: int, count: int) -> Iterator[StepData]:
        """Load the next ``count`` steps, one after the other; as many at once as keep the workers busy."""
        workers = self.loading.workers
        at_once = 0 if workers is None else -(-(len(workers) + 1) // max(1, len(self.leaves) * self._pieces()))
        return pipeline_results(self._started(samples_consumed, count), at_once)

    def _started(self, samples_consumed: int, count: int) -> Iterator[Callable[[], StepData]]:
        for _ in range(count):
            batch = self.sampler.batch_size(samples_consumed)
            yield self._start(samples_consumed, batch)
            samples_consumed += batch

    def _start(self, samples_consumed: int, batch: int) -> Callable[[], StepData]:
        leaves = [(leaf, self._start_leaf(leaf, samples_consumed, batch)) for leaf in self.leaves]

        def result() -> StepData:
            done = tuple(LeafData(leaf, tuple(micro() for micro in micros)) for leaf, micros in leaves)
            return StepData(samples_consumed, batch, done)

        return result

    def _start_leaf(self, leaf: int, samples_consumed: int, batch: int) -> list[Callable[[], MicroBatch]]:
        start, stop = slice_bounds(batch, self.leaf_count, leaf)
        # As many micro-batches in every leaf, since some strategies communicate in each.
        pieces = self._pieces(batch)
        bounds = [slice_bounds(stop - start, pieces, piece) for piece in range(pieces)]
        return [
            self.loading.start_slice(self.sampler.select(samples_consumed, start + a, start + b), self.training.seed)
            for a, b in bounds
        ]

    def _pieces(self, batch: int | None = None) -> int:
        """Return how many micro-batches a leaf's part is cut into."""
        largest = slice_bounds(self.training.global_batch if batch is None else batch, self.leaf_count, 0)[1]
        return max(1, min(self.training.accumulate, largest))


class SampleRecorder:
    """Keeps what a rank trained on: one JSON line a leaf, with the keys of its samples in their order."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    def append(self, step: int, data: StepData) -> None:
        for leaf in data.leaves:
            keys = [key for micro in leaf.micro_batches for key in micro.keys]
            self._file.write(json.dumps({"step": step, "leaf": leaf.leaf, "keys": keys}) + "\n")
        self._file.flush()
