"""Questions to the read model about checkpoints: of a run that has many, all but ``read_present`` read few."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from contracts.best_checkpoint import RankingMetric, ranking_metrics
from contracts.spec.run import RunSpec
from services.gateway import views
from services.gateway.core.rows import Checkpoint
from services.gateway.pages import Order
from services.gateway.store import CHECKPOINTS, Store

#: The newest first. A generation that began further back may have committed the same step again.
NEWEST_CHECKPOINTS = Order(
    (CHECKPOINTS.c.step, CHECKPOINTS.c.generation, CHECKPOINTS.c.uri), frozenset({"step", "generation", "uri"})
)
#: Newest checkpoints whose steps, epochs or metrics are named where another is wanted.
MAX_NAMED_CHECKPOINTS = 20


async def list_checkpoints(
    store: Store, row: Mapping[Any, Any], *, limit: int, cursor: str | None
) -> views.Checkpoints:
    """The committed checkpoints of a run, the newest first, deleted ones too; and the best of those that are left."""
    found = await store.fetch(page_query(row["run_id"], cursor).limit(limit + 1))
    page, next_cursor = NEWEST_CHECKPOINTS.cut(found, limit)
    return views.Checkpoints(
        checkpoints=[_read(each) for each in page], next_cursor=next_cursor, best=await describe_best(store, row)
    )


def page_query(run_id: str, cursor: str | None) -> sa.Select[Any]:
    """Return the query for the checkpoints of a run that come after a cursor, the newest first.

    Raises:
        BadCursor: it is not one of this list.
    """
    query = sa.select(CHECKPOINTS).where(CHECKPOINTS.c.run_id == run_id, *NEWEST_CHECKPOINTS.conditions(cursor))
    return query.order_by(*NEWEST_CHECKPOINTS.clauses())


async def read_newest_present(store: Store, run_id: str, *conditions: sa.ColumnElement[bool]) -> list[Checkpoint]:
    """The ``MAX_NAMED_CHECKPOINTS`` newest checkpoints of a run that are not deleted, the newest first."""
    query = page_query(run_id, None).where(CHECKPOINTS.c.deleted_at.is_(None), *conditions)
    return [_read(each) for each in await store.fetch(query.limit(MAX_NAMED_CHECKPOINTS))]


async def read_present(store: Store, run_id: str | None = None) -> list[Checkpoint]:
    """All committed checkpoints of a run, or of all runs, that are not deleted, the oldest of each run first."""
    query = sa.select(CHECKPOINTS).where(CHECKPOINTS.c.deleted_at.is_(None))
    if run_id is not None:
        query = query.where(CHECKPOINTS.c.run_id == run_id)
    rows = await store.fetch(query.order_by(CHECKPOINTS.c.run_id, CHECKPOINTS.c.step, CHECKPOINTS.c.generation))
    return [_read(row) for row in rows]


async def find_best(store: Store, row: Mapping[Any, Any]) -> tuple[Checkpoint, RankingMetric] | None:
    """Return the best of a run's checkpoints that are not deleted, and by which metric, as ``best_checkpoint`` does.

    None if none has a metric that the run names.
    """
    spec = RunSpec.model_validate(row["spec"]) if row["spec"] else None
    for metric in ranking_metrics(spec):
        if (best := await _find_best_by(store, row["run_id"], metric)) is not None:
            return best, metric
    return None


async def _find_best_by(store: Store, run_id: str, metric: RankingMetric) -> Checkpoint | None:
    """Return the best by one metric, of equals the newest. NaN and infinity, which are text there, do not count."""
    given = sa.func.json_each(CHECKPOINTS.c.metrics).table_valued("key", sa.column("value"), sa.column("type"))
    number: sa.ColumnElement[float] = given.c.value
    is_number = given.c.type.in_(("integer", "real"))
    if not store.sqlite:
        number = sa.cast(sa.cast(given.c.value, sa.Text), sa.Double)
        is_number = sa.func.json_typeof(given.c.value).in_(("number",))
    query = (
        sa.select(CHECKPOINTS)
        .join(given, sa.true())
        .where(
            CHECKPOINTS.c.run_id == run_id,
            CHECKPOINTS.c.deleted_at.is_(None),
            given.c.key == metric.name,
            is_number,
        )
        .order_by(number.desc() if metric.mode == "max" else number.asc(), *NEWEST_CHECKPOINTS.clauses())
        .limit(1)
    )
    found = await store.fetch(query)
    return _read(found[0]) if found else None


async def describe_best(store: Store, row: Mapping[Any, Any]) -> views.BestCheckpoint | None:
    """Return the best of a run's checkpoints as answers have it. None as for ``find_best``."""
    found = await find_best(store, row)
    if found is None:
        return None
    best, metric = found
    return views.BestCheckpoint(
        uri=best.uri,
        step=best.step,
        epoch=best.epoch,
        metric=metric.name,
        mode=metric.mode,
        value=best.metrics[metric.name],
        step_is_count=best.step_is_count,
    )


async def find_state_digest(store: Store, uri: str | None) -> str | None:
    """Return the digest of the state in a checkpoint; None if it has none, or is deleted."""
    query = sa.select(CHECKPOINTS.c.state_digest).where(CHECKPOINTS.c.uri == uri, CHECKPOINTS.c.deleted_at.is_(None))
    found = await store.fetch(query)
    return found[0]["state_digest"] if found else None


def _read(row: Mapping[Any, Any]) -> Checkpoint:
    # NaN and infinity are text in the database.
    return Checkpoint(**{**row, "metrics": {name: float(value) for name, value in row["metrics"].items()}})
