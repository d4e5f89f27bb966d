"""``trainbus scheduler replay``: every recorded decision is made again."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from trainbus.commands import render
from trainbus.commands.progress import entries_with_bar
from trainbus.operate.history.fact_log import FactLog
from trainbus.operate.history.verification import Counts, Difference, Index, ReplayVerifier

#: Characters of a field's value that are shown.
WIDTH = 200


async def replay_decisions(log: FactLog, *, limit: int, as_json: bool) -> int:
    """Print what was compared and every difference; return 1 if there is one."""
    started = time.perf_counter()
    index, verifier, found = await replay_log(log)
    took_s = time.perf_counter() - started
    if as_json:
        print(render.as_json(_plain(log, index, verifier.counts, found, took_s)))
    else:
        render.console().print(_table(log, index, verifier.counts, found, took_s), *map(_render_change, found[:limit]))
        if len(found) > limit:
            print(f"and {len(found) - limit} more differences: see them with --limit, or --json")
    return 1 if found else 0


async def replay_log(log: FactLog) -> tuple[Index, ReplayVerifier, list[Difference]]:
    """Read the log twice: once for its scheduling cycles, once to decide them again."""
    index = Index()
    async for entry in entries_with_bar(log, "reading"):
        index.add(entry)
    verifier = ReplayVerifier(index, await log.requests())
    found: list[Difference] = []
    async for entry in entries_with_bar(log, "deciding again"):
        found += verifier.feed(entry)
    return index, verifier, found


def _table(log: FactLog, index: Index, counts: Counts, found: list[Difference], took_s: float) -> RenderableType:
    made = Table.grid(padding=(0, 2))
    made.add_column()
    made.add_column(justify="right")
    rows: list[tuple[str, int]] = [
        ("facts", counts.facts),
        ("scheduling cycles", counts.cycles),
        ("decisions", counts.decisions),
        ("  the same", counts.same),
        ("answers to requests", counts.answers),
        ("differences", len(found)),
        ("decided, not published", counts.unpublished),
        ("not checked: made by older code", counts.unchecked),
        ("not checked: answers without their requests", counts.unasked),
    ]
    for name, count in rows:
        style = "[bold red]" if name == "differences" and count else ""
        made.add_row(name, f"{style}{count:,}")
    made.add_row("seconds", f"{took_s:.1f}")
    notes = [
        f"policy {digest} was adopted by other code: fields that this code does not know are left out"
        for digest in index.foreign
    ]
    return Group(f"[bold]decisions of {render.escape(log.name)}, made again[/]", made, *notes)


def _render_change(difference: Difference) -> RenderableType:
    """Render a difference in full: its place, the inputs of the decision, and each field."""
    head = (
        f"[bold red]{difference.kind}[/] {difference.subject} [dim]({difference.sequence}, "
        f"{difference.time:%Y-%m-%d %H:%M:%S.%f} UTC)[/] {render.escape(difference.text)}"
    )
    lines = [head]
    if (key := difference.made_from) is not None:
        lines.append(f"  [dim]decided from {key.at_sequence} at {key.at.isoformat()} by policy {key.policy}[/]")
    if not difference.fields:
        return Group(*lines)
    made = render.table("field", "recorded", "decided again")
    for field in difference.fields:
        made.add_row(field.field, _value(field.recorded), _value(field.replayed))
    return Group(*lines, made)


def _value(value: Any) -> str:
    text = str(value)
    return render.escape(text if len(text) <= WIDTH else f"{text[:WIDTH]}…")


def _plain(log: FactLog, index: Index, counts: Counts, found: list[Difference], took_s: float) -> dict[str, Any]:
    return {
        "log": log.name,
        "facts": counts.facts,
        "passes": counts.cycles,
        "decisions": counts.decisions,
        "same": counts.same,
        "answers": counts.answers,
        "unpublished": counts.unpublished,
        "unchecked": counts.unchecked,
        "unasked": counts.unasked,
        "decisions_by_fact": dict(counts.by_fact),
        "policies": sorted(index.policies),
        "foreign_policies": index.foreign,
        "seconds": round(took_s, 3),
        "difference_count": len(found),
        "differences": [
            {
                "kind": each.kind,
                "sequence": each.sequence,
                "time": each.time.isoformat(),
                "subject": each.subject,
                "text": each.text,
                "decided": None if each.made_from is None else each.made_from._asdict(),
                "fields": [
                    {"field": field.field, "recorded": field.recorded, "replayed": field.replayed}
                    for field in each.fields
                ],
            }
            for each in found
        ],
    }
