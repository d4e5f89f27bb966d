"""Runs and nodes as the gateway's read model lists them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from contracts.checkpoint_ref import CheckpointRef
from contracts.problems import FieldProblem, join_problems
from contracts.run_states import STATES, TERMINAL_STATES
from trainbus.client.connection import PAGE_ITEMS, Connection
from trainbus.client.run_filter import RunFilter
from trainbus.client.views import AWAITING, NodeView, RunView, StudyView, TimelineEntry

#: Ended runs that a list holds unless all are asked for.
MAX_ENDED_RUNS = 20
#: The newest facts of a run that a timeline has.
MAX_TIMELINE = 1000
#: Comes from every node before a checkpoint is committed: a timeline has the commit alone.
ROUTINE_FACT = "checkpoint_staged"
LIVE_STATES = [state for state in STATES if state not in TERMINAL_STATES]
ENDED_STATES = [state for state in STATES if state in TERMINAL_STATES]


async def list_runs(connection: Connection, *, include_ended: bool, matching: RunFilter | None = None) -> list[RunView]:
    """Return the runs in the order of their requests: those that have not ended and the newest that have, or all.

    Without ``include_ended``, the evaluations that have ended are left out: their runs have the results. Requests that
    the scheduler has not answered are among the runs.
    """
    chosen = matching or RunFilter()
    if include_ended:
        views = [view async for view in _read_runs(connection, chosen)]
    else:
        # In this order a run that ends meanwhile is in both lists, and counts as ended; in the other, in neither.
        live = [view async for view in _read_runs(connection, _narrow(chosen, LIVE_STATES))]
        ended_limit = min(MAX_ENDED_RUNS, chosen.limit or MAX_ENDED_RUNS)
        ended_only = replace(chosen, kind=chosen.kind or "train", limit=ended_limit)
        ended = [view async for view in _read_runs(connection, _narrow(ended_only, ENDED_STATES))]
        found = {view.run_id: view for view in [*live, *ended]}.values()
        views = sorted(found, key=by_request, reverse=True)
        views = views[: chosen.limit]
    requested = [view for view in views if view.state == "requested"]
    if requested:
        reason = await explain_requested(connection, requested[0].run_id)
        for view in requested:
            view.reason = reason
    return views[::-1]


def _narrow(chosen: RunFilter, states: Sequence[str]) -> RunFilter | None:
    """Return the filter for those runs that are in one of these states, too; None: there can be none."""
    both = tuple(state for state in states if not chosen.states or state in chosen.states)
    return replace(chosen, states=both) if both else None


async def _read_runs(connection: Connection, chosen: RunFilter | None) -> AsyncIterator[RunView]:
    """Yield the runs that are meant, newest first; of many, no more pages are read than ``chosen.limit`` needs."""
    if chosen is None:
        return
    async for found in _read_rows(connection, "/training-runs", "runs", chosen):
        yield read_summary(found)


async def _read_rows(
    connection: Connection, path: str, key: str, chosen: RunFilter
) -> AsyncIterator[Mapping[str, Any]]:
    """Yield the rows of a list that are meant, newest first."""
    count = 0
    size = min(PAGE_ITEMS, chosen.limit or PAGE_ITEMS)
    async for page in connection.read_pages(path, limit=size, **chosen.to_params()):
        for found in page[key]:
            yield found
            count += 1
            if count == chosen.limit:
                return


async def list_studies(connection: Connection, *, include_ended: bool, matching: RunFilter) -> list[StudyView]:
    """Return the studies that have a run that is meant, in the order of their requests.

    Without ``include_ended``: the newest ones, and all whose trials have not ended.
    """
    searched = [replace(matching, trials=True)]
    if not include_ended:
        newest = min(MAX_ENDED_RUNS, matching.limit or MAX_ENDED_RUNS)
        searched = [replace(searched[0], limit=newest), replace(searched[0], states=tuple(LIVE_STATES))]
    found: dict[str, StudyView] = {}
    for chosen in searched:
        async for each in _read_rows(connection, "/hpo/studies", "studies", chosen):
            found[each["study_id"]] = _read_study(each)
    return sorted(found.values(), key=by_request)[-(matching.limit or len(found)) :]


def _read_study(found: Mapping[str, Any]) -> StudyView:
    taken = ("study_id", "name", "state", "reason", "planned_trials", "trials_by_state", "objective", "best_value")
    return StudyView(requested_at=read_time(found["requested_at"]), **{name: found[name] for name in taken})


def by_request(view: RunView | StudyView) -> tuple[datetime, str]:
    """Return by what lists are ordered: when it was requested, and its id."""
    own_id = view.run_id if isinstance(view, RunView) else view.study_id
    return view.requested_at or datetime.min.replace(tzinfo=UTC), own_id


async def find_run(connection: Connection, name: str) -> str:
    """Return the id of the run that ``name`` means: an id, the unique start of one, or a run's name.

    Raises:
        NotFoundError: there is none (the message has the closest names) or more than one.
    """
    return str((await read_detail(connection, name))["run_id"])


async def read_detail(connection: Connection, name: str) -> dict[str, Any]:
    """Return what the read model knows of the run that ``name`` means. Raises as ``find_run`` does."""
    found = await connection.get(f"/training-runs/{quote(name, safe='')}")
    assert isinstance(found, dict)
    return found


async def read_run(connection: Connection, run_id: str, timeline: int = MAX_TIMELINE) -> RunView:
    """Return one run as it stands, with its newest facts and its training's position."""
    view = read_view(await connection.get(f"/training-runs/{run_id}", {"fresh": True, "timeline": timeline}))
    if view.state == "requested":
        view.reason = await explain_requested(connection, run_id)
    return view


async def explain_requested(connection: Connection, run_id: str) -> str:
    """Return why a run is not accepted yet."""
    return str((await connection.get(f"/training-runs/{run_id}/why"))["message"])


async def list_nodes(connection: Connection) -> list[NodeView]:
    """Return the nodes and what runs on them, in the order of their names."""
    return [read_node(each) async for page in connection.read_pages("/nodes") for each in page["nodes"]]


def read_summary(found: Mapping[str, Any]) -> RunView:
    """Return a run from how the gateway lists it."""
    taken = (
        "run_id", "name", "kind", "state", "user", "team", "priority", "generation", "failures", "step", "total_steps",
        "epoch", "samples_consumed", "dataset_id", "model", "experiment", "parent_run_id", "evaluates",
        "mlflow_run_id", "mlflow_experiment_id", "inexact_since",
    )  # fmt: skip
    view = RunView(**{name: found[name] for name in taken})
    for name in ("exactness", "exactness_reason"):
        setattr(view, name, found[name] or "")
    slots, waiting, evaluation = found["slots"], found["waiting"], found["evaluation"] or {}
    view.slots_min, view.slots_max, view.slots_got = slots["min"], slots["max"], slots["got"]
    view.study = found.get("study")
    view.requested_at, view.ended_at = read_time(found["requested_at"]), read_time(found["ended_at"])
    view.reason = found["reason"] or (waiting["message"] if waiting is not None else "")
    view.params, view.nodes, view.resizes = found["params"], tuple(found["nodes"]), tuple(found["sizes"])
    if view.ended:
        view.slots_got, view.nodes = 0, ()
    view.metrics = read_metrics(found["metrics"])
    view.evaluation = read_metrics(evaluation.get("metrics") or {})
    view.champion = read_metrics(evaluation.get("champion_metrics") or {})
    view.metric = found["evaluation_metric"]
    view.verdict, view.verdict_reason = _describe_verdict(found), found["verdict_reason"] or ""
    if found["last_checkpoint"] is not None:
        view.last_checkpoint = CheckpointRef.model_validate(found["last_checkpoint"])
    return view


def read_view(found: Mapping[str, Any]) -> RunView:
    """Return a run from all that the gateway knows of it."""
    view = read_summary(found)
    view.steps_per_s, view.state_digest = found["steps_per_s"], found["state_digest"] or ""
    view.warnings = tuple(found["warnings"])
    view.log_tail, view.starts = tuple(found["log_tail"]), found["starts"]
    if found["problems"]:
        view.reason = join_problems(map(FieldProblem.model_validate, found["problems"]))
    if found["spec"] is not None:
        from contracts.spec.run import RunSpec

        view.spec = RunSpec.model_validate(found["spec"])
        view.logical_ranks = view.spec.training.logical_ranks if view.spec.training else None
    view.sequence = found["sequence"]
    view.is_timeline_cut = len(found["timeline"]) == MAX_TIMELINE
    view.timeline = [
        TimelineEntry(each["sequence"], datetime.fromisoformat(each["time"]), each["fact"], each["summary"])
        for each in found["timeline"]
        if each["type"].startswith("trainbus.run.") and each["fact"] != ROUTINE_FACT
    ]
    return view


def _describe_verdict(found: Mapping[str, Any]) -> str:
    match found["verdict"]:
        case "promoted":
            version = found["champion_version"]
            return f"was champion v{found['model_version']}" if version is None else f"champion v{version}"
        case "not_promoted":
            return "not promoted"
        case str(verdict) if verdict.startswith(f"{AWAITING}_"):
            return verdict.replace("_", " ", 1)
        case _:
            return ""


def read_node(found: Mapping[str, Any]) -> NodeView:
    """Return a node from how the gateway lists it."""
    taken = (
        "node_id", "state", "slots", "accelerator", "address", "memory_bytes", "incarnation", "machine_digest",
        "run_names",
    )  # fmt: skip
    view = NodeView(**{name: found[name] for name in taken})
    view.joined_at, view.reason = read_time(found["joined_at"]), found["reason"] or ""
    if found["drain"] is not None:
        from contracts.state.node import NodeDrain

        view.drain = NodeDrain.model_validate(found["drain"])
    view.busy = {each["slot"]: (each["run_id"], each["rank"]) for each in found["busy"]}
    return view


def read_metrics(found: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics whose NaN and infinity travel as text."""
    return {name: float(value) for name, value in found.items()}


def read_time(text: str | None) -> datetime | None:
    """Return a time of an answer."""
    return None if text is None else datetime.fromisoformat(text)
