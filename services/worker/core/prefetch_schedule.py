"""Which shard of a dataset is fetched next, and which one goes: by when the ranks of this node need them.

What is needed last goes first (L. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM
Systems Journal 1966): ranks say what they will read, so that the future need not be guessed. What nobody has announced
goes before all that is announced, oldest use first.

A look costs what it starts, not what there is: a course keeps its shards in order, so that only heads are compared.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

#: Samples a second of a rank that has not said how fast it is.
NOMINAL_PER_S = 1000.0
#: Seconds until something is needed that is worth having here though nobody said that it will be.
SOMETIME_S = 1e9
#: The last position of a need that never passes.
FOREVER = 2**62


@dataclass(frozen=True, slots=True)
class CachedShard:
    """A shard that is here."""

    size_bytes: int
    #: When it came or was asked for last.
    used_s: float


class ShardConsumer(Protocol):
    """Who reads."""

    def lacks(self, sha256: str) -> bool: ...


class ReadSequence:
    """What somebody reads, one shard after the other: a rank's way through a split, or a list."""

    def __init__(
        self, needs: Iterable[tuple[str, int, int]], *, at: int = 0, per_s: float = 0.0, after_s: float = 0.0
    ) -> None:
        """Begin it.

        Args:
            needs: (shard, first and last position that needs it).
            at: position, in samples of the run, that is loaded now.
            per_s: how many positions it gets on in a second; 0: not known.
            after_s: seconds that pass before it begins.
        """
        ordered = sorted(needs, key=lambda need: need[1])
        self.shards = [shard for shard, _, _ in ordered]
        self.first = [first for _, first, _ in ordered]
        self.last = [last for _, _, last in ordered]
        self.at, self.per_s, self._after_s = at, per_s or NOMINAL_PER_S, after_s
        self._numbers: dict[str, list[int]] = {}
        for number, shard in enumerate(self.shards):
            self._numbers.setdefault(shard, []).append(number)
        #: How many of a shard's needs are behind.
        self._behind: dict[str, int] = {}
        self._by_last = sorted(range(len(self.last)), key=self.last.__getitem__)
        self._passed = 0

    @classmethod
    def of(cls, shards: Iterable[str], *, every_s: float = 1.0, after_s: float = 0.0) -> ReadSequence:
        """A list that is needed from its first to its last, however far anybody is."""
        needs = ((shard, place, FOREVER) for place, shard in enumerate(shards))
        return cls(needs, per_s=1 / every_s, after_s=after_s)

    def __contains__(self, shard: str) -> bool:
        return shard in self._numbers

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def due_s(self, number: int) -> float:
        """Seconds until a need begins."""
        return self.begins_s(self.first[number])

    def begins_s(self, position: int) -> float:
        """Seconds until it is at a position; what is behind has begun as soon as the course has."""
        return self._after_s + max(0, position - self.at) / self.per_s

    def has_begun(self, position: int) -> bool:
        return position <= self.at

    def is_behind(self, number: int) -> bool:
        return self.last[number] < self.at

    def next(self, shard: str) -> int | None:
        """The number of the first need of a shard that is not behind; None if there is none."""
        numbers = self._numbers.get(shard)
        if numbers is None:
            return None
        behind = known = self._behind.get(shard, 0)
        while behind < len(numbers) and self.is_behind(numbers[behind]):
            behind += 1
        if behind != known:
            self._behind[shard] = behind
        return numbers[behind] if behind < len(numbers) else None

    def move(self, at: int, per_s: float) -> list[str]:
        """Get on, never back; return the shards of which a need is now behind."""
        self.at, self.per_s = at, per_s or NOMINAL_PER_S
        passed: list[str] = []
        while self._passed < len(self._by_last) and self.is_behind(self._by_last[self._passed]):
            passed.append(self.shards[self._by_last[self._passed]])
            self._passed += 1
        return passed


class NextShard(NamedTuple):
    """What is to be brought next."""

    due_s: float
    shard: str
    owner: ShardConsumer
    #: Whether it is here, and has only to be checked.
    here: bool


#: Where a shard is among those that may go: position that needs it first (negative), last use, shard.
EvictionKey = tuple[int, float, str]


class _ActiveSequence:
    """A course that is followed, with the numbers of needs whose shards its owner lacks, in their order."""

    def __init__(
        self, course: ReadSequence, owner: ShardConsumer, serial: int, present: Mapping[str, CachedShard]
    ) -> None:
        self.course, self.owner, self.serial = course, owner, serial
        self._lacking: dict[bool, list[int]] = {True: [], False: []}
        # In the order of the needs, so that both are heaps.
        for number, shard in enumerate(course.shards):
            if owner.lacks(shard):
                self._lacking[shard in present].append(number)
        #: The shards here that this course needs soonest of all: those it has come to, and those it has not.
        self.now: list[EvictionKey] = []
        self.later: list[EvictionKey] = []

    def lacking(self, shard: str, here: bool) -> None:
        """Note that the owner may lack a shard."""
        if (number := self.course.next(shard)) is not None and self.owner.lacks(shard):
            heapq.heappush(self._lacking[here], number)

    def head(self, here: bool, present: Mapping[str, CachedShard], busy: Collection[str]) -> int | None:
        """The first need of what is lacking and here, or not here, and nobody sees to."""
        heap, course = self._lacking[here], self.course
        while heap:
            number = heap[0]
            shard = course.shards[number]
            lacking = self.owner.lacks(shard) and shard not in busy and (shard in present) == here
            if lacking and not course.is_behind(number):
                return number
            heapq.heappop(heap)
            if lacking and (following := course.next(shard)) is not None:
                heapq.heappush(heap, following)
        return None


class PrefetchSchedule:
    """All courses of a node: what is brought next, and which of the shards that are here goes first.

    Whoever changes what is present, or what an owner lacks, says ``changed``.
    """

    def __init__(self, present: Mapping[str, CachedShard], pinned: Callable[[str], bool] = lambda shard: False) -> None:
        """``pinned``: shards that never go."""
        self._present, self._pinned = present, pinned
        self._open: dict[ReadSequence, _ActiveSequence] = {}
        self._serial = 0
        self._unannounced: list[EvictionKey] = [(0, each.used_s, shard) for shard, each in present.items()]
        heapq.heapify(self._unannounced)
        #: By shard that is here: the course that it is filed under, and its place there. It is needed no later than
        #: that place says; whether sooner is looked at when its turn to go has come.
        self._goes_by: dict[str, tuple[ReadSequence | None, EvictionKey]] = {
            place[2]: (None, place) for place in self._unannounced
        }

    def open(self, course: ReadSequence, owner: ShardConsumer) -> None:
        self._open[course] = _ActiveSequence(course, owner, self._serial, self._present)
        self._serial += 1

    def close(self, *courses: ReadSequence) -> None:
        """Follow courses no more."""
        closed = {shard for course in courses if self._open.pop(course, None) is not None for shard in course}
        for shard in closed:
            filed = self._goes_by.get(shard)
            if filed is None or filed[0] in courses:
                self._file(shard)

    def move(self, course: ReadSequence, at: int, per_s: float) -> None:
        """Somebody has got on."""
        for shard in course.move(at, per_s):
            if shard in self._goes_by and self._goes_by[shard][0] is course:
                self._file(shard)

    def changed(self, shard: str) -> None:
        """It has come or gone, or somebody may lack it who did not."""
        self._file(shard)
        for each in self._open.values():
            each.lacking(shard, shard in self._present)

    def pin(self, shard: str) -> None:
        """It must not go from now on; ``pinned`` says so."""
        self._file(shard)

    def due_s(self, shard: str) -> float:
        """Seconds until it is needed; infinity: nobody has announced it."""
        course, number = self._soonest(shard)
        return math.inf if course is None else course.due_s(number)

    # -- what comes ---------------------------------------------------------

    def next(self, busy: Collection[str], *, check: bool = True) -> NextShard | None:
        """What is lacked and needed soonest, but for what is seen to; without ``check`` nothing that is here."""
        best: tuple[float, int, int, bool, _ActiveSequence] | None = None
        for each in self._open.values():
            for here in (True, False) if check else (False,):
                number = each.head(here, self._present, busy)
                if number is not None:
                    found = (each.course.due_s(number), each.serial, number, here, each)
                    if best is None or found[:3] < best[:3]:
                        best = found
        if best is None:
            return None
        due_s, _, number, here, opened = best
        return NextShard(due_s, opened.course.shards[number], opened.owner, here)

    # -- what goes ----------------------------------------------------------

    def victims(
        self, over_bytes: int, due_s: float, ahead_s: float = math.inf, spared: Collection[str] = ()
    ) -> list[str]:
        """What has to go to free ``over_bytes`` for a shard that is needed in ``due_s``; as much as may go, if less.

        What is needed before it, or at the same time, stays. What is needed at all stays as long as the shard is not
        needed within ``ahead_s``: by then something better to lose may have been used for the last time (P. Cao et
        al., "A Study of Integrated Prefetching and Caching Strategies", SIGMETRICS 1995).
        """
        kept_s = due_s if due_s <= ahead_s else max(due_s, SOMETIME_S)
        chosen: list[str] = []
        seen: list[str] = []
        while over_bytes > 0 and (last := self._take_last()) is not None:
            shard, needed_s = last
            seen.append(shard)
            if needed_s <= kept_s:
                break
            if shard not in spared:
                chosen.append(shard)
                over_bytes -= self._present[shard].size_bytes
        for shard in seen:  # here until they are evicted
            self._file(shard)
        return chosen

    def _take_last(self) -> tuple[str, float] | None:
        """Take out what is needed last; of several, what was used the longest time ago."""
        while True:
            best, heap = min(
                (((-due_s, *heap[0][1:]), heap) for due_s, heap in self._lasts()),
                key=lambda found: found[0],
                default=(None, None),
            )
            if best is None or heap is None:
                return None
            shard = self._unfile(heap)
            soonest_s = self.due_s(shard)
            if soonest_s == -best[0]:
                return shard, soonest_s
            self._file(shard)  # another course has come to need it sooner

    def _lasts(self) -> Iterator[tuple[float, list[EvictionKey]]]:
        """The heaps of what is here, none empty, each with when at the latest its top is needed."""
        if self._is_filed(None, self._unannounced):
            yield math.inf, self._unannounced
        for course, each in self._open.items():
            while self._is_filed(course, each.later) and course.has_begun(-each.later[0][0]):
                self._file(self._unfile(each.later))
            if each.later:
                yield course.begins_s(-each.later[0][0]), each.later
            if self._is_filed(course, each.now):
                yield course.begins_s(course.at), each.now

    def _is_filed(self, course: ReadSequence | None, heap: list[EvictionKey]) -> bool:
        """Whether the heap has a top, once what is filed elsewhere is off it."""
        while heap and self._goes_by.get(heap[0][2]) != (course, heap[0]):
            heapq.heappop(heap)
        return bool(heap)

    def _unfile(self, heap: list[EvictionKey]) -> str:
        """Take the top off a heap."""
        shard = heapq.heappop(heap)[2]
        del self._goes_by[shard]
        return shard

    def _file(self, shard: str) -> None:
        """Put a shard where it will be found when something has to go: under the course that needs it soonest."""
        there = self._present.get(shard)
        if there is None or self._pinned(shard):
            self._goes_by.pop(shard, None)
            return
        course, number = self._soonest(shard)
        place: EvictionKey = (0, there.used_s, shard)
        heap = self._unannounced
        if course is not None:
            heap = self._open[course].now
            if not course.has_begun(course.first[number]):
                heap, place = self._open[course].later, (-course.first[number], there.used_s, shard)
        if self._goes_by.get(shard) != (course, place):
            self._goes_by[shard] = course, place
            heapq.heappush(heap, place)

    def _soonest(self, shard: str) -> tuple[ReadSequence | None, int]:
        """The course that needs a shard soonest, and the number of its need."""
        found: tuple[float, ReadSequence | None, int] = (math.inf, None, 0)
        for course in self._open:
            number = course.next(shard)
            if number is not None and (due_s := course.due_s(number)) < found[0]:
                found = (due_s, course, number)
        return found[1:]
