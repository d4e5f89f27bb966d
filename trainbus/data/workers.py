"""Decoding of samples to a batch by a task, in any process, and processes that decode.

They receive bytes and return batches; they open no file and hold no state.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import setitem
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from contracts.datasets import FieldStatistics
from trainbus.data.channel import ChannelClosed, open_channel, receive, send
from trainbus.data.reader import Fields, RaggedField, sample_fields
from trainbus.data.sampler import Ids
from trainbus.task import ROW_FIELD, Task, TaskError, describe

_SLOT_BYTES = 8
#: Fields of a row that an error lists.
MAX_NAMED_FIELDS = 40
#: In a worker's slot while it decodes no particular sample.
_NOWHERE = -1


@dataclass(frozen=True, slots=True)
class DecodeJob:
    """The input of one batch. The batch depends only on it and the task."""

    ids: Ids
    fields: Fields
    #: The epoch (counted from 0) of each sample, and the run's seed, where the samples are to be augmented.
    epochs: Ids | None = None
    seed: int = 0


class DecodeError(Exception):
    """The task raised an error, or the decoding process died."""

    def __init__(self, text: str, place: int | None = None) -> None:
        super().__init__(text, place)  # both, so that it pickles
        self.text = text
        #: Which of the job's samples it was; None: no particular one.
        self.place = place


def run_decode_job(task: Task, job: DecodeJob, at: Callable[[int], None] = lambda place: None) -> Any:
    """Return the batch of a job's samples, one at least.

    Args:
        at: called with the place of each sample before it is decoded.

    Raises:
        DecodeError: the task raised an error; its traceback is in the log.
    """
    place: int | None = None
    method = "decode_batch"
    try:
        if takes_arrays(task, job):
            return task.decode_batch(
                {name: field for name, field in job.fields.items() if not isinstance(field, RaggedField)}
            )
        method, examples = "decode", []
        for place in range(len(job.ids)):
            at(place)
            examples.append(task.decode(sample_fields(job.fields, place)))
        if job.epochs is not None and has_augmentation(task):
            method = "augment"
            for place, (epoch, sample) in enumerate(zip(job.epochs.tolist(), job.ids.tolist(), strict=True)):
                at(place)
                examples[place] = task.augment(examples[place], sample_generator(job.seed, epoch, sample))
        place, method = None, "collate"
        return task.collate(examples)
    except Exception as error:
        traceback.print_exception(error)
        text = f"{describe(error, _code(task))}: {type(task).__name__}.{method}() failed"
        if isinstance(error, KeyError):
            text += describe_fields(sample_fields(job.fields, place or 0))
        raise DecodeError(text, place) from error


def describe_fields(sample: Mapping[str, bytes]) -> str:
    """Return which fields a sample has, and those of the row in it, ready to follow an error."""
    text = f"; the sample has the fields {', '.join(sorted(sample))}"
    try:
        row = json.loads(sample[ROW_FIELD])
    except (KeyError, ValueError):
        return text
    if not isinstance(row, dict):
        return text
    names = ", ".join(sorted(map(str, row))[:MAX_NAMED_FIELDS]) + (", ..." if len(row) > MAX_NAMED_FIELDS else "")
    return f"{text}, and its row ({ROW_FIELD}) has {names}"


def _code(task: Task) -> Path | None:
    """Return the folder of the user's code, so that an error names a line in it."""
    file = getattr(sys.modules.get(type(task).__module__), "__file__", None)
    return None if file is None else Path(file).parent


def has_augmentation(task: Task) -> bool:
    return type(task).augment is not Task.augment


def takes_arrays(task: Task, job: DecodeJob) -> bool:
    """Return whether the task takes these samples as arrays."""
    if type(task).decode_batch is Task.decode_batch or (job.epochs is not None and has_augmentation(task)):
        return False
    return not any(isinstance(field, RaggedField) for field in job.fields.values())


def sample_generator(seed: int, epoch: int, sample: int) -> np.random.Generator:
    """Return a generator whose numbers are a function of (seed, epoch, sample), however far it is read.

    Philox counts, so there is nothing to save: the low half of its 256-bit counter is the generator's own.
    Reference: "Parallel Random Numbers: As Easy as 1, 2, 3" (Salmon et al., SC 2011).
    """
    key, counter = np.array([seed, 0], dtype=np.uint64), np.array([0, 0, sample, epoch], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


@dataclass(frozen=True, slots=True)
class _DatasetInfo:
    """The dataset's properties that a task uses."""

    classes: tuple[str, ...]
    statistics: Mapping[str, FieldStatistics]


class DecodeFuture:
    """The result of a submitted job."""

    def __init__(self, worker: _Worker) -> None:
        self._worker = worker
        self.answer: tuple[Any, float] | DecodeError | None = None

    def result(self) -> tuple[Any, float]:
        """Wait for the batch; return it and the seconds that it took to decode.

        Raises:
            DecodeError: the task raised an error, or the worker died.
        """
        self._worker.wait_for(self)
        assert self.answer is not None
        if isinstance(self.answer, DecodeError):
            raise self.answer
        return self.answer


class WorkerPool:
    """A pool of processes, forked from this one. Thread-safe."""

    def __init__(self, count: int, make: Callable[[], Task]) -> None:
        """Fork the processes at once: best before there are threads, and before CUDA is used.

        Args:
            make: called in each worker; what it raises is raised by the first job.
        """
        #: For each worker the sample that it decodes, to be read after its death.
        slots = memoryview(mmap.mmap(-1, max(1, count) * _SLOT_BYTES)).cast("q")
        self._workers: list[_Worker] = []
        sys.stdout.flush()
        sys.stderr.flush()
        for number in range(count):
            ours, theirs = open_channel()
            pid = os.fork()
            if pid == 0:
                # An end that stayed open here would hide its owner's death from the other workers.
                for end in (ours, *(worker.end for worker in self._workers)):
                    end.close()
                _run_worker(theirs, make, partial(setitem, slots, number))
            theirs.close()
            self._workers.append(_Worker(number, pid, ours, slots))
        self._next, self._lock, self._owner = 0, threading.Lock(), os.getpid()

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    def set_dataset(self, classes: tuple[str, ...], statistics: Mapping[str, FieldStatistics]) -> None:
        """Set the ``classes`` and ``statistics`` of every worker's task."""
        for worker in self._workers:
            worker.submit(_DatasetInfo(classes, dict(statistics)), None)

    def submit(self, job: DecodeJob) -> DecodeFuture:
        """Submit a job. Workers take jobs in turn; the result depends only on the job."""
        with self._lock:
            worker = self._workers[self._next % len(self._workers)]
            self._next += 1
        ticket = DecodeFuture(worker)
        worker.submit(job, ticket)
        return ticket

    def close(self) -> None:
        """Kill the workers."""
        for worker in self._workers:
            worker.end.close()
            worker.kill()
        for worker in self._workers:
            worker.reap()

    def __del__(self) -> None:
        if getattr(self, "_owner", None) == os.getpid():  # and not a fork that has inherited this object
            self.close()


class _Worker:
    """The parent's side of one worker."""

    def __init__(self, number: int, pid: int, end: socket.socket, slots: memoryview[int]) -> None:
        self.number, self.pid, self.end, self._slots = number, pid, end, slots
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._waiting: deque[DecodeFuture] = deque()
        self._status: int | None = None

    def submit(self, value: Any, ticket: DecodeFuture | None) -> None:
        with self._sending:
            if ticket is not None:
                self._waiting.append(ticket)
            with contextlib.suppress(ChannelClosed):  # waiting for the ticket raises the error
                send(self.end, value)

    def wait_for(self, ticket: DecodeFuture) -> None:
        """Receive answers, which come in the order of the jobs, until this one arrives."""
        with self._receiving:
            while ticket.answer is None:
                try:
                    answer = receive(self.end)
                except ChannelClosed:
                    answer = self._death()
                except OSError as error:
                    answer = DecodeError(f"the batch of loader worker {self.number} cannot be received: {error}")
                self._waiting.popleft().answer = answer

    def kill(self) -> None:
        if self._status is None:  # otherwise another process may have its number
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def reap(self) -> int:
        """Wait for the process to end and return its status; it must have been ended."""
        if self._status is None:
            try:
                self._status = os.waitpid(self.pid, 0)[1]
            except ChildProcessError:  # it was reaped elsewhere
                self._status = 0
        return self._status

    def _death(self) -> DecodeError:
        code, place = os.waitstatus_to_exitcode(self.reap()), self._slots[self.number]
        self._slots[self.number] = _NOWHERE  # jobs behind the fatal one did not start
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        hint = " (out of memory? fewer training.loading.workers take less)" if code == -signal.SIGKILL else ""
        return DecodeError(f"loader worker {self.number} {how}{hint}", place if place >= 0 else None)


def _run_worker(end: socket.socket, make: Callable[[], Task], record_place: Callable[[int], None]) -> NoReturn:
    """Decode until the parent is gone."""
    code = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)  # meant for the parent, which then ends this process
        record_place(_NOWHERE)
        threading.Thread(target=_exit_with_peer, args=(end,), daemon=True).start()
        torch.set_num_threads(1)
        task: Task | None = None
        dataset: _DatasetInfo | None = None
        while True:
            value = receive(end)
            if isinstance(value, _DatasetInfo):
                dataset = value
                task = None if task is None else _configure(task, dataset)
                continue
            started = time.perf_counter()
            try:
                task = task or _configure(make(), dataset)
                answer: Any = run_decode_job(task, value, record_place), time.perf_counter() - started
            except DecodeError as error:
                answer = error
            except TaskError as error:
                answer = DecodeError(str(error))
            record_place(_NOWHERE)
            _send_answer(end, answer)
    except ChannelClosed:
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _send_answer(end: socket.socket, answer: Any) -> None:
    try:
        send(end, answer)
    except (ChannelClosed, OSError):
        raise
    except Exception as error:
        traceback.print_exception(error)
        send(end, DecodeError(f"the batch cannot be passed on between processes: {type(error).__name__}: {error}"))


def _configure(task: Task, dataset: _DatasetInfo | None) -> Task:
    if dataset is not None:
        task.classes, task.statistics = dataset.classes, dataset.statistics
    return task


def _exit_with_peer(end: socket.socket) -> None:
    """End this process when the other end is closed, even in the middle of a long decode."""
    poll = select.poll()
    poll.register(end, select.POLLRDHUP)
    poll.poll()
    os._exit(0)
