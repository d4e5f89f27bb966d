"""Tables and texts for a terminal; plain where there is none (CI, pipes)."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel
from rich import box
from rich.console import Console, Group
from rich.markup import escape as _escape_markup
from rich.table import Table

from trainbus.client.views import ModelView, NodeView, RunView, TimelineEntry

STATE_STYLE = {
    "completed": "green",
    "running": "bold cyan",
    "placed": "cyan",
    "preempting": "yellow",
    "cancelling": "yellow",
    "queued": "yellow",
    "preparing": "yellow",
    "accepted": "yellow",
    "failed": "bold red",
    "rejected": "bold red",
    "cancelled": "magenta",
    "up": "green",
    "lost": "bold red",
    "draining": "yellow",
    "notice": "yellow",
    "unfit": "bold red",
    "left": "dim",
}
#: Columns whose values are not wrapped.
UNBROKEN = ("run", "state", "metric", "verdict", "node", "dataset", "manifest")
#: Width where there is no terminal: long lines are better than wrapped ones.
PLAIN_WIDTH = 160
#: Terminal width from which on tables have the columns that `trainbus show` also has.
WIDE = 130
#: Control characters and text-direction marks -> how they are shown.
_CONTROL_CHARACTERS = {
    code: chr(code).encode("unicode_escape").decode()
    for code in (*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
    if chr(code) not in "\n\t"
}


def console(stderr: bool = False) -> Console:
    """Return a console that writes plain text where there is no terminal."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else PLAIN_WIDTH, highlight=False, soft_wrap=False)


def visible(text: str) -> str:
    """Return text from outside with its control characters made visible."""
    return text.translate(_CONTROL_CHARACTERS)


def escape(text: str) -> str:
    """Return text from outside for a console: without markup and control characters."""
    return _escape_markup(visible(text))


def as_json(value: Any) -> str:
    """Return the JSON of views, models, times and collections of them."""
    return json.dumps(_plain(value), indent=2, default=str)


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value.isoformat() if isinstance(value, datetime) else value


def whole(view: RunView) -> dict[str, Any]:
    """Return a run for JSON without its request: people put secrets into its ``env``."""
    plain: dict[str, Any] = _plain(view)
    return {name: value for name, value in plain.items() if name != "spec"}


def summary(view: RunView) -> dict[str, Any]:
    """Return a run for lists: without its timeline, environments and output."""
    return {name: value for name, value in whole(view).items() if name not in ("timeline", "log_tail", "starts")}


def state(name: str) -> str:
    return f"[{STATE_STYLE.get(name, 'default')}]{name}[/]"


def ago(time: datetime | None, now: datetime) -> str:
    """Return how long ago a time was: ``3 m``."""
    return "" if time is None else span((now - time).total_seconds())


def span(seconds: float) -> str:
    """Return a duration in the largest unit that fits."""
    seconds = max(0.0, seconds)
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def size(count: float) -> str:
    """Return bytes in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def table(*columns: str, title: str | None = None, right: Iterable[str] = ()) -> Table:
    made = Table(
        box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False, padding=(0, 1, 0, 0)
    )
    for name in columns:
        whole = name in right or name in UNBROKEN
        made.add_column(name, justify="right" if name in right else "left", overflow="fold", no_wrap=whole)
    return made


def runs(views: Iterable[RunView], now: datetime, width: int = PLAIN_WIDTH) -> Group:
    """Return a table of runs, and under it the reasons of those that wait or failed."""
    views = list(views)
    names = ["run", "name", "state", "slots", "step", "restarts", "exact", "checkpoint", "metric", "verdict", "age"]
    narrow = width < WIDE
    if narrow:
        names = [name for name in names if name not in ("restarts", "exact", "checkpoint")]
    made = table(*names, right=("slots", "step", "restarts", "age"))
    for view in views:
        cells = {
            "run": view.run_id,
            "name": escape(view.name),
            "state": state(view.state),
            "slots": slots(view),
            "step": str(view.step) + (f"/{view.total_steps}" if view.total_steps else ""),
            "restarts": str(view.restarts),
            "exact": {"exact": "bits", "samples-exact": "samples"}.get(view.exactness, ""),
            "checkpoint": f"step {view.last_checkpoint.step}" if view.last_checkpoint else "",
            "metric": metric(view).rpartition("/")[2] if narrow else metric(view),
            "verdict": escape(view.verdict),
            "age": ago(view.requested_at, now),
        }
        made.add_row(*(cells[name] for name in names))
    reasons = [
        f"{view.run_id} [bold]{escape(view.name)}[/] {state(view.state)}: {escape(view.reason)}"
        for view in views
        if view.reason and view.state != "running"
    ]
    return Group(made, *reasons)


def slots(view: RunView) -> str:
    """Return the slots that a run has had one after the other, and its range: ``4→2 of 1-4``."""
    wants = str(view.slots_max) if view.slots_min == view.slots_max else f"{view.slots_min}-{view.slots_max}"
    # A placement on the same number of slots is a restart, not another size.
    sizes = [size for size, before in zip(view.resizes, (None, *view.resizes), strict=False) if size != before]
    got = "→".join(str(size) for size in sizes[-4:]) or "0"
    return f"{got} of {wants}"


def metric(view: RunView) -> str:
    """Return the metric that matters: of the evaluation if there is one, else the last of the training."""
    if view.evaluation:
        name = view.metric if view.metric in view.evaluation else next(iter(view.evaluation))
        return f"{name} {view.evaluation[name]:.4f}" if name else ""
    for name in ("validation/accuracy", "accuracy", "validation/loss", "train/loss", "loss"):
        if name in view.metrics:
            return f"{name} {view.metrics[name]:.4f}"
    return next((f"{name} {value:.4g}" for name, value in view.metrics.items()), "")


def details(view: RunView, now: datetime) -> Table:
    """Return all fields of one run."""
    made = Table.grid(padding=(0, 2))
    last = view.last_checkpoint
    rows: list[tuple[str, str]] = [
        ("run", view.run_id),
        ("name", escape(view.name)),
        ("state", state(view.state) + (f" [dim]({escape(view.reason)})[/]" if view.reason else "")),
        ("slots", slots(view) + (f" on {', '.join(view.nodes)}" if view.nodes else "")),
        ("priority", str(view.priority)),
        ("step", f"{view.step}" + (f" of {view.total_steps}" if view.total_steps else "")),
        ("samples", f"{view.samples_consumed:,}"),
        ("placements", f"{view.generation} ({view.failures} failures by its own fault)"),
        ("exactness", exactness(view)),
        ("dataset", view.dataset_id or ""),
        ("checkpoint", f"step {last.step}, epoch {last.epoch}: {last.uri}" if last else ""),
        ("state digest", view.state_digests.get(last.uri, "") if last else ""),
        ("metrics", numbers(view.metrics)),
        ("evaluation", numbers(view.evaluation)),
        ("champion was", numbers(view.champion)),
        ("verdict", escape(f"{view.verdict}: {view.verdict_reason}") if view.verdict else ""),
        ("model", view.model or ""),
        ("MLflow run", view.mlflow_run_id or ""),
        ("restored from", view.parent_run_id or ""),
        ("weights from", _init(view)),
        ("evaluates", view.evaluates or ""),
        ("requested", f"{view.requested_at:%Y-%m-%d %H:%M:%S} UTC" if view.requested_at else ""),
        (
            "took",
            span((view.ended_at - view.requested_at).total_seconds()) if view.ended_at and view.requested_at else "",
        ),
    ]
    for name, value in rows:
        if value:
            made.add_row(f"[dim]{name}[/]", value)
    return made


def _init(view: RunView) -> str:
    """Return the checkpoint whose weights the run started with, and the tensors that it left out."""
    if view.spec is None or view.spec.init_from is None:
        return ""
    without = f" [dim](without {escape(', '.join(view.spec.init_exclude))})[/]" if view.spec.init_exclude else ""
    return escape(view.spec.init_from) + without


def exactness(view: RunView) -> str:
    """Return whether the run is exact to the bit, on how many logical ranks and in which environment, or why not."""
    if view.exactness != "exact":
        return f"{view.exactness} [dim]({escape(view.exactness_reason)})[/]" if view.exactness else ""
    digests = sorted({start.environment_digest[:12] for start in view.starts if start.environment_digest})
    environment = f", environment {', '.join(digests)}" if digests else ""
    return f"[green]exact[/] [dim]({view.logical_ranks} logical ranks{environment})[/]"


def numbers(values: dict[str, float]) -> str:
    return ", ".join(f"{escape(name)} {value:.4g}" for name, value in sorted(values.items()))


def timeline(moments: Iterable[TimelineEntry], start: datetime | None = None) -> Table:
    """Return a run's timeline in seconds since its request. Checkpoints in a row are one line."""
    made = table("at", "seq", "", right=("at", "seq"))
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
    return [TimelineEntry(last.sequence, last.time, last.fact, more + last.text)]


def nodes(views: Iterable[NodeView], names: Mapping[str, str], now: datetime) -> Group:
    """Return a table of nodes, and under it the reasons of those that are out of use."""
    views = list(views)
    made = table("node", "state", "slots", "kind", "busy with", "up", right=("slots", "up"))
    for view in views:
        held: dict[str, int] = {}
        for run_id, _ in view.busy.values():
            held[run_id] = held.get(run_id, 0) + 1
        busy = ", ".join(f"{escape(names.get(run_id) or run_id)}×{count}" for run_id, count in held.items())
        made.add_row(
            view.node_id, state(view.state), f"{len(view.busy)}/{view.slots}", view.accelerator, busy,
            ago(view.joined_at, now) if view.state in ("up", "draining", "notice", "unfit") else "",
        )  # fmt: skip
    return Group(
        made, *(f"{view.node_id} {escape(view.reason)}" for view in views if view.reason and _is_out_of_use(view))
    )


def _is_out_of_use(view: NodeView) -> bool:
    return view.state in ("draining", "notice", "unfit")


def models(views: Iterable[ModelView], now: datetime) -> Table:
    made = table("model", "version", "run", "metrics", "since", right=("version", "since"))
    for view in views:
        made.add_row(view.model, str(view.version), view.run_id, numbers(view.metrics), ago(view.promoted_at, now))
    return made


def utc_now() -> datetime:
    return datetime.now(UTC)


def print_wait(answer: dict[str, Any]) -> None:
    """Print which runs hold what a run waits for, and when it is expected to start, as far as the scheduler knows."""
    if holders := answer.get("holders"):
        table = Table(box=None, padding=(0, 2, 0, 0), title="runs that hold what it needs", title_justify="left")
        for column in ("run", "name", "slots", "priority", "until"):
            table.add_column(column, justify="right" if column in ("slots", "priority") else "left")
        for each in holders:
            until = f"{each['until']}{' at the latest' if each['until_is'] == 'limit' else ' (expected)'}"
            table.add_row(each["run_id"], escape(each["name"]), str(each["slots"]), str(each["priority"]), until)
        console().print(table)
    if "start_p50" in answer:
        p10, p50, p90 = (answer[name] for name in ("start_p10", "start_p50", "start_p90"))
        console().print(
            f"expected to start at about {p50}, with 80 % probability between {p10} and {p90}", soft_wrap=True
        )
