"""Samples: what is read, and in which order."""

from __future__ import annotations

import hashlib
import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainbus.support import linear_dataset, linear_samples, write_dataset
from trainbus.data.dataset import Dataset
from trainbus.data.loader import ahead
from trainbus.data.reader import DatasetError
from trainbus.data.sampler import Sampler, ShuffledOrder, slice_bounds

generation = st.tuples(
    st.integers(1, 9),  # world size
    st.integers(1, 40),  # global batch: a restored run may have another
    st.integers(0, 6),  # steps until it is killed
    st.integers(0, 6),  # of which this many are lost, because no checkpoint was committed after them
)


@given(samples=st.integers(1, 60), seed=st.integers(0, 3), epochs=st.integers(1, 3), history=st.lists(generation))
def test_any_history_trains_the_same_samples_in_the_same_order(
    samples: int, seed: int, epochs: int, history: list[tuple[int, int, int, int]]
) -> None:
    def sampler(batch: int) -> Sampler:  # made anew for each generation: it remembers nothing
        return Sampler(ShuffledOrder("d" * 64, samples, seed), batch, epochs * samples)

    reference = sampler(1).ids(0, epochs * samples).tolist()
    for epoch in range(epochs):
        assert sorted(reference[epoch * samples : (epoch + 1) * samples]) == list(range(samples))

    consumed, trained = 0, list[int]()
    for world_size, batch, steps, lost in [*history, (2, 7, 1000, 0)]:
        now = sampler(batch)
        committed = (consumed, list(trained))
        for step in range(steps):
            size = now.batch_size(consumed)
            if size == 0:
                break
            for rank in range(world_size):
                trained += now.slice(consumed, world_size, rank).ids.tolist()
            consumed += size
            if step < steps - lost:
                committed = (consumed, list(trained))
        consumed, trained = committed
    assert trained == reference
    assert sampler(1).batch_size(consumed) == 0
    assert sampler(1).epoch(consumed) == epochs


@given(st.integers(0, 100), st.integers(1, 17))
def test_slices_are_contiguous_even_and_never_leave_rank_0_out(batch: int, world_size: int) -> None:
    bounds = [slice_bounds(batch, world_size, rank) for rank in range(world_size)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == batch
    assert all(left[1] == right[0] for left, right in pairwise(bounds))
    sizes = [stop - start for start, stop in bounds]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_the_order_is_fixed_for_ever() -> None:
    """A resumed run may meet another numpy: these numbers may never change."""
    order = ShuffledOrder("ab" * 32, 10, 7)
    assert [order.ids(epoch, 0, 10).tolist() for epoch in (0, 1)] == FIXED
    big = ShuffledOrder("ab" * 32, 100_000, 7).ids(0, 0, 100_000)
    assert hashlib.sha256(big.astype("<i8").tobytes()).hexdigest() == FIXED_SHA256


FIXED = [[7, 8, 9, 5, 2, 3, 1, 4, 0, 6], [1, 0, 9, 7, 3, 4, 5, 8, 2, 6]]
FIXED_SHA256 = "9b99c9e4abedb2a352b5fab02630adc0a5274e2635b0f4da1f4eeadfb852cb94"


def test_epochs_are_counted_from_1() -> None:
    sampler = Sampler(ShuffledOrder("d" * 64, 10, 0), 4)
    assert [sampler.epoch(consumed) for consumed in (0, 1, 10, 11, 20, 21)] == [0, 1, 1, 2, 2, 3]


def test_samples_are_read_by_offset_across_shards(tmp_path: Path) -> None:
    dataset = linear_dataset(tmp_path, train=120)
    split = dataset.split("train")
    assert len(split) == 120
    wanted = list(linear_samples(120))
    for number in (119, 0, 49, 50, 100):
        assert (split[number].key, split[number].fields) == wanted[number]
        assert split.key(number) == wanted[number][0]
    with pytest.raises(IndexError):
        split[120]


def test_webdataset_and_tar_read_the_helpers_shards(tmp_path: Path) -> None:
    import tarfile

    linear_dataset(tmp_path)
    with tarfile.open(tmp_path / "train/shard-00000.tar") as tar:
        assert tar.getnames()[:2] == ["s000000.bin", "s000000.cls"]


def test_another_dataset_or_a_broken_one_is_refused(tmp_path: Path) -> None:
    dataset = linear_dataset(tmp_path)
    with pytest.raises(DatasetError, match="not ffffffffffff"):
        Dataset(tmp_path, "f" * 64)
    shard = tmp_path / "train/shard-00000.tar"
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(DatasetError, match="not what the manifest says"):
        dataset.split("train")[0]
    index = tmp_path / "train/shard-00001.idx.json"
    index.write_text(json.dumps({"version": 1}))
    with pytest.raises(DatasetError, match="cannot be read"):
        dataset.split("train")[60]
    with pytest.raises(DatasetError, match=r"no manifest\.json"):
        Dataset(tmp_path / "gone")


def test_a_split_without_samples_is_empty(tmp_path: Path) -> None:
    dataset_id = write_dataset(tmp_path, {"train": linear_samples(3)})
    assert len(Dataset(tmp_path, dataset_id).split("test")) == 0


def test_an_error_in_the_loader_thread_is_raised_where_its_item_is_due() -> None:
    def items() -> object:
        yield 1
        raise ValueError("broken")

    got = ahead(items())  # type: ignore[arg-type]
    assert next(got) == 1
    with pytest.raises(ValueError, match="broken"):
        next(got)
