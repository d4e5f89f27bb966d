"""Read plans: which shards a rank will read, in the order of first need, to fill a cache ahead."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from trainbus.data.order import Ids, LaneOrder
from trainbus.data.sampler import slice_bounds


@dataclass(frozen=True, slots=True)
class ShardNeed:
    """A shard (its number in the manifest's order) that is read by positions ``first`` to ``last`` of the run.

    It is read as soon as the batch that position ``first`` is in is made, and not after the one of ``last``.
    """

    shard: int
    first: int
    last: int


class ReadAhead(Protocol):
    """Fetches shards to the node before a rank needs them."""

    def set_plan(self, split: str, needs: Callable[[int, int], Sequence[ShardNeed]]) -> None:
        """Set what any range of positions will need; ``needs`` may be called from another thread."""
        ...

    def set_position(self, samples_consumed: int) -> None:
        """Set how far training is."""
        ...


class ReadPlan:
    """What the leaves (or ranks) ``own`` of ``parts`` will read. Not thread-safe.

    It is exact in the lanes' windows: a window that these leaves take samples from counts with all its shards, from
    its first position to its last. So a shard that is named may, seldom, not be read; none is read without being named.
    """

    def __init__(
        self, order: LaneOrder, global_batch: int, parts: int, own: Collection[int], end: int | None = None
    ) -> None:
        self._order, self._global_batch, self._parts, self._end = order, global_batch, parts, end
        self._own = sorted(own)
        #: By the lane that a batch begins with: the lanes that its own places are in.
        self._lanes: dict[int, Ids] = {}

    def needs(self, start: int, stop: int) -> list[ShardNeed]:
        """Return what positions ``start`` to ``stop`` need, sorted by ``first``; ``start`` is where a batch begins."""
        if self._end is not None:
            stop = min(stop, self._end)
        found: dict[int, list[ShardNeed]] = {}
        slack = self._global_batch + self._order.lanes
        while start < stop:
            epoch, place = divmod(start, self._order.samples)
            left = (epoch + 1) * self._order.samples - start
            # Batches that lie in this epoch as a whole, then the one that crosses into the next (or is the last).
            whole = min(left, (self._end or start + left) - start) // self._global_batch
            whole = min(whole, -(-(stop - start) // self._global_batch))
            if whole:
                size = whole * self._global_batch
                windows = self._windows(epoch, place, place + size, self._lanes_from(place, whole))
                start += size
            else:
                size = self._global_batch if self._end is None else min(self._global_batch, self._end - start)
                windows = self._single(self._own_positions(start, size))
                start += size
            for need in windows:
                _merge(found.setdefault(need.shard, []), need, slack)
        return sorted((need for needs in found.values() for need in needs), key=lambda need: (need.first, need.shard))

    def _lanes_from(self, place: int, batches: int) -> Ids:
        """Return the lanes of the next whole batches from ``place`` on; they repeat after ``lanes`` batches at most."""
        lanes, step = self._order.lanes, self._global_batch % self._order.lanes
        period = lanes // math.gcd(lanes, step) if step else 1
        found = []
        for number in range(min(batches, period)):
            first = (place + number * step) % lanes
            if first not in self._lanes:
                # Any place of this lane in an epoch has the same result; batches of one epoch have no other bounds.
                positions = np.arange(first, first + self._global_batch)
                rank = self._order.lane_rank[positions % lanes]
                laid_out = (positions % lanes)[np.argsort(rank, kind="stable")]
                self._lanes[first] = np.unique(np.concatenate([laid_out[a:b] for a, b in self._bounds(len(laid_out))]))
            found.append(self._lanes[first])
        return np.unique(np.concatenate(found))

    def _bounds(self, size: int) -> Iterator[tuple[int, int]]:
        return (slice_bounds(size, self._parts, part) for part in self._own)

    def _own_positions(self, start: int, size: int) -> Ids:
        laid_out = self._order.batch(start, size)
        return np.concatenate([laid_out[a:b] for a, b in self._bounds(size)])

    def _windows(self, epoch: int, start: int, stop: int, lanes: Ids) -> Iterator[ShardNeed]:
        """Yield the shards of every window of ``lanes`` that places ``start`` to ``stop`` of an epoch reach."""
        order = self._order
        base = epoch * order.samples
        for lane in lanes.tolist():
            rows = max(0, -(-(start - lane) // order.lanes)), -(-(stop - lane) // order.lanes)
            if rows[0] >= rows[1]:
                continue
            first = int(order.window_of(lane, rows[0]))
            for window in range(first, int(order.window_of(lane, rows[1] - 1)) + 1):
                a, b = order.window_bounds(lane, window)
                yield from self._shards(
                    epoch,
                    int(order.lane_starts[lane]) + a,
                    int(order.lane_starts[lane]) + b,
                    base + max(start, a * order.lanes + lane),
                    base + (b - 1) * order.lanes + lane,
                )

    def _single(self, positions: Ids) -> Iterator[ShardNeed]:
        """Yield the very shards that one batch reads."""
        order = self._order
        ids = order.at(positions)
        shards = np.searchsorted(order.shard_starts, ids, side="right") - 1
        for shard in np.unique(shards).tolist():
            here = positions[shards == shard]
            yield ShardNeed(shard, int(here.min()), int(here.max()))

    def _shards(self, epoch: int, slot: int, stop: int, first: int, last: int) -> Iterator[ShardNeed]:
        known = self._order.epoch(epoch)
        a, b = np.searchsorted(known.ends, [slot, stop - 1], side="right")
        for shard in known.shards[a : b + 1].tolist():
            yield ShardNeed(shard, first, last)


def _merge(needs: list[ShardNeed], new: ShardNeed, slack: int) -> None:
    """Add ``new``, as one with those that it overlaps or nearly touches."""
    first, last, apart = new.first, new.last, []
    for need in needs:
        if need.first <= last + slack and first <= need.last + slack:
            first, last = min(first, need.first), max(last, need.last)
        else:
            apart.append(need)
    needs[:] = [*apart, ShardNeed(new.shard, first, last)]
