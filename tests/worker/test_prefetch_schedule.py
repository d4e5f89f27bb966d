"""When shards are needed and which are evicted: by tables, and against a plain definition."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.core.prefetch_schedule import (
    DEFAULT_PER_S,
    SPECULATIVE_S,
    CachedShard,
    PrefetchSchedule,
    ReadSequence,
)

HERE = {name: CachedShard(10, used_s) for used_s, name in enumerate("abcdef")}


@dataclass(eq=False)
class Consumer:
    """A reader with a plan."""

    ready: set[str] = field(default_factory=set)

    def lacks(self, sha256: str) -> bool:
        return sha256 not in self.ready


# -- the plain definition ------------------------------------------------------------------------------


def dues(sequence: ReadSequence) -> Iterator[tuple[str, float, int]]:
    """Each need that is not behind: the shard, the seconds until it is needed, its number."""
    for number, (shard, last) in enumerate(zip(sequence.shards, sequence.last, strict=True)):
        if last >= sequence.at:
            yield shard, sequence.due_s(number), number


def earliest(sequences: Collection[ReadSequence]) -> dict[str, float]:
    found: dict[str, float] = {}
    for sequence in sequences:
        for shard, due_s, _ in dues(sequence):
            found[shard] = min(due_s, found.get(shard, math.inf))
    return found


def next_of(
    sequences: Mapping[ReadSequence, Consumer], present: Mapping[str, CachedShard], busy: Collection[str], check: bool
) -> tuple[float, str] | None:
    lacking = [
        (due_s, serial, number, shard)
        for serial, (sequence, reading) in enumerate(sequences.items())
        for shard, due_s, number in dues(sequence)
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
    kept_s = due_s if due_s <= ahead_s else max(due_s, SPECULATIVE_S)
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


def test_passed_needs_end_and_reached_needs_are_due() -> None:
    needs = [("a", 0, 99), ("b", 50, 150), ("c", 100, 100), ("d", 300, 400), ("a", 500, 600)]
    sequence = ReadSequence(needs)
    assert sequence.advance(100, 10.0) == ["a"]
    assert earliest([sequence]) == {"b": 0.0, "c": 0.0, "d": 20.0, "a": 40.0}
    assert [sequence.next_need(shard) for shard in "abcdx"] == [4, 1, 2, 3, None]
    assert earliest([ReadSequence([("a", 1000, 2000)])]) == {"a": 1000 / DEFAULT_PER_S}
    assert earliest([ReadSequence.of_list("ab", every_s=2.0, after_s=1.0)]) == {"a": 1.0, "b": 3.0}


def at(due_s: Mapping[str, float]) -> PrefetchSchedule:
    """A schedule on which these shards are due then."""
    schedule = PrefetchSchedule(HERE)
    schedule.add(ReadSequence([(shard, int(10 * due), 10**6) for shard, due in due_s.items()], per_s=10.0), Consumer())
    return schedule


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
def test_victims_are_needed_last(
    due_s: dict[str, float], spared: str, over_bytes: int, for_s: float, ahead_s: float, gone: str
) -> None:
    schedule = at(due_s)
    for _ in range(2):  # to ask changes nothing
        assert schedule.select_victims(over_bytes, for_s, ahead_s, set(spared)) == list(gone)


def test_speculative_shard_yields_only_to_an_earlier_speculative_one() -> None:
    """Otherwise two datasets that do not fit together would push each other out for ever."""
    schedule = PrefetchSchedule(HERE)
    schedule.add(ReadSequence.of_list("abcdefg", after_s=SPECULATIVE_S), Consumer())
    assert schedule.select_victims(10, schedule.due_s("g"), 60.0) == []
    assert schedule.select_victims(10, schedule.due_s("e"), 60.0) == ["f"]


def test_pinned_shards_are_never_victims() -> None:
    pinned = {"a", "b"}
    schedule = PrefetchSchedule(HERE, pinned.__contains__)
    whole = ReadSequence.of_list("ab", every_s=1e-6)
    schedule.add(whole, Consumer())
    schedule.update_place("a")
    schedule.update_place("b")
    assert schedule.select_victims(60, -1.0) == list("cdef")
    pinned.clear()
    schedule.remove(whole)
    assert schedule.select_victims(60, -1.0) == list("abcdef")


# -- any history -----------------------------------------------------------------------------------------


class Node:
    """A node on which anything happens: the schedule beside what the plain definition is made of."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.shards = [f"s{number}" for number in range(self.rng.randint(1, 12))]
        self.present = {shard: self._made() for shard in self.shards if self.rng.random() < 0.4}
        self.schedule = PrefetchSchedule(self.present)
        self.readings = [Consumer(), Consumer()]
        self.sequences: dict[ReadSequence, Consumer] = {}
        self.busy: set[str] = set()

    def _made(self) -> CachedShard:
        return CachedShard(self.rng.randint(1, 20), float(self.rng.randint(0, 5)))

    def step(self) -> None:
        self.rng.choice([self.open, self.move, self.move, self.close, self.bring, self.bring, self.touch, self.evict])()
        self.compare()

    def open(self) -> None:
        if self.rng.random() < 0.3:
            chosen = self.rng.sample(self.shards, self.rng.randint(0, len(self.shards)))
            sequence = ReadSequence.of_list(chosen, after_s=self.rng.choice([0.0, 1.0, SPECULATIVE_S]))
        else:
            needs = []
            for _ in range(self.rng.randint(0, 20)):
                first = self.rng.randrange(0, 100, 5)
                needs.append((self.rng.choice(self.shards), first, first + self.rng.randint(0, 30)))
            sequence = ReadSequence(needs, at=self.rng.randint(0, 20), per_s=self.rng.choice([0.0, 1.0, 2.5]))
        self.sequences[sequence] = self.rng.choice(self.readings)
        self.schedule.add(sequence, self.sequences[sequence])

    def move(self) -> None:
        if self.sequences:
            sequence = self.rng.choice(list(self.sequences))
            per_s = self.rng.choice([sequence.per_s, 0.5, 3.0])
            self.schedule.advance(sequence, sequence.at + self.rng.randint(0, 25), per_s)

    def close(self) -> None:
        if len(self.sequences) > 1:
            sequence = self.rng.choice(list(self.sequences))
            del self.sequences[sequence]
            self.schedule.remove(sequence)

    def bring(self) -> None:
        """Begin to bring what is next, or have what was begun come, go wrong, or be there for one reading alone."""
        following = self.schedule.next_shard(self.busy)
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
            self.schedule.update(shard)

    def touch(self) -> None:
        if self.present:
            shard = self.rng.choice(sorted(self.present))
            self.present[shard] = CachedShard(self.present[shard].size_bytes, float(self.rng.randint(5, 9)))
            self.schedule.update(shard)

    def evict(self) -> None:
        for shard in self.victims():
            del self.present[shard]
            for reading in self.readings:
                reading.ready.discard(shard)
            self.schedule.update(shard)

    def victims(self) -> list[str]:
        over_bytes, due_s = self.rng.randint(-5, 60), self.rng.choice([-1.0, 0.0, 1.0, 10.0, 70.0, SPECULATIVE_S + 3])
        spared = set(self.rng.sample(self.shards, self.rng.randint(0, min(2, len(self.shards)))))
        found = self.schedule.select_victims(over_bytes, due_s, 60.0, spared)
        assert found == victims_of(self.present, earliest(self.sequences), spared, over_bytes, due_s, 60.0)
        return found

    def compare(self) -> None:
        self.victims()
        needed = earliest(self.sequences)
        assert {shard: self.schedule.due_s(shard) for shard in self.shards} == {
            shard: needed.get(shard, math.inf) for shard in self.shards
        }
        for check in (True, False):
            following = self.schedule.next_shard(self.busy, check=check)
            found = None if following is None else (following.due_s, following.shard)
            assert found == next_of(self.sequences, self.present, self.busy, check)
            assert following is None or following.here == (following.shard in self.present)


@given(st.integers(0, 2**32))
def test_the_schedule_agrees_with_the_plain_definition(seed: int) -> None:
    node = Node(seed)
    for _ in range(60):
        node.step()


# -- what it costs ---------------------------------------------------------------------------------------


class CountingConsumer(Consumer):
    """Counts the lookups."""

    lookups = 0

    def lacks(self, sha256: str) -> bool:
        CountingConsumer.lookups += 1
        return super().lacks(sha256)


@pytest.mark.parametrize("count", [1_000, 10_000])
def test_decision_costs_what_it_starts(count: int) -> None:
    """Every shard comes, one after the other, through a cache that holds half of them."""
    present: dict[str, CachedShard] = {}
    schedule, reading = PrefetchSchedule(present), CountingConsumer()
    shards = [f"s{number}" for number in range(count)]
    sequence = ReadSequence([(shard, number, number) for number, shard in enumerate(shards)], per_s=1.0)
    schedule.add(sequence, reading)
    CountingConsumer.lookups = 0
    for number in range(count):
        schedule.advance(sequence, number, 1.0)
        following = schedule.next_shard(())
        assert following is not None
        assert following.shard == shards[number]
        if len(present) == count // 2:
            (gone,) = schedule.select_victims(1, following.due_s)
            del present[gone]
            schedule.update(gone)
        present[following.shard] = CachedShard(1, float(number))
        reading.ready.add(following.shard)
        schedule.update(following.shard)
    assert CountingConsumer.lookups < 4 * count
