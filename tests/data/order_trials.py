"""Random lives of a run: resized, killed, resumed from its state alone, its batch changed at checkpoints."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tests.data.reference_order import Reference
from trainbus.data.order import LaneOrder
from trainbus.data.sampler import Sampler, slice_bounds


@dataclass(frozen=True)
class Life:
    """One dataset and the order it is read in."""

    dataset_id: str
    shards: list[int]
    seed: int
    lanes: int | None
    window: int | None
    epochs: int

    @property
    def samples(self) -> int:
        return sum(self.shards)

    def order(self) -> LaneOrder:
        return LaneOrder(self.dataset_id, self.shards, self.seed, lanes=self.lanes, window=self.window)


def life(rng: random.Random) -> Life:
    shards = [rng.randint(1, 40) for _ in range(rng.randint(1, 24))]
    return Life(
        dataset_id=f"{rng.getrandbits(256):064x}",
        shards=shards,
        seed=rng.getrandbits(63),
        lanes=rng.choice([None, None, 1, 2, 3, 8, 13, 64]),
        window=rng.choice([None, None, 1, 2, 5, 30]),
        epochs=rng.randint(1, 3),
    )


def trial(seed: int) -> int:
    """Live one life and compare what was trained on with the reference; return the number of steps.

    Raises:
        AssertionError: a sample was lost, repeated, or came in another order.
    """
    rng = random.Random(seed)
    run = life(rng)
    order = run.order()
    reference = Reference(run.dataset_id, run.shards, run.seed, order.lanes, order.window_samples)
    stream = reference.stream(run.epochs)
    for epoch in range(run.epochs):
        assert sorted(stream[epoch * run.samples : (epoch + 1) * run.samples]) == list(range(run.samples))
    end = run.samples * run.epochs

    trained: dict[int, int] = {}  # what survives: position -> sample
    saved: dict[str, Any] = {"samples_consumed": 0, "order": order.state()}
    steps, batch = 0, rng.choice([1, 7, 16, 32, 64, 100])
    while saved["samples_consumed"] < end:
        state = json.loads(json.dumps(saved))  # the only state that one generation passes to the next
        assert len(json.dumps(state)) < 1024
        world_size, parts = rng.randint(1, 64), rng.choice([None, 64, 48])
        if rng.random() < 0.3:
            batch = rng.choice([1, 7, 16, 33, 64, 128, 300])
        count = world_size if parts is None else parts  # logical ranks, independent of the world's size
        # Each rank is a process of its own; a few of them stand for the others of a large world.
        ranks = [Sampler(run.order(), batch, end) for _ in range(min(count, 4))]
        ranks[0].order.check(state["order"])
        consumed, unsaved = state["samples_consumed"], dict[int, int]()
        killed_after = rng.randint(1, 12)
        for _ in range(killed_after):
            size = ranks[0].batch_size(consumed)
            if not size:
                break
            places = reference.batch(consumed, size)
            got, epochs = list[int](), list[int]()
            pieces = rng.choice([1, 1, 3])  # micro-batches, of any sizes
            for rank in range(count):
                start, stop = slice_bounds(size, count, rank)
                cuts = sorted(rng.choices(range(start, stop + 1), k=pieces - 1))
                for a, b in pairwise([start, *cuts, stop]):
                    picked = ranks[rank % len(ranks)].select(consumed, a, b)
                    got += picked.ids.tolist()
                    epochs += picked.epochs.tolist()
            assert epochs == [position // run.samples for position in places]
            assert got == [stream[position] for position in places], (seed, consumed, size, count)
            for position, sample in zip(places, got, strict=True):
                assert position not in trained
                assert position not in unsaved
                unsaved[position] = sample
            consumed += size
            steps += 1
            if rng.random() < 0.4 or consumed == end:  # a checkpoint
                trained |= unsaved
                unsaved = {}
                saved = {"samples_consumed": consumed, "order": ranks[0].order.state()}
        # Killed: what was not saved is trained again.
    assert [trained[position] for position in range(end)] == stream
    return steps
