"""The loader: the same batches from a thread and from workers, errors that name the sample, no process left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.data import shards
from trainbus.data.channel import open_channel, receive, send
from trainbus.data.loader import BatchLoader, pipeline_results
from trainbus.data.workers import WorkerPool
from trainbus.task import Task, TaskError


class Images(Task):
    """Fields of any sizes, varied at random."""

    def decode(self, sample: dict[str, bytes]) -> dict[str, Any]:
        values = np.frombuffer(sample["png"], dtype=np.uint8)
        return {"mean": torch.tensor(float(values.sum())), "label": int(sample["cls"]), "length": len(values)}

    def augment(self, example: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {**example, "noise": torch.from_numpy(rng.standard_normal(4)).to(torch.bfloat16)}


class Vectors(Task):
    def decode(self, sample: dict[str, bytes]) -> torch.Tensor:
        return torch.from_numpy(np.frombuffer(sample["bin"], dtype=np.uint8).astype(np.int64))

    def decode_batch(self, fields: dict[str, NDArray[np.uint8]]) -> torch.Tensor:
        self.batches = getattr(self, "batches", 0) + 1
        return torch.from_numpy(fields["bin"].astype(np.int64))


class Varied(Vectors):
    def augment(self, example: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
        return example + int(rng.integers(5))


@pytest.fixture
def workers() -> Iterator[Callable[[int, Task], WorkerPool]]:
    pools: list[WorkerPool] = []

    def make(count: int, task: Task) -> WorkerPool:
        pools.append(WorkerPool(count, lambda: task))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return left.dtype == right.dtype and torch.equal(left, right)


@pytest.mark.parametrize("count", [1, 3])
def test_workers_give_the_batches_of_the_thread(
    tmp_path: Path, workers: Callable[[int, Task], WorkerPool], count: int
) -> None:
    task, reader = Images(), shards.write(tmp_path, {"train": shards.ragged(200)}).split("train")
    rng = np.random.default_rng(0)
    batches = [(rng.integers(0, 200, size), rng.integers(0, 3, size)) for size in (1, 17, 0, 64, 5, 9, 30)]

    def gather_limited(loading: BatchLoader, depth: int) -> list[Any]:
        return list(pipeline_results((loading.start(ids, epochs, seed=7) for ids, epochs in batches), depth))

    alone = gather_limited(BatchLoader(task, reader), 0)
    together = gather_limited(BatchLoader(task, reader, workers=workers(count, task)), 4)
    for (ids, _), one, other in zip(batches, alone, together, strict=True):
        assert one.samples == other.samples == len(ids)
        assert one.keys == other.keys == tuple(f"s{i:05d}" for i in ids.tolist())
        assert (one.batch is None and other.batch is None) or same(one.batch, other.batch)


def test_arrays_give_the_batch_of_the_samples(tmp_path: Path) -> None:
    reader = shards.write(tmp_path, {"train": shards.fixed(120)}).split("train")
    ids, epochs = np.arange(10, 70, 3), np.zeros(20, dtype=np.int64)
    slow = Vectors()
    expected = slow.collate([slow.decode(reader[i].fields) for i in ids.tolist()])
    fast = Vectors()
    assert same(BatchLoader(fast, reader).start(ids)().batch, expected)
    assert same(BatchLoader(fast, reader).start(ids, epochs)().batch, expected)
    assert fast.batches == 2

    varied = Varied()  # training samples are varied one by one, others are not
    assert same(BatchLoader(varied, reader).start(ids)().batch, expected)
    assert not same(BatchLoader(varied, reader).start(ids, epochs)().batch, expected)
    assert varied.batches == 1


def test_samples_of_different_sizes_are_decoded_one_by_one(tmp_path: Path) -> None:
    samples = list(shards.fixed(60))
    samples[30] = ("odd", {"bin": b"123"})

    class First(Vectors):
        def decode(self, sample: dict[str, bytes]) -> torch.Tensor:
            return super().decode({"bin": sample["bin"][:3]})

    task, reader = First(), shards.write(tmp_path, {"train": samples}).split("train")
    assert BatchLoader(task, reader).start(np.arange(25, 35))().batch.shape == (10, 3)
    assert not hasattr(task, "batches")


class Broken(Images):
    """Fails at one sample; its label selects the failure."""

    def decode(self, sample: dict[str, bytes]) -> dict[str, Any]:
        if int(sample["cls"]) == 7:
            raise ValueError("not my kind")
        if int(sample["cls"]) == 8:
            os.kill(os.getpid(), signal.SIGKILL)
        if int(sample["cls"]) == 9:
            os._exit(3)
        return super().decode(sample)


@pytest.mark.parametrize("count", [0, 2])
def test_an_error_names_the_sample(tmp_path: Path, workers: Callable[[int, Task], WorkerPool], count: int) -> None:
    task, reader = Broken(), shards.write(tmp_path, {"train": shards.ragged(120)}).split("train")
    loading = BatchLoader(task, reader, workers=workers(count, task))
    place = r"ValueError: not my kind \(test_loader\.py:\d+, in decode\): Broken\.decode\(\) failed"
    with pytest.raises(TaskError, match=place + r"; it was sample 's00057' of train/shard-00001\.tar"):
        loading.start(np.array([1, 2, 57, 3]))()
    assert loading.start(np.array([1, 2]))().samples == 2  # the worker still runs


@pytest.mark.parametrize(
    ("sample", "how"), [(18, "was killed by SIGKILL (out of memory?"), (19, "ended with exit code 3")]
)
def test_a_worker_that_dies_names_the_sample(
    tmp_path: Path, workers: Callable[[int, Task], WorkerPool], sample: int, how: str
) -> None:
    task, reader = Broken(), shards.write(tmp_path, {"train": shards.ragged(120)}).split("train")
    loading = BatchLoader(task, reader, workers=workers(1, task))
    waiting = [loading.start(np.array(ids)) for ids in ([1, 2], [3, sample, 4], [5])]
    assert waiting[0]().samples == 2
    for result in waiting[1:]:  # later results raise the error too
        with pytest.raises(TaskError, match=re.escape(how)) as raised:
            result()
    with pytest.raises(TaskError, match=re.escape(how)):
        loading.start(np.array([6]))()
    assert "loader worker 0" in str(raised.value)


def test_the_sample_that_killed_a_worker_is_named(tmp_path: Path, workers: Callable[[int, Task], WorkerPool]) -> None:
    task, reader = Broken(), shards.write(tmp_path, {"train": shards.ragged(120)}).split("train")
    result = BatchLoader(task, reader, workers=workers(2, task)).start(np.array([3, 4, 58]))
    with pytest.raises(TaskError, match=r"loader worker 0 was killed.*sample 's00058' of train/shard-00001\.tar"):
        result()


class Unlike(Images):
    def collate(self, examples: Any) -> Any:
        return lambda: examples


def test_a_batch_that_cannot_be_pickled_raises_an_error(
    tmp_path: Path, workers: Callable[[int, Task], WorkerPool]
) -> None:
    task, reader = Unlike(), shards.write(tmp_path, {"train": shards.ragged(60)}).split("train")
    with pytest.raises(TaskError, match=r"the batch cannot be passed on between processes.*'s00001' to 's00002'"):
        BatchLoader(task, reader, workers=workers(1, task)).start(np.array([1, 2]))()


def test_tensors_and_arrays_pass_as_they_are() -> None:
    ours, theirs = open_channel()
    value = {
        "strided": torch.arange(24).reshape(4, 6)[:, ::2],
        "half": torch.randn(3).to(torch.bfloat16),
        "bool": torch.tensor(True),
        "none": torch.empty(0, 5),
        "array": np.arange(5, dtype=np.float32),
        "grad": torch.ones(2, requires_grad=True),
        "complex": torch.view_as_complex(torch.ones(3, 2)).conj(),
        "rest": ["text", (1, None)],
    }
    send(ours, value)
    got = receive(theirs)
    for name in ("strided", "half", "bool", "none", "grad", "complex"):
        assert got[name].dtype == value[name].dtype
        assert got[name].shape == value[name].shape
        assert torch.equal(got[name].resolve_conj(), value[name].resolve_conj())
    assert got["array"].tolist() == value["array"].tolist()
    assert got["rest"] == value["rest"]
    got["strided"] += 1  # it is the receiver's own
    assert value["strided"][0, 0] == 0


OWNER = """
import os, sys, time
from trainbus.data.workers import DecodeJob
from trainbus.data.workers import WorkerPool
from trainbus.task import Task
import numpy as np

class Slow(Task):
    def decode(self, sample):
        time.sleep(600)

pool = WorkerPool(3, Slow)
pool.submit(DecodeJob(np.arange(1), {"bin": np.zeros((1, 1), dtype=np.uint8)}))
print(*pool.pids, flush=True)
time.sleep(600)
"""


def test_no_worker_outlives_a_killed_owner() -> None:
    """One of them is in the middle of a decode."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(pids) == 3
    owner.kill()
    owner.wait()
    deadline = time.monotonic() + 60
    while any(_is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [pid for pid in pids if _is_alive(pid)]


def _is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
