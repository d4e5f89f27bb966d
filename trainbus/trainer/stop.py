"""How the ranks agree on the last step, and on what the loss was, at the cost of one small sum a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainbus.trainer.world import World


@dataclass(frozen=True, slots=True)
class Said:
    """What all ranks together said at the end of one step. The same on every rank."""

    step: int
    #: Sum over the ranks of what each passed as ``loss``: the mean loss over the global batch.
    loss: float
    grad_norm: float
    stop: bool
    checkpoint_now: bool


class Consensus:
    """One asynchronous sum of four numbers after each step, looked at one step later.

    Nothing waits for it: by the time it is read, a whole step has gone by. Every rank reads the same sum at
    the same point, so all of them stop after the same step, whenever each was told.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._posted: tuple[int, Tensor, Any] | None = None

    def exchange(self, step: int, loss: Tensor, grad_norm: Tensor, *, stop: bool, checkpoint_now: bool) -> Said | None:
        """Post this step's numbers and return what was said at the last step; None before the first.

        ``loss`` is this rank's share of the mean over the global batch, ``grad_norm`` the same number on every rank.
        """
        said = self.settle()
        flags = torch.tensor([float(stop), float(checkpoint_now)], dtype=torch.float64).to(loss.device)
        numbers = torch.cat([torch.stack([loss.double(), grad_norm.double() / self._world.size]), flags])
        if self._world.size == 1:
            self._posted = (step, *_fetch(numbers))
        elif numbers.is_cuda:
            dist.all_reduce(numbers, async_op=True).wait()  # orders the streams; the host goes on at once
            self._posted = (step, *_fetch(numbers))
        else:
            self._posted = (step, numbers, dist.all_reduce(numbers, async_op=True).wait)
        return said

    def settle(self) -> Said | None:
        """Return what was said at the last posted step, waiting for it if need be; None if that was read already."""
        if self._posted is None:
            return None
        step, numbers, wait = self._posted
        self._posted = None
        wait()
        loss, grad_norm, stop, checkpoint_now = numbers.tolist()
        return Said(step, loss, grad_norm, stop > 0, checkpoint_now > 0)


def _fetch(numbers: Tensor) -> tuple[Tensor, Any]:
    """Copy to the host without holding it up: (the copy, what to call before reading it)."""
    if not numbers.is_cuda:
        return numbers, lambda: None
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    host.copy_(numbers, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return host, event.synchronize
