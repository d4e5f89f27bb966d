"""Which shard is needed when, and which one goes: by tables, and as a plain definition says at every step."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.core.prefetch_schedule import (
    NOMINAL_PER_S,
    SOMETIME_S,
    CachedShard,
    PrefetchSchedule,
    ReadSequence,
)

HERE = {name: CachedShard(10, used_s) for used_s, name in enumerate("abcdef")}


@dataclass(eq=False)
class DatasetView:
    """Somebody who reads."""

    ready: set[str] = field(default_factory=set)

    def lacks(self, sha256: str) -> bool:
        return sha256 not in self.ready


# -- the plain definition ------------------------------------------------------------------------------


def dues(course: ReadSequence) -> Iterator[tuple[str, float, int]]:
    """Each need that is not behind: the shard, the seconds until it is needed, its number."""
    for number, (shard, last) in enumerate(zip(course.shards, course.last, strict=True)):
        if last >= course.at:
            yield shard, course.due_s(number), number


def earliest(courses: Collection[ReadSequence]) -> dict[str, float]:
    found: dict[str, float] = {}
    for course in courses:
        for shard, due_s, _ in dues(course):
            found[shard] = min(due_s, found.get(shard, math.inf))
    return found


def next_of(
    courses: Mapping[ReadSequence, DatasetView], present: Mapping[str, CachedShard], busy: Collection[str], check: bool
) -> tuple[float, str] | None:
    lacking = [
        (due_s, serial, number, shard)
        for serial, (course, reading) in enumerate(courses.items())
        for shard, due_s, number in dues(course)
        if reading.lacks(shard) and shard not in busy and (check or shard not in present)
    ]
    return (min(lacking)[0], min(lacking)[3]) if lacking else None


def victims_of(
    present: Mapping[str, CachedShard],
    needed: Mapping[str, float],
    spared: Collection[str],
    over_bytes: int,
    due_s: float,
    ahead_s: float,
) -> list[str]:
    kept_s = due_s if due_s <= ahead_s else max(due_s, SOMETIME_S)
    candidates = [
        (-needed.get(shard, math.inf), each.used_s, shard)
        for shard, each in present.items()
        if shard not in spared and needed.get(shard, math.inf) > kept_s
    ]
    chosen: list[str] = []
    for _, _, shard in sorted(candidates):
        if over_bytes <= 0:
            break
        chosen.append(shard)
        over_bytes -= present[shard].size_bytes
    return chosen


# -- tables ----------------------------------------------------------------------------------------------


def test_needs_behind_are_over_and_those_under_way_are_due_now() -> None:
    needs = [("a", 0, 99), ("b", 50, 150), ("c", 100, 100), ("d", 300, 400), ("a", 500, 600)]
    course = ReadSequence(needs)
    assert course.move(100, 10.0) == ["a"]
    assert earliest([course]) == {"b": 0.0, "c": 0.0, "d": 20.0, "a": 40.0}
    assert [course.next(shard) for shard in "abcdx"] == [4, 1, 2, 3, None]
    assert earliest([ReadSequence([("a", 1000, 2000)])]) == {"a": 1000 / NOMINAL_PER_S}
    assert earliest([ReadSequence.of("ab", every_s=2.0, after_s=1.0)]) == {"a": 1.0, "b": 3.0}


def at(due_s: Mapping[str, float]) -> PrefetchSchedule:
    """An agenda on which these shards are due then."""
    agenda = PrefetchSchedule(HERE)
    agenda.open(
        ReadSequence([(shard, int(10 * due), 10**6) for shard, due in due_s.items()], per_s=10.0), DatasetView()
    )
    return agenda


@pytest.mark.parametrize(
    ("due_s", "spared", "over_bytes", "for_s", "ahead_s", "gone"),
    [
        ({}, "", 0, 0.0, 60.0, ""),
        ({}, "", 15, 0.0, 60.0, "ab"),  # unannounced: oldest use first
        ({"a": 5.0}, "b", 10, 0.0, 60.0, "c"),  # announced and spared stay
        ({name: float(n) for n, name in enumerate("abcdef")}, "", 20, 2.0, 60.0, "fe"),  # what is needed last goes
        ({name: float(n) for n, name in enumerate("abcdef")}, "", 50, 2.0, 60.0, "fed"),  # nothing needed sooner goes
        (dict.fromkeys("abcde", 500.0), "", 20, 100.0, 60.0, "f"),  # too early to give up what is needed
        (dict.fromkeys("abcde", 500.0), "", 20, 50.0, 60.0, "fa"),
        (dict.fromkeys("abcdef", 0.0), "", 20, -1.0, 60.0, "ab"),  # a rank waits: even what is under way
    ],
)
def test_what_goes(
    due_s: dict[str, float], spared: str, over_bytes: int, for_s: float, ahead_s: float, gone: str
) -> None:
    agenda = at(due_s)
    for _ in range(2):  # to ask changes nothing
        assert agenda.victims(over_bytes, for_s, ahead_s, set(spared)) == list(gone)


def test_what_is_only_worth_having_gives_way_to_what_is_sooner_worth_having_alone() -> None:
    """Otherwise two datasets that do not fit together would push each other out for ever."""
    agenda = PrefetchSchedule(HERE)
    agenda.open(ReadSequence.of("abcdefg", after_s=SOMETIME_S), DatasetView())
    assert agenda.victims(10, agenda.due_s("g"), 60.0) == []
    assert agenda.victims(10, agenda.due_s("e"), 60.0) == ["f"]


def test_what_is_pinned_stays_until_it_is_not() -> None:
    pinned = {"a", "b"}
    agenda = PrefetchSchedule(HERE, pinned.__contains__)
    whole = ReadSequence.of("ab", every_s=1e-6)
    agenda.open(whole, DatasetView())
    agenda.pin("a")
    agenda.pin("b")
    assert agenda.victims(60, -1.0) == list("cdef")
    pinned.clear()
    agenda.close(whole)
    assert agenda.victims(60, -1.0) == list("abcdef")


# -- any history -----------------------------------------------------------------------------------------


class Node:
    """A node on which anything happens: the agenda beside what the plain definition is made of."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.shards = [f"s{number}" for number in range(self.rng.randint(1, 12))]
        self.present = {shard: self._made() for shard in self.shards if self.rng.random() < 0.4}
        self.agenda = PrefetchSchedule(self.present)
        self.readings = [DatasetView(), DatasetView()]
        self.courses: dict[ReadSequence, DatasetView] = {}
        self.busy: set[str] = set()

    def _made(self) -> CachedShard:
        return CachedShard(self.rng.randint(1, 20), float(self.rng.randint(0, 5)))

    def step(self) -> None:
        self.rng.choice([self.open, self.move, self.move, self.close, self.bring, self.bring, self.touch, self.evict])()
        self.compare()

    def open(self) -> None:
        if self.rng.random() < 0.3:
            chosen = self.rng.sample(self.shards, self.rng.randint(0, len(self.shards)))
            course = ReadSequence.of(chosen, after_s=self.rng.choice([0.0, 1.0, SOMETIME_S]))
        else:
            needs = []
            for _ in range(self.rng.randint(0, 20)):
                first = self.rng.randrange(0, 100, 5)
                needs.append((self.rng.choice(self.shards), first, first + self.rng.randint(0, 30)))
            course = ReadSequence(needs, at=self.rng.randint(0, 20), per_s=self.rng.choice([0.0, 1.0, 2.5]))
        self.courses[course] = self.rng.choice(self.readings)
        self.agenda.open(course, self.courses[course])

    def move(self) -> None:
        if self.courses:
            course = self.rng.choice(list(self.courses))
            per_s = self.rng.choice([course.per_s, 0.5, 3.0])
            self.agenda.move(course, course.at + self.rng.randint(0, 25), per_s)

    def close(self) -> None:
        if len(self.courses) > 1:
            course = self.rng.choice(list(self.courses))
            del self.courses[course]
            self.agenda.close(course)

    def bring(self) -> None:
        """Begin to bring what is next, or have what was begun come, go wrong, or be there for one reading alone."""
        following = self.agenda.next(self.busy)
        if following is not None and len(self.busy) < 3:
            self.busy.add(following.shard)
            return
        if self.busy:
            shard = self.rng.choice(sorted(self.busy))
            self.busy.remove(shard)
            if self.rng.random() < 0.8:
                self.present[shard] = self._made()
                for reading in self.rng.sample(self.readings, self.rng.randint(1, 2)):
                    reading.ready.add(shard)
            self.agenda.changed(shard)

    def touch(self) -> None:
        if self.present:
            shard = self.rng.choice(sorted(self.present))
            self.present[shard] = CachedShard(self.present[shard].size_bytes, float(self.rng.randint(5, 9)))
            self.agenda.changed(shard)

    def evict(self) -> None:
        for shard in self.victims():
            del self.present[shard]
            for reading in self.readings:
                reading.ready.discard(shard)
            self.agenda.changed(shard)

    def victims(self) -> list[str]:
        over_bytes, due_s = self.rng.randint(-5, 60), self.rng.choice([-1.0, 0.0, 1.0, 10.0, 70.0, SOMETIME_S + 3])
        spared = set(self.rng.sample(self.shards, self.rng.randint(0, min(2, len(self.shards)))))
        found = self.agenda.victims(over_bytes, due_s, 60.0, spared)
        assert found == victims_of(self.present, earliest(self.courses), spared, over_bytes, due_s, 60.0)
        return found

    def compare(self) -> None:
        self.victims()
        needed = earliest(self.courses)
        assert {shard: self.agenda.due_s(shard) for shard in self.shards} == {
            shard: needed.get(shard, math.inf) for shard in self.shards
        }
        for check in (True, False):
            following = self.agenda.next(self.busy, check=check)
            found = None if following is None else (following.due_s, following.shard)
            assert found == next_of(self.courses, self.present, self.busy, check)
            assert following is None or following.here == (following.shard in self.present)


@given(st.integers(0, 2**32))
def test_the_agenda_says_what_the_plain_definition_says_whatever_happens(seed: int) -> None:
    node = Node(seed)
    for _ in range(60):
        node.step()


# -- what it costs ---------------------------------------------------------------------------------------


class Counted(DatasetView):
    """Counts how often it is looked at."""

    looks = 0

    def lacks(self, sha256: str) -> bool:
        Counted.looks += 1
        return super().lacks(sha256)


@pytest.mark.parametrize("count", [1_000, 10_000])
def test_a_look_costs_what_it_starts_and_not_what_there_is(count: int) -> None:
    """Every shard comes, one after the other, through a cache that holds half of them."""
    present: dict[str, CachedShard] = {}
    agenda, reading = PrefetchSchedule(present), Counted()
    shards = [f"s{number}" for number in range(count)]
    course = ReadSequence([(shard, number, number) for number, shard in enumerate(shards)], per_s=1.0)
    agenda.open(course, reading)
    Counted.looks = 0
    for number in range(count):
        agenda.move(course, number, 1.0)
        following = agenda.next(())
        assert following is not None
        assert following.shard == shards[number]
        if len(present) == count // 2:
            (gone,) = agenda.victims(1, following.due_s)
            del present[gone]
            agenda.changed(gone)
        present[following.shard] = CachedShard(1, float(number))
        reading.ready.add(following.shard)
        agenda.changed(following.shard)
    assert Counted.looks < 4 * count
