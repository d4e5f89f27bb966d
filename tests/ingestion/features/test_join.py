"""The newest row that was known: named cases, generated ones against brute force, and DuckDB."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import polars as pl
import pytest

from services.ingestion.features.join import CREATED, EVENT, NO_ROW, ROW, TIME, JoinRule, LatestRows
from tests.ingestion.features import duck
from tests.ingestion.features.oracle import Case, brute_force, entity_frame, feature_frame, generated, joined

GENERATED = 600
Ask = Callable[..., list[int]]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """Return a function that asks DuckDB, in a process of its own: in this one it would report leaks at the end."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        yield lambda question, *arguments: pool.submit(question, *arguments).result()


#: (event, created) of the rows of one key, the entity's time, the rule; the row that wins.
CASES = {
    "nothing": ([], 5, JoinRule(), NO_ROW),
    "an event at the very time counts": ([(5, 5)], 5, JoinRule(), 0),
    "one of the future does not": ([(6, 6)], 5, JoinRule(), NO_ROW),
    "what was not known yet does not": ([(3, 3), (4, 6)], 5, JoinRule(), 0),
    "unless corrections count": ([(3, 3), (4, 6)], 5, JoinRule(as_known=False), 1),
    "known at the very time": ([(3, 5)], 5, JoinRule(), 0),
    "the latest event wins, not the one known last": ([(4, 4), (3, 5)], 5, JoinRule(), 0),
    "of one event the latest correction": ([(3, 4), (3, 5), (3, 3)], 5, JoinRule(), 1),
    "of one event the correction known by then": ([(3, 4), (3, 6)], 5, JoinRule(), 0),
    "of equal rows the last": ([(3, 3), (3, 3)], 5, JoinRule(), 1),
    "known before it happened": ([(4, 1), (4, 2), (4, 0)], 5, JoinRule(), 1),
    "just young enough": ([(2, 2)], 5, JoinRule(ttl=3), 0),
    "just too old": ([(1, 1)], 5, JoinRule(ttl=3), NO_ROW),
    "no age at all": ([(4, 4), (5, 5)], 5, JoinRule(ttl=0), 1),
    "never too old": ([(-(2**62), 0)], 2**62, JoinRule(ttl=2**63), 0),
    "an old event known late does not come back": ([(1, 5), (0, 5)], 5, JoinRule(ttl=3), NO_ROW),
    "what came after the snapshot is left out": ([(3, 3), (4, 4)], 5, JoinRule(snapshot=3), 0),
    "a snapshot goes by when it was known": ([(3, 3), (3, 4)], 5, JoinRule(as_known=False, snapshot=3), 0),
    "never noted: known when it happened": ([(3, None), (4, 9)], 5, JoinRule(), 0),
    "never noted and a snapshot": ([(3, None), (4, None)], 5, JoinRule(snapshot=3), 0),
    "without an event time it is no candidate": ([(None, 1)], 5, JoinRule(), NO_ROW),
}


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    rows, time, rule, winner = CASES[name]
    case = Case([((1,), time)], [((1,), *row) for row in rows], rule, [(0, len(rows))])
    assert brute_force(case) == [winner]
    assert joined(case) == [winner]


def test_keys_are_compared_part_by_part() -> None:
    entities = [((1, 12), 5), ((11, 2), 5), ((1, None), 5), ((None, None), 5)]
    features = [((1, 12), 1, 1), ((11, 2), 1, 1), ((1, None), 1, 1), ((None, None), 1, 1)]
    assert joined(Case(entities, features, JoinRule(), [(0, 4)])) == [0, 1, NO_ROW, NO_ROW]


def test_generated_cases_agree_with_brute_force() -> None:
    wrong = [seed for seed in range(GENERATED) if joined(case := generated(seed)) != brute_force(case)]
    assert not wrong


@pytest.mark.shell
def test_generated_cases_cover_the_edge_cases(ask: Ask) -> None:
    """The brute force would also agree on cases in which nothing happens."""
    cases = [generated(seed) for seed in range(GENERATED)]
    naive = sum(ask(duck.naive, entity_frame(case), feature_frame(case)) != brute_force(case) for case in cases[:100])
    assert naive > 15
    found = sum(row != NO_ROW for case in cases for row in brute_force(case))
    assert found > 2 * GENERATED
    for part in ("ttl", "snapshot"):
        assert sum(brute_force(case) != brute_force(_without(case, part)) for case in cases) > GENERATED // 20
    assert sum(brute_force(case) != brute_force(_without(case, "as_known")) for case in cases) > GENERATED // 20


def _without(case: Case, part: str) -> Case:
    parts = {name: getattr(case.rule, name) for name in JoinRule.__dataclass_fields__}
    rule = JoinRule(**{**parts, part: False if part == "as_known" else None})
    return Case(case.entities, case.features, rule, case.pieces)


@pytest.mark.shell
def test_duckdb_agrees(ask: Ask) -> None:
    for seed in range(1000, 1060):
        case = generated(seed)
        assert ask(duck.winners, entity_frame(case), feature_frame(case), case.rule) == joined(case), seed


@pytest.mark.shell
@pytest.mark.parametrize("as_known", [True, False])
def test_duckdb_agrees_on_a_larger_table(ask: Ask, as_known: bool) -> None:
    entities, features = duck.large_tables(20_000, 200_000, keys=500)
    rule = JoinRule(as_known=as_known, ttl=40_000)
    winners = LatestRows(entities, rule)
    for start in range(0, features.height, 70_000):
        winners.add(features[start : start + 70_000])
    found = winners.rows().tolist()
    assert found == ask(duck.winners, entities, features, rule)
    assert sum(row != NO_ROW for row in found) > 1000


def test_empty_pieces_and_no_pieces() -> None:
    entities = pl.DataFrame({"k0": [1], TIME: [5]}, schema={"k0": pl.Int64, TIME: pl.Int64})
    winners = LatestRows(entities, JoinRule())
    assert winners.rows().tolist() == [NO_ROW]
    winners.add(pl.DataFrame(schema={"k0": pl.Int64, EVENT: pl.Int64, CREATED: pl.Int64, ROW: pl.Int64}))
    assert winners.rows().tolist() == [NO_ROW]
