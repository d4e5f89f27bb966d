"""Measures a model on a split: exact means over its samples, whatever the world size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainbus.data.loader import MicroBatch, ahead, load, to_device
from trainbus.data.reader import SplitReader
from trainbus.data.sampler import slice_bounds
from trainbus.task import Task, TaskError
from trainbus.trainer.world import World

#: Samples that go through the model at once in a measurement.
MEASURE_BATCH = 256


def measure(
    task: Task,
    model: nn.Module,
    reader: SplitReader,
    world: World,
    precision: str,
    *,
    batch_size: int = MEASURE_BATCH,
    each: Callable[[MicroBatch, Any], None] | None = None,
) -> dict[str, float]:
    """Return ``task.metrics`` as means over all samples of the split; every rank calls it and gets the same.

    ``each`` is called with every batch of this rank's slice. The model is in eval mode meanwhile.
    """
    if len(reader) == 0:
        return {}
    device = world.device
    sums: dict[str, Tensor] = {}
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode(), torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16"):
            for item in ahead(_batches(task, reader, world, batch_size)):
                batch = to_device(item.batch, lambda tensor: tensor.to(device))
                for name, value in task.metrics(model, batch).items():
                    total = _sum(task, name, value, item.samples)
                    sums[name] = sums[name] + total if name in sums else total
                if each is not None:
                    each(item, batch)
    finally:
        model.train(was_training)
    # Rank 0's slice is never empty, so it knows every name.
    names: list[str] = world.from_first(sorted(sums))
    if extra := set(sums) - set(names):
        raise TaskError(f"{type(task).__name__}.metrics() returns {sorted(extra)} for some batches only")
    if not names:
        return {}
    zero = torch.zeros((), dtype=torch.float64, device=device)
    totals = world.all_reduce(torch.stack([sums.get(name, zero) for name in names]))
    return {name: total / len(reader) for name, total in zip(names, totals.tolist(), strict=True)}


def _batches(task: Task, reader: SplitReader, world: World, batch_size: int) -> Iterator[MicroBatch]:
    start, stop = slice_bounds(len(reader), world.size, world.rank)
    for first in range(start, stop, batch_size):
        yield load(task, reader, np.arange(first, min(stop, first + batch_size), dtype=np.int64))


def _sum(task: Task, name: str, value: Tensor, samples: int) -> Tensor:
    value = torch.as_tensor(value).detach().double()
    if value.shape == ():
        return value * samples
    if value.shape == (samples,):
        return value.sum()
    raise TaskError(
        f"{type(task).__name__}.metrics()[{name!r}] has shape {tuple(value.shape)}; "
        f"it must be a scalar (the mean) or one value for each of the {samples} samples"
    )
