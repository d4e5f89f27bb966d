"""Reads, decodes and collates ahead of the training step, in one thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from trainbus.data.reader import SplitReader
from trainbus.data.sampler import Ids, Sampler
from trainbus.task import Task

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some samples that go through the model together. ``batch`` is None where there are none."""

    samples: int
    batch: Any | None
    keys: tuple[str, ...] = field(default=())


def load(task: Task, reader: SplitReader, ids: Ids, augment: Callable[[int, Any], Any] | None = None) -> MicroBatch:
    """Read and decode the samples and make one batch of them.

    ``augment`` is given the place of an example among ``ids``, and the example.
    """
    if len(ids) == 0:
        return MicroBatch(0, None)
    samples = [reader[int(i)] for i in ids]
    examples = [task.decode(sample.fields) for sample in samples]
    if augment is not None:
        examples = [augment(place, example) for place, example in enumerate(examples)]
    return MicroBatch(len(samples), task.collate(examples), tuple(sample.key for sample in samples))


def load_for_training(
    task: Task, reader: SplitReader, sampler: Sampler, seed: int, start: int, stop: int
) -> MicroBatch:
    """Load positions ``start`` to ``stop`` of the run's sequence of samples, augmented where the task does that."""
    ids = sampler.ids(start, stop)
    if type(task).augment is Task.augment:
        return load(task, reader, ids)

    def augment(place: int, example: Any) -> Any:
        epoch = (start + place) // sampler.order.samples
        return task.augment(example, sample_generator(seed, epoch, int(ids[place])))

    return load(task, reader, ids, augment)


def sample_generator(seed: int, epoch: int, sample: int) -> np.random.Generator:
    """Return a generator whose numbers are a function of (seed, epoch, sample), however far it is read.

    Philox counts, so there is nothing to save: the low half of its 256-bit counter is the generator's own.
    See "Parallel Random Numbers: As Easy as 1, 2, 3" (Salmon et al., SC 2011).
    """
    key, counter = np.array([seed, 0], dtype=np.uint64), np.array([0, 0, sample, epoch], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def ahead(items: Iterable[T], depth: int = 2) -> Generator[T]:
    """Yield ``items``, made up to ``depth`` ahead in a thread; an error in making one is raised here.

    Closing the iterator ends the thread.
    """
    done = object()
    ready: queue.Queue[Any] = queue.Queue(maxsize=depth)
    closed = threading.Event()

    def put(item: object) -> bool:
        while not closed.is_set():
            try:
                ready.put(item, timeout=0.2)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for item in items:
                if not put((item, None)):
                    return
            put((done, None))
        except BaseException as error:
            put((done, error))

    threading.Thread(target=work, name="trainbus-loader", daemon=True).start()
    try:
        while True:
            item, error = ready.get()
            if error is not None:
                raise error
            if item is done:
                return
            yield item
    finally:
        closed.set()


def to_device(batch: Any, move: Callable[[Any], Any]) -> Any:
    """Apply ``move`` to every tensor inside nested tuples, lists and dicts."""
    match batch:
        case dict():
            return {key: to_device(value, move) for key, value in batch.items()}
        case tuple() if hasattr(batch, "_fields"):
            return type(batch)(*(to_device(value, move) for value in batch))
        case tuple() | list():
            return type(batch)(to_device(value, move) for value in batch)
        case _:
            return move(batch) if hasattr(batch, "to") else batch
