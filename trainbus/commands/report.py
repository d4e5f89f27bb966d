"""``trainbus report``: what the evaluation of a run found, as a table or as its page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from contracts.formats import format_bytes
from contracts.metric_names import LATENCY_MS, strip_split
from trainbus.client.errors import NotFoundError
from trainbus.commands import render
from trainbus.commands.options import Json, Run, command

if TYPE_CHECKING:
    from trainbus.client.client import AsyncClient
    from trainbus.client.evaluation_report import EvaluationReport

app = typer.Typer()
PANEL = "Runs"
MARKS = {True: "[green]✓[/]", False: "[bold red]✗[/]", None: "[yellow]…[/]"}
MAX_SLICES = 8


@command(app, rich_help_panel=PANEL)
async def report(
    client: AsyncClient,
    name: Run,
    html: Annotated[Path | None, typer.Option("--html", help="Write the page with everything to this file.")] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    as_json: Json = False,
) -> None:
    """Show how a run compares with its model's champion, and what each gate found."""
    from trainbus.client.evaluation_report import read_file, read_report

    found = await read_report(client.connection, client.address, await client.find_run(name))
    if as_json:
        print(render.as_json(found.content or found.evaluated))
    else:
        _print_report(found)
    if html is None and not open_page:
        return
    if "report.html" not in found.files:
        raise NotFoundError(f"the report of run {found.run_id} has no page")
    path = html or Path(f"report-{found.run_id}.html")
    path.write_bytes(await read_file(client.address, found.run_id, found.files["report.html"]))
    if not as_json:
        print(f"page: {path}")
    if open_page:
        typer.launch(str(path.resolve()))


def _print_report(found: EvaluationReport) -> None:
    evaluated, content = found.evaluated, found.content or {}
    champion = content.get("champion") or evaluated.champion_run_id or "none"
    render.console().print(f"{found.run_id} against champion {render.escape(str(champion))}", soft_wrap=True)
    table = render.table("metric", "candidate", "champion", "difference", right=("candidate", "champion", "difference"))
    for metric in _order(evaluated.metrics, content.get("metric")):
        own, other = evaluated.metrics[metric], evaluated.champion_metrics.get(metric)
        difference = "" if other is None else f"{own - other:+.4g}"
        if metric == content.get("metric") and (interval := content.get("interval")):
            difference += f" ({interval[0]:+.4g} to {interval[1]:+.4g})"
        table.add_row(render.escape(metric), f"{own:.5g}", "" if other is None else f"{other:.5g}", difference)
    render.console().print(table)
    _print_slices(content.get("slices") or [])
    for gate in evaluated.gates:
        words = f"{gate.name}: {gate.words}"
        render.console().print(f"{MARKS[gate.passed]} {render.escape(words)}", soft_wrap=True)
    _print_footprint(content.get("footprint") or {})
    if found.result:
        render.console().print(f"[bold]{render.escape(found.result)}[/]", soft_wrap=True)


def _order(metrics: dict[str, float], first: str | None) -> list[str]:
    # The latency is a line of its own below the table.
    shown = [name for name in metrics if strip_split(name) != LATENCY_MS or name == first]
    return sorted(shown, key=lambda name: (name != first, name))


def _print_slices(slices: list[dict[str, Any]]) -> None:
    losing = [each for each in slices if each["difference"] and each["difference"]["mean"] < 0]
    if not losing:
        return
    table = render.table("worse slices", "samples", "candidate", "champion", right=("samples", "candidate", "champion"))
    for each in sorted(losing, key=lambda each: each["difference"]["mean"])[:MAX_SLICES]:
        label = render.escape(f"{each['column']}={each['value']}")
        table.add_row(label, f"{each['samples']:,}", f"{each['candidate']:.4g}", f"{each['champion']:.4g}")
    render.console().print(table)


def _print_footprint(footprint: dict[str, Any]) -> None:
    forms: dict[str, tuple[str, Callable[[float], str]]] = {
        "latency_ms": ("latency", lambda value: f"{value:.3g} ms"),
        "size_bytes": ("weights", format_bytes),
        "slot_hours": ("training", lambda value: f"{value:.3g} slot-hours"),
    }
    parts = []
    for name, (label, form) in forms.items():
        own, other = (footprint.get(each, {}).get(name) for each in ("candidate", "champion"))
        if own is not None:
            parts.append(f"{label} {form(own)}" + (f" (champion {form(other)})" if other is not None else ""))
    if parts:
        print(", ".join(parts))
