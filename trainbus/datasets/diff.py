"""Differences between two versions of a dataset: two indexes, sorted by key, read side by side.

Records belong together that have the same key and content; else the same content (it was renamed, or its row has
another number now); else the same key (its content changed). A record without a partner was added or removed.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from contracts.datasets import IndexRecord

Kind = Literal["added", "removed", "renamed", "relabelled", "moved", "changed"]
KINDS: tuple[Kind, ...] = ("added", "removed", "renamed", "relabelled", "moved", "changed")
_BEFORE, _AFTER = 0, 1


class RecordVersion(NamedTuple):
    """A record in one of the two versions."""

    key: str
    split: str
    #: '' for none.
    label: str
    sha256: str

    @classmethod
    def of(cls, record: IndexRecord) -> RecordVersion:
        return cls(record["key"], record["split"], record["label"] or "", record["sha256"])


@dataclass(slots=True)
class Difference:
    """How many records changed in which way. Memory does not grow with the datasets, but for the number of classes."""

    #: Records that are in both with the same key, content, label and split.
    same: int = 0
    #: Kind -> (split, class) -> records, by their new version; ``removed`` ones by their old version.
    by_class: dict[Kind, Counter[tuple[str, str]]] = field(default_factory=lambda: {kind: Counter() for kind in KINDS})
    #: (split before, split after) -> records that moved.
    moves: Counter[tuple[str, str]] = field(default_factory=Counter)
    #: (class before, class after) -> records that were relabelled.
    relabels: Counter[tuple[str, str]] = field(default_factory=Counter)
    #: The first keys of each kind.
    examples: dict[Kind, list[str]] = field(default_factory=lambda: {kind: [] for kind in KINDS})

    def count(self, kind: Kind) -> int:
        return self.by_class[kind].total()

    @property
    def total(self) -> int:
        """Return the number of changes; a record may have several."""
        return sum(self.count(kind) for kind in KINDS)

    def add(self, old: RecordVersion | None, new: RecordVersion | None, examples: int) -> None:
        """Count the changes of one record."""
        record = new or old
        assert record is not None
        kinds = list(_kinds(old, new))
        self.same += not kinds
        for kind in kinds:
            self.by_class[kind][record.split, record.label] += 1
            if len(self.examples[kind]) < examples:
                renamed = old and new and old.key != new.key
                self.examples[kind].append(f"{old.key} -> {record.key}" if old and renamed else record.key)
        if old is not None and new is not None:
            if "moved" in kinds:
                self.moves[old.split, new.split] += 1
            if "relabelled" in kinds:
                self.relabels[old.label, new.label] += 1


def _kinds(old: RecordVersion | None, new: RecordVersion | None) -> Iterator[Kind]:
    if old is None or new is None:
        yield "added" if old is None else "removed"
        return
    if old.key != new.key:
        yield "renamed"
    if old.label != new.label:
        yield "relabelled"
    if old.split != new.split:
        yield "moved"
    if old.sha256 != new.sha256:
        yield "changed"


class UnsortedIndex(ValueError):
    """An index is not in the order of its keys."""


def compare(before: Iterable[IndexRecord], after: Iterable[IndexRecord], examples: int = 5) -> Difference:
    """Count what differs, and keep the first ``examples`` keys of each kind.

    Raises:
        UnsortedIndex: an index is not sorted by key, or has a key twice.
    """
    found = Difference()
    with closing(_UnmatchedRecords()) as unmatched:
        for old, new in match_records(before, after):
            if old is not None and new is not None and old.sha256 == new.sha256:
                found.add(old, new, examples)
                continue
            if old is not None:
                unmatched.add(_BEFORE, old)
            if new is not None:
                unmatched.add(_AFTER, new)
        for old, new in unmatched.pairs():
            found.add(old, new, examples)
    return found


class _UnmatchedRecords:
    """Records without a partner of the same key and content, in a temporary database on disk."""

    def __init__(self) -> None:
        self._db = sqlite3.connect("", isolation_level=None)
        self._db.executescript(
            """
            PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;
            CREATE TABLE records (side INTEGER, key TEXT, split TEXT, label TEXT, sha256 TEXT);
            BEGIN;
            """
        )

    def close(self) -> None:
        self._db.close()

    def add(self, side: int, record: RecordVersion) -> None:
        self._db.execute("INSERT INTO records VALUES (?, ?, ?, ?, ?)", (side, *record))

    def pairs(self) -> Iterator[tuple[RecordVersion | None, RecordVersion | None]]:
        """Yield every record once: with its partner by content, else by key, else alone, in the order of keys."""
        self._db.executescript(
            """
            CREATE TABLE alike AS SELECT *, row_number() OVER (PARTITION BY side, sha256 ORDER BY key) AS place
                FROM records;
            DROP TABLE records;
            CREATE INDEX by_content ON alike (sha256, place, side);
            """
        )
        yield from self._select_pairs(
            """SELECT old.key, old.split, old.label, old.sha256, new.key, new.split, new.label, new.sha256
            FROM alike AS old JOIN alike AS new ON new.sha256 = old.sha256 AND new.place = old.place
            WHERE old.side = 0 AND new.side = 1 ORDER BY old.key"""
        )
        self._db.executescript(
            """
            CREATE TABLE single AS SELECT * FROM alike AS one WHERE NOT EXISTS (SELECT 1 FROM alike AS other
                WHERE other.sha256 = one.sha256 AND other.place = one.place AND other.side != one.side);
            CREATE INDEX by_key ON single (key, side);
            """
        )
        yield from self._select_pairs(
            """SELECT old.key, old.split, old.label, old.sha256, new.key, new.split, new.label, new.sha256
            FROM single AS old JOIN single AS new ON new.key = old.key
            WHERE old.side = 0 AND new.side = 1 ORDER BY old.key"""
        )
        alone = """SELECT side, key, split, label, sha256 FROM single AS one WHERE NOT EXISTS
            (SELECT 1 FROM single AS other WHERE other.key = one.key AND other.side != one.side) ORDER BY key"""
        for side, *record in self._db.execute(alone):
            yield (RecordVersion(*record), None) if side == _BEFORE else (None, RecordVersion(*record))

    def _select_pairs(self, query: str) -> Iterator[tuple[RecordVersion, RecordVersion]]:
        for row in self._db.execute(query):
            yield RecordVersion(*row[:4]), RecordVersion(*row[4:])


def match_records(
    before: Iterable[IndexRecord],
    after: Iterable[IndexRecord],
) -> Iterator[tuple[RecordVersion | None, RecordVersion | None]]:
    """Yield each key's record in one version or both, in the order of keys."""
    ours, theirs = _check_order(before), _check_order(after)
    old, new = next(ours, None), next(theirs, None)
    while old is not None or new is not None:
        if new is None or (old is not None and old.key < new.key):
            yield old, None
            old = next(ours, None)
        elif old is None or new.key < old.key:
            yield None, new
            new = next(theirs, None)
        else:
            yield old, new
            old, new = next(ours, None), next(theirs, None)


def _check_order(records: Iterable[IndexRecord]) -> Iterator[RecordVersion]:
    last = ""
    for record in records:
        if record["key"] <= last:
            raise UnsortedIndex(f"the index has {record['key']!r} after {last!r}")
        last = record["key"]
        yield RecordVersion.of(record)
