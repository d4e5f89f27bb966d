"""Agreement of all ranks on the last step and on the loss, at one small all-reduce a step, and on having samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainbus.agent_link.channels import Control
from trainbus.data.loader import Prefetcher
from trainbus.trainer.drift import find_drifted
from trainbus.trainer.world import World

#: Places of the numbers ahead of the leaves' losses.
STOP, CHECKPOINT_NOW, LACKS_DATA, HEAD = range(4)
#: Steps whose samples a rank must have so that ranks need not meet: reports arrive a step later.
MIN_PREFETCHED_STEPS = 2
#: Seconds between two meetings of ranks that wait for samples; well below the timeout of a collective.
MEETING_INTERVAL_S = 1.0
#: Seconds between two checks of a waiting rank whether it must stop.
STOP_CHECK_INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True)
class StepSummary:
    """What all ranks reported of one step. The same on every rank."""

    step: int
    #: Sum of the leaves' losses: the mean loss over the global batch.
    loss: float
    grad_norm: float
    stop: bool
    checkpoint_now: bool
    skipped: bool
    #: A rank does not have the samples of the next steps yet.
    lacks_data: bool
    #: Each rank's own seconds of work in the step before, by rank.
    busy_s: tuple[float, ...]
    #: The ranks whose state differed from the others' before this step.
    drifted: tuple[int, ...] = ()


def _nothing() -> None:
    """Wait for nothing."""


@dataclass(slots=True)
class PostedStep:
    """The numbers of a step that are on their way."""

    step: int
    #: The sum over all ranks; to be read after ``wait``.
    numbers: Tensor
    wait: Callable[[], object]
    #: Known once the step is complete; to be read after ``wait_for_norm``.
    grad_norm: Tensor | None = None
    wait_for_norm: Callable[[], object] = _nothing
    skipped: bool = False
    #: Whether the ranks' checksums are among the numbers.
    has_checksums: bool = False


class StepAgreement:
    """One asynchronous all-reduce of a short vector in each step, read one step later.

    A step is posted before its last backward pass and completed after the optimizer's update. Every rank posts at the
    same point between the same collectives, so the all-reduce finishes before the last gradients do. Every rank reads
    the same sum at the same point, so all of them stop after the same step, whenever the request reached each of them.
    Every number but the flags has a place of its own that one rank fills, and the places are added up in their order:
    the loss is the same to the bit for any number of ranks.
    """

    def __init__(self, world: World, leaf_count: int) -> None:
        self._world = world
        self._leaf_count = leaf_count
        self._posted: PostedStep | None = None
        #: Where the ranks' checksums begin, behind their seconds of work.
        self._checksums_at = HEAD + leaf_count + world.size
        cuda = world.device.type == "cuda"
        #: The all-reduce waits for the slowest rank; on this stream the backward pass does not wait with it.
        self._stream = torch.cuda.Stream(world.device) if cuda else None  # type: ignore[no-untyped-call]

    def post(
        self,
        step: int,
        losses: Mapping[int, Tensor],
        *,
        stop: bool,
        checkpoint_now: bool,
        lacks_data: bool = False,
        busy_s: float = 0.0,
        checksum: Tensor | None = None,
    ) -> StepSummary | None:
        """Post the numbers of the step under way; return the summary of the step before, None if it was returned.

        ``losses`` are those of this rank's leaves, each its share of the mean over the global batch. ``busy_s`` and
        ``checksum`` (``drift.checksum``, of all ranks or none) are of the step before, since this one is not over.
        """
        summary = self.collect()
        known = [0.0] * (self._checksums_at + 2 * self._world.size)
        known[STOP], known[CHECKPOINT_NOW], known[LACKS_DATA] = float(stop), float(checkpoint_now), float(lacks_data)
        known[HEAD + self._leaf_count + self._world.rank] = busy_s
        numbers = torch.tensor(known, dtype=torch.float64).to(self._world.device, non_blocking=True)
        if losses:
            first = HEAD + min(losses)
            numbers[first : first + len(losses)] = torch.stack([losses[leaf] for leaf in sorted(losses)])
        if checksum is not None:
            own = self._checksums_at + 2 * self._world.rank
            numbers[own : own + 2] = checksum
        self._posted = PostedStep(step, *self._sum(numbers), has_checksums=checksum is not None)
        return summary

    def _sum(self, numbers: Tensor) -> tuple[Tensor, Callable[[], object]]:
        """Start to add up the ranks' numbers; return the sum on the host, and what to call before reading it."""
        alone = self._world.size == 1
        if self._stream is None:
            return numbers, _nothing if alone else dist.all_reduce(numbers, async_op=True).wait
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        numbers.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            if not alone:
                dist.all_reduce(numbers, async_op=True).wait()  # orders the streams; the host goes on at once
            return _fetch(numbers)

    def wait(self) -> None:
        """Wait on CPU until all ranks have sent their numbers of the step under way.

        It costs nothing before the last gradients are awaited, since the ranks sent their numbers earlier. On CUDA the
        host does not wait: the communicator works in order, so no gradient arrives unless the numbers did.

        Raises:
            RuntimeError: a rank is gone.
        """
        if self._posted is not None and self._stream is None:
            self._posted.wait()
            self._posted.wait = _nothing

    def complete(self, grad_norm: Tensor, *, skipped: bool = False) -> StepSummary | None:
        """Add what is the same on every rank and known after the update.

        A single rank on CPU gets the summary of this very step, and of any other None.
        """
        assert self._posted is not None
        self._posted.skipped = skipped
        self._posted.grad_norm, self._posted.wait_for_norm = _fetch(grad_norm)
        return self.collect() if self._world.size == 1 and self._stream is None else None

    def collect(self) -> StepSummary | None:
        """Return the summary of the last complete step, waiting for it if need be; None if it was returned before."""
        posted = self._posted
        if posted is None or posted.grad_norm is None:
            return None
        self._posted = None
        posted.wait()
        posted.wait_for_norm()
        values: list[float] = posted.numbers.tolist()
        losses, busy_s = values[HEAD : HEAD + self._leaf_count], values[HEAD + self._leaf_count : self._checksums_at]
        return StepSummary(
            posted.step,
            sum_in_order(losses),
            float(posted.grad_norm),
            stop=values[STOP] > 0,
            checkpoint_now=values[CHECKPOINT_NOW] > 0,
            skipped=posted.skipped,
            lacks_data=values[LACKS_DATA] > 0,
            busy_s=tuple(busy_s),
            drifted=find_drifted(_pairs(values[self._checksums_at :])) if posted.has_checksums else (),
        )

    def compare(self, checksum: Tensor) -> tuple[int, ...]:
        """Return the ranks whose checksum differs from the others'; every rank calls it and waits."""
        if self._world.size == 1:
            return ()
        numbers = torch.zeros(2 * self._world.size, dtype=torch.float64, device=self._world.device)
        numbers[2 * self._world.rank : 2 * self._world.rank + 2] = checksum
        return find_drifted(_pairs(self._world.sum_on_host(numbers)))

    def agree(self, lacking: bool, stop: bool) -> tuple[bool, bool]:
        """Return whether any rank lacks its samples, and whether any must stop; every rank calls it and waits."""
        if self._world.size == 1:
            return lacking, stop
        flags = self._world.sum_on_host(torch.tensor([float(lacking), float(stop)], device=self._world.device))
        return flags[0] > 0, flags[1] > 0

    def sum_weights(self, weights: Mapping[int, float], has_empty: bool) -> tuple[float, bool]:
        """Return the sum of all leaves' weights, and whether any rank has an empty micro-batch; every rank calls it.

        ``weights`` are those of this rank's leaves.
        """
        places = [float(has_empty), *(weights.get(leaf, 0.0) for leaf in range(self._leaf_count))]
        numbers = torch.tensor(places, dtype=torch.float64, device=self._world.device)
        values: list[float] = self._world.sum_on_host(numbers)
        return sum_in_order(values[1:]), values[0] > 0


class StepBarrier:
    """Holds all ranks before a step until each of them has its samples, so that all begin it or none does.

    Every rank makes the same calls. A rank that has begun a step waits for the others in its collectives, and nothing
    ends that wait. If one rank waited for samples there (the store is away), ranks could not stop before the samples
    come, and the grace period would end without a checkpoint. So ranks report after each step, with what they exchange
    anyway, whether they have the samples of the next two. Only where one does not, they meet before the next step until
    all of them have theirs or must stop.
    """

    def __init__(self, agreement: StepAgreement, control: Control, clock: Callable[[], float] = time.monotonic) -> None:
        self._agreement, self._control, self._clock = agreement, control, clock
        #: The step up to which all ranks are known to have their samples.
        self._prefetched_until = -1

    def record_summary(self, summary: StepSummary) -> None:
        """Note whether all ranks had samples in stock after a step."""
        if not summary.lacks_data:
            self._prefetched_until = summary.step + MIN_PREFETCHED_STEPS

    def wait(self, step: int, steps: Prefetcher[Any], on_ready: Callable[[], None] = lambda: None) -> bool:
        """Wait until all ranks can take ``step``; False if they must stop before it.

        Args:
            on_ready: called when this rank has its samples, however long others still wait for theirs.
        """
        if step <= self._prefetched_until:
            return True
        while True:
            lacking = not self._wait_for_samples(steps)
            if not lacking:
                on_ready()
            anyone_lacks, stop = self._agreement.agree(lacking, self._control.stop_requested)
            if not anyone_lacks:
                return True
            if stop:
                return False

    def _wait_for_samples(self, steps: Prefetcher[Any]) -> bool:
        """Wait until the samples are here, the next meeting is due or a stop is requested; return whether they are."""
        until = self._clock() + MEETING_INTERVAL_S
        while (
            not (here := steps.has(1, STOP_CHECK_INTERVAL_S))
            and not self._control.stop_requested
            and self._clock() < until
        ):
            pass
        return here


def _pairs(values: list[float]) -> list[tuple[float, float]]:
    return list(zip(values[::2], values[1::2], strict=True))


def sum_in_order(values: list[float]) -> float:
    """Add up from the left, each sum rounded to a double, in every version of Python."""
    total = 0.0
    for value in values:
        total += value
    return total


def _fetch(numbers: Tensor) -> tuple[Tensor, Callable[[], object]]:
    """Copy to the host without holding it up: (the copy, what to call before reading it)."""
    if not numbers.is_cuda:
        return numbers, _nothing
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    host.copy_(numbers, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(numbers.device))
    return host, event.synchronize
