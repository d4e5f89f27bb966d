"""Random lives of a run, as in ``order_trials``, through the whole reader: shards, feeds, worker processes."""

from __future__ import annotations

import random
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch

from contracts.spec.training import Training
from tests.data import shards
from tests.data.reference_order import Reference
from trainbus.data.loader import BatchLoader, Prefetcher
from trainbus.data.order import LaneOrder
from trainbus.data.sampler import Sampler
from trainbus.data.workers import WorkerPool
from trainbus.task import Task
from trainbus.trainer.step_data import StepData, StepLoader


class Numbers(Task):
    """Each sample is its own number."""

    def decode(self, sample: dict[str, bytes]) -> torch.Tensor:
        return torch.tensor(int(sample["txt"]))


def trial(seed: int, folder: Path) -> int:
    """Live one life and compare what the batches hold with the reference; return the number of steps.

    Raises:
        AssertionError: a sample was lost, repeated, or came in another order.
    """
    rng = random.Random(seed)
    samples, per_shard, epochs = rng.randint(20, 200), rng.randint(3, 20), rng.randint(1, 2)
    lanes, window = rng.choice([None, None, 3, 8]), rng.choice([None, 1, 3])
    content = [(f"k{number:05}", {"txt": str(number).encode()}) for number in range(samples)]
    dataset = shards.write(folder, {"train": content}, per_shard=per_shard)
    sizes, end = dataset.shard_samples("train"), samples * epochs

    def order() -> LaneOrder:
        return LaneOrder(dataset.dataset_id, sizes, seed, lanes=lanes, window=window)

    reference = Reference(dataset.dataset_id, sizes, seed, order().lanes, order().window_samples)
    stream = reference.stream(epochs)
    trained: dict[int, int] = {}
    saved, steps = 0, 0
    with closing(WorkerPool(rng.randint(0, 8), Numbers)) as workers:
        while saved < end:
            batch, world_size = rng.choice([5, 16, 33]), rng.randint(1, 9)
            training = Training(epochs=epochs, global_batch=batch, accumulate=rng.choice([1, 3]))
            consumed, unsaved = saved, dict[int, int]()
            with ExitStack() as generation:
                ranks: list[Any] = []
                for rank in range(world_size):
                    loading = BatchLoader(Numbers(), dataset.split("train"), workers=workers)
                    feed = StepLoader(
                        loading, Sampler(order(), batch, end), training, range(rank, rank + 1), world_size
                    )
                    items = Prefetcher(feed.steps(consumed, -(-(end - consumed) // batch)), rng.randint(1, 3))
                    ranks.append(generation.enter_context(closing(items)))
                for _ in range(rng.randint(1, 8)):  # then it is killed, with batches on their way
                    step: list[StepData] = [next(rank) for rank in ranks]
                    places = reference.batch(consumed, step[0].global_samples)
                    micros = [micro for data in step for leaf in data.leaves for micro in leaf.micro_batches]
                    got = [int(value) for micro in micros if micro.batch is not None for value in micro.batch]
                    assert got == [stream[position] for position in places], (seed, consumed)
                    assert [key for micro in micros for key in micro.keys] == [f"k{number:05}" for number in got]
                    assert not unsaved.keys() & set(places)
                    unsaved |= dict(zip(places, got, strict=True))
                    consumed += len(places)
                    steps += 1
                    if rng.random() < 0.5 or consumed == end:  # a checkpoint
                        assert not trained.keys() & unsaved.keys()
                        trained |= unsaved
                        unsaved, saved = {}, consumed
                    if consumed == end:
                        break
    assert [trained[position] for position in range(end)] == stream
    return steps
