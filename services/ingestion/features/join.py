"""Which row of a feature table each row of an entity table gets: the newest that was known at its time.

A feature row is a candidate for an entity row at time T when their keys are equal, its event time is in
[T - ttl, T] and it was known by T. The largest (event time, created time, row number) wins. Times are whole
ticks since 1970 and row numbers are unique, so there is one winner in any order of the work.

One sort instead of a search for each row: a candidate counts from max(event, created) on, its knowledge time.
Sorted by that, a row is worth keeping only if no row before it has a later event; what remains is a history of
winners, in which an as-of join finds each entity row's. The best of all rows is the best of the bests of any
parts of them, so a table is taken in pieces and memory does not grow with it. The age is checked last: the
winner has the latest event of all, so if it is too old, all others are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

#: Columns of what is given to ``LatestRows``, beside those of the key.
TIME, EVENT, CREATED, ROW = "__time", "__event", "__created", "__row"
_PLACE, _ID, _KNOWN = "__place", "__id", "__known"
#: In place of a row number: no feature row fits.
NO_ROW = -1

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class JoinRule:
    """What makes a feature row a candidate, beyond its key. In ticks."""

    #: Only what was known at the entity row's time.
    as_known: bool = True
    #: Leave out what came to be known after this.
    snapshot: int | None = None
    ttl: int | None = None


class LatestRows:
    """The best feature row for each entity row, among the pieces of the feature table added so far."""

    def __init__(self, entities: pl.DataFrame, rule: JoinRule) -> None:
        """``entities`` has the columns of the key and ``TIME`` (Int64). A null in any of them: no features."""
        self._rule, self._count = rule, entities.height
        self._keys = [name for name in entities.columns if name != TIME]
        whole = entities.with_row_index(_PLACE).drop_nulls()
        # Numbers in place of keys, so that (1, 12) and (11, 2) differ.
        self._ids = whole.select(self._keys).unique().with_row_index(_ID)
        self._asked = whole.join(self._ids, on=self._keys).select(_PLACE, _ID, TIME).sort(_ID, TIME, _PLACE)
        self._best: pl.DataFrame | None = None

    def add(self, features: pl.DataFrame) -> None:
        """Add another piece: the columns of the key, ``EVENT``, ``CREATED`` and ``ROW`` (Int64), in its order.

        A row without an event time is no candidate. One without a created time was known when it happened.
        """
        found = self._asked.select(_ID, TIME).join_asof(
            self._history(features),
            left_on=TIME,
            right_on=_KNOWN,
            by=_ID,
            strategy="backward",
            check_sortedness=False,  # Both are sorted within each id.
        )
        found = found.select(EVENT, CREATED, ROW)
        self._best = found if self._best is None else _better(self._best, found)

    def rows(self) -> Rows:
        """Return the feature row's number for each entity row, in order; ``NO_ROW`` where there is none."""
        result = np.full(self._count, NO_ROW, dtype=np.int64)
        if self._best is not None:
            best = self._asked.hstack(self._best).filter(pl.col(ROW).is_not_null() & self._fresh())
            result[best[_PLACE].to_numpy()] = best[ROW].to_numpy()
        return result

    def _history(self, features: pl.DataFrame) -> pl.DataFrame:
        """Return the rows that are the latest of their key from their knowledge time on, sorted by both."""
        created = pl.coalesce(CREATED, EVENT)
        rows = features.lazy().filter(pl.col(EVENT).is_not_null())
        if self._rule.snapshot is not None:
            rows = rows.filter(created <= self._rule.snapshot)
        known = pl.max_horizontal(EVENT, created) if self._rule.as_known else pl.col(EVENT)
        table = (
            rows.join(self._ids.lazy(), on=self._keys, maintain_order="left")
            .select(_ID, known.alias(_KNOWN), EVENT, created.alias(CREATED), ROW)
            .collect()
        )
        # By id, known, created and row: stable sorts from the last to the first take half as long as one by all.
        # Of one event, known does not fall as created grows: its last row in this order is its best.
        for name in (CREATED, _KNOWN, _ID):
            table = table.sort(name, maintain_order=True)
        return table.filter(pl.col(EVENT) >= pl.col(EVENT).cum_max().over(_ID))

    def _fresh(self) -> pl.Expr:
        if self._rule.ttl is None:
            return pl.lit(True)
        # In 128 bits: two times may lie farther apart than 64 hold.
        age = pl.col(TIME).cast(pl.Int128) - pl.col(EVENT).cast(pl.Int128)
        return age <= pl.lit(min(self._rule.ttl, 2**64), pl.Int128)


def _better(one: pl.DataFrame, other: pl.DataFrame) -> pl.DataFrame:
    """Return row by row the larger (event, created, row); null is the smallest."""
    both = one.hstack(other.select(pl.all().name.suffix("_")))
    event, created, row = (pl.col(name + "_") > pl.col(name) for name in (EVENT, CREATED, ROW))
    same_event, same_created = (pl.col(name + "_") == pl.col(name) for name in (EVENT, CREATED))
    larger = pl.col(ROW).is_null() | event | (same_event & (created | (same_created & row)))
    takes = pl.col(ROW + "_").is_not_null() & larger
    return both.select(pl.when(takes).then(name + "_").otherwise(name).alias(name) for name in (EVENT, CREATED, ROW))
