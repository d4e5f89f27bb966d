"""Measures a model on a split: exact means over its samples, the same to the bit for any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from contracts.spec.training import EarlyStopping
from trainbus.data.batch_tensors import to_device
from trainbus.data.loader import BatchLoader, MicroBatch, Prefetcher, pipeline_results
from trainbus.data.reader import SplitReader
from trainbus.data.sampler import slice_bounds
from trainbus.data.workers import WorkerPool
from trainbus.task import Task, TaskError
from trainbus.trainer.checkpoint import Progress
from trainbus.trainer.loss_weights import has_loss_weights, weigh_batch
from trainbus.trainer.step_agreement import sum_in_order
from trainbus.trainer.strategies.base import AUTOCAST
from trainbus.trainer.world import World, seed_all

#: The most samples that go through the model at once in a measurement.
MEASURE_BATCH = 256
#: A split is cut into about CHUNKS chunks of at least MIN_CHUNK samples, so that many ranks have work.
CHUNKS, MIN_CHUNK = 32, 16

MetricMode = Literal["min", "max"]


@dataclass(frozen=True, slots=True)
class MeasuredChunk:
    """Samples that went through the model together."""

    samples: MicroBatch
    #: The same, on the device.
    batch: Any
    #: What ``task.metrics`` returned.
    metrics: Mapping[str, Tensor]
    #: Whether they are part of the result.
    counted: bool


OnChunk = Callable[[MeasuredChunk], None]


def chunk_size(samples: int, largest: int = MEASURE_BATCH) -> int:
    """Return how many samples go through the model at once: a function of the split alone."""
    return min(largest, max(MIN_CHUNK, -(-samples // CHUNKS)))


def measure_split(
    task: Task,
    model: nn.Module,
    reader: SplitReader,
    world: World,
    precision: str,
    *,
    batch_size: int | None = None,
    on_chunk: OnChunk | None = None,
    workers: WorkerPool | None = None,
) -> dict[str, float]:
    """Return ``task.metrics`` as means over all samples of the split; every rank calls it and gets the same.

    The split is cut into chunks that do not depend on the ranks; one rank computes a chunk, and the chunks' sums
    are added in their order. ``on_chunk`` is called with every chunk of this rank, in order, and as often on every
    rank: the chunks that do not count only keep ranks together that communicate. The model is in eval mode.
    """
    if len(reader) == 0:
        return {}
    size = batch_size or chunk_size(len(reader))
    chunks = -(-len(reader) // size)
    loading = BatchLoader(task, reader, workers=workers, pin_for=world.gpu)
    loaded = pipeline_results(
        _chunks(loading, len(reader), world, size, chunks), 0 if loading.workers is None else len(loading.workers) + 1
    )
    device, dtype = world.device, AUTOCAST.get(precision)
    sums: dict[str, dict[int, Tensor]] = {}
    weights: dict[int, float] = {}
    means: set[str] = set()
    was_training = model.training
    model.eval()
    try:
        # Not inference mode: what FSDP2 gathers there could not be trained on afterwards.
        with torch.no_grad(), torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            for chunk, counted, item in Prefetcher(loaded):
                seed_all("measure", chunk)
                batch = to_device(item.batch, lambda tensor: tensor.to(device, non_blocking=True))
                found = task.metrics(model, batch)
                if counted:
                    weights[chunk] = weigh_batch(task, item.batch) if has_loss_weights(task) else float(item.samples)
                    for name, value in found.items():
                        sums.setdefault(name, {})[chunk] = _sum(task, name, value, item.samples, weights[chunk])
                        if torch.as_tensor(value).shape == ():
                            means.add(name)
                if on_chunk is not None:
                    on_chunk(MeasuredChunk(item, batch, found, counted))
    finally:
        model.train(was_training)
    # Rank 0 has the first chunk, so it knows every name.
    names: list[str]
    names, means = world.broadcast_object((sorted(sums), means))
    if extra := set(sums) - set(names):
        raise TaskError(f"{type(task).__name__}.metrics() returns {sorted(extra)} for some batches only")
    if not names:
        return {}
    table = torch.zeros(len(names) + 1, chunks, dtype=torch.float64, device=device)
    for row, name in zip(table, names, strict=False):
        if own := sums.get(name):
            row[list(own)] = torch.stack(list(own.values()))
    table[-1, list(weights)] = torch.tensor(list(weights.values()), dtype=torch.float64, device=device)
    *rows, weight_row = world.sum_on_host(table)
    total = sum_in_order(weight_row)
    return {
        name: sum_in_order(row) / (total if name in means else len(reader))
        for name, row in zip(names, rows, strict=True)
    }


def _chunks(
    loading: BatchLoader, samples: int, world: World, size: int, chunks: int
) -> Iterator[Callable[[], tuple[int, bool, MicroBatch]]]:
    """Start to load this rank's chunks: (number, whether it counts, samples). As many on every rank.

    Some strategies communicate in each forward, so a rank with fewer chunks repeats one that does not count.
    """
    start, stop = slice_bounds(chunks, world.size, world.rank)
    most = slice_bounds(chunks, world.size, 0)[1]
    for number in range(start, start + most):
        chunk, counted = (number, True) if number < stop else (0, False)
        started = loading.start(np.arange(chunk * size, min(samples, (chunk + 1) * size), dtype=np.int64))
        yield partial(_load_chunk, chunk, counted, started)


def _load_chunk(chunk: int, counted: bool, started: Callable[[], MicroBatch]) -> tuple[int, bool, MicroBatch]:
    return chunk, counted, started()


def _sum(task: Task, name: str, value: Tensor, samples: int, weight: float) -> Tensor:
    value = torch.as_tensor(value).detach().double()
    if value.shape == ():
        return value * weight if weight else torch.zeros_like(value)  # the mean over nothing is no number
    if value.shape == (samples,):
        return value.sum()
    raise TaskError(
        f"{type(task).__name__}.metrics()[{name!r}] has shape {tuple(value.shape)}; "
        f"it must be a scalar (the mean) or one value for each of the {samples} samples"
    )


class BestMetricTracker:
    """Keeps the best values in ``state``: one for checkpoints, one for early stopping, which has its own metric."""

    def __init__(self, state: Progress, metric: str, mode: MetricMode, stopping: EarlyStopping | None) -> None:
        self._state, self._metric, self._mode, self._stopping = state, metric, mode, stopping

    def update(self, metrics: Mapping[str, float]) -> bool:
        """Add a validation; return whether it is the best one for checkpoints."""
        improved = self._improves(metrics, self._metric, self._mode, 0.0, "best")
        stopping = self._stopping
        if stopping is not None and stopping.metric in metrics:
            better = self._improves(metrics, stopping.metric, stopping.mode, stopping.min_delta, "early_stopping")
            self._state.validations_without_improvement = (
                0 if better else self._state.validations_without_improvement + 1
            )
        return improved

    @property
    def is_patience_over(self) -> bool:
        stopping = self._stopping
        return stopping is not None and self._state.validations_without_improvement >= stopping.patience

    def _improves(self, metrics: Mapping[str, float], metric: str, mode: str, min_delta: float, purpose: str) -> bool:
        value = metrics.get(metric)
        if value is None or not math.isfinite(value):
            return False
        best = self._state.best.get(purpose)
        gain = math.inf if best is None else (best - value if mode == "min" else value - best)
        if gain <= min_delta:
            return False
        self._state.best[purpose] = value
        return True
