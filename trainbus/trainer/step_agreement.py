"""Lets the ranks agree on the last step, and on the loss, at the cost of one small all-reduce a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainbus.trainer.world import World

#: Places of the numbers ahead of the leaves' losses.
STOP, CHECKPOINT_NOW, GRAD_NORM, SKIPPED, LACKS_DATA, HEAD = range(6)


@dataclass(frozen=True, slots=True)
class StepSummary:
    """What all ranks reported at the end of one step. The same on every rank."""

    step: int
    #: Sum of the leaves' losses: the mean loss over the global batch.
    loss: float
    grad_norm: float
    stop: bool
    checkpoint_now: bool
    skipped: bool
    #: A rank does not have the samples of the next steps yet.
    lacks_data: bool
    #: Each rank's own seconds of work, by rank.
    busy_s: tuple[float, ...]


class StepAgreement:
    """One asynchronous all-reduce of a short vector after each step, read one step later.

    Nothing waits for it: a whole step passes before it is read. Every rank reads the same sum at the same point, so all
    of them stop after the same step, whenever the request reached each of them. Every number but the flags has a place
    of its own that one rank fills, and the places are added up in their order: the loss is the same to the bit for any
    number of ranks.
    """

    def __init__(self, world: World, leaf_count: int) -> None:
        self._world = world
        self._leaf_count = leaf_count
        self._posted: tuple[int, Tensor, Any] | None = None

    def exchange(
        self,
        step: int,
        losses: Mapping[int, Tensor],
        grad_norm: Tensor,
        *,
        stop: bool,
        checkpoint_now: bool,
        skipped: bool = False,
        lacks_data: bool = False,
        busy_s: float = 0.0,
    ) -> StepSummary | None:
        """Post this step's numbers and return the summary of the step before; None before the first.

        A single rank on CPU gets the summary of this very step.

        ``losses`` are those of this rank's leaves, each its share of the mean over the global batch; ``grad_norm`` and
        ``skipped`` are the same on every rank.
        """
        summary = self.collect()
        known = [0.0] * (HEAD + self._leaf_count + self._world.size)
        known[STOP], known[CHECKPOINT_NOW] = float(stop), float(checkpoint_now)
        known[SKIPPED], known[LACKS_DATA] = float(skipped), float(lacks_data)
        known[HEAD + self._leaf_count + self._world.rank] = busy_s
        numbers = torch.tensor(known, dtype=torch.float64).to(grad_norm.device, non_blocking=True)
        if losses:
            first = HEAD + min(losses)
            numbers[first : first + len(losses)] = torch.stack([losses[leaf] for leaf in sorted(losses)])
        if self._world.is_first:
            numbers[GRAD_NORM] = grad_norm
        if self._world.size == 1:
            self._posted = (step, *_fetch(numbers))
            if not numbers.is_cuda:
                return self.collect()  # there is no other rank to wait for
        elif numbers.is_cuda:
            dist.all_reduce(numbers, async_op=True).wait()  # orders the streams; the host goes on at once
            self._posted = (step, *_fetch(numbers))
        else:
            self._posted = (step, numbers, dist.all_reduce(numbers, async_op=True).wait)
        return summary

    def collect(self) -> StepSummary | None:
        """Return the summary of the last posted step, waiting for it if need be; None if it was returned before."""
        if self._posted is None:
            return None
        step, numbers, wait = self._posted
        self._posted = None
        wait()
        values: list[float] = numbers.tolist()
        losses, busy_s = values[HEAD : HEAD + self._leaf_count], values[HEAD + self._leaf_count :]
        return StepSummary(
            step,
            sum_in_order(losses),
            values[GRAD_NORM],
            stop=values[STOP] > 0,
            checkpoint_now=values[CHECKPOINT_NOW] > 0,
            skipped=values[SKIPPED] > 0,
            lacks_data=values[LACKS_DATA] > 0,
            busy_s=tuple(busy_s),
        )

    def agree(self, lacking: bool, stop: bool) -> tuple[bool, bool]:
        """Return whether any rank lacks its samples, and whether any must stop; every rank calls it and waits."""
        if self._world.size == 1:
            return lacking, stop
        flags = self._world.all_reduce(torch.tensor([float(lacking), float(stop)], device=self._world.device))
        return flags[0].item() > 0, flags[1].item() > 0


def sum_in_order(values: list[float]) -> float:
    """Add up from the left, each sum rounded to a double, in every version of Python."""
    total = 0.0
    for value in values:
        total += value
    return total


def _fetch(numbers: Tensor) -> tuple[Tensor, Any]:
    """Copy to the host without holding it up: (the copy, what to call before reading it)."""
    if not numbers.is_cuda:
        return numbers, lambda: None
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    host.copy_(numbers, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return host, event.synchronize
