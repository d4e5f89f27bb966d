"""The order of samples: fixed for ever, nothing lost or repeated, few shards a rank."""

from __future__ import annotations

import hashlib
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.data import reading_trials
from tests.data.order_trials import trial
from tests.data.reference_order import Reference, philox
from trainbus.data.order import MAX_WINDOW_SAMPLES, LaneOrder, OrderMismatch, permutation
from trainbus.data.read_plan import ReadPlan
from trainbus.data.sampler import Sampler, slice_bounds

DATASET = "ab" * 32


def everything(order: LaneOrder, epochs: int = 1) -> list[int]:
    ids: list[int] = order.at(np.arange(epochs * order.samples)).tolist()
    return ids


def test_random_restarts_train_the_samples_of_the_reference() -> None:
    assert sum(trial(seed) for seed in range(150)) > 2000


def test_philox_matches_the_paper() -> None:
    """The known answers that come with Random123, and numpy's words, are the reference's."""
    # Published for the counter 243f6a8885a308d3...: it is incremented before the block.
    words = philox(
        (0x452821E638D01377, 0xBE5466CF34E90C6C),
        (0x243F6A8885A308D2, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89),
    )
    assert [next(words) for _ in range(4)] == [
        0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6,
    ]  # fmt: skip
    key, counter = np.array([3, 2**64 - 1], dtype=np.uint64), (2**64 - 2, 2**64 - 1, 7, 1)
    mine = philox((3, 2**64 - 1), counter)
    numpys = np.random.Philox(key=key, counter=np.array(counter, dtype=np.uint64)).random_raw(99)
    assert numpys.tolist() == [next(mine) for _ in range(99)]


def test_the_order_never_changes() -> None:
    """A resumed run may meet another numpy: these numbers may never change while the algorithm is version 1."""
    small = LaneOrder(DATASET, [4, 3, 3], 7)
    assert [small.at(np.arange(10) + 10 * epoch).tolist() for epoch in (0, 1)] == FIXED
    laned = LaneOrder(DATASET, [5, 6, 7, 6], 7, lanes=3, window=1)
    assert laned.at(np.arange(24)).tolist() == FIXED_LANES
    assert laned.batch(20, 9).tolist() == FIXED_BATCH
    big = LaneOrder(DATASET, [1000 + shard for shard in range(100)], 7)
    assert (big.lanes, big.window_samples) == (25, 4198)
    assert hashlib.sha256(big.at(np.arange(2 * big.samples)).astype("<i8").tobytes()).hexdigest() == FIXED_SHA256
    assert big.state() | {"dataset_id": ""} == {
        "algorithm": 1,
        "dataset_id": "",
        "seed": 7,
        "lanes": 25,
        "window": None,
        "window_samples": 4198,
    }


FIXED = [[8, 5, 2, 1, 3, 6, 0, 4, 9, 7], [9, 4, 6, 3, 8, 1, 0, 7, 2, 5]]
FIXED_LANES = [1, 18, 10, 0, 19, 11, 2, 16, 9, 6, 17, 8, 5, 22, 12, 7, 23, 13, 4, 21, 14, 3, 20, 15]
FIXED_BATCH = [21, 24, 27, 20, 23, 26, 22, 25, 28]
FIXED_SHA256 = "389a5bd612e1325757689aaad169fa7f1a6f40827ba386dca834537a2a341354"


@pytest.mark.parametrize(
    ("shards", "lanes", "window_samples"),
    [
        ([1], 1, 1),
        ([100], 1, 100),
        ([100] * 7, 1, 700),  # few shards are shuffled as a whole
        ([100] * 8, 2, 400),
        ([100] * 256, 64, 400),
        ([100] * 8000, 64, 400),
        ([12_500] * 8000, 64, 50_000),
        ([2**20] * 100, 25, MAX_WINDOW_SAMPLES // 25),  # large shards of small samples: memory is what bounds it
        ([2**24], 1, MAX_WINDOW_SAMPLES),
    ],
)
def test_lanes_and_windows_suit_the_dataset(shards: list[int], lanes: int, window_samples: int) -> None:
    order = LaneOrder(DATASET, shards, 0)
    assert (order.lanes, order.window_samples) == (lanes, window_samples)


def test_an_epoch_of_a_small_dataset_is_shuffled_as_a_whole() -> None:
    """The mean distance between neighbours is a third of the whole, as in any shuffle; and so with each epoch."""
    order = LaneOrder(DATASET, [700] * 7, 3)
    for epoch in range(3):
        ids = order.at(np.arange(4900) + 4900 * epoch)
        assert 0.31 < float(np.abs(np.diff(ids)).mean()) / 4900 < 0.36


def test_permutations_are_fair() -> None:
    """Each thing comes to each place about as often: chi-squared over 4,000 permutations of 8."""
    counts = np.zeros((8, 8))
    key = np.array([1, 2], dtype=np.uint64)
    for number in range(4000):
        counts[np.arange(8), permutation(8, key, (0, number, 0, 1))] += 1
    assert float(((counts - 500) ** 2 / 500).sum()) < 100  # 49 degrees of freedom: 85 is one in a thousand


def test_memory_is_bounded_however_large_the_dataset_is() -> None:
    """Shards of a million samples: the first batch touches two windows of each lane at most, 4 bytes a sample."""
    import tracemalloc

    tracemalloc.start()
    order = LaneOrder(DATASET, [2**20] * 1000, 0)  # a billion samples
    sampler = Sampler(order, 256)
    for consumed in (0, 2**29, 2**30 - 100):
        assert len(set(sampler.select(consumed, 0, 256).ids.tolist())) == 256
    kept = tracemalloc.get_traced_memory()[0]  # counts pages that were never written to, too
    tracemalloc.stop()
    assert kept < 2 * 4 * MAX_WINDOW_SAMPLES + 2**21


def test_windows_that_do_not_fit_into_memory_are_refused() -> None:
    with pytest.raises(ValueError, match=r"lower training\.loading\.window or training\.loading\.lanes"):
        LaneOrder(DATASET, [2**20] * 1000, 0, lanes=64, window=8)


@pytest.mark.parametrize(("global_batch", "world_size"), [(1024, 8), (1000, 8), (64, 8), (96, 7), (1024, 64)])
def test_a_rank_reads_few_shards(global_batch: int, world_size: int) -> None:
    """About 1/W of an epoch's shards, and some more where ranks' slices end in the middle of a lane."""
    shards, order = 640, LaneOrder(DATASET, [200] * 640, 0)
    sampler, read = Sampler(order, global_batch), [set[int]() for _ in range(world_size)]
    for consumed in range(0, order.samples, global_batch):
        for rank in range(world_size):
            read[rank] |= set((sampler.slice(consumed, world_size, rank).ids // 200).tolist())
    # A lane that two ranks share is read by both; so is a shard that lies in two lanes.
    shared = 0 if global_batch % order.lanes == 0 and order.lanes % world_size == 0 else 3
    most = (order.lanes / world_size + shared) / order.lanes * shards
    assert max(len(shards_read) for shards_read in read) <= 1.1 * most + 2 * world_size


@pytest.mark.parametrize("seed", range(40))
def test_the_plan_names_every_shard_that_is_read(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shards = rng.integers(1, 60, rng.integers(1, 60)).tolist()
    lanes, window = [(None, None), (8, 2), (63, 1), (1, 5)][seed % 4]
    batch, parts = int(rng.integers(1, 100)), int(rng.integers(1, 9))
    own = sorted(set(rng.integers(0, parts, 3).tolist()))
    end = [None, 3 * sum(shards)][seed % 2]

    def order() -> LaneOrder:
        return LaneOrder(DATASET, shards, seed, lanes=lanes, window=window)

    sampler, plan = Sampler(order(), batch, end), ReadPlan(order(), batch, parts, own, end)
    starts = np.cumsum(shards) - shards
    start = batch * int(rng.integers(0, sum(shards) // batch + 1))
    stop = start + int(rng.integers(1, 2 * sum(shards)))
    needs = plan.needs(start, stop)
    assert [need.first for need in needs] == sorted(need.first for need in needs)
    consumed = start
    while consumed < stop and sampler.batch_size(consumed):
        size = sampler.batch_size(consumed)
        for part in own:
            a, b = slice_bounds(size, parts, part)
            positions = sampler.order.batch(consumed, size)[a:b].tolist()
            for position, sample in zip(positions, sampler.select(consumed, a, b).ids.tolist(), strict=True):
                shard = int(np.searchsorted(starts, sample, side="right")) - 1
                assert any(n.shard == shard and n.first <= position <= n.last for n in needs), (position, shard)
        consumed += size


def test_the_plan_of_an_epoch_names_each_shard_once_or_twice_and_releases_it() -> None:
    order = LaneOrder(DATASET, [1000] * 640, 0)
    needs = ReadPlan(order, 1024, 8, [3]).needs(0, order.samples // 1024 * 1024)
    assert len({need.shard for need in needs}) == 80
    assert len(needs) <= 82
    assert max(need.last - need.first for need in needs) < 8 * order.window_samples * order.lanes / 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 8}, r"set training\.seed to 8"),
        ({"lanes": 3}, r"set training\.loading\.lanes to 3"),
        ({"window_samples": 77, "window": 3}, r"set training\.loading\.window to 3"),
        ({"window_samples": 77}, r"set training\.loading\.window to null"),
        ({"dataset_id": "cd" * 32}, "data.dataset_id cdcdcd"),
        ({"algorithm": 2}, "algorithm 2"),
        ({"seed": 8, "lanes": 3}, r"training\.seed.*training\.loading\.lanes"),
    ],
)
def test_another_order_is_refused_and_the_error_names_the_setting(change: dict[str, object], message: str) -> None:
    order = LaneOrder(DATASET, [100] * 20, 7)
    order.check(json.loads(json.dumps(order.state())))
    with pytest.raises(OrderMismatch, match=message):
        order.check(order.state() | change)


def test_epochs_and_seeds_and_datasets_differ() -> None:
    orders = [
        everything(LaneOrder(dataset, [50] * 10, seed))
        for dataset, seed in ((DATASET, 0), (DATASET, 1), ("cd" * 32, 0))
    ]
    twice = everything(LaneOrder(DATASET, [50] * 10, 0), epochs=2)
    different = [*orders, twice[500:]]
    assert twice[:500] == orders[0]
    assert all(sorted(one) == list(range(500)) for one in different)
    assert all(a != b for a, b in pairwise(different))


def test_the_reference_detects_another_order() -> None:
    """The comparison fails for another seed, another number of lanes and another window."""
    order = LaneOrder(DATASET, [9] * 20, 1, lanes=4, window=2)
    right = Reference(DATASET, [9] * 20, 1, 4, order.window_samples)
    assert right.epoch(0) == everything(order)
    for seed, lanes, window in ((2, 4, 18), (1, 3, 18), (1, 4, 17)):
        assert Reference(DATASET, [9] * 20, seed, lanes, window).epoch(0) != right.epoch(0)


@pytest.mark.parametrize("seed", range(6))
def test_restarts_with_worker_processes_read_the_samples_of_the_reference(tmp_path: Path, seed: int) -> None:
    assert reading_trials.trial(seed, tmp_path) > 1
