"""Which shard of a dataset is fetched next, and which one is evicted, from the read sequences of a node's ranks.

The shard that is needed last is evicted first (L. Belady, "A study of replacement algorithms for a virtual-storage
computer", IBM Systems Journal 1966): ranks send what they will read, so that the future is known. A shard in no
sequence is evicted before all others, the least recently used one first.

A decision costs what it starts, not what there is: each sequence is ordered, so that only heads are compared.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

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


@dataclass(frozen=True, slots=True)
class CachedShard:
    """A shard that is on this node."""

    size_bytes: int
    #: When it was fetched or requested last.
    used_s: float


class ShardConsumer(Protocol):
    """The reader of a sequence."""

    def lacks(self, sha256: str) -> bool: ...


class NextShard(NamedTuple):
    """The shard to be brought next."""

    due_s: float
    shard: str
    consumer: ShardConsumer
    #: Whether it is here, and has only to be verified.
    here: bool


#: Orders shards for eviction: position that needs the shard first (negative), last use, shard.
EvictionKey = tuple[int, float, str]


class _ActiveSequence:
    """A sequence with the numbers of needs whose shards its consumer lacks, and the eviction heaps of its shards."""

    def __init__(
        self, sequence: ReadSequence, consumer: ShardConsumer, serial: int, present: Mapping[str, CachedShard]
    ) -> None:
        self.sequence, self.consumer, self.serial = sequence, consumer, serial
        self._lacking: dict[bool, list[int]] = {True: [], False: []}
        # In the order of the needs, so that both are heaps.
        for number, shard in enumerate(sequence.shards):
            if consumer.lacks(shard):
                self._lacking[shard in present].append(number)
        #: The shards here that this sequence needs soonest of all sequences: needs that it has reached, and others.
        self.reached: list[EvictionKey] = []
        self.upcoming: list[EvictionKey] = []

    def update(self, shard: str, here: bool) -> None:
        """Note that the consumer may lack a shard."""
        if (number := self.sequence.next_need(shard)) is not None and self.consumer.lacks(shard):
            heapq.heappush(self._lacking[here], number)

    def next_lacking(self, here: bool, present: Mapping[str, CachedShard], busy: Collection[str]) -> int | None:
        """Return the first need of a shard that the consumer lacks and that is not busy; ``here``: of those present."""
        heap, sequence = self._lacking[here], self.sequence
        while heap:
            number = heap[0]
            shard = sequence.shards[number]
            lacking = self.consumer.lacks(shard) and shard not in busy and (shard in present) == here
            if lacking and not sequence.has_passed(number):
                return number
            heapq.heappop(heap)
            if lacking and (following := sequence.next_need(shard)) is not None:
                heapq.heappush(heap, following)
        return None


class PrefetchSchedule:
    """All sequences of a node: which shard is brought next, and which is evicted first.

    ``update`` must be called for a shard that has become present or absent, or that a consumer has come to lack.
    """

    def __init__(self, present: Mapping[str, CachedShard], pinned: Callable[[str], bool] = lambda shard: False) -> None:
        """``pinned``: shards that are never evicted."""
        self._present, self._pinned = present, pinned
        self._active: dict[ReadSequence, _ActiveSequence] = {}
        self._serial = 0
        self._unneeded: list[EvictionKey] = [(0, each.used_s, shard) for shard, each in present.items()]
        heapq.heapify(self._unneeded)
        #: By shard that is here: the sequence in whose heap it is, and its key there. It is needed no later than the
        #: key says; whether sooner is checked when it is about to be evicted.
        self._filed: dict[str, tuple[ReadSequence | None, EvictionKey]] = {
            key[2]: (None, key) for key in self._unneeded
        }

    def add(self, sequence: ReadSequence, consumer: ShardConsumer) -> None:
        """Follow a sequence."""
        self._active[sequence] = _ActiveSequence(sequence, consumer, self._serial, self._present)
        self._serial += 1

    def remove(self, *sequences: ReadSequence) -> None:
        """Follow sequences no longer."""
        removed = {
            shard for sequence in sequences if self._active.pop(sequence, None) is not None for shard in sequence
        }
        for shard in removed:
            filed = self._filed.get(shard)
            if filed is None or filed[0] in sequences:
                self._place(shard)

    def advance(self, sequence: ReadSequence, at: int, per_s: float) -> None:
        """Move a reader on to a position."""
        for shard in sequence.advance(at, per_s):
            if shard in self._filed and self._filed[shard][0] is sequence:
                self._place(shard)

    def update(self, shard: str) -> None:
        """Note that a shard has become present or absent, or that a consumer has come to lack it."""
        self._place(shard)
        for each in self._active.values():
            each.update(shard, shard in self._present)

    def update_place(self, shard: str) -> None:
        """Note that a shard was pinned, or is pinned no longer."""
        self._place(shard)

    def due_s(self, shard: str) -> float:
        """Return the seconds until a shard is needed; infinity if no sequence has it."""
        sequence, number = self._soonest_need(shard)
        return math.inf if sequence is None else sequence.due_s(number)

    # -- fetching -----------------------------------------------------------

    def next_shard(self, busy: Collection[str], *, check: bool = True) -> NextShard | None:
        """Return the lacking shard that is needed soonest and not busy; without ``check`` none that is here."""
        best: tuple[float, int, int, bool, _ActiveSequence] | None = None
        for each in self._active.values():
            for here in (True, False) if check else (False,):
                number = each.next_lacking(here, self._present, busy)
                if number is not None:
                    found = (each.sequence.due_s(number), each.serial, number, here, each)
                    if best is None or found[:3] < best[:3]:
                        best = found
        if best is None:
            return None
        due_s, _, number, here, active = best
        return NextShard(due_s, active.sequence.shards[number], active.consumer, here)

    # -- eviction -----------------------------------------------------------

    def select_victims(
        self, over_bytes: int, due_s: float, ahead_s: float = math.inf, unevictable: Collection[str] = ()
    ) -> list[str]:
        """Return shards to evict for one that is needed in ``due_s``: of ``over_bytes``, or fewer if no more may go.

        Shards that are needed before it, or at the same time, stay. If it is not needed within ``ahead_s``, all shards
        that are needed stay: by then a better victim may have been used for the last time (P. Cao et al., "A Study of
        Integrated Prefetching and Caching Strategies", SIGMETRICS 1995).
        """
        kept_s = due_s if due_s <= ahead_s else max(due_s, SPECULATIVE_S)
        chosen: list[str] = []
        seen: list[str] = []
        while over_bytes > 0 and (last := self._pop_last_needed()) is not None:
            shard, needed_s = last
            seen.append(shard)
            if needed_s <= kept_s:
                break
            if shard not in unevictable:
                chosen.append(shard)
                over_bytes -= self._present[shard].size_bytes
        for shard in seen:  # present until they are evicted
            self._place(shard)
        return chosen

    def _pop_last_needed(self) -> tuple[str, float] | None:
        """Remove the shard that is needed last, of several the least recently used, and return when it is needed."""
        while True:
            best, heap = min(
                (((-due_s, *heap[0][1:]), heap) for due_s, heap in self._tops()),
                key=lambda found: found[0],
                default=(None, None),
            )
            if best is None or heap is None:
                return None
            shard = self._pop(heap)
            soonest_s = self.due_s(shard)
            if soonest_s == -best[0]:
                return shard, soonest_s
            self._place(shard)  # another sequence needs it sooner

    def _tops(self) -> Iterator[tuple[float, list[EvictionKey]]]:
        """Yield the heaps that are not empty, each with the latest time at which its top is needed."""
        if self._has_top(None, self._unneeded):
            yield math.inf, self._unneeded
        for sequence, each in self._active.items():
            while self._has_top(sequence, each.upcoming) and sequence.has_reached(-each.upcoming[0][0]):
                self._place(self._pop(each.upcoming))
            if each.upcoming:
                yield sequence.reached_s(-each.upcoming[0][0]), each.upcoming
            if self._has_top(sequence, each.reached):
                yield sequence.reached_s(sequence.at), each.reached

    def _has_top(self, sequence: ReadSequence | None, heap: list[EvictionKey]) -> bool:
        """Whether the heap is not empty, once shards that are in another heap by now are removed."""
        while heap and self._filed.get(heap[0][2]) != (sequence, heap[0]):
            heapq.heappop(heap)
        return bool(heap)

    def _pop(self, heap: list[EvictionKey]) -> str:
        shard = heapq.heappop(heap)[2]
        del self._filed[shard]
        return shard

    def _place(self, shard: str) -> None:
        """Put a shard into the eviction heap of the sequence that needs it soonest."""
        cached = self._present.get(shard)
        if cached is None or self._pinned(shard):
            self._filed.pop(shard, None)
            return
        sequence, number = self._soonest_need(shard)
        key: EvictionKey = (0, cached.used_s, shard)
        heap = self._unneeded
        if sequence is not None:
            heap = self._active[sequence].reached
            if not sequence.has_reached(sequence.first[number]):
                heap, key = self._active[sequence].upcoming, (-sequence.first[number], cached.used_s, shard)
        if self._filed.get(shard) != (sequence, key):
            self._filed[shard] = sequence, key
            heapq.heappush(heap, key)

    def _soonest_need(self, shard: str) -> tuple[ReadSequence | None, int]:
        """Return the sequence that needs a shard soonest, and the number of its need."""
        found: tuple[float, ReadSequence | None, int] = (math.inf, None, 0)
        for sequence in self._active:
            number = sequence.next_need(shard)
            if number is not None and (due_s := sequence.due_s(number)) < found[0]:
                found = (due_s, sequence, number)
        return found[1:]
