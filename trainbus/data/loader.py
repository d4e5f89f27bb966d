"""Loads batches ahead of the training step, in a thread or in worker processes."""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch

from trainbus.data.batch_tensors import to_device
from trainbus.data.batch_timings import BatchTimings
from trainbus.data.reader import SplitReader
from trainbus.data.sampler import Ids
from trainbus.data.workers import DecodeError, DecodeJob, WorkerPool, run_decode_job
from trainbus.task import Task, TaskError

T = TypeVar("T")
_NO_IDS: Ids = np.empty(0, dtype=np.int64)
#: Seconds to wait, at the end of the process, for a thread that still makes a batch.
JOIN_S = 10.0
#: The threads that make batches, and what each fills.
_RUNNING: dict[threading.Thread, _PrefetchQueue[Any]] = {}


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples that go through the model together. ``batch`` is None if there are none."""

    samples: int
    batch: Any | None
    ids: Ids = field(default_factory=lambda: _NO_IDS)
    reader: SplitReader | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the samples' keys, looked up on access."""
        return () if self.reader is None else self.reader.keys(self.ids)


class BatchLoader:
    """Makes batches of one split's samples with a task, in this process or in workers.

    What a batch holds is a function of the task, its samples and, where they are augmented, their epochs and the seed.
    """

    def __init__(
        self,
        task: Task,
        reader: SplitReader,
        *,
        workers: WorkerPool | None = None,
        waits: BatchTimings | None = None,
        pin_for: torch.device | None = None,
    ) -> None:
        """Load nothing yet.

        Args:
            workers: processes that decode; None: the calling thread decodes.
            waits: where the time is counted.
            pin_for: the GPU for which batches are put into pinned memory, from where it copies while it computes.
        """
        self._task, self._reader, self._waits, self._pin_for = task, reader, waits or BatchTimings(), pin_for
        self.workers = workers if workers is not None and len(workers) else None

    def start(self, ids: Ids, epochs: Ids | None = None, seed: int = 0) -> Callable[[], MicroBatch]:
        """Start a batch and return a function that waits for it. With ``epochs`` the samples are augmented.

        Without workers nothing happens before it is waited for.
        """
        if not len(ids):
            return lambda: MicroBatch(0, None)
        if self.workers is None:
            return lambda: self._finish(ids, self._decode(self._read(ids, epochs, seed)))
        ticket, workers = self.workers.submit(self._read(ids, epochs, seed)), len(self.workers)

        def result() -> MicroBatch:
            try:
                batch, decode_s = ticket.result()
            except DecodeError as error:
                raise self._describe_error(ids, error) from error
            self._waits.add("decode", decode_s / workers)
            return self._finish(ids, batch)

        return result

    def _read(self, ids: Ids, epochs: Ids | None, seed: int) -> DecodeJob:
        fetched = self._waits.totals()["fetch"]
        with self._waits.during("read"):
            fields = self._reader.gather(ids)
        # The time spent waiting for a shard counts as fetch, not as read.
        self._waits.add("read", fetched - self._waits.totals()["fetch"])
        return DecodeJob(ids, fields, epochs, seed)

    def _decode(self, job: DecodeJob) -> Any:
        try:
            with self._waits.during("decode"):
                return run_decode_job(self._task, job)
        except DecodeError as error:
            raise self._describe_error(job.ids, error) from error

    def _finish(self, ids: Ids, batch: Any) -> MicroBatch:
        if self._pin_for is not None:
            # The current device of this thread would get a context of this process, and a new thread's is device 0.
            with self._waits.during("transfer"), torch.cuda.device(self._pin_for):
                batch = to_device(batch, lambda value: value.pin_memory() if isinstance(value, torch.Tensor) else value)
        return MicroBatch(len(ids), batch, ids, self._reader)

    def _describe_error(self, ids: Ids, error: DecodeError) -> TaskError:
        if error.place is None:
            first, last = int(ids[0]), int(ids[-1])
            where = f"a batch of {len(ids)} samples, {self._reader.key(first)!r} to {self._reader.key(last)!r}"
        else:
            sample = int(ids[error.place])
            where = f"sample {self._reader.key(sample)!r} of {self._reader.shard_path(sample)}"
        return TaskError(f"{error.text}; it was {where}", is_permanent=False)


def pipeline_results(started: Iterable[Callable[[], T]], depth: int) -> Iterator[T]:
    """Yield what each of ``started`` returns, in order, while the ``depth`` after it have been started."""
    waiting: deque[Callable[[], T]] = deque()
    for result in started:
        waiting.append(result)
        if len(waiting) > depth:
            yield waiting.popleft()()
    while waiting:
        yield waiting.popleft()()


class Prefetcher(Generic[T]):
    """An iterator over items that a thread makes ahead; ``close`` ends the thread."""

    def __init__(self, items: Iterable[T], depth: int = 2) -> None:
        """Start to make ``items``, up to ``depth`` ahead; an error in making one is raised where it is due."""
        self._queue: _PrefetchQueue[T] = _PrefetchQueue(depth)
        # The thread references the queue alone, so that dropping the iterator ends the thread.
        thread = threading.Thread(target=self._queue.fill, args=(items,), name="trainbus-loader", daemon=True)
        _RUNNING[thread] = self._queue
        thread.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        """Return the next item, waiting for it; an error in making it is raised here."""
        return self._queue.pop()

    def has(self, count: int, timeout_s: float = 0.0) -> bool:
        """Return whether the next ``count`` items are made within that time; true at the end of the items."""
        return self._queue.has(count, timeout_s)

    def close(self) -> None:
        """Stop the thread."""
        self._queue.close()

    def __del__(self) -> None:
        self._queue.close()


class _PrefetchQueue(Generic[T]):
    """The items that are made and not consumed yet."""

    def __init__(self, depth: int) -> None:
        self._depth, self._ready = depth, deque[T]()
        self._changed = threading.Condition()
        self._over = self._closed = False
        #: Made, and waiting for room.
        self._in_hand = 0
        self._error: BaseException | None = None

    def fill(self, items: Iterable[T]) -> None:
        try:
            for item in items:
                if not self._put(item):
                    break
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()
            _RUNNING.pop(threading.current_thread(), None)

    def _put(self, item: T) -> bool:
        """Add an item when there is room; return False once the queue is closed."""
        with self._changed:
            self._in_hand = 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or len(self._ready) < self._depth)
            self._in_hand = 0
            if not self._closed:
                self._ready.append(item)
                self._changed.notify_all()
            return not self._closed

    def pop(self) -> T:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._over)
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
        if self._error is not None:
            raise self._error
        raise StopIteration

    def has(self, count: int, timeout_s: float) -> bool:
        with self._changed:
            made = self._changed.wait_for(lambda: self._over or len(self._ready) + self._in_hand >= count, timeout_s)
            return bool(made)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


@atexit.register
def _close_prefetchers() -> None:
    """Stop all prefetchers before the interpreter ends: a thread that returns from C++ then would abort it."""
    running = list(_RUNNING.items())
    for _, queue in running:
        queue.close()
    for thread, _ in running:
        thread.join(JOIN_S)
