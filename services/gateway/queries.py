"""Questions to the read model."""

from __future__ import annotations

import base64
import binascii
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import sqlalchemy as sa
import structlog
from pydantic_core import from_json

from contracts.best_checkpoint import find_best, find_ranking_metric
from contracts.spec.run import RunSpec
from contracts.state.node import drain_in_force
from contracts.state.run import HOLDING_STATES
from services.gateway import views
from services.gateway.core.rows import Checkpoint, Dataset, Node, Run
from services.gateway.store import (
    CHECKPOINTS,
    DATASETS,
    EVENTS,
    MODELS,
    NODES,
    POINTS,
    PROGRESS,
    RUNS,
    Store,
    begins_with,
)

log = structlog.get_logger(__name__)

Row = Mapping[Any, Any]
#: What runs are counted by, and how many values of each are named: the most frequent ones.
COUNTED_COLUMNS = ("state", "kind", "user", "team", "model")
MAX_COUNTED_VALUES = 100
#: Stands for any text in a filter.
ANYTHING = "*"
SEARCHED_COLUMNS = ("name", "user", "team", "model")


#: Runs with how far they are.
RUNS_AND_PROGRESS = sa.select(RUNS, *(column for column in PROGRESS.c if column.name not in RUNS.c)).select_from(
    RUNS.outerjoin(PROGRESS, RUNS.c.run_id == PROGRESS.c.run_id)
)


def _is_like(column: sa.ColumnElement[str], pattern: str) -> sa.ColumnElement[bool]:
    """Return the condition that a column is a text, in which ``*`` stands for anything."""
    beginning, sign, rest = pattern.partition(ANYTHING)
    if not sign:
        return column == pattern
    if not rest:
        return begins_with(column, beginning)
    escaped = "".join("%" if each == ANYTHING else f"\\{each}" if each in "\\%_" else each for each in pattern)
    return column.like(escaped, escape="\\")


class NotFound(Exception):
    """Nothing is known under this name."""


class BadCursor(ValueError):
    """The cursor is none that this interface gave out."""


@dataclass(frozen=True, slots=True)
class RunFilter:
    """Which runs are listed. An empty field leaves nothing out."""

    states: tuple[str, ...] = ()
    user: str | None = None
    team: str | None = None
    model: str | None = None
    #: Part of the name.
    name: str | None = None
    #: Part of the name, the user, the team or the model, or the beginning of the id.
    text: str | None = None
    #: Seconds since the epoch: runs requested from then on.
    since_s: float | None = None
    kind: str | None = None
    #: The run whose checkpoints the listed runs of kind evaluate measure.
    evaluates: str | None = None

    def conditions(self, without: str = "") -> list[sa.ColumnElement[bool]]:
        """Return the conditions in SQL, but for those on the column ``without``."""
        exact = {name: getattr(self, name) for name in ("user", "model", "kind", "evaluates")}
        found = [_is_like(RUNS.c[column], value) for column, value in exact.items() if value and column != without]
        if self.team and without != "team":
            found.append(sa.or_(_is_like(RUNS.c.team, self.team), _is_like(RUNS.c.team, f"{self.team}/*")))
        if self.states and without != "state":
            found.append(RUNS.c.state.in_(self.states))
        if self.since_s is not None:
            found.append(RUNS.c.requested_at >= self.since_s)
        if self.name:
            is_pattern = ANYTHING in self.name
            part = RUNS.c.name.icontains(self.name, autoescape=True)
            found.append(_is_like(RUNS.c.name, self.name) if is_pattern else part)
        if self.text:
            parts = [
                RUNS.c[column].icontains(self.text, autoescape=True) for column in ("name", "user", "team", "model")
            ]
            found.append(sa.or_(*parts, begins_with(RUNS.c.run_id, self.text)))
        return found


#: The start of the verdict of a run whose promotion waits for somebody.
AWAITING = "awaiting_"


async def list_runs(store: Store, wanted: RunFilter, *, limit: int, cursor: str | None) -> views.RunPage:
    """Runs, newest first."""
    newest_first = (RUNS.c.requested_at.desc(), RUNS.c.run_id.desc())
    # The ids come from an index alone; only the rows of one page are read whole.
    ids = sa.select(RUNS.c.run_id).where(*wanted.conditions()).order_by(*newest_first).limit(limit + 1)
    if cursor:
        time_s, run_id = _read_cursor(cursor)
        earlier = sa.or_(RUNS.c.requested_at < time_s, sa.and_(RUNS.c.requested_at == time_s, RUNS.c.run_id < run_id))
        ids = ids.where(earlier)
    rows = await store.fetch(RUNS_AND_PROGRESS.where(RUNS.c.run_id.in_(ids)).order_by(*newest_first))
    more = len(rows) > limit
    rows = rows[:limit]
    return views.RunPage(
        runs=[summarize(row) for row in rows],
        next_cursor=_cursor(rows[-1]) if more else None,
    )


def summarize(row: Row) -> views.RunSummary:
    """Return a run as a list shows it. One that cannot be shown is shown as such: it must not hide the others."""
    try:
        summary = views.RunSummary.model_validate(views.run_fields(row))
        summary.model_dump_json()  # what fails while an answer is written fails the whole answer
    except Exception as error:
        log.warning("a run cannot be shown", run_id=row["run_id"], error=repr(error))
        blank = dict.fromkeys(RUNS_AND_PROGRESS.selected_columns.keys()) | asdict(Run(row["run_id"]))
        reason = f"this run cannot be shown: {describe_error(error)}"
        known = {name: row[name] for name in ("run_id", "name", "state") if isinstance(row[name], str)}
        return views.RunSummary.model_validate(views.run_fields({**blank, **known, "reason": reason}))
    return summary


def describe_error(error: Exception) -> str:
    """Return the first line of an error, with its kind."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]


async def count_runs(store: Store, wanted: RunFilter) -> dict[str, dict[str, int]]:
    """How many runs each state, user, team and model has; each under the other conditions of the filter."""
    found: dict[str, dict[str, int]] = {}
    for name in COUNTED_COLUMNS:
        column, runs = RUNS.c[name], sa.func.count().label("runs")
        query = sa.select(column, runs).where(column.is_not(None), *wanted.conditions(without=name)).group_by(column)
        rows = await store.fetch(query.order_by(runs.desc(), column).limit(MAX_COUNTED_VALUES))
        found[name] = {row[name]: row["runs"] for row in rows}
    return found


async def run_detail(store: Store, row: Row) -> views.RunDetail:
    """Everything about a run, with its timeline."""
    facts = await run_facts(store, row["run_id"])
    best = find_best_checkpoint(row, await checkpoints(store, row["run_id"]))
    timeline = [fact.model_dump() for fact in facts]
    return views.RunDetail.model_validate({**views.run_fields(row), "best_checkpoint": best, "timeline": timeline})


async def run_facts(store: Store, run_id: str, after: int = 0, limit: int | None = None) -> list[views.Fact]:
    """The first ``limit`` facts of a run after a sequence; those of its dataset and model that name it included."""
    query = sa.select(EVENTS).where(EVENTS.c.run_id == run_id, EVENTS.c.sequence > after).order_by(EVENTS.c.sequence)
    query = query.limit(limit)
    return [views.Fact.model_validate(views.timeline_fields(row)) for row in await store.fetch(query)]


async def curves(store: Store, run_id: str, names: list[str], max_points: int) -> views.Curves:
    """The run's metric curves, at most ``max_points`` values each, the last one always among them."""
    query = (
        sa.select(POINTS.c.name, POINTS.c.step, POINTS.c.value)
        .where(POINTS.c.run_id == run_id, POINTS.c.kind == "training")
        .order_by(POINTS.c.name, POINTS.c.step)
    )
    if names:
        query = query.where(POINTS.c.name.in_(names))
    found: dict[str, list[tuple[int, float]]] = {}
    for row in await store.fetch(query):
        found.setdefault(row["name"], []).append((row["step"], row["value"]))
    return views.Curves(run_id=run_id, curves={name: thin(points, max_points) for name, points in found.items()})


def thin(points: list[tuple[int, float]], max_points: int) -> list[tuple[int, float]]:
    """Every n-th point counted from the last, so that the newest value is shown."""
    stride = -(-len(points) // max_points)
    return points[::-1][::stride][::-1] if stride > 1 else points


async def checkpoints(store: Store, run_id: str) -> list[Checkpoint]:
    """The run's committed checkpoints, oldest first, deleted ones included."""
    query = sa.select(CHECKPOINTS).where(CHECKPOINTS.c.run_id == run_id).order_by(CHECKPOINTS.c.step)
    rows = [Checkpoint(**row) for row in await store.fetch(query)]
    # NaN and infinity are text in the database.
    return [replace(row, metrics={name: float(value) for name, value in row.metrics.items()}) for row in rows]


def find_best_checkpoint(row: Row, found: list[Checkpoint]) -> views.BestCheckpoint | None:
    """Return the best of a run's checkpoints that are not deleted; None if none has a metric that the run names."""
    if row["spec"] is None:
        return None
    spec, present = RunSpec.model_validate(row["spec"]), [each for each in found if each.deleted_at is None]
    best, metric = find_best(spec, present), find_ranking_metric(spec, present)
    if best is None or metric is None:
        return None
    value = best.metrics[metric.name]
    return views.BestCheckpoint(
        uri=best.uri, step=best.step, epoch=best.epoch, metric=metric.name, mode=metric.mode, value=value
    )


async def nodes(store: Store) -> list[views.Node]:
    """Every node that ever joined, with what it runs now."""
    #: Node -> run -> slots that the run holds there.
    used: defaultdict[str, dict[str, int]] = defaultdict(dict)
    names: dict[str, str] = {}
    busy: defaultdict[str, list[views.BusySlot]] = defaultdict(list)
    for run in await store.fetch(sa.select(RUNS).where(RUNS.c.state.in_(HOLDING_STATES))):
        for member in run["members"]:
            if not member["released"]:
                used[member["node_id"]][run["run_id"]] = len(member["slots"])
                busy[member["node_id"]] += [
                    views.BusySlot(slot=slot, run_id=run["run_id"], rank=rank)
                    for slot, rank in zip(member["slots"], member["ranks"], strict=False)
                ]
                names[run["run_id"]] = run["name"]
    rows = await store.fetch(sa.select(NODES).order_by(NODES.c.node_id))
    held = ((row, used[row["node_id"]]) for row in rows)
    return [
        views.Node.model_validate(
            {
                **row,
                "drain": drain_in_force(Node(**row)),
                "busy": sorted(busy[row["node_id"]], key=lambda each: each.slot),
                "used": sum(runs.values()),
                "runs": sorted(runs),
                "run_names": {run_id: names[run_id] for run_id in sorted(runs)},
            }
        )
        for row, runs in held
    ]


async def datasets(store: Store, limit: int) -> list[Dataset]:
    """The newest datasets first."""
    rows = await store.fetch(sa.select(DATASETS).order_by(DATASETS.c.created_at.desc()).limit(limit))
    return [Dataset(**row) for row in rows]


async def models(store: Store, limit: int) -> list[views.ModelVersion]:
    """Registered models, each with its newest version first."""
    rows = await store.fetch(sa.select(MODELS).order_by(MODELS.c.name, MODELS.c.version.desc()).limit(limit))
    champions: dict[str, int] = {}
    for row in rows:
        champions.setdefault(row["name"], row["version"])
    return [views.ModelVersion(**row, champion=champions[row["name"]] == row["version"]) for row in rows]


async def model_versions(store: Store, name: str) -> list[views.ModelVersion]:
    """The versions of one model, the newest first."""
    rows = await store.fetch(sa.select(MODELS).where(MODELS.c.name == name).order_by(MODELS.c.version.desc()))
    return [views.ModelVersion(**row, champion=number == 0) for number, row in enumerate(rows)]


async def pending_promotions(store: Store, model: str) -> list[views.PendingPromotion]:
    """The runs whose promotion waits for somebody, the oldest first."""
    query = sa.select(RUNS.c.run_id, RUNS.c.name, RUNS.c.verdict, RUNS.c.verdict_reason)
    query = query.where(RUNS.c.model == model, RUNS.c.verdict.startswith(AWAITING)).order_by(RUNS.c.ended_at)
    return [
        views.PendingPromotion(
            run_id=row["run_id"],
            name=row["name"],
            awaits=row["verdict"].removeprefix(AWAITING),
            reason=row["verdict_reason"],
        )
        for row in await store.fetch(query)
    ]


async def states(store: Store) -> dict[str, int]:
    """How many runs are in each state."""
    query = sa.select(RUNS.c.state, sa.func.count().label("runs")).group_by(RUNS.c.state)
    return {row["state"]: row["runs"] for row in await store.fetch(query)}


async def oldest_queued(store: Store) -> float | None:
    """When the run was queued that has waited longest, or None if none waits."""
    query = sa.select(sa.func.min(RUNS.c.queued_at).label("oldest")).where(RUNS.c.state == "queued")
    oldest = (await store.fetch(query))[0]["oldest"]
    return None if oldest is None else float(oldest)


def _cursor(row: Row) -> str:
    return base64.urlsafe_b64encode(json.dumps([row["requested_at"], row["run_id"]]).encode()).decode().rstrip("=")


def _read_cursor(cursor: str) -> tuple[float, str]:
    try:
        time_s, run_id = from_json(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        return float(time_s), str(run_id)
    except (binascii.Error, ValueError, TypeError) as error:
        raise BadCursor("cursor: give a 'next_cursor' of an earlier answer, unchanged") from error
