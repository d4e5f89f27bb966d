"""Samples: what is read, and in which order."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainbus.support import linear_dataset, linear_samples, write_dataset
from trainbus.data.dataset import Dataset
from trainbus.data.loader import Prefetcher
from trainbus.data.order import LaneOrder
from trainbus.data.reader import DatasetError
from trainbus.data.sampler import Sampler, slice_bounds


@given(st.integers(0, 100), st.integers(1, 17))
def test_slices_are_contiguous_and_even_and_rank_0_has_one(batch: int, world_size: int) -> None:
    bounds = [slice_bounds(batch, world_size, rank) for rank in range(world_size)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == batch
    assert all(left[1] == right[0] for left, right in pairwise(bounds))
    sizes = [stop - start for start, stop in bounds]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_epochs_count_from_1() -> None:
    sampler = Sampler(LaneOrder("d" * 64, [10], 0), 4)
    assert [sampler.epoch(consumed) for consumed in (0, 1, 10, 11, 20, 21)] == [0, 1, 1, 2, 2, 3]


def test_a_step_belongs_to_the_epoch_that_it_ends() -> None:
    sampler = Sampler(LaneOrder("d" * 64, [10], 0), 4, end=30)
    steps = [0, 4, 8, 12, 16, 20, 24, 28, 30]
    assert [sampler.epoch_of_step(consumed) for consumed in steps] == [0, 1, 1, 1, 2, 2, 3, 3, 3]
    several_a_step = Sampler(LaneOrder("d" * 64, [3], 0), 4, end=9)
    assert [several_a_step.epoch_of_step(consumed) for consumed in (0, 4, 8, 9)] == [0, 1, 2, 3]


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


def test_webdataset_and_tar_read_the_shards(tmp_path: Path) -> None:
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
    with pytest.raises(DatasetError, match="bytes, the manifest has"):
        dataset.split("train")[0]
    index = tmp_path / "train/shard-00001.idx"
    index.write_text("{}")
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

    got = Prefetcher(items())  # type: ignore[arg-type]
    assert next(got) == 1
    with pytest.raises(ValueError, match="broken"):
        next(got)
