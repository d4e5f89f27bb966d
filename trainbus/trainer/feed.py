"""What a rank is to compute in each step: the leaves it has, and their samples, loaded ahead."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from contracts.events.train import Training
from trainbus.data.loader import MicroBatch, load_for_training
from trainbus.data.reader import SplitReader
from trainbus.data.sampler import Sampler, slice_bounds
from trainbus.task import Task


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


def last_step(training: Training, sampler: Sampler, step: int, samples_consumed: int) -> int:
    """Return the step at which training ends, counted over all generations, of a run that has got so far."""
    ends = []
    if sampler.end is not None:
        left = max(0, sampler.end - samples_consumed)
        ends.append(step + -(-left // training.global_batch))
    if training.max_steps is not None:
        ends.append(training.max_steps)
    return min(ends)


@dataclass(frozen=True, slots=True)
class Feed:
    """Loads the parts of a rank that computes ``leaves`` of ``leaf_count``."""

    task: Task
    split: SplitReader
    sampler: Sampler
    training: Training
    leaves: range
    leaf_count: int

    def steps(self, samples_consumed: int, count: int) -> Iterator[StepData]:
        """Load the next ``count`` steps, one after the other."""
        for _ in range(count):
            batch = self.sampler.batch_size(samples_consumed)
            leaves = tuple(self._leaf(leaf, samples_consumed, batch) for leaf in self.leaves)
            yield StepData(samples_consumed, batch, leaves)
            samples_consumed += batch

    def _leaf(self, leaf: int, samples_consumed: int, batch: int) -> LeafData:
        start, stop = slice_bounds(batch, self.leaf_count, leaf)
        # As many micro-batches in every leaf, since some strategies communicate in each.
        largest = slice_bounds(batch, self.leaf_count, 0)[1]
        pieces = max(1, min(self.training.accumulate, largest))
        bounds = [slice_bounds(stop - start, pieces, piece) for piece in range(pieces)]
        first = samples_consumed + start
        return LeafData(leaf, tuple(self._load(first + a, first + b) for a, b in bounds))

    def _load(self, start: int, stop: int) -> MicroBatch:
        return load_for_training(self.task, self.split, self.sampler, self.training.seed, start, stop)


class Record:
    """Keeps what a rank trained on: one JSON line a leaf, with the keys of its samples in their order."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    def append(self, step: int, data: StepData) -> None:
        for leaf in data.leaves:
            keys = [key for micro in leaf.micro_batches for key in micro.keys]
            self._file.write(json.dumps({"step": step, "leaf": leaf.leaf, "keys": keys}) + "\n")
        self._file.flush()
