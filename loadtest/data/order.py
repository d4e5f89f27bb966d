"""The order of samples: random lives against a second implementation, a cold resume, how much a node reads.

python -m loadtest.data --only order [--quick]
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tests.data import reading_trials
from tests.data.order_trials import trial
from trainbus.data.order import LaneOrder
from trainbus.data.read_plan import ReadPlan
from trainbus.data.sampler import Sampler

Row = tuple[str, str, str, bool]

DATASET = "ab" * 32
#: 100 million samples in 8,000 shards, 1 TB of 10 KB each.
LARGE = [12_500] * 8_000
BATCH = 1_024
FIRST_SEED = 1_000_000
STREAM = "each one the reference's stream"


def measure(quick: bool = False) -> list[Row]:
    """Return the figures of the order: each with its target, and whether it is met."""
    return [
        _lives(200 if quick else 10_000),
        _read_lives(10 if quick else 500),
        *_resume(5 if quick else 15),
        *_steady(300 if quick else 3_000),
        *_reading(quick),
    ]


def _lives(count: int) -> Row:
    return _exact(f"order: {count:,} random lives of a run", (trial(FIRST_SEED + n) for n in range(count)), count)


def _read_lives(count: int) -> Row:
    def lives() -> Iterator[int]:
        for number in range(count):
            with tempfile.TemporaryDirectory() as folder:
                yield reading_trials.trial(FIRST_SEED + number, Path(folder))

    return _exact(f"order: {count:,} of them through shards, feeds and 0 to 8 worker processes", lives(), count)


def _exact(name: str, lives: Iterator[int], count: int) -> Row:
    """Live them all, up to the first that is wrong; it names its seed."""
    lived, steps = 0, 0
    try:
        for taken in lives:
            lived, steps = lived + 1, steps + taken
    except AssertionError as error:
        return name, f"seed {FIRST_SEED + lived} is wrong: {error}"[:200], STREAM, False
    return name, f"{lived:,} exact, {steps:,} steps", STREAM, lived == count


def _resume(repeats: int) -> list[Row]:
    """A new process at the middle of the run: the order built, the first batch's ids there."""
    rows = []
    for name, world_size in (("the whole batch, 64 lanes", 1), ("a rank of 64", 64)):
        cpu_s, wall_s = [], []
        for repeat in range(repeats):
            cpu, wall = time.process_time(), time.perf_counter()
            sampler = Sampler(LaneOrder(DATASET, LARGE, repeat), BATCH)
            ids = sampler.slice(sampler.order.samples // 2 // BATCH * BATCH, world_size, 0).ids
            cpu_s.append(time.process_time() - cpu)
            wall_s.append(time.perf_counter() - wall)
            assert len(set(ids.tolist())) == BATCH // world_size
        rows.append(
            (
                f"order: first ids at 50M of 100M samples, {name}",
                f"{statistics.median(cpu_s) * 1e3:.1f} ms CPU (worst {max(cpu_s) * 1e3:.1f}), "
                f"{statistics.median(wall_s) * 1e3:.1f} ms",
                "100 ms",
                statistics.median(cpu_s) <= 0.1 and min(wall_s) <= 0.1,
            )
        )
    state = json.dumps({"samples_consumed": 50_000_000, "order": LaneOrder(DATASET, LARGE, 2**63 - 1).state()})
    rows.append(("order: state", f"{len(state)} bytes", "1,024 bytes", len(state) < 1024))
    return rows


def _steady(batches: int) -> list[Row]:
    tracemalloc.start()
    sampler = Sampler(LaneOrder(DATASET, LARGE, 1), BATCH)
    sampler.slice(0, 1, 0)
    memory = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    started = time.process_time()
    for number in range(batches):
        sampler.slice(50_000_000 // BATCH * BATCH + number * BATCH, 1, 0)
    each_ns = (time.process_time() - started) / batches / BATCH * 1e9
    plan = ReadPlan(LaneOrder(DATASET, LARGE, 1), BATCH, 8, [3])
    started = time.process_time()
    needs = len(plan.needs(0, 10**8))
    planned_s = time.process_time() - started
    return [
        ("order: choosing samples", f"{each_ns:.0f} ns CPU a sample", "1,000 ns", each_ns < 1000),
        ("order: memory for 100M samples", f"{memory / 1e6:.0f} MB", "800 MB (8 bytes a sample) / 10", memory < 80e6),
        (
            "order: an epoch's plan of one of 8 nodes",
            f"{planned_s * 1e3:.1f} ms, {needs:,} needs",
            "1 s",
            planned_s < 1,
        ),
    ]


def _reading(quick: bool) -> list[Row]:
    """How many of an epoch's shards the nodes read between them: 1.0 is each shard once."""
    samples = 100 if quick else 200
    order = LaneOrder(DATASET, [samples] * 2_000, 1)
    rows = []
    for world_size, batch in ((1, 1024), (2, 1000), (8, 1024), (8, 1000), (8, 64), (7, 1024), (32, 1024), (64, 1000)):
        sampler, read = Sampler(order, batch), [set[int]() for _ in range(world_size)]
        for consumed in range(0, order.samples - batch, batch):
            for rank in range(world_size):
                read[rank].update(np.unique(sampler.slice(consumed, world_size, rank).ids // samples).tolist())
        total = sum(map(len, read)) / 2_000
        # A slice may end within a lane, which two nodes then share; and a shard may lie in two lanes.
        lanes = order.lanes
        fits = batch % lanes == 0 and lanes % world_size == 0
        limit = 1.05 if fits else 1 + 2 * world_size / lanes + 0.05
        rows.append(
            (
                f"order: shards read an epoch, {world_size} nodes, batch {batch:,}, {lanes} lanes",
                f"{total:.3f} of the dataset in all",
                f"{limit:.2f}" + ("" if fits else " (up to two lanes more a node)"),
                total <= limit,
            )
        )
    return rows
