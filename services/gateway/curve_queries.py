"""Metric curves of a run from the read model. An answer costs as much for a million points as for a thousand."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import sqlalchemy as sa

from services.gateway import views
from services.gateway.pages import Order
from services.gateway.store import POINTS, Store

BY_METRIC = Order((POINTS.c.name,))
#: Points of all curves in one answer: of finer curves fewer fit.
MAX_POINTS = 100_000


async def list_curves(
    store: Store, run_id: str, *, names: list[str], max_points: int, limit: int, cursor: str | None
) -> views.Curves:
    """Curves by the names of their metrics: of the metrics in ``names``, or of all.

    A curve has at most ``max_points`` (at least 2) points, the newest always among them.
    """
    limit = min(limit, max(1, MAX_POINTS // max_points))
    metrics, next_cursor = BY_METRIC.cut(await store.fetch(names_query(run_id, names, limit + 1, cursor)), limit)
    curves: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
    if metrics:
        for row in await store.fetch(points_query(run_id, [row["name"] for row in metrics], max_points)):
            curves[row["name"]].append((row["step"], row["value"]))
    return views.Curves(run_id=run_id, curves=dict(curves), next_cursor=next_cursor)


def names_query(run_id: str, names: list[str], limit: int, cursor: str | None) -> sa.Select[Any]:
    """Return the query for the names of the metrics that have points, in order.

    ``DISTINCT`` would read every point of the run: each name is looked up in the index after the one before it.
    """
    first = sa.select(sa.func.min(POINTS.c.name).label("name")).where(
        *_of_run(run_id), *_among(names), *BY_METRIC.conditions(cursor)
    )
    found = first.cte("metrics", recursive=True)
    later = sa.select(sa.func.min(POINTS.c.name)).where(*_of_run(run_id), *_among(names), POINTS.c.name > found.c.name)
    found = found.union_all(sa.select(later.scalar_subquery()).where(found.c.name.is_not(None)))
    return sa.select(found.c.name).where(found.c.name.is_not(None)).limit(limit)


def points_query(run_id: str, names: list[str], max_points: int) -> sa.Select[Any]:
    """Return the query for the points of curves, in order.

    Of a curve with too many points it walks back from the newest to the next point that is a stride of steps away.
    """

    def of_metric(name: sa.ColumnElement[str]) -> tuple[sa.ColumnElement[bool], ...]:
        # A step below 0 is nonsense, and with one a difference of steps may be beyond the database's integers.
        return *_of_run(run_id), POINTS.c.name == name, POINTS.c.step >= 0

    given = (
        sa.values(sa.column("name", POINTS.c.name.type), name="given").data([(name,) for name in names]).cte("given")
    )
    newest = sa.select(sa.func.max(POINTS.c.step)).where(*of_metric(given.c.name)).scalar_subquery()
    oldest = sa.select(sa.func.min(POINTS.c.step)).where(*of_metric(given.c.name)).scalar_subquery()
    beyond = sa.select(POINTS.c.step).where(*of_metric(given.c.name)).order_by(POINTS.c.step)
    is_whole = beyond.offset(max_points).limit(1).scalar_subquery().is_(None)
    # Rounded up: that many strides reach the oldest point.
    stride = sa.case((is_whole, 1), else_=(newest - oldest - 1) // (max_points - 1) + 1)
    walk = sa.select(given.c.name, newest.label("step"), stride.label("stride")).cte("walk", recursive=True)
    before = sa.select(sa.func.max(POINTS.c.step)).where(
        *of_metric(walk.c.name), POINTS.c.step <= walk.c.step - walk.c.stride
    )
    walk = walk.union_all(
        sa.select(walk.c.name, before.scalar_subquery(), walk.c.stride).where(walk.c.step.is_not(None))
    )
    points = sa.select(POINTS.c.name, POINTS.c.step, POINTS.c.value).join(
        walk, sa.and_(*of_metric(walk.c.name), POINTS.c.step == walk.c.step)
    )
    return points.order_by(POINTS.c.name, POINTS.c.step)


def _of_run(run_id: str) -> tuple[sa.ColumnElement[bool], ...]:
    # Training points belong to no node; with this the index has each curve in the order of its steps.
    return POINTS.c.run_id == run_id, POINTS.c.kind == "training", POINTS.c.node_id == ""


def _among(names: list[str]) -> list[sa.ColumnElement[bool]]:
    return [POINTS.c.name.in_(names)] if names else []
