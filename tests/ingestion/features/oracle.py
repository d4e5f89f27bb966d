"""A brute-force feature join, which tries every feature row for every entity row, and the cases to compare."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import polars as pl

from services.ingestion.features.join import CREATED, EVENT, NO_ROW, ROW, TIME, JoinRule, LatestRows

Key = tuple[int | str | None, ...]
#: Put behind one another (1, 12), (11, 2) and (1, 1, 2) would be one key.
VALUES: list[list[int | str]] = [[1, 11, 2, 12, 112], [7], ["a", "ab", "b", "", "a|b"]]


@dataclass(frozen=True, slots=True)
class Case:
    """An entity table (key, time), a feature table (key, event, created), and a rule."""

    entities: list[tuple[Key, int | None]]
    features: list[tuple[Key, int | None, int | None]]
    rule: JoinRule
    #: Where the feature table is cut into pieces, and the order in which they come.
    pieces: list[tuple[int, int]]


def brute_force(case: Case) -> list[int]:
    """Return the winner's row number for each entity row, directly by the definition."""
    return [_winner(key, time, case) for key, time in case.entities]


def _winner(key: Key, time: int | None, case: Case) -> int:
    best = None
    for row, (other, event, noted) in enumerate(case.features):
        if time is None or event is None or None in key or key != other:
            continue
        created = event if noted is None else noted
        rule = case.rule
        if not (rule.ttl is None or event >= time - rule.ttl) or event > time:
            continue
        if (rule.as_known and created > time) or (rule.snapshot is not None and created > rule.snapshot):
            continue
        if best is None or (event, created, row) > best:
            best = (event, created, row)
    return NO_ROW if best is None else best[2]


def joined(case: Case) -> list[int]:
    """Return the result of the engine."""
    rows = feature_frame(case)
    winners = LatestRows(entity_frame(case), case.rule)
    for start, stop in case.pieces:
        winners.add(rows[start:stop])
    return [int(row) for row in winners.rows()]


def entity_frame(case: Case) -> pl.DataFrame:
    keys = _keys([key for key, _ in case.entities], case)
    return pl.DataFrame([*keys, pl.Series(TIME, [time for _, time in case.entities], dtype=pl.Int64)])


def feature_frame(case: Case) -> pl.DataFrame:
    """With ``ROW``."""
    keys = _keys([key for key, _, _ in case.features], case)
    events = pl.Series(EVENT, [event for _, event, _ in case.features], dtype=pl.Int64)
    created = pl.Series(CREATED, [noted for _, _, noted in case.features], dtype=pl.Int64)
    rows = pl.Series(ROW, range(len(case.features)), dtype=pl.Int64)
    return pl.DataFrame([*keys, events, created, rows])


def _keys(keys: Sequence[Key], case: Case) -> list[pl.Series]:
    every = [key for key, _ in case.entities] + [key for key, _, _ in case.features]
    width = len(every[0]) if every else 1
    columns = []
    for place in range(width):
        text = any(isinstance(key[place], str) for key in every)
        columns.append(pl.Series(f"k{place}", [key[place] for key in keys], dtype=pl.String if text else pl.Int64))
    return columns


def generated(seed: int) -> Case:
    """One of endlessly many cases, small enough to have ties, and full of what goes wrong."""
    chance = random.Random(seed)
    width = chance.choice((1, 1, 2, 3))
    values: list[int | str] = chance.choice(VALUES)
    span = chance.choice((3, 10, 100, 2**40))
    offset = chance.choice((0, 0, -span // 2, -(2**62)))
    nulls = chance.choice((0.0, 0.05, 0.5))

    def key() -> Key:
        return tuple(None if chance.random() < nulls / 2 else chance.choice(values) for _ in range(width))

    def time() -> int | None:
        return None if chance.random() < nulls else offset + chance.randrange(span)

    def late(event: int | None) -> int | None:
        """Some are known at once, some before they happen, some much later, of some it was not noted."""
        if event is None or chance.random() < nulls:
            return time()
        return event + chance.choice((0, 0, -1, 1, chance.randrange(span)))

    entities = [(key(), time()) for _ in range(chance.choice((0, 1, 5, 30)))]
    events = [(key(), time()) for _ in range(chance.choice((0, 1, 10, 60)))]
    features = [(k, event, late(event)) for k, event in events]
    if chance.random() < 0.2:
        features += features[: len(features) // 2]
    # Ages that are just allowed, or just not.
    ages = [time - event for _, time in entities for _, event, _ in features if time is not None and event is not None]
    ttl = chance.choice((None, None, 0, span // 2, abs(chance.choice(ages)) if ages else 1, 2**63))
    snapshot = chance.choice((None, None, offset + chance.randrange(span)))
    rule = JoinRule(as_known=chance.random() < 0.7, snapshot=snapshot, ttl=ttl)
    cuts = [0, *sorted(chance.randrange(len(features) + 1) for _ in range(chance.choice((0, 0, 1, 3)))), len(features)]
    pieces = list(pairwise(cuts))
    chance.shuffle(pieces)
    return Case(entities, features, rule, pieces)
