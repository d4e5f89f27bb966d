"""Which samples a step trains on: a pure function, whose whole state is one integer.

The epochs of a run laid end to end are one infinite sequence of positions, and what stands at each is the order's
word (``trainbus/data/order.py``), never the world size's. A step takes the next ``global_batch`` positions, whatever
epoch they lie in; the batch lays them out as its places, and each rank gets a contiguous slice of those. So after any
kills and resizes the surviving history is the same sequence: nothing lost, nothing repeated, nothing padded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trainbus.data.order import Ids, LaneOrder

__all__ = ["Ids", "SampleSlice", "Sampler", "slice_bounds"]


@dataclass(frozen=True, slots=True)
class SampleSlice:
    """The samples in some places of a batch, and the epoch (counted from 0) of each."""

    ids: Ids
    epochs: Ids

    def __len__(self) -> int:
        return len(self.ids)


def slice_bounds(batch: int, world_size: int, rank: int) -> tuple[int, int]:
    """Return where rank's slice of ``batch`` places lies. Sizes differ by one at most, the low ranks' are the larger.

    Rank 0 therefore has a sample in every step, and a rank has none when the batch is smaller than the world.
    """
    size, extra = divmod(batch, world_size)
    start = rank * size + min(rank, extra)
    return start, start + size + (rank < extra)


class Sampler:
    """Selects the samples of a run's batches. ``end`` is the number of samples of all its epochs."""

    def __init__(self, order: LaneOrder, global_batch: int, end: int | None = None) -> None:
        if order.samples == 0:
            raise ValueError("the train split has no samples")
        self.order = order
        self.global_batch = global_batch
        self.end = end
        self._laid_out: tuple[int, int, Ids] = (-1, 0, np.empty(0, dtype=np.int64))

    def batch_size(self, samples_consumed: int) -> int:
        """Return how many samples the step after ``samples_consumed`` takes; 0 at the end. Only the last is smaller."""
        if self.end is None:
            return self.global_batch
        return max(0, min(self.global_batch, self.end - samples_consumed))

    def select(self, samples_consumed: int, start: int, stop: int) -> SampleSlice:
        """Return what is in places ``start`` to ``stop`` of the batch after ``samples_consumed`` samples."""
        positions = self._batch(samples_consumed)[start:stop]
        return SampleSlice(self.order.at(positions), positions // self.order.samples)

    def slice(self, samples_consumed: int, world_size: int, rank: int) -> SampleSlice:
        """Return rank's part of the step that starts after ``samples_consumed`` samples."""
        return self.select(samples_consumed, *slice_bounds(self.batch_size(samples_consumed), world_size, rank))

    def ids(self, start: int, stop: int) -> Ids:
        """Return the sample ids at positions ``start`` to ``stop`` of the infinite sequence."""
        return self.order.at(np.arange(start, stop, dtype=np.int64))

    def epoch(self, samples_consumed: int) -> int:
        """Return the epoch, counted from 1, that the last consumed sample belongs to; 0 before the first."""
        return -(-samples_consumed // self.order.samples)

    def epoch_of_step(self, samples_consumed: int) -> int:
        """Return the epoch, counted from 1, of the step that consumed up to here; 0 before the first.

        A step that crosses the end of an epoch belongs to the epoch that it ends, as do the validation and the
        checkpoint that follow it.
        """
        ended, beyond = divmod(samples_consumed, self.order.samples)
        return ended if beyond == 0 or (ended and beyond < self.global_batch) else ended + 1

    def _batch(self, samples_consumed: int) -> Ids:
        # A rank with several leaves asks for one batch several times.
        size = self.batch_size(samples_consumed)
        if self._laid_out[:2] != (samples_consumed, size):
            self._laid_out = samples_consumed, size, self.order.batch(samples_consumed, size)
        return self._laid_out[2]
