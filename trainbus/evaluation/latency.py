"""How long a model takes to answer one sample as serving does: decoded, collated, predicted, back on the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from trainbus.data.batch_tensors import to_device
from trainbus.data.reader import SplitReader
from trainbus.task import Task, describe

#: Answers before the first that counts: kernels are chosen and caches filled by them.
WARM_UP_ANSWERS = 5
#: Samples that are answered, spread over the split, and how long that may take.
MAX_SAMPLES = 200
MAX_S = 1.0


def measure_latency_ms(task: Task, model: nn.Module, reader: SplitReader, device: torch.device) -> float | None:
    """Return the median time of an answer to a single sample, in milliseconds; None if the task answers none.

    Other work on the machine only ever adds time, and to some answers more than to others: the median stays where it is
    until half of them are disturbed. Reading the samples does not count, since a request brings them.
    """
    if type(task).serve is Task.serve and type(task).predict is Task.predict:
        return None
    count = min(len(reader), MAX_SAMPLES)
    samples = [reader[number * len(reader) // count].fields for number in range(count)]
    durations_ms: list[float] = []
    start = time.perf_counter()
    try:
        for answered in range(WARM_UP_ANSWERS + count):
            began = time.perf_counter()
            if _answer(task, model, samples[answered % count], device) is None:
                return None
            ended = time.perf_counter()
            if answered >= WARM_UP_ANSWERS:
                durations_ms.append((ended - began) * 1000)
            elif ended - start > MAX_S:
                # So slow a model has no time to warm up; this answer is better than none.
                durations_ms = [(ended - began) * 1000]
            if ended - start > MAX_S:
                break
    except Exception as error:
        # What is measured of whole batches stands: not every model takes a single sample.
        print(f"trainbus: latency_ms is not measured, since a batch of one sample fails: {describe(error, None)}")
        return None
    return statistics.median(durations_ms)


def _answer(task: Task, model: nn.Module, sample: Mapping[str, bytes], device: torch.device) -> Any:
    """Return what a served model answers for one sample, on the host; None: nothing."""
    batch = to_device(task.collate([task.decode(dict(sample))]), lambda value: value.to(device))
    with torch.inference_mode():
        answer: Any = task.serve(model, batch)
        if answer is None:
            answer = task.predict(model, batch)
        # A GPU has computed it only once the values are here.
        return to_device(answer, lambda value: value.cpu() if isinstance(value, torch.Tensor) else value)
