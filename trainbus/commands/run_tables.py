"""Tables of runs, nodes and models."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table

from contracts.formats import DEFAULT_REASONS, format_duration, format_reason, plural
from contracts.main_metric import choose_main_metric
from trainbus.client.address import StackAddress
from trainbus.client.views import NodeView, RunView, StudyView, TimelineEntry
from trainbus.commands import render
from trainbus.commands.render import escape

if TYPE_CHECKING:
    from contracts.checkpoint_ref import CheckpointRef
    from contracts.state.node import NodeDrain

#: Terminal width from which on tables have the columns that `trainbus show` also has.
WIDE = 130
#: What only the view of a single run has.
DETAILS = ("timeline", "log_tail", "starts", "state_digest", "sequence", "is_timeline_cut", "warnings")
#: Columns of a list of runs that are there where they are empty too.
ALWAYS_SHOWN = ("run", "name", "state", "slots", "step", "age")


def run_to_plain(view: RunView) -> dict[str, Any]:
    """Return a run for JSON without its request: people put secrets into its ``env``."""
    plain: dict[str, Any] = render.to_plain(view)
    return {name: value for name, value in plain.items() if name != "spec"}


def summarize_run(view: RunView) -> dict[str, Any]:
    """Return a run for lists: without its timeline, environments and output."""
    return {name: value for name, value in run_to_plain(view).items() if name not in DETAILS}


def render_runs(views: Iterable[RunView | StudyView], now: datetime, width: int = render.PLAIN_WIDTH) -> Group:
    """Return a table of runs and folded studies; under it, why runs wait or failed, and how many trials are over."""
    views = list(views)
    narrow = width < WIDE
    rows = [
        _list_cells(view, now, narrow=narrow) if isinstance(view, RunView) else _study_cells(view, now, narrow=narrow)
        for view in views
    ]
    shown = {name for row in rows for name, text in row.items() if text}
    names = [name for name in rows[0] if name in shown or name in ALWAYS_SHOWN] if rows else list(ALWAYS_SHOWN)
    if narrow:
        names = [name for name in names if name not in ("restarts", "exact", "checkpoint")]
    made = render.table(*names, right=("slots", "step", "restarts", "age"))
    for row in rows:
        made.add_row(*(row.get(name, "") for name in names))
    return Group(made, *(text for view in views if (text := _describe_row(view))))


def _describe_row(view: RunView | StudyView) -> str:
    """Return the line under a table of runs about one row; '' if its cells have all."""
    if isinstance(view, RunView):
        own_id, text = view.run_id, view.reason if has_reason(view) else ""
    else:
        counts = ", ".join(f"{count} {state}" for state, count in view.trials_by_state.items())
        # The row itself says that all have completed.
        is_told = not counts or view.trials_by_state == {"completed": view.planned_trials}
        trials = "" if is_told else f"{counts} of {plural(view.planned_trials, 'trial')}"
        own_id, text = view.study_id, "; ".join(filter(None, (view.reason, trials)))
    return f"{own_id} [bold]{escape(view.name)}[/] {render.state(view.state)}: {escape(text)}" if text else ""


def _study_cells(view: StudyView, now: datetime, *, narrow: bool) -> dict[str, str]:
    """Return the cells of a study in a list of runs: column -> text."""
    over = sum(count for state, count in view.trials_by_state.items() if state not in ("running", "paused"))
    objective = (view.objective or "").rpartition("/")[2] if narrow else view.objective or ""
    return {
        "run": view.study_id,
        "name": escape(view.name),
        "state": render.state(view.state),
        "step": f"{over}/{plural(view.planned_trials, 'trial')}" if view.planned_trials else "",
        "metric": "" if view.best_value is None else f"{escape(objective)} {view.best_value:.4g}",
        "age": render.ago(view.requested_at, now),
    }


def _list_cells(view: RunView, now: datetime, *, narrow: bool) -> dict[str, str]:
    """Return a run's cells in a list: column -> text."""
    return {
        "run": view.run_id,
        "name": escape(view.name),
        "state": render.state(view.state),
        "slots": format_slots(view),
        "step": _format_step(view),
        "restarts": str(view.restarts) if view.restarts else "",
        "exact": {"exact": "bits", "samples-exact": "samples"}.get(view.exactness, ""),
        "checkpoint": format_point(view.last_checkpoint).partition(",")[0] if view.last_checkpoint else "",
        "metric": format_metric(view).rpartition("/")[2] if narrow else format_metric(view),
        "verdict": escape(view.verdict),
        "age": render.ago(view.requested_at, now),
    }


def _format_step(view: RunView) -> str:
    """Return the step; nothing for a script that reports none."""
    if view.known_step is None:
        return ""
    return str(view.step) + (f"/{view.total_steps}" if view.total_steps else "")


def format_point(ref: CheckpointRef) -> str:
    """Return what a checkpoint is of: ``step 40, epoch 2``, or ``version 2`` of an output folder."""
    return ref.point + (f", epoch {ref.epoch}" if ref.epoch else "")


def has_reason(view: RunView) -> bool:
    """Return whether a run has a reason that says more than its state."""
    return bool(view.reason) and view.reason not in DEFAULT_REASONS


def format_slots(view: RunView) -> str:
    """Return the slots that a run has had one after the other, and its range: ``4→2 of 1-4``."""
    wants = str(view.slots_max) if view.slots_min == view.slots_max else f"{view.slots_min}-{view.slots_max}"
    # A placement on the same number of slots is a restart, not another size.
    sizes = [size for size, before in zip(view.resizes, (None, *view.resizes), strict=False) if size != before]
    got = "→".join(str(size) for size in sizes[-4:]) or "0"
    return f"{got} of {wants}"


def format_metric(view: RunView) -> str:
    """Return the metric that matters: of the evaluation if there is one, else the last of the training."""
    chosen = choose_main_metric(view.metrics, view.evaluation, view.metric)
    return "" if chosen is None else f"{chosen.name} {chosen.value:.4g}"


def find_links(view: RunView, address: StackAddress) -> dict[str, str]:
    """Return the addresses of a run's pages: ``page`` is the gateway's, ``mlflow`` MLflow's."""
    links = {}
    if address.gateway_url:
        links["page"] = f"{address.gateway_url.rstrip('/')}/#{view.run_id}"
    if view.mlflow_run_id and (address.mlflow_uri or "").startswith("http"):
        place = f"#/experiments/{view.mlflow_experiment_id}/runs/{view.mlflow_run_id}"
        links["mlflow"] = f"{(address.mlflow_uri or '').rstrip('/')}/{place}"
    return links


def render_run(view: RunView, links: Mapping[str, str] | None = None) -> Table:
    """Return all fields of one run."""
    links = links or {}
    made = Table.grid(padding=(0, 2))
    last = view.last_checkpoint
    rows: list[tuple[str, str]] = [
        ("run", view.run_id),
        ("name", escape(view.name)),
        ("state", render.state(view.state) + (f" [dim]({escape(view.reason)})[/]" if has_reason(view) else "")),
        *(("warning", f"[yellow]{escape(text)}[/]") for text in view.warnings),
        ("slots", format_slots(view) + (f" on {', '.join(view.nodes)}" if view.nodes else "")),
        ("team", escape("/".join(filter(None, (view.team, view.user))))),
        ("priority", str(view.priority) if view.priority else ""),
        ("params", escape(", ".join(f"{name}={_format_param(value)}" for name, value in view.params.items()))),
        ("step", _format_position(view)),
        ("samples", f"{view.samples_consumed:,}" if view.samples_consumed else ""),
        ("placements", _format_placements(view)),
        ("exactness", format_exactness(view)),
        ("dataset", view.dataset_id or ""),
        ("checkpoint", f"{format_point(last)}: {last.uri}" if last else ""),
        ("state digest", view.state_digest),
        ("metrics", render.numbers(view.metrics)),
        ("evaluation", render.numbers(view.evaluation)),
        ("champion was", render.numbers(view.champion)),
        ("verdict", escape(f"{view.verdict}: {view.verdict_reason}") if view.verdict else ""),
        ("model", view.model or ""),
        ("page", links.get("page", "")),
        ("MLflow", links.get("mlflow") or (f"run {view.mlflow_run_id} (`trainbus ui`)" if view.mlflow_run_id else "")),
        ("restored from", view.parent_run_id or ""),
        ("files from" if view.spec is not None and view.spec.command else "weights from", _init(view)),
        ("evaluates", view.evaluates or ""),
        ("requested", f"{view.requested_at:%Y-%m-%d %H:%M:%S} UTC" if view.requested_at else ""),
        (
            "took",
            render.span((view.ended_at - view.requested_at).total_seconds())
            if view.ended_at and view.requested_at
            else "",
        ),
    ]
    for name, value in rows:
        if value:
            made.add_row(f"[dim]{name}[/]", value)
    return made


def _format_position(view: RunView) -> str:
    """Return the step with the epoch, and how long the training still takes."""
    if not view.step and not view.total_steps:
        return ""
    parts = [f"{view.step:,}" + (f" of {view.total_steps:,}" if view.total_steps else "")]
    if view.epoch:
        parts.append(f"epoch {view.epoch}")
    if view.left_s is not None:
        parts.append(f"{format_duration(view.left_s)} left")
    return ", ".join(parts)


def _format_placements(view: RunView) -> str:
    if not view.generation:
        return ""
    return str(view.generation) + (f" ({plural(view.failures, 'failure')} of its own)" if view.failures else "")


def _format_param(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _init(view: RunView) -> str:
    """Return the checkpoint whose weights the run started with, and the tensors that it left out."""
    if view.spec is None or view.spec.init_from is None:
        return ""
    without = f" [dim](without {escape(', '.join(view.spec.init_exclude))})[/]" if view.spec.init_exclude else ""
    return escape(view.spec.init_from) + without


def format_exactness(view: RunView) -> str:
    """Return whether the run is exact to the bit, on how many logical ranks and in which environment, or why not."""
    if view.exactness != "exact":
        return f"{view.exactness} [dim]({escape(view.exactness_reason)})[/]" if view.exactness else ""
    digests = sorted({start["environment_digest"][:12] for start in view.starts if start["environment_digest"]})
    environment = f", environment {', '.join(digests)}" if digests else ""
    return f"[green]exact[/] [dim]({view.logical_ranks} logical ranks{environment})[/]"


def render_timeline(moments: Iterable[TimelineEntry], start: datetime | None = None) -> Table:
    """Return a run's timeline in seconds since its request. Checkpoints in a row are one line."""
    made = render.table("at", "seq", "", right=("at", "seq"))
    for moment in _without_routine(moments):
        start = start or moment.time
        made.add_row(f"+{(moment.time - start).total_seconds():.1f} s", str(moment.sequence), escape(moment.text))
    return made


def _without_routine(moments: Iterable[TimelineEntry]) -> Iterator[TimelineEntry]:
    """Leave out deletions; of checkpoints in a row keep the last, with their number."""
    row: list[TimelineEntry] = []
    for moment in moments:
        if moment.fact == "checkpoint_committed":
            row.append(moment)
        elif moment.fact != "checkpoint_deleted":
            yield from _merge_checkpoints(row)
            row = []
            yield moment
    yield from _merge_checkpoints(row)


def _merge_checkpoints(row: list[TimelineEntry]) -> list[TimelineEntry]:
    if not row:
        return []
    last = row[-1]
    more = f"{len(row)} checkpoints, the last: " if len(row) > 1 else ""
    text = more + last.text.removeprefix("checkpoint of ") if more else last.text
    return [TimelineEntry(last.sequence, last.time, last.fact, text)]


def render_nodes(views: Iterable[NodeView], names: Mapping[str, str], now: datetime) -> Group:
    """Return a table of nodes, and under it the reasons of those that are out of use."""
    views = list(views)
    made = render.table("node", "state", "slots", "kind", "busy with", "up", right=("slots", "up"))
    for view in views:
        held: dict[str, int] = {}
        for run_id, _ in view.busy.values():
            held[run_id] = held.get(run_id, 0) + 1
        busy = ", ".join(f"{escape(names.get(run_id) or run_id)}×{count}" for run_id, count in held.items())
        made.add_row(
            view.node_id, render.state(view.state), f"{len(view.busy)}/{view.slots}", view.accelerator, busy,
            render.ago(view.joined_at, now) if view.state in ("up", "draining", "notice", "unfit") else "",
        )  # fmt: skip
    return Group(
        made,
        *(f"{view.node_id} {escape(view.reason)}" for view in views if view.reason and _is_out_of_use(view)),
        *(f"{view.node_id} {escape(_describe_drain(view.drain, now))}" for view in views if view.drain),
    )


def _describe_drain(drain: NodeDrain, now: datetime) -> str:
    """Return who drained a node, when and why, and what ends it."""
    by = f" by {drain.user}" if drain.user else ""
    ago = f" {render.ago(drain.requested_at, now)} ago" if drain.requested_at else ""
    until = "until `trainbus undrain`" if drain.scope == "node" else "until its agent joins again"
    return f"drained{by}{ago}{format_reason(drain.reason)}; {until}"


def _is_out_of_use(view: NodeView) -> bool:
    return view.state in ("notice", "unfit")


def print_wait(answer: dict[str, Any]) -> None:
    """Print which runs hold what a run waits for, and when it is expected to start, as far as the scheduler knows."""
    if holders := answer.get("holders"):
        table = Table(box=None, padding=(0, 2, 0, 0), title="runs that hold what it needs", title_justify="left")
        for column in ("run", "name", "slots", "priority", "until"):
            table.add_column(column, justify="right" if column in ("slots", "priority") else "left")
        for each in holders:
            until = f"{each['until']}{' at the latest' if each['until_is'] == 'limit' else ' (expected)'}"
            table.add_row(each["run_id"], escape(each["name"]), str(each["slots"]), str(each["priority"]), until)
        render.console().print(table)
    if "start_p50" in answer:
        p10, p50, p90 = (answer[name] for name in ("start_p10", "start_p50", "start_p90"))
        render.console().print(
            f"expected to start at about {p50}, with 80 % probability between {p10} and {p90}", soft_wrap=True
        )
