"""``trainbus scheduler what-if``: past submissions on other nodes, or by another policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Group, RenderableType

from contracts.events.node import NodeFact, NodeJoined
from contracts.scheduling import Policy
from trainbus.client.errors import TrainbusError, UsageError
from trainbus.commands import render
from trainbus.commands.progress import count_bar, entries_with_bar
from trainbus.operate.history.fact_log import FactLog
from trainbus.operate.history.history import History
from trainbus.operate.history.what_if import (
    Figures,
    Prices,
    Scenario,
    Submissions,
    like,
    parse_nodes,
    play,
    prices_of,
    recorded,
    submissions,
)
from trainbus.operate.simulation.engine import NeverAtRest
from trainbus.operate.simulation.report import Recorder

#: The past itself, simulated as the others are.
BASE = "as it was, played"
#: Field of the figures -> its column, its unit, and whether less is better (None: not compared).
COLUMNS: dict[str, tuple[str, str, bool | None]] = {
    "slots": ("slots", "n", None),
    "never": ("never run", "n", None),
    "avg_wait_s": ("avg wait", "s", True),
    "p50_wait_s": ("median", "s", None),
    "p90_wait_s": ("p90", "s", None),
    "p99_wait_s": ("p99", "s", True),
    "max_wait_s": ("longest", "s", None),
    "avg_jct_s": ("completion", "s", True),
    "utilisation": ("use", "%", None),
    "preemptions": ("preempted", "n", None),
    "cost": ("cost", "money", True),
}
#: A change by more than this share is shown as a multiple.
MAX_PERCENT_CHANGE = 3.0


async def read_history(log: FactLog, history: History) -> History:
    """Fold the whole log into the history of submissions and nodes."""
    async for entry in entries_with_bar(log, "reading"):
        history.feed(entry)
    history.close()
    return history


def compare_scenarios(
    history: History,
    *,
    nodes: Sequence[str],
    add: Sequence[str],
    policies: Sequence[Policy],
    prices: Sequence[str],
    resume_cost_s: float | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Print the figures of the past and of every scenario.

    Raises:
        UsageError: nothing was submitted, or there is nothing to compare.
        WhatIfError: a set of nodes or a price is not valid.
    """
    resume_cost_s = history.resume_cost_s() if resume_cost_s is None else resume_cost_s
    given = submissions(history, resume_cost_s)
    if not given.counted:
        raise UsageError(
            f"nothing was submitted from {history.start.isoformat()} to {history.end.isoformat()}: "
            "choose another time with --from and --to",
        )
    chosen = list_scenarios(history, nodes, add, policies)
    known = prices_of([scenario.policy for scenario in chosen], prices)
    figures = [recorded(history, chosen[0].policy.name, known)]
    recorders: list[tuple[str, Recorder]] = []
    for scenario in chosen:
        found, recorder = _simulate(scenario, given, known, resume_cost_s)
        figures.append(found)
        recorders.append((scenario.name, recorder))
    if as_json:
        print(render.as_json(_plain(history, given, figures) | {"resume_cost_s": resume_cost_s}))
    else:
        render.console().print(_table(history, figures))
        print(f"a restart is assumed to cost {_span(resume_cost_s)} (--resume-cost-s)")
        if given.assumed:
            runs = "run" if given.assumed == 1 else "runs"
            print(f"{given.assumed} {runs} had not ended: assumed to need what runs of the same size usually need")
    if plot is not None:
        from trainbus.operate.history.plots import draw

        print(draw(recorders, given.counted, plot))


def list_scenarios(
    history: History, nodes: Sequence[str], add: Sequence[str], policies: Sequence[Policy]
) -> list[Scenario]:
    """Return the past first, then every given set of nodes under every given policy."""
    was, in_force = history.nodes, history.policy or Policy()
    if not was:
        raise UsageError("no node had joined in that time: nothing could run")
    first, events = history.first_nodes, history.nodes_until_last()
    sets: list[tuple[str, tuple[NodeJoined, ...], tuple[tuple[float, NodeFact], ...]]] = []
    sets += [(text, like(parse_nodes(text), was), ()) for text in nodes]
    sets += [(f"+{text}", first + like(parse_nodes(text, "more"), was), events) for text in add]
    found = [Scenario(BASE, first, in_force, events)]
    for name, joined, changes in sets or [("", first, events)]:
        for policy in policies or ([in_force] if sets else []):
            what = [part for part in (name, policy.name if policies else "") if part]
            found.append(Scenario(", ".join(what), joined, policy, changes))
    if len(found) == 1:
        raise UsageError("nothing to compare: give --nodes, --add or --policy")
    return found


def _simulate(scenario: Scenario, given: Submissions, prices: Prices, resume_cost_s: float) -> tuple[Figures, Recorder]:
    with count_bar(scenario.name, len(given.jobs)) as progress:
        try:
            return play(scenario, given, prices, resume_cost_s=resume_cost_s, progress=progress)
        except NeverAtRest as error:
            raise TrainbusError(f"{scenario.name}: {error}") from error


def _table(history: History, figures: Sequence[Figures]) -> RenderableType:
    """Return a table of scenarios; from the third on compared with the second, the simulated past."""
    columns = {field: shown for field, shown in COLUMNS.items() if any(getattr(each, field) for each in figures)}
    names = [name for name, _, _ in columns.values()]
    made = render.table("scenario", *names, right=names)
    made.columns[0].no_wrap = True
    base = figures[1]
    for place, each in enumerate(figures):
        cells = [
            _format_change(getattr(each, field), getattr(base, field), unit, less_is_better if place > 1 else None)
            for field, (_, unit, less_is_better) in columns.items()
        ]
        made.add_row(render.escape(each.name), *cells)
    title = (
        f"[bold]{base.jobs:,} runs submitted from {history.start:%Y-%m-%d %H:%M} to {history.end:%Y-%m-%d %H:%M} UTC, "
        f"policy {render.escape(base.policy)}[/]"
    )
    return Group(title, made)


def _format_value(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    match unit:
        case "s":
            return _span(value)
        case "%":
            return f"{value:.1%}"
        case "money":
            return f"{value:,.2f}"
        case _:
            return f"{value:,.0f}"


def _span(seconds: float) -> str:
    """Return a duration in a unit that is fine enough for a comparison."""
    for size_s, unit in ((172_800, "d"), (5_400, "h"), (90, "min")):
        if seconds >= size_s:
            return f"{seconds / {'d': 86_400, 'h': 3_600, 'min': 60}[unit]:.1f} {unit}"
    return f"{seconds:.0f} s"


def _format_change(value: float | None, base: float | None, unit: str, less_is_better: bool | None) -> str:
    """Return the value and its change against the simulated past."""
    text = _format_value(value, unit)
    if value is None or base is None or less_is_better is None or _format_value(base, unit) == text:
        return text
    style = "green" if (value < base) == less_is_better else "red"
    if not base:
        return f"[{style}]{text}[/]"
    change = (value - base) / base
    return f"{text} [{style}]{f'x{value / base:.1f}' if change > MAX_PERCENT_CHANGE else f'{change:+.0%}'}[/]"


def _plain(history: History, given: Submissions, figures: Sequence[Figures]) -> dict[str, object]:
    return {
        "from": history.start.isoformat(),
        "to": history.end.isoformat(),
        "runs": len(given.counted),
        "carried": len(given.jobs) - len(given.counted),
        "assumed": given.assumed,
        "scenarios": [asdict(each) for each in figures],
    }
