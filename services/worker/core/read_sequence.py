"""The shards that a rank reads, in order, with the time at which it will need each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

#: Samples a second of a rank that has not sent its speed.
DEFAULT_PER_S = 1000.0
#: Seconds until a shard is needed that is worth fetching though no rank has announced it.
SPECULATIVE_S = 1e9
#: The last position of a need that never passes.
FOREVER = 2**62


class ReadSequence:
    """The needs of one reader: a rank's way through a split, or a list of shards."""

    def __init__(
        self, needs: Iterable[tuple[str, int, int]], *, at: int = 0, per_s: float = 0.0, after_s: float = 0.0
    ) -> None:
        """Begin at ``at``.

        Args:
            needs: (shard, first and last position that needs it).
            at: position, in samples of the run, that is loaded now.
            per_s: positions a second; 0: unknown.
            after_s: seconds until the reader begins.
        """
        ordered = sorted(needs, key=lambda need: need[1])
        self.shards = [shard for shard, _, _ in ordered]
        self.first = [first for _, first, _ in ordered]
        self.last = [last for _, _, last in ordered]
        self.at, self.per_s, self._after_s = at, per_s or DEFAULT_PER_S, after_s
        self._numbers: dict[str, list[int]] = {}
        for number, shard in enumerate(self.shards):
            self._numbers.setdefault(shard, []).append(number)
        #: How many needs of a shard have passed.
        self._passed_of: dict[str, int] = {}
        self._by_last = sorted(range(len(self.last)), key=self.last.__getitem__)
        self._passed = 0

    @classmethod
    def of_list(cls, shards: Iterable[str], *, every_s: float = 1.0, after_s: float = 0.0) -> ReadSequence:
        """Return a sequence that needs one shard after the other, and all of them for ever."""
        needs = ((shard, place, FOREVER) for place, shard in enumerate(shards))
        return cls(needs, per_s=1 / every_s, after_s=after_s)

    def __contains__(self, shard: str) -> bool:
        return shard in self._numbers

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def due_s(self, number: int) -> float:
        """Return the seconds until a need begins."""
        return self.reached_s(self.first[number])

    def reached_s(self, position: int) -> float:
        """Return the seconds until the reader is at a position; 0 for one that has passed, once it has begun."""
        return self._after_s + max(0, position - self.at) / self.per_s

    def has_reached(self, position: int) -> bool:
        """Whether the reader is at a position, or beyond it."""
        return position <= self.at

    def has_passed(self, number: int) -> bool:
        """Whether a need has ended."""
        return self.last[number] < self.at

    def next_need(self, shard: str) -> int | None:
        """Return the number of the first need of a shard that has not passed."""
        numbers = self._numbers.get(shard)
        if numbers is None:
            return None
        passed = known = self._passed_of.get(shard, 0)
        while passed < len(numbers) and self.has_passed(numbers[passed]):
            passed += 1
        if passed != known:
            self._passed_of[shard] = passed
        return numbers[passed] if passed < len(numbers) else None

    def advance(self, at: int, per_s: float) -> list[str]:
        """Move the reader on, never back; return the shards of which a need has passed now."""
        self.at, self.per_s = at, per_s or DEFAULT_PER_S
        passed: list[str] = []
        while self._passed < len(self._by_last) and self.has_passed(self._by_last[self._passed]):
            passed.append(self.shards[self._by_last[self._passed]])
            self._passed += 1
        return passed
