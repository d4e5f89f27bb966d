"""How things look on a terminal. Without one (CI, pipes) the same, plain."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel
from rich import box
from rich.console import Console
from rich.markup import escape as escape
from rich.table import Table

from trainbus.cli.board import Board, DatasetView, ModelView, Moment, NodeView, RunView

STATE_STYLE = {
    "completed": "green",
    "running": "bold cyan",
    "starting": "cyan",
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
    "left": "dim",
}
#: Without a terminal there is no width to fit; long lines are better than broken ones.
PLAIN_WIDTH = 160


def console(stderr: bool = False) -> Console:
    """A console that writes plain text where there is no terminal."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else PLAIN_WIDTH, highlight=False, soft_wrap=False)


def as_json(value: Any) -> str:
    """JSON of views, models, times and whatever they are made of."""
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


def state(name: str) -> str:
    return f"[{STATE_STYLE.get(name, 'default')}]{name}[/]"


def ago(time: datetime | None, now: datetime) -> str:
    """``3 m``: how long since."""
    return "" if time is None else span((now - time).total_seconds())


def span(seconds: float) -> str:
    """A length of time in the unit that suits it."""
    seconds = max(0.0, seconds)
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def size(count: float) -> str:
    """Bytes in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def table(*columns: str, title: str | None = None, right: Iterable[str] = ()) -> Table:
    made = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return made


def runs(views: Iterable[RunView], now: datetime) -> Table:
    """One line a run."""
    made = table(
        "run", "name", "state", "slots", "step", "restarts", "checkpoint", "metric", "verdict", "age",
        right=("slots", "step", "restarts", "age"),
    )  # fmt: skip
    for view in views:
        made.add_row(
            view.run_id,
            escape(view.name) + (" [dim](evaluation)[/]" if view.kind == "evaluate" else ""),
            state(view.state),
            slots(view),
            str(view.step) + (f"/{view.total_steps}" if view.total_steps else ""),
            str(view.restarts),
            f"step {view.last_checkpoint.step}" if view.last_checkpoint else "",
            metric(view),
            escape(view.verdict),
            ago(view.requested_at, now),
        )
        if view.reason and view.state != "running":
            made.add_row("", f"[dim]{escape(view.reason)}[/]", end_section=False)
    return made


def slots(view: RunView) -> str:
    """What a run has, or had last, of what it wants: ``2/1-4``."""
    wants = str(view.slots_max) if view.slots_min == view.slots_max else f"{view.slots_min}-{view.slots_max}"
    got = "→".join(str(size) for size in view.resizes[-4:]) or "0"
    return f"{got} of {wants}"


def metric(view: RunView) -> str:
    """The value that matters: on the test split if it was evaluated, else the last that training told."""
    if view.evaluation:
        name = view.metric if view.metric in view.evaluation else next(iter(view.evaluation))
        return f"{name} {view.evaluation[name]:.4f}" if name else ""
    for name in ("validation/accuracy", "accuracy", "validation/loss", "train/loss", "loss"):
        if name in view.metrics:
            return f"{name} {view.metrics[name]:.4f}"
    return next((f"{name} {value:.4g}" for name, value in view.metrics.items()), "")


def details(view: RunView, now: datetime) -> Table:
    """What there is to know about one run."""
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
        ("dataset", view.dataset_id or ""),
        ("checkpoint", f"step {last.step}, epoch {last.epoch}: {last.uri}" if last else ""),
        ("metrics", _numbers(view.metrics)),
        ("evaluation", _numbers(view.evaluation)),
        ("champion was", _numbers(view.champion)),
        ("verdict", escape(f"{view.verdict}: {view.verdict_reason}") if view.verdict else ""),
        ("model", view.model or ""),
        ("MLflow run", view.mlflow_run_id or ""),
        ("restored from", view.parent_run_id or ""),
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


def _numbers(values: dict[str, float]) -> str:
    return ", ".join(f"{escape(name)} {value:.4g}" for name, value in sorted(values.items()))


def timeline(moments: Iterable[Moment], start: datetime | None = None) -> Table:
    """A run's life, line by line, in seconds since it was requested. Checkpoints in a row are one line."""
    made = table("at", "seq", "", right=("at", "seq"))
    for moment in _without_routine(moments):
        start = start or moment.time
        made.add_row(f"+{(moment.time - start).total_seconds():.1f} s", str(moment.sequence), escape(moment.text))
    return made


def _without_routine(moments: Iterable[Moment]) -> Iterator[Moment]:
    """Leave out what retention deletes; of checkpoints in a row keep the last, with their number."""
    row: list[Moment] = []
    for moment in moments:
        if moment.fact == "checkpoint_committed":
            row.append(moment)
        elif moment.fact != "checkpoint_deleted":
            yield from _one_of(row)
            row = []
            yield moment
    yield from _one_of(row)


def _one_of(row: list[Moment]) -> list[Moment]:
    if not row:
        return []
    last = row[-1]
    more = f"{len(row)} checkpoints, the last: " if len(row) > 1 else ""
    return [Moment(last.sequence, last.time, last.fact, more + last.text)]


def nodes(views: Iterable[NodeView], board: Board, now: datetime) -> Table:
    made = table("node", "state", "slots", "kind", "busy with", "up", right=("slots", "up"))
    for view in views:
        held: dict[str, int] = {}
        for run_id, _ in view.busy.values():
            held[run_id] = held.get(run_id, 0) + 1
        busy = ", ".join(
            f"{escape(board.runs[run_id].name or run_id) if run_id in board.runs else run_id}×{count}"
            for run_id, count in held.items()
        )
        made.add_row(
            view.node_id, state(view.state), f"{len(view.busy)}/{view.slots}", view.accelerator, busy,
            ago(view.joined_at, now) if view.state in ("up", "draining") else "",
        )  # fmt: skip
    return made


def datasets(views: Iterable[DatasetView]) -> Table:
    made = table("dataset", "source", "format", "records", "quarantined", "splits", "size", right=("records", "size"))
    for view in views:
        bad = ", ".join(f"{count} {code}" for code, count in view.quarantined.items())
        splits = " ".join(f"{name}={count}" for name, count in view.split_counts.items())
        made.add_row(
            (view.dataset_id or "")[:16] or "[red]failed[/]" if view.failed else (view.dataset_id or "")[:16],
            escape(view.source or view.failed), view.format, f"{view.accepted:,}", bad, splits,
            size(view.size_bytes) if view.size_bytes else "",
        )  # fmt: skip
    return made


def models(views: Iterable[ModelView], now: datetime) -> Table:
    made = table("model", "version", "run", "metrics", "since", right=("version", "since"))
    for view in views:
        made.add_row(view.model, str(view.version), view.run_id, _numbers(view.metrics), ago(view.promoted_at, now))
    return made


def utc_now() -> datetime:
    return datetime.now(UTC)
