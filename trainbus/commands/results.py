"""Commands on what runs came to: fetch a result, go on from it, compare runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from contracts.formats import plural
from trainbus.client.errors import TrainbusError
from trainbus.commands import render
from trainbus.commands.options import Json, Run, command, parse_pair, parse_param

if TYPE_CHECKING:
    from trainbus.client.client import AsyncClient
    from trainbus.client.comparison import Comparison

app = typer.Typer()
PANEL = "Runs"
#: Columns of a curve, and its levels from low to high.
CURVE_WIDTH = 48
LEVELS = "▁▂▃▄▅▆▇█"


@command(app, rich_help_panel=PANEL)
async def fetch(
    client: AsyncClient,
    target: Annotated[
        str, typer.Argument(help="RUN (its best checkpoint, else its last), RUN@STEP, or models:/NAME@champion.")
    ],
    folder: Annotated[
        Path | None, typer.Argument(help="Where to put the files; a new or empty folder. Default: named for the run.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Fetch a run's model and artifacts as plain files, and print how to load them."""
    fetched = await client.fetch_model(target, folder)
    commit = None if fetched.stored is None else fetched.stored.commit
    if as_json:
        found = {
            "run_id": fetched.run_id,
            "folder": str(fetched.folder),
            "step": commit and commit.checkpoint.step,
            "epoch": commit and commit.checkpoint.epoch,
            "metrics": commit.metrics if commit else {},
            "mark": fetched.mark,
            "files": [str(path.relative_to(fetched.folder)) for path in fetched.paths],
            "lines": fetched.lines,
        }
        print(render.as_json(found))
        return
    what = "artifacts"
    if commit is not None:
        mark = f"{fetched.mark} checkpoint" if fetched.mark else "checkpoint"
        metrics = f" ({render.numbers(commit.metrics)})" if commit.metrics else ""
        what = f"{mark}, {commit.checkpoint.point}{metrics}"
    size = render.size(fetched.size_bytes)
    render.console().print(f"{fetched.run_id}: {what}", soft_wrap=True)
    files = plural(len(fetched.paths), "file")
    print(f"{files}, {size}, verified: {fetched.folder}\n\n  " + "\n  ".join(fetched.lines))


@command(app, rich_help_panel=PANEL)
async def resume(
    client: AsyncClient,
    name: Run,
    start: Annotated[str, typer.Option("--from", help="The checkpoint to go on from: best, last or a step.")] = "last",
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs in all, those of the run included.")] = None,
    max_steps: Annotated[int | None, typer.Option(min=1, help="Steps in all, those of the run included.")] = None,
    new_command: Annotated[
        str | None, typer.Option("--command", help="Of a script: what to run instead, 'python train.py --epochs 20'.")
    ] = None,
    env: Annotated[list[str] | None, typer.Option(help="KEY=VALUE of every rank to change; repeatable.")] = None,
    param: Annotated[list[str] | None, typer.Option(help="key=value to change; repeatable.")] = None,
    new_name: Annotated[str | None, typer.Option("--name", help="Name of the new run.")] = None,
    as_json: Json = False,
) -> None:
    """Go on from a run's checkpoint in a new run: for longer, or with other settings."""
    resumed = await client.resume(
        name,
        start=start,
        epochs=epochs,
        max_steps=max_steps,
        params=dict(map(parse_param, param or ())),
        env=dict(parse_pair("--env", text) for text in env or ()),
        command=new_command,
        name=new_name,
    )
    if resumed.warning:
        print(f"warning: {resumed.warning}", file=sys.stderr)
    if as_json:
        print(render.as_json(resumed))
    else:
        print(f"{resumed.run_id}  {resumed.name}: from {resumed.point} of {resumed.parent_run_id}")
        print(f"{resumed.note}")
        print(f"{resumed.answer or 'requested; the scheduler has not answered yet'}")
    if resumed.answer and resumed.answer.startswith("rejected"):
        raise TrainbusError(f"the request was {resumed.answer}")


@command(app, rich_help_panel=PANEL)
async def compare(
    client: AsyncClient,
    names: Annotated[list[str], typer.Argument(help="Two or more runs: RUN, or RUN@best, RUN@STEP.")],
    metric: Annotated[list[str] | None, typer.Option(help="Only this metric; repeatable.")] = None,
    as_json: Json = False,
) -> None:
    """Compare runs: settings that differ, metrics, and curves."""
    found = await client.compare(names, metric or ())
    if as_json:
        print(render.as_json(found))
        return
    _print_differences(found)
    _print_metrics(found)
    _print_curves(found)


def _print_differences(found: Comparison) -> None:
    labels = [render.escape(each.label) for each in found.runs]
    if not found.differences:
        print("the requests are the same")
        return
    table = render.table("differs in", *labels)
    for name, values in found.differences.items():
        table.add_row(render.escape(name), *("" if value is None else render.escape(str(value)) for value in values))
    render.console().print(table)


def _print_metrics(found: Comparison) -> None:
    labels = [render.escape(each.label) for each in found.runs]
    table = render.table("metric", "", *labels, right=labels)
    table.add_row("state", "", *(render.state(each.state) for each in found.runs))
    table.add_row("step", "", *("-" if each.step is None else str(each.step) for each in found.runs))
    for name, mode in found.modes.items():
        summaries = [each.metrics.get(name) for each in found.runs]
        choose = min if mode == "min" else max
        for title in ("last", "best"):
            values = [None if each is None else float(getattr(each, title)) for each in summaries]
            winner = choose((value for value in values if value is not None), default=None)
            cells = [
                "" if value is None else f"[bold green]{value:.5g}[/]" if value == winner else f"{value:.5g}"
                for value in values
            ]
            table.add_row(render.escape(name) if title == "last" else "", f"{title} ({mode})", *cells)
    render.console().print(table)


def _print_curves(found: Comparison) -> None:
    width = max(len(each.label) for each in found.runs)
    for name in found.modes:
        curves = [(each.label, each.metrics[name].points) for each in found.runs if name in each.metrics]
        curves = [(label, points) for label, points in curves if len(points) > 1]
        if not curves:
            continue
        values = [value for _, points in curves for _, value in points]
        low, high = min(values), max(values)
        last_step = max(points[-1][0] for _, points in curves)
        render.console().print(f"[bold]{render.escape(name)}[/] [dim]{low:.4g} to {high:.4g}, steps to {last_step}[/]")
        for label, points in curves:
            print(f"  {render.visible(label):<{width}} {draw_curve(points, low, high, last_step)}")


def draw_curve(points: Sequence[tuple[int, float]], low: float, high: float, last_step: int) -> str:
    """Return a curve in one line: the mean of each column's points, all runs on one scale."""
    columns: list[list[float]] = [[] for _ in range(CURVE_WIDTH)]
    for step, value in points:
        columns[min(CURVE_WIDTH - 1, step * CURVE_WIDTH // max(last_step + 1, 1))].append(value)
    span = (high - low) or 1.0
    drawn = ""
    for values in columns:
        level = round((sum(values) / len(values) - low) / span * (len(LEVELS) - 1)) if values else None
        drawn += " " if level is None else LEVELS[level]
    return drawn.rstrip()
