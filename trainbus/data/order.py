"""The order of samples: the sample at each position, a pure function of a few numbers.

The epochs of a run laid end to end are one infinite sequence of positions; position p is place ``p % N`` of epoch
``p // N``. Algorithm version 1, for a dataset of S shards and N samples in the manifest's order:

- *Random numbers.* The epoch's key is the first 16 bytes of SHA-256 of ``"<dataset_id>\\0<seed>\\0<epoch>"``, two
  little-endian 64-bit words. ``words(counter, n)`` are the first n outputs of Philox4x64-10 with that key, whose
  256-bit counter begins at ``counter`` and is increased before each block of four. A permutation of n things is
  0..n-1 sorted by those words, their low ``bit_length(n - 1)`` bits replaced by the thing's number.
- *Shards.* They are permuted with counter (0, 0, 0, 0) and their samples laid one after the other: N slots.
- *Lanes.* The slots are cut into C lanes. Place p reads lane ``p % C``, as its sample ``p // C``: lane l has
  ``N // C`` slots, and one more where ``l < N % C``. The lanes lie in the slots in the order of their numbers with
  the bits reversed: consecutive lanes are far apart, so any run of positions, however short, covers the slots evenly.
- *Windows.* A lane is cut into windows of ``window_samples``, its first one of ``(l + 1) / C`` of that (rounded up),
  so that the lanes come to new shards in turn and not all at once. Window w of lane l is permuted with counter
  (0, w, l, 1).
- *Batches.* The places of a batch are its positions, sorted by where their lane lies in the slots and then by
  position. So contiguous slices of a batch, for ranks or logical ranks, read few shards, and always the same lanes.

Philox is that of "Parallel Random Numbers: As Easy as 1, 2, 3" (Salmon et al., SC 2011). numpy keeps the raw words of
a bit generator for ever (NEP 19), but not its ``permutation``; that is why the sorting is done here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

ALGORITHM = 1
#: Shards' worth of samples in a window, where nothing is set, and how many lanes there are at most.
WINDOW = 4
MAX_LANES = 64
#: The most samples in the windows of all lanes together, where no window is set. They are in memory (4 bytes each,
#: twice), and a resumed run sorts them before its first batch.
MAX_WINDOW_SAMPLES = 2**22
#: And where one is set.
MAX_SET_WINDOW_SAMPLES = 2**28
_SHARDS = (0, 0, 0, 0)


class OrderMismatch(ValueError):
    """A state belongs to another order of samples; the message names the setting to change."""


@dataclass(frozen=True, slots=True)
class EpochOrder:
    """One epoch's random numbers and shards."""

    key: NDArray[np.uint64]
    #: Shard numbers in the order of the slots; where each ends; what turns a slot of it into a sample's id.
    shards: Ids
    ends: Ids
    shift: Ids


class LaneOrder:
    """The order of one split's samples. Not thread-safe: it caches the current windows."""

    def __init__(
        self,
        dataset_id: str,
        shard_samples: Sequence[int],
        seed: int,
        *,
        lanes: int | None = None,
        window: int | None = None,
    ) -> None:
        """Lay out the order; it computes samples only on demand.

        Args:
            shard_samples: samples of each shard, in the manifest's order.
            lanes: read side by side; None: as many as make a window of each lane's shards, 64 at most.
            window: in shards' worth of samples; None: 4, or everything where the shards are fewer than 8.

        Raises:
            ValueError: the windows would not fit into memory.
        """
        self.dataset_id, self.seed = dataset_id, seed
        self._shard_samples = np.asarray(shard_samples, dtype=np.int64)
        self.shard_starts = _starts(self._shard_samples)
        self.samples, shards = int(self._shard_samples.sum()), len(shard_samples)
        self.window = window
        self.lanes, self.window_samples = _layout(self.samples, shards, lanes, window)
        number = np.arange(self.lanes, dtype=np.int64)
        size, extra = divmod(self.samples, self.lanes)
        #: By lane: its samples, which of all lanes it is in the slots, its first slot, its first window's samples.
        self.lane_samples = size + (number < extra)
        self.lane_rank = _spread(self.lanes)
        by_rank = np.argsort(self.lane_rank)
        self.lane_starts = _starts(self.lane_samples[by_rank])[self.lane_rank]
        self.first_window = -(-self.window_samples * (number + 1) // self.lanes)
        #: Windows as they are permuted: two of each lane. Pages that are never written take no memory.
        width = min(self.window_samples, int(self.lane_samples[0]))
        self._windows = np.empty((2, self.lanes, width), dtype=np.uint32)
        self._loaded = np.full((2, self.lanes), -1, dtype=np.int64)
        self._epochs: dict[int, EpochOrder] = {}

    # --- samples by position ------------------------------------------------------------------

    def at(self, positions: Ids) -> Ids:
        """Return the sample ids at positions of the infinite sequence, in any order."""
        ids = np.empty(len(positions), dtype=np.int64)
        if not len(positions):
            return ids
        epochs = positions // self.samples
        first, last = int(epochs.min()), int(epochs.max())
        if first == last:
            return self._in_epoch(first, positions - first * self.samples)
        for number in range(first, last + 1):
            here = np.flatnonzero(epochs == number)
            if len(here):
                ids[here] = self._in_epoch(number, positions[here] - number * self.samples)
        return ids

    def batch(self, start: int, size: int) -> Ids:
        """Return the positions ``start`` to ``start + size`` as a batch lays them out: a function of the two alone."""
        positions = np.arange(start, start + size, dtype=np.int64)
        rank = self.lane_rank[positions % self.samples % self.lanes]
        return positions[np.argsort(rank.astype(np.uint16), kind="stable")]

    def _in_epoch(self, number: int, places: Ids) -> Ids:
        epoch, lane, row = self.epoch(number), places % self.lanes, places // self.lanes
        window = self.window_of(lane, row)
        slots = np.empty(len(places), dtype=np.int64)
        first, last = int(window.min()), int(window.max())
        for w in range(first, last + 1):
            here = slice(None) if first == last else np.flatnonzero(window == w)
            lanes = lane[here]
            stale = lanes[self._loaded[w & 1, lanes] != _tag(number, w)]
            for needed in np.unique(stale).tolist() if len(stale) else ():
                self._load(number, needed, w)
            starts = self.first_window[lanes] + (w - 1) * self.window_samples if w else 0
            slots[here] = self.lane_starts[lanes] + starts + self._windows[w & 1, lanes, row[here] - starts]
        return slots + epoch.shift[np.searchsorted(epoch.ends, slots, side="right")]

    def window_of(self, lane: Any, row: Any) -> Any:
        """Return the number of the window that a lane's row is in; for numbers or arrays of them."""
        first = self.first_window[lane]
        return np.where(row < first, 0, 1 + (row - first) // self.window_samples)

    def window_bounds(self, lane: int, window: int) -> tuple[int, int]:
        """Return the rows of a lane where its window of that number begins and ends."""
        stop = int(self.first_window[lane]) + window * self.window_samples
        return 0 if window == 0 else stop - self.window_samples, min(stop, int(self.lane_samples[lane]))

    def _load(self, epoch: int, lane: int, window: int) -> None:
        start, stop = self.window_bounds(lane, window)
        order = permutation(stop - start, self.epoch(epoch).key, (0, window, lane, 1))
        self._windows[window & 1, lane, : stop - start] = order
        self._loaded[window & 1, lane] = _tag(epoch, window)

    def epoch(self, number: int) -> EpochOrder:
        """Return the shards of one epoch (counted from 0)."""
        if (known := self._epochs.get(number)) is not None:
            return known
        digest = hashlib.sha256(f"{self.dataset_id}\0{self.seed}\0{number}".encode()).digest()
        key = np.frombuffer(digest[:16], dtype="<u8").astype(np.uint64)
        shards = permutation(len(self._shard_samples), key, _SHARDS)
        ends = np.cumsum(self._shard_samples[shards])
        made = EpochOrder(key, shards, ends, self.shard_starts[shards] - (ends - self._shard_samples[shards]))
        # A batch rarely spans more than two epochs; older ones are computed again on demand.
        self._epochs = {n: e for n, e in self._epochs.items() if n == number - 1} | {number: made}
        return made

    # --- identity -----------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the order's identity, which a checkpoint holds beside ``samples_consumed``."""
        return {
            "algorithm": ALGORITHM,
            "dataset_id": self.dataset_id,
            "seed": self.seed,
            "lanes": self.lanes,
            "window": self.window,
            "window_samples": self.window_samples,
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Check that a run with ``state`` continues in this order.

        Raises:
            OrderMismatch: the order differs; the message names the setting to change.
        """
        here = self.state()
        if state.get("algorithm") != ALGORITHM:
            raise OrderMismatch(
                f"the checkpoint's samples are in the order of algorithm {state.get('algorithm')!r}, this trainbus has "
                f"{ALGORITHM}: go on with the version of trainbus that wrote it, or train from the start"
            )
        setting = "null" if state.get("window") is None else str(state["window"])
        differences = [
            text.format(was=state.get(name), now=here[name], setting=setting)
            for name, text in _DIFFERS.items()
            if state.get(name) != here[name]
        ]
        if differences:
            raise OrderMismatch(
                "this run cannot go on from the checkpoint, samples would be lost or repeated: "
                + "; ".join(differences)
            )


_DIFFERS = {
    "dataset_id": "it was trained on dataset {was}, this is {now}: give the run data.dataset_id {was}",
    "seed": "its order has seed {was}, this run's is {now}: set training.seed to {was}",
    "lanes": "its order has {was} lanes, this run's {now}: set training.loading.lanes to {was}",
    "window_samples": "its windows have {was} samples, this run's {now}: set training.loading.window to {setting}",
}


def permutation(count: int, key: NDArray[np.uint64], counter: tuple[int, int, int, int]) -> Ids:
    """Return 0..count-1 shuffled: sorted by random words whose low bits are the numbers themselves.

    No two keys are equal, so the result does not depend on how they are sorted.
    """
    low = np.uint64((1 << max(count - 1, 0).bit_length()) - 1)
    words = np.random.Philox(key=key, counter=np.array(counter, dtype=np.uint64)).random_raw(count)
    keys = np.asarray(words, dtype=np.uint64)
    keys &= ~low
    keys |= np.arange(count, dtype=np.uint64)
    keys.sort()
    keys &= low
    return keys.view(np.int64)


def _layout(samples: int, shards: int, lanes: int | None, window: int | None) -> tuple[int, int]:
    """Return the number of lanes and the samples of a window."""
    if samples == 0:
        return 1, 1
    wanted = max(1, min(shards // (window or WINDOW), MAX_LANES)) if lanes is None else lanes
    count = min(wanted, samples)
    if window is None:
        worth = shards if shards < 2 * WINDOW else WINDOW  # few shards are shuffled as a whole
        return count, max(1, min(-(-worth * samples // shards), MAX_WINDOW_SAMPLES // count))
    size = -(-window * samples // shards)
    if (kept := min(count * size, samples)) > MAX_SET_WINDOW_SAMPLES:
        raise ValueError(
            f"{count} lanes with windows of {size:,} samples would keep {kept:,} in memory, which may be "
            f"{MAX_SET_WINDOW_SAMPLES:,}: lower training.loading.window or training.loading.lanes, or leave them out"
        )
    return count, size


def _spread(count: int) -> Ids:
    """Return for each number its rank among all of them read with their bits reversed."""
    bits = (count - 1).bit_length()
    reversed_bits = [int(f"{number:0{bits}b}"[::-1], 2) if bits else 0 for number in range(count)]
    rank = np.empty(count, dtype=np.int64)
    rank[np.argsort(reversed_bits)] = np.arange(count)
    return rank


def _starts(sizes: Ids) -> Ids:
    return np.cumsum(sizes) - sizes


def _tag(epoch: int, window: int) -> int:
    return epoch << 32 | window
