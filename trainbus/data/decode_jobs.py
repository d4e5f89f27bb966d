"""Decoding of samples to a batch by a task, in any process."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainbus.data.reader import Fields, RaggedField, sample_fields
from trainbus.data.sampler import Ids
from trainbus.task import Task, describe


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
        raise DecodeError(f"{type(task).__name__}.{method}() failed: {describe(error, _code(task))}", place) from error


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
