"""Questions to the read model."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import sqlalchemy as sa
import structlog

from contracts.pace import TrainingPace
from contracts.run_states import HOLDING_STATES
from contracts.state.node import GONE_STATES, drain_in_force
from services.gateway import checkpoint_queries, views
from services.gateway.core.rows import Ingestion, Node, Run
from services.gateway.pages import Order
from services.gateway.store import (
    CHECKPOINTS,
    COUNTED_COLUMNS,
    DATASETS,
    EVENTS,
    INGESTIONS,
    MODELS,
    NODES,
    POINTS,
    PROGRESS,
    REGISTERED,
    RUN_COUNTS,
    RUNS,
    STUDIES,
    Store,
    begins_with,
)

log = structlog.get_logger(__name__)

Row = Mapping[Any, Any]
#: How many values of a column are named with their counts: the most frequent ones.
MAX_COUNTED_VALUES = 100
#: Nodes named where a node is not known.
MAX_NAMED_NODES = 20
#: Of a model, in one answer.
MAX_PENDING = 100
#: Ingestions and runs of a dataset that are listed with it.
MAX_OF_DATASET = 1000
#: Newest facts of a run that its timeline has unless more are asked for.
MAX_TIMELINE = 1000
#: Newest points of a curve that a run's speed is measured by.
MAX_PACE_POINTS = 600
#: The orders of the lists.
NEWEST_RUNS = Order((RUNS.c.requested_at, RUNS.c.run_id), frozenset({"requested_at", "run_id"}))
NEWEST_DATASETS = Order((DATASETS.c.created_at, DATASETS.c.dataset_id), frozenset({"created_at", "dataset_id"}))
NEWEST_INGESTIONS = Order((INGESTIONS.c.at, INGESTIONS.c.ingestion_id), frozenset({"at", "ingestion_id"}))
NEWEST_STUDIES = Order((STUDIES.c.requested_at, STUDIES.c.study_id), frozenset({"requested_at", "study_id"}))
BY_NODE = Order((NODES.c.node_id,))
BY_VERSION = Order((MODELS.c.name, MODELS.c.version), frozenset({"version"}))
BY_MODEL = Order((REGISTERED.c.name,))
#: Stands for any text in a filter.
ANYTHING = "*"


_VERSIONS = MODELS.alias()
#: The newest version of a run's model, if it is of that run: promotions and rollbacks of others come after a run's own.
CHAMPION_VERSION = (
    sa.select(MODELS.c.version)
    .where(
        MODELS.c.name == RUNS.c.model,
        MODELS.c.run_id == RUNS.c.run_id,
        MODELS.c.version
        == sa.select(sa.func.max(_VERSIONS.c.version)).where(_VERSIONS.c.name == MODELS.c.name).scalar_subquery(),
    )
    .scalar_subquery()
    .label("champion_version")
)
#: Runs with how far they are, and whether they are champions.
RUNS_AND_PROGRESS = sa.select(
    RUNS, *(column for column in PROGRESS.c if column.name not in RUNS.c), CHAMPION_VERSION
).select_from(RUNS.outerjoin(PROGRESS, RUNS.c.run_id == PROGRESS.c.run_id))
#: Versions of models, with what the training reported of their checkpoints.
VERSIONS = sa.select(
    MODELS, CHECKPOINTS.c.metrics.label("checkpoint_metrics"), RUNS.c.metrics.label("run_metrics")
).select_from(
    MODELS.outerjoin(CHECKPOINTS, MODELS.c.checkpoint_uri == CHECKPOINTS.c.uri).outerjoin(
        RUNS, MODELS.c.run_id == RUNS.c.run_id
    )
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


def _is_of_team(team: str) -> tuple[sa.ColumnElement[bool], sa.ColumnElement[bool]]:
    """Return the conditions that a run is of a team itself, and that it is of a part of the team."""
    return _is_like(RUNS.c.team, team), _is_like(RUNS.c.team, f"{team}/*")


class NotFound(Exception):
    """Nothing is known under this name."""


@dataclass(frozen=True, slots=True)
class RunFilter:
    """Which runs are listed. An empty field leaves nothing out; in a text, ``*`` stands for anything."""

    states: tuple[str, ...] = ()
    user: str | None = None
    team: str | None = None
    model: str | None = None
    name: str | None = None
    #: Part of the name, the user, the team or the model, or the beginning of the id.
    text: str | None = None
    #: Seconds since the epoch: runs requested from then on.
    since_s: float | None = None
    kind: str | None = None
    #: The run whose checkpoints the listed runs of kind evaluate measure.
    evaluates: str | None = None
    #: Id or name of the study whose trials are listed.
    study: str | None = None
    #: Whether the trials of studies are among the runs.
    trials: bool = True

    def conditions(self, without: str = "") -> list[sa.ColumnElement[bool]]:
        """Return the conditions in SQL, but for those on the column ``without``."""
        exact = {name: getattr(self, name) for name in ("user", "model", "name", "kind", "evaluates")}
        found = [_is_like(RUNS.c[column], value) for column, value in exact.items() if value and column != without]
        if self.team and without != "team":
            found.append(sa.or_(*_is_of_team(self.team)))
        if self.states and without != "state":
            found.append(RUNS.c.state.in_(self.states))
        if self.since_s is not None:
            found.append(RUNS.c.requested_at >= self.since_s)
        if self.study:
            found.append(RUNS.c.study.in_(sa.select(STUDIES.c.study_id).where(self._is_study())))
        if not self.trials:
            found.append(RUNS.c.study.is_(None))
        if self.text:
            parts = [
                RUNS.c[column].icontains(self.text, autoescape=True) for column in ("name", "user", "team", "model")
            ]
            found.append(sa.or_(*parts, begins_with(RUNS.c.run_id, self.text)))
        return found

    def study_conditions(self) -> list[sa.ColumnElement[bool]]:
        """Return the conditions in SQL that a study has a trial that is meant."""
        found = [self._is_study()] if self.study else []
        if conditions := replace(self, study=None).conditions():
            found.append(sa.exists().where(RUNS.c.study == STUDIES.c.study_id, *conditions))
        return found

    def _is_study(self) -> sa.ColumnElement[bool]:
        study = self.study or ANYTHING
        return sa.or_(_is_like(STUDIES.c.study_id, study), _is_like(STUDIES.c.name, study))


#: The start of the verdict of a run whose promotion waits for somebody.
AWAITING = "awaiting_"


async def list_runs(store: Store, wanted: RunFilter, *, limit: int, cursor: str | None) -> views.RunPage:
    """Runs, newest first."""
    # The ids come from an index alone; only the rows of one page are read whole.
    ids = ids_query(wanted, limit + 1, NEWEST_RUNS.conditions(cursor))
    found = await store.fetch(RUNS_AND_PROGRESS.where(RUNS.c.run_id.in_(ids)).order_by(*NEWEST_RUNS.clauses()))
    rows, next_cursor = NEWEST_RUNS.cut(found, limit)
    return views.RunPage(runs=[summarize(row) for row in rows], next_cursor=next_cursor)


def ids_query(wanted: RunFilter, limit: int, later: list[sa.ColumnElement[bool]]) -> sa.Select[Any]:
    """Return the query for the ids of the newest runs.

    Several states, or a team and its parts, are one search each: an index has the newest of each, but not of several.
    """
    parts = [replace(wanted, states=(state,)) for state in wanted.states] if len(wanted.states) > 1 else [wanted]
    searched = [part.conditions() for part in parts]
    if wanted.team and ANYTHING not in wanted.team:
        searched = [[*part.conditions(without="team"), team] for part in parts for team in _is_of_team(wanted.team)]
    key = sa.select(RUNS.c.requested_at, RUNS.c.run_id)
    searches = [
        key.where(*conditions, *later).order_by(*NEWEST_RUNS.clauses()).limit(limit).subquery()
        for conditions in searched
    ]
    found = sa.union_all(*(sa.select(each) for each in searches)).subquery()
    newest_first = found.c.requested_at.desc(), found.c.run_id.desc()
    return sa.select(found.c.run_id).order_by(*newest_first).limit(limit)


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
    return {name: await _count_values(store, wanted, name) for name in COUNTED_COLUMNS}


async def _count_values(store: Store, wanted: RunFilter, name: str) -> dict[str, int]:
    conditions = wanted.conditions(without=name)
    if conditions:
        column = RUNS.c[name]
        query = sa.select(column.label("value"), sa.func.count().label("runs"))
        query = query.where(column.is_not(None), *conditions).group_by(column)
    else:
        query = sa.select(RUN_COUNTS.c.value, RUN_COUNTS.c.runs)
        query = query.where(RUN_COUNTS.c.column == name)
    rows = await store.fetch(query.order_by(sa.desc("runs"), "value").limit(MAX_COUNTED_VALUES))
    return {row["value"]: row["runs"] for row in rows}


async def run_detail(store: Store, run_id: str, timeline: int = MAX_TIMELINE) -> views.RunDetail:
    """Everything about a run that is there, with its newest ``timeline`` facts."""
    newest = sa.select(EVENTS).where(EVENTS.c.run_id == run_id).order_by(EVENTS.c.sequence.desc())
    # Facts of its dataset and its model name it, too. One statement: the row is as that very fact has left it.
    last_own = newest.with_only_columns(EVENTS.c.sequence).where(begins_with(EVENTS.c.subject, "run.")).limit(1)
    query = RUNS_AND_PROGRESS.add_columns(last_own.scalar_subquery().label("last_own"))
    (row,) = await store.fetch(query.where(RUNS.c.run_id == run_id))
    facts = await store.fetch(newest.limit(timeline)) if timeline else []
    last = (row["checkpoint"] or {}).get("uri")
    summary = views.run_fields(row)
    fields = {
        **summary,
        "warnings": views.find_warnings(summary),
        "best_checkpoint": await checkpoint_queries.describe_best(store, row),
        "state_digest": await checkpoint_queries.find_state_digest(store, last),
        "steps_per_s": await _measure_pace(store, row) if row["state"] == "running" else None,
        "sequence": row["last_own"] or 0,
        "timeline": [views.timeline_fields(fact) for fact in reversed(facts)],
    }
    return views.RunDetail.model_validate(fields)


async def _measure_pace(store: Store, row: Row) -> float | None:
    """How many steps a second a run has trained in the last minute, by the times of one of its metrics."""
    query = sa.select(POINTS.c.time, POINTS.c.step, POINTS.c.name).where(
        POINTS.c.run_id == row["run_id"],
        POINTS.c.kind == "training",
        POINTS.c.name == min(row["latest"] or {}, default=""),
        POINTS.c.node_id == "",
        POINTS.c.generation == row["generation"],
    )
    points = await store.fetch(query.order_by(POINTS.c.step.desc()).limit(MAX_PACE_POINTS))
    pace = TrainingPace()
    for point in reversed(points):
        pace.add(point["time"], point["step"])
    return pace.steps_per_s


async def run_facts(store: Store, run_id: str, after: int, limit: int) -> list[views.Fact]:
    """The first ``limit`` facts of a run after a sequence; those of its dataset and model that name it included."""
    query = sa.select(EVENTS).where(EVENTS.c.run_id == run_id, EVENTS.c.sequence > after).order_by(EVENTS.c.sequence)
    return [views.Fact.model_validate(views.timeline_fields(row)) for row in await store.fetch(query.limit(limit))]


async def check_node(store: Store, node_id: str) -> None:
    """Check that a node has joined.

    Raises:
        NotFound: it has not; some that have are named.
    """
    if await store.fetch(sa.select(NODES.c.node_id).where(NODES.c.node_id == node_id)):
        return
    known = await store.fetch(sa.select(NODES.c.node_id).order_by(NODES.c.node_id).limit(MAX_NAMED_NODES + 1))
    named = ", ".join(row["node_id"] for row in known[:MAX_NAMED_NODES]) + (", …" * (len(known) > MAX_NAMED_NODES))
    raise NotFound(f"there is no node {node_id!r}; there is: {named or 'none'}")


async def _held_members(store: Store, *conditions: sa.ColumnElement[bool]) -> list[tuple[Row, dict[str, Any]]]:
    """Return each run that meets the conditions with a part of its placement whose slots it has not released."""
    columns = (RUNS.c.run_id, RUNS.c.name, RUNS.c.study, RUNS.c.members)
    holders = sa.select(*columns).where(RUNS.c.state.in_(HOLDING_STATES), *conditions)
    return [(run, part) for run in await store.fetch(holders) for part in run["members"] if not part["released"]]


async def list_nodes(store: Store, *, limit: int, cursor: str | None = None) -> views.Nodes:
    """Nodes that ever joined, by their names, with what they run now."""
    #: Node -> run -> slots that the run holds there.
    used: defaultdict[str, dict[str, int]] = defaultdict(dict)
    names: dict[str, str] = {}
    busy: defaultdict[str, list[views.BusySlot]] = defaultdict(list)
    for run, member in await _held_members(store):
        used[member["node_id"]][run["run_id"]] = len(member["slots"])
        busy[member["node_id"]] += [
            views.BusySlot(slot=slot, run_id=run["run_id"], rank=rank)
            for slot, rank in zip(member["slots"], member["ranks"], strict=False)
        ]
        names[run["run_id"]] = run["name"]
    query = sa.select(NODES).where(*BY_NODE.conditions(cursor)).order_by(*BY_NODE.clauses())
    rows, next_cursor = BY_NODE.cut(await store.fetch(query.limit(limit + 1)), limit)
    for node_id in (row["node_id"] for row in rows if row["state"] in GONE_STATES):
        used.pop(node_id, None)  # a run that is being stopped may still have slots there
        busy.pop(node_id, None)
    held = ((row, used[row["node_id"]]) for row in rows)
    listed = [
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
    return views.Nodes(nodes=listed, next_cursor=next_cursor)


async def count_nodes(store: Store) -> dict[str, int]:
    """How many nodes are in each state."""
    query = sa.select(NODES.c.state, sa.func.count().label("nodes")).group_by(NODES.c.state)
    return {row["state"]: row["nodes"] for row in await store.fetch(query)}


async def count_slots(store: Store) -> tuple[int, int]:
    """How many slots of nodes that are not gone are used, and how many are free."""
    query = sa.select(NODES.c.node_id, NODES.c.slots).where(NODES.c.state.not_in(GONE_STATES))
    slots = {row["node_id"]: row["slots"] for row in await store.fetch(query)}
    used = sum(len(part["slots"]) for _, part in await _held_members(store) if part["node_id"] in slots)
    return used, sum(slots.values()) - used


async def list_studies(store: Store, wanted: RunFilter, *, limit: int, cursor: str | None) -> views.Studies:
    """The newest studies that have a run that is meant, without their trials."""
    query = studies_query(wanted, NEWEST_STUDIES.conditions(cursor))
    rows, next_cursor = NEWEST_STUDIES.cut(await store.fetch(query.limit(limit + 1)), limit)
    slots = await _count_study_slots(store, [row["study_id"] for row in rows])
    studies = [_summarize_study(row, slots[row["study_id"]]) for row in rows]
    return views.Studies(studies=studies, next_cursor=next_cursor)


async def _count_study_slots(store: Store, study_ids: Sequence[str]) -> Counter[str]:
    """Return how many slots the runs of each of these studies hold."""
    slots: Counter[str] = Counter()
    for run, part in await _held_members(store, RUNS.c.study.in_(study_ids)):
        slots[run["study"]] += len(part["slots"])
    return slots


def studies_query(wanted: RunFilter, later: list[sa.ColumnElement[bool]]) -> sa.Select[Any]:
    """Return the query for the studies that have a run that is meant; without any condition, for all."""
    return sa.select(STUDIES).where(*wanted.study_conditions(), *later).order_by(*NEWEST_STUDIES.clauses())


def _summarize_study(row: Row, allocated_slots: int) -> views.StudyView:
    counts = Counter((row["trial_states"] or {}).values())
    return views.StudyView.model_validate(
        {
            **row,
            "planned_trials": row["planned_trials"] or 0,
            "trials_by_state": dict(sorted(counts.items())),
            "allocated_slots": allocated_slots,
        }
    )


async def list_datasets(store: Store, *, limit: int, cursor: str | None) -> views.Datasets:
    """The newest datasets first."""
    query = sa.select(DATASETS).where(*NEWEST_DATASETS.conditions(cursor)).order_by(*NEWEST_DATASETS.clauses())
    rows, next_cursor = NEWEST_DATASETS.cut(await store.fetch(query.limit(limit + 1)), limit)
    return views.Datasets(datasets=await _add_run_counts(store, rows), next_cursor=next_cursor)


async def _add_run_counts(store: Store, rows: Sequence[Row]) -> list[views.Dataset]:
    ids = [row["dataset_id"] for row in rows]
    query = sa.select(RUN_COUNTS.c.value, RUN_COUNTS.c.runs)
    query = query.where(RUN_COUNTS.c.column == "dataset_id", RUN_COUNTS.c.value.in_(ids))
    counts = {row["value"]: row["runs"] for row in await store.fetch(query)}
    return [views.Dataset(**row, run_count=counts.get(row["dataset_id"], 0)) for row in rows]


async def list_ingestions(store: Store, *, without_dataset: bool, limit: int, cursor: str | None) -> views.Ingestions:
    """The newest ingestions first: all, or those that have no dataset (yet)."""
    order, conditions = NEWEST_INGESTIONS, NEWEST_INGESTIONS.conditions(cursor)
    if without_dataset:
        conditions.append(INGESTIONS.c.dataset_id.is_(None))
    query = sa.select(INGESTIONS).where(*conditions).order_by(*order.clauses())
    rows, next_cursor = order.cut(await store.fetch(query.limit(limit + 1)), limit)
    return views.Ingestions(ingestions=[Ingestion(**row) for row in rows], next_cursor=next_cursor)


async def dataset_detail(store: Store, dataset_id: str, manifest_uri: str, row: Row | None) -> views.DatasetDetail:
    """A dataset with where it comes from and what was made of it."""
    query = sa.select(INGESTIONS).where(INGESTIONS.c.dataset_id == dataset_id).order_by(INGESTIONS.c.at)
    ingestions = [Ingestion(**each) for each in await store.fetch(query.limit(MAX_OF_DATASET))]
    dataset = (await _add_run_counts(store, [row]))[0] if row is not None else None
    return views.DatasetDetail(
        dataset_id=dataset_id,
        manifest_uri=manifest_uri,
        dataset=dataset,
        ingestions=ingestions,
        runs=await _dataset_uses(store, dataset_id),
    )


async def _dataset_uses(store: Store, dataset_id: str) -> list[views.DatasetUse]:
    columns = (RUNS.c.run_id, RUNS.c.name, RUNS.c.kind, RUNS.c.state, RUNS.c.spec)
    newest = sa.select(*columns).where(RUNS.c.dataset_id == dataset_id).order_by(RUNS.c.requested_at.desc())
    runs = (await store.fetch(newest.limit(MAX_OF_DATASET)))[::-1]
    promoted = await store.fetch(sa.select(MODELS).where(MODELS.c.run_id.in_([run["run_id"] for run in runs])))
    present = await _champions(store, [row["name"] for row in promoted])
    champions: defaultdict[str, list[views.DatasetChampion]] = defaultdict(list)
    for row in sorted(promoted, key=lambda each: each["promoted_at"]):
        is_champion = present[row["name"]].version == row["version"]
        champions[row["run_id"]].append(
            views.DatasetChampion.model_validate({**row, "model": row["name"], "champion": is_champion})
        )
    return [
        views.DatasetUse.model_validate(
            {**run, "init_from": (run["spec"] or {}).get("init_from"), "champions": champions[run["run_id"]]}
        )
        for run in runs
    ]


async def list_dataset_ids(store: Store) -> list[str]:
    """The ids of all datasets, the oldest first."""
    rows = await store.fetch(sa.select(DATASETS.c.dataset_id).order_by(DATASETS.c.created_at, DATASETS.c.dataset_id))
    return [row["dataset_id"] for row in rows]


async def list_versions(store: Store, *, limit: int, cursor: str | None, model: str | None = None) -> views.Models:
    """The versions of one model or of all, of each the newest first."""
    query = VERSIONS.where(*BY_VERSION.conditions(cursor)).order_by(*BY_VERSION.clauses())
    if model is not None:
        query = query.where(MODELS.c.name == model)
    rows, next_cursor = BY_VERSION.cut(await store.fetch(query.limit(limit + 1)), limit)
    champions = await _champions(store, [row["name"] for row in rows])
    versions = [_read_version(row, champion=champions[row["name"]].version == row["version"]) for row in rows]
    return views.Models(models=versions, next_cursor=next_cursor)


async def list_models(store: Store, *, limit: int, cursor: str | None) -> views.RegisteredModels:
    """Registered models by their names, also those that have gates or candidates alone."""
    query = sa.select(REGISTERED).where(*BY_MODEL.conditions(cursor)).order_by(*BY_MODEL.clauses())
    rows, next_cursor = BY_MODEL.cut(await store.fetch(query.limit(limit + 1)), limit)
    names = [row["name"] for row in rows]
    champions, pending = await _champions(store, names), await _pending_promotions(store, names)
    models = [
        views.RegisteredModel.model_validate(
            {**row, "model": row["name"], "champion": champions.get(row["name"]), "pending": pending[row["name"]]}
        )
        for row in rows
    ]
    return views.RegisteredModels(models=models, next_cursor=next_cursor)


async def get_model(store: Store, name: str) -> views.RegisteredModel:
    """One model as it stands.

    Raises:
        NotFound: there is none of this name.
    """
    rows = await store.fetch(sa.select(REGISTERED).where(REGISTERED.c.name == name))
    if not rows:
        raise NotFound(f"there is no model {name!r}; GET /registered-models lists them")
    champions, pending = await _champions(store, [name]), await _pending_promotions(store, [name])
    fields = {**rows[0], "model": name, "champion": champions.get(name), "pending": pending[name]}
    return views.RegisteredModel.model_validate(fields)


async def _champions(store: Store, names: Sequence[str]) -> dict[str, views.ModelVersion]:
    """The newest version of each model, which is its champion."""
    newest = sa.select(MODELS.c.name, sa.func.max(MODELS.c.version).label("version")).where(MODELS.c.name.in_(names))
    champion = newest.group_by(MODELS.c.name).subquery()
    same = sa.and_(MODELS.c.name == champion.c.name, MODELS.c.version == champion.c.version)
    rows = await store.fetch(VERSIONS.join(champion, same))
    return {row["name"]: _read_version(row, champion=True) for row in rows}


def _read_version(row: Row, *, champion: bool) -> views.ModelVersion:
    fields = {column.name: row[column.name] for column in MODELS.c}
    reported = row["checkpoint_metrics"] or row["run_metrics"] or {}
    return views.ModelVersion(**fields, champion=champion, training_metrics=reported)


async def _pending_promotions(store: Store, models: Sequence[str]) -> dict[str, list[views.PendingPromotion]]:
    """Model -> the runs whose promotion waits for somebody, the oldest first; of each model the first 100."""
    columns = (RUNS.c.run_id, RUNS.c.name, RUNS.c.model, RUNS.c.verdict, RUNS.c.verdict_reason, RUNS.c.ended_at)
    place = sa.func.row_number().over(partition_by=RUNS.c.model, order_by=(RUNS.c.ended_at, RUNS.c.run_id))
    waiting = sa.select(*columns, place.label("place")).where(
        begins_with(RUNS.c.verdict, AWAITING), RUNS.c.model.in_(models)
    )
    part = waiting.subquery()
    query = sa.select(part).where(part.c.place <= MAX_PENDING).order_by(part.c.model, part.c.place)
    found: dict[str, list[views.PendingPromotion]] = defaultdict(list)
    for row in await store.fetch(query):
        awaits, reason = row["verdict"].removeprefix(AWAITING), row["verdict_reason"]
        found[row["model"]].append(
            views.PendingPromotion(run_id=row["run_id"], name=row["name"], awaits=awaits, reason=reason)
        )
    return found


async def states(store: Store) -> dict[str, int]:
    """How many runs are in each state."""
    return await _count_values(store, RunFilter(), "state")


async def oldest_queued(store: Store) -> float | None:
    """When the run was queued that has waited longest, or None if none waits."""
    query = sa.select(sa.func.min(RUNS.c.queued_at).label("oldest")).where(RUNS.c.state == "queued")
    oldest = (await store.fetch(query))[0]["oldest"]
    return None if oldest is None else float(oldest)
