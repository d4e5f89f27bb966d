"""The order of samples, written a second time: slow, in plain Python, from its description alone.

It shares no line with ``trainbus.data``, and no numpy. Tests compare the two after every change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

WORD = (1 << 64) - 1


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> Iterator[int]:
    """Yield the words of Philox4x64-10 (Salmon et al., SC 2011), the counter incremented before each block."""
    number = sum(word << (64 * place) for place, word in enumerate(counter))
    while True:
        number = (number + 1) % (1 << 256)
        c = [(number >> (64 * place)) & WORD for place in range(4)]
        k0, k1 = key
        for _ in range(10):
            a, b = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
            c = [(b >> 64) ^ c[1] ^ k0, b & WORD, (a >> 64) ^ c[3] ^ k1, a & WORD]
            k0, k1 = (k0 + 0x9E3779B97F4A7C15) & WORD, (k1 + 0xBB67AE8584CAA73B) & WORD
        yield from c


def shuffled(count: int, key: tuple[int, int], counter: tuple[int, int, int, int]) -> list[int]:
    """0 to count - 1, by random words whose lowest bits are the numbers."""
    bits = (count - 1).bit_length() if count else 0
    words = philox(key, counter)
    return [number for _, number in sorted(((next(words) >> bits) << bits | n, n) for n in range(count))]


def mirrored(number: int, bits: int) -> int:
    """The number with its bits reversed."""
    return sum(1 << (bits - 1 - bit) for bit in range(bits) if number >> bit & 1)


class Reference:
    """The whole stream of a run, an epoch at a time."""

    def __init__(self, dataset_id: str, shards: list[int], seed: int, lanes: int, window_samples: int) -> None:
        self.dataset_id, self.shards, self.seed = dataset_id, shards, seed
        self.lanes, self.window = lanes, window_samples
        self.samples = sum(shards)
        bits = (lanes - 1).bit_length()
        #: Lane numbers as they lie in the slots.
        self.in_slots = sorted(range(lanes), key=lambda lane: mirrored(lane, bits))

    def epoch(self, epoch: int) -> list[int]:
        """The ids of an epoch, in the order of their places."""
        digest = hashlib.sha256(b"\0".join(str(x).encode() for x in (self.dataset_id, self.seed, epoch))).digest()
        key = int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little")
        slots: list[int] = []
        for shard in shuffled(len(self.shards), key, (0, 0, 0, 0)):
            first = sum(self.shards[:shard])
            slots += range(first, first + self.shards[shard])
        lanes: dict[int, list[int]] = {}
        for lane in self.in_slots:
            length = self.samples // self.lanes + (lane < self.samples % self.lanes)
            lanes[lane] = self._lane(slots[:length], lane, key)
            del slots[:length]
        return [lanes[place % self.lanes][place // self.lanes] for place in range(self.samples)]

    def _lane(self, slots: list[int], lane: int, key: tuple[int, int]) -> list[int]:
        ordered: list[int] = []
        size, window = -(-self.window * (lane + 1) // self.lanes), 0
        while slots:
            cut, slots = slots[:size], slots[size:]
            ordered += [cut[n] for n in shuffled(len(cut), key, (0, window, lane, 1))]
            size, window = self.window, window + 1
        return ordered

    def stream(self, epochs: int) -> list[int]:
        """Return the ids of ``epochs`` epochs, by position."""
        return [sample for epoch in range(epochs) for sample in self.epoch(epoch)]

    def batch(self, start: int, size: int) -> list[int]:
        """The positions of a batch, in the order of its places."""
        rank = {lane: number for number, lane in enumerate(self.in_slots)}
        return sorted(
            range(start, start + size),
            key=lambda position: (rank[position % self.samples % self.lanes], position),
        )
