"""The same join in DuckDB, written in another way: all candidates, ranked. And naive ones, for what they get wrong."""

from __future__ import annotations

import numpy as np
import polars as pl

from services.ingestion.features.join import CREATED, EVENT, ROW, TIME, JoinRule


def winners(entities: pl.DataFrame, features: pl.DataFrame, rule: JoinRule) -> list[int]:
    """The winner's row number for each entity row; -1 where there is none."""
    keys = [name for name in entities.columns if name != TIME]
    same = " AND ".join(f"e.{key} = f.{key}" for key in keys)
    known = f"AND f.{CREATED} <= e.{TIME}" if rule.as_known else ""
    cut = f"WHERE {CREATED} <= {rule.snapshot}" if rule.snapshot is not None else ""
    # Without overflow, however far apart the times are.
    fresh = f"AND f.{EVENT}::HUGEINT >= e.{TIME}::HUGEINT - {rule.ttl}::HUGEINT" if rule.ttl is not None else ""
    return _rows(
        entities,
        features,
        f"""
        WITH f AS (
            SELECT * FROM (SELECT * REPLACE (coalesce({CREATED}, {EVENT}) AS {CREATED}) FROM features) {cut}
        ), ranked AS (
            SELECT place, f.{ROW} AS winner,
                row_number() OVER (PARTITION BY place ORDER BY f.{EVENT} DESC, f.{CREATED} DESC, f.{ROW} DESC) AS rank
            FROM entities e JOIN f ON {same} AND f.{EVENT} <= e.{TIME} {known} {fresh}
        )
        SELECT coalesce(winner, -1) FROM entities LEFT JOIN (SELECT * FROM ranked WHERE rank = 1) USING (place)
        ORDER BY place
        """,  # noqa: S608
    )


def naive(entities: pl.DataFrame, features: pl.DataFrame) -> list[int]:
    """What one writes at first: an ASOF join on the event time."""
    same = " AND ".join(f"e.{name} = f.{name}" for name in entities.columns if name != TIME)
    return _rows(
        entities,
        features,
        f"""
        SELECT coalesce(f.{ROW}, -1) FROM entities e ASOF LEFT JOIN features f ON {same} AND e.{TIME} >= f.{EVENT}
        ORDER BY place
        """,  # noqa: S608
    )


def naive_with_knowledge_time(entities: pl.DataFrame, features: pl.DataFrame) -> list[int]:
    """What one writes next: as of the knowledge time; old events known late win, ties are left to luck."""
    same = " AND ".join(f"e.{name} = f.{name}" for name in entities.columns if name != TIME)
    return _rows(
        entities,
        features,
        f"""
        SELECT coalesce(f.{ROW}, -1) FROM entities e
        ASOF LEFT JOIN (SELECT *, greatest({EVENT}, {CREATED}) AS known FROM features) f
        ON {same} AND e.{TIME} >= f.known ORDER BY place
        """,  # noqa: S608
    )


def _rows(entities: pl.DataFrame, features: pl.DataFrame, query: str) -> list[int]:
    import duckdb  # only where it is asked: at the end of a process it reports what others keep alive of it

    with duckdb.connect() as connection:
        connection.execute("SET enable_progress_bar = false")
        connection.register("entities", entities.with_row_index("place").to_arrow())
        connection.register("features", features.to_arrow())
        return [int(row) for row in connection.execute(query).fetchnumpy().popitem()[1]]


def large_tables(entities: int, features: int, *, keys: int, seed: int = 0) -> tuple[pl.DataFrame, pl.DataFrame]:
    """A day in seconds of a service with ``keys`` users: late data, corrections of one event, whole copies."""
    chance = np.random.default_rng(seed)
    day = 86_400
    event = chance.integers(0, day, features)
    corrected = chance.random(features) < 0.1
    event[corrected] = event[chance.integers(0, features, int(corrected.sum()))]
    late = np.where(chance.random(features) < 0.3, chance.integers(0, 7200, features), 0)
    table = pl.DataFrame({"k0": chance.integers(0, keys, features), EVENT: event, CREATED: event + late})
    asked = pl.DataFrame({"k0": chance.integers(0, keys, entities), TIME: chance.integers(0, day, entities)})
    return asked, table.with_row_index(ROW).with_columns(pl.col(ROW).cast(pl.Int64))
