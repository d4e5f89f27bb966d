"""A loader for any PyTorch loop: it needs a folder with a dataset, and no trainbus stack."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from trainbus.data import loader
from trainbus.data.dataset import Dataset, SplitName
from trainbus.data.loader import BatchLoader, MicroBatch, pipeline_results
from trainbus.data.order import LaneOrder
from trainbus.data.sampler import Sampler, slice_bounds
from trainbus.data.workers import WorkerPool
from trainbus.task import Task

Decode = Callable[[dict[str, bytes]], Any]


def open_dataset(folder: str | os.PathLike[str], dataset_id: str | None = None) -> Dataset:
    """Open the dataset in a folder (``manifest.json`` and its shards).

    Raises:
        DatasetError: there is none, or it is not ``dataset_id``.
    """
    return Dataset(Path(folder), dataset_id)


class Loader:
    """Iterates over this rank's part of each global batch: nothing lost, repeated or padded, however often resized.

    The whole state is how many samples all ranks together have consumed. A loader made for another ``rank`` of another
    ``world_size``, even with another ``batch``, goes on from there.
    """

    def __init__(
        self,
        dataset: Dataset,
        task: Task | Decode,
        *,
        batch: int,
        split: SplitName = "train",
        rank: int = 0,
        world_size: int = 1,
        epochs: int | None = 1,
        seed: int = 0,
        workers: int = 0,
        ahead: int = 2,
        lanes: int | None = None,
        window: int | None = None,
        pin: bool | None = None,
    ) -> None:
        """Fork the workers; create the loader before CUDA is used.

        Args:
            task: a ``trainbus.Task`` (of which ``decode``, ``augment``, ``collate`` and ``decode_batch`` are used), or
                just a function that decodes a sample: its fields by extension.
            batch: samples a step over all ranks.
            epochs: after which the iteration ends, counted over all resumptions; None: never.
            workers: processes that decode; 0: a thread does.
            ahead: batches that are made ready ahead.
            lanes, window: of the order of samples (docs/reading.md); None: what suits the dataset.
            pin: put batches into pinned memory, for the current GPU; None: where there is CUDA.
        """
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of world_size {world_size}: ranks count from 0 to world_size - 1")
        if batch < 1:
            raise ValueError(f"batch is {batch}: give the samples of a step, over all ranks")
        self._order = LaneOrder(dataset.dataset_id, dataset.shard_samples(split), seed, lanes=lanes, window=window)
        self._sampler = Sampler(self._order, batch, None if epochs is None else epochs * self._order.samples)
        self._seed, self._rank, self._world_size, self._ahead = seed, rank, world_size, ahead
        task = task if isinstance(task, Task) else _FunctionTask(task)
        task.classes, task.statistics = dataset.classes, dataset.statistics
        self._workers = WorkerPool(workers, lambda: task)
        pins = torch.cuda.is_available() if pin is None else pin
        gpu = torch.device("cuda", torch.cuda.current_device()) if pins else None
        self._batch_loader = BatchLoader(task, dataset.split(split), workers=self._workers, pin_for=gpu)
        #: Over all ranks, with the batch that was handed out last.
        self.samples_consumed = 0

    @property
    def epoch(self) -> int:
        """The epoch, counted from 1, of the last step; 0 before the first. A step belongs to the epoch that it ends."""
        return self._sampler.epoch_of_step(self.samples_consumed)

    def state_dict(self) -> dict[str, Any]:
        """Return where the iteration is: inside the loop, after the batch in hand. The same on every rank."""
        return {"samples_consumed": self.samples_consumed, "order": self._order.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state`` with the next iteration.

        Raises:
            ValueError: the state belongs to another dataset, seed or order; the message names the setting to change.
        """
        self._order.check(state["order"])
        self.samples_consumed = int(state["samples_consumed"])

    def __iter__(self) -> Generator[MicroBatch]:
        """Yield this rank's samples of each step, to the end; ``batch`` is None where it has none."""
        workers = self._batch_loader.workers
        loaded = pipeline_results(self._start_steps(self.samples_consumed), 0 if workers is None else len(workers) + 1)
        with closing(loader.Prefetcher(loaded, self._ahead)) as steps:
            for samples_consumed, step in steps:
                self.samples_consumed = samples_consumed
                yield step

    def close(self) -> None:
        """End the workers."""
        self._workers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_steps(self, samples_consumed: int) -> Iterator[Callable[[], tuple[int, MicroBatch]]]:
        while size := self._sampler.batch_size(samples_consumed):
            bounds = slice_bounds(size, self._world_size, self._rank)
            picked = self._sampler.select(samples_consumed, *bounds)
            samples_consumed += size
            started = self._batch_loader.start(picked.ids, picked.epochs, self._seed)
            yield partial(_with_position, samples_consumed, started)


class _FunctionTask(Task):
    """A task that only decodes, by a function."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode

    def decode(self, sample: dict[str, bytes]) -> Any:
        return self._decode(sample)


def _with_position(samples_consumed: int, started: Callable[[], MicroBatch]) -> tuple[int, MicroBatch]:
    return samples_consumed, started()
