"""Which samples a step trains on: a pure function, whose whole state is one integer.

The epochs of a run laid end to end are one infinite sequence of positions. Position p is sample
``order(p // N)[p % N]``; the order of an epoch is a pure function of (dataset_id, seed, epoch) and never of the
world size. A step takes the next ``global_batch`` positions, whatever epoch they lie in, and each
rank a contiguous slice of those. So after any kills and resizes, the surviving history is the same
sequence: nothing lost, nothing repeated, nothing padded.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


class Order(Protocol):
    """An epoch's order. Another one (by shard and window, for 100 million samples) can take its place."""

    @property
    def samples(self) -> int: ...

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        """Return the sample ids at places ``start`` to ``stop`` (exclusive) of an epoch, counted from 0."""
        ...


class ShuffledOrder:
    """The whole epoch shuffled: ids sorted by a hash of (dataset_id, seed, epoch, id).

    The hash is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
    OOPSLA 2014) written out here, because numpy's own generators may change their streams between versions. Takes
    8 bytes a sample for each of the two epochs it remembers.
    """

    def __init__(self, dataset_id: str, samples: int, seed: int) -> None:
        self._dataset_id = dataset_id
        self._samples = samples
        self._seed = seed
        self._epochs: dict[int, Ids] = {}

    @property
    def samples(self) -> int:
        return self._samples

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        order = self._epochs.get(epoch)
        if order is None:
            order = self._shuffle(epoch)
            # A batch spans two epochs at most while samples >= global_batch; an older one is not asked for again.
            self._epochs = {e: o for e, o in self._epochs.items() if e == epoch - 1}
            self._epochs[epoch] = order
        return order[start:stop]

    def _shuffle(self, epoch: int) -> Ids:
        digest = hashlib.sha256(f"{self._dataset_id}\0{self._seed}\0{epoch}".encode()).digest()
        key = np.uint64(int.from_bytes(digest[:8], "little"))
        golden = np.uint64(0x9E3779B97F4A7C15)
        with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is meant
            z = key + (np.arange(self._samples, dtype=np.uint64) + np.uint64(1)) * golden
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            z = z ^ (z >> np.uint64(31))
        return np.argsort(z, kind="stable").astype(np.int64, copy=False)


@dataclass(frozen=True, slots=True)
class Slice:
    """One rank's part of one step: places ``start`` to ``stop`` of the global batch, and the samples there."""

    start: int
    stop: int
    ids: Ids


def slice_bounds(batch: int, world_size: int, rank: int) -> tuple[int, int]:
    """Return where rank's slice of ``batch`` places lies. Sizes differ by one at most, the low ranks' are the larger.

    Rank 0 therefore has a sample in every step, and a rank has none when the batch is smaller than the world.
    """
    size, extra = divmod(batch, world_size)
    start = rank * size + min(rank, extra)
    return start, start + size + (rank < extra)


class Sampler:
    """Hands out a run's batches. ``end`` is the number of samples after which the run has consumed its epochs."""

    def __init__(self, order: Order, global_batch: int, end: int | None = None) -> None:
        if order.samples == 0:
            raise ValueError("the train split has no samples")
        self.order = order
        self.global_batch = global_batch
        self.end = end

    def batch_size(self, samples_consumed: int) -> int:
        """Return how many samples the step after ``samples_consumed`` takes; 0 at the end. Only the last is smaller."""
        if self.end is None:
            return self.global_batch
        return max(0, min(self.global_batch, self.end - samples_consumed))

    def slice(self, samples_consumed: int, world_size: int, rank: int) -> Slice:
        """Return rank's part of the step that starts after ``samples_consumed`` samples."""
        start, stop = slice_bounds(self.batch_size(samples_consumed), world_size, rank)
        return Slice(start, stop, self.ids(samples_consumed + start, samples_consumed + stop))

    def ids(self, start: int, stop: int) -> Ids:
        """Return the sample ids at positions ``start`` to ``stop`` of the infinite sequence."""
        parts: list[Ids] = []
        position = start
        while position < stop:
            epoch, place = divmod(position, self.order.samples)
            taken = min(stop - position, self.order.samples - place)
            parts.append(self.order.ids(epoch, place, place + taken))
            position += taken
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def epoch(self, samples_consumed: int) -> int:
        """Return the epoch, counted from 1, that the last consumed sample belongs to; 0 before the first."""
        return -(-samples_consumed // self.order.samples)
