"""The statistics in a dataset's manifest reach a task's ``decode``, in this process and in workers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from contracts.datasets import FieldStatistics
from tests.data import shards
from trainbus.data.loader import BatchLoader
from trainbus.data.workers import WorkerPool
from trainbus.task import Task

STATISTICS = {"age": FieldStatistics(count=10, nulls=1, mean=40.0, std=8.0, min=20.0, max=60.0)}


class Ages(Task):
    def decode(self, sample: dict[str, bytes]) -> torch.Tensor:
        age = self.statistics["age"]
        return torch.tensor([(len(sample["png"]) - age.mean) / age.std, float(len(self.classes))])


@pytest.mark.parametrize("count", [0, 2])
def test_decode_can_normalize(tmp_path: Path, count: int) -> None:
    task, reader = Ages(), shards.write(tmp_path, {"train": shards.ragged(20)}).split("train")
    ids, epochs = np.arange(20), np.zeros(20, dtype=np.int64)
    workers = WorkerPool(count, Ages) if count else None
    try:
        if workers is not None:
            workers.set_dataset(("a", "b"), STATISTICS)
        else:
            task.classes, task.statistics = ("a", "b"), STATISTICS
        batch = BatchLoader(task, reader, workers=workers).start(ids, epochs, seed=0)().batch
    finally:
        if workers is not None:
            workers.close()
    assert batch is not None
    sizes = torch.tensor([len(files["png"]) for _, files in shards.ragged(20)], dtype=torch.float32)
    assert torch.equal(batch[:, 0], (sizes - 40.0) / 8.0)
    assert batch[:, 1].tolist() == [2.0] * 20
