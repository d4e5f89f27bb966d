"""``trainbus scheduler shadow``: follow the log with a candidate policy, then report what it would have decided."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean, median
from typing import Any

from rich.table import Table

from contracts.scheduling import Policy
from trainbus.commands import render
from trainbus.commands.progress import entries_with_bar
from trainbus.operate.connection import Connection
from trainbus.operate.history.shadow import Comparison, Shadow, prefix
from trainbus.operate.history.shadow_follower import ShadowFollower

#: Runs that the report names.
MAX_NAMED_RUNS = 10
#: Starts within this are one start: the leader's fact and the shadow's have different times.
SAME_START_S = 1.0


async def shadow_scheduler(connection: Connection, candidate: Policy, *, for_s: float | None, as_json: bool) -> None:
    """Follow the log until the time is over or a signal comes, then print the report.

    Raises:
        TrainbusError: the server has no stream for the decisions.
    """
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    follower = await ShadowFollower.start(connection, candidate, lambda log: entries_with_bar(log, "folding the log"))
    if not as_json:
        print(
            f"{candidate.name} ({candidate.digest}) follows {follower.shadow.in_force.name}; "
            f"its decisions go to {prefix(candidate)}>",
            file=sys.stderr,
        )
    started = time.monotonic()
    with _status(follower.shadow) as show:
        await follower.follow(stop, for_s, show)
    result = report(follower.shadow, follower.published, time.monotonic() - started)
    if as_json:
        print(render.as_json(result))
    else:
        _print_report(result)


@contextmanager
def _status(shadow: Shadow) -> Iterator[Any]:
    """Show the state of the comparison on stderr, where it is a terminal."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    console = render.console(stderr=True)
    with console.status("following") as status:

        def show() -> None:
            found = shadow.result
            status.update(
                f"{found.points} points, {_share(found.agreeing, found.points)} alike; {len(found.starts)} starts, "
                f"{len(found.only_candidate)} more that the candidate would make now"
            )

        yield show


# -- the report -------------------------------------------------------------------------------------


def report(shadow: Shadow, published: int, took_s: float) -> dict[str, Any]:
    """Return the comparison as data."""
    found = shadow.result
    earlier = sorted(
        each.earlier_s for each in found.starts if each.earlier_s is not None and each.earlier_s > SAME_START_S
    )
    return {
        "candidate": {"name": shadow.candidate.name, "digest": shadow.candidate.digest},
        "in_force": {"name": shadow.in_force.name, "digest": shadow.in_force.digest},
        "seconds": round(took_s, 1),
        "published": published,
        "points": found.points,
        "agreeing": found.agreeing,
        "agreeing_but_where": found.agreeing_but_where,
        "missed": found.missed,
        "starts": len(found.starts),
        "earlier": len(earlier),
        "earlier_avg_s": fmean(earlier) if earlier else 0.0,
        "earlier_p50_s": median(earlier) if earlier else 0.0,
        "not_yet": sum(each.candidate_at is None for each in found.starts),
        "would_start_now": len(found.only_candidate),
        "candidate_starts_while": dict(found.candidate_starts_while),
        "candidate_waits_for": dict(found.candidate_waits_for),
        "stops_in_force": len(found.stops_in_force),
        "stops_candidate": len(found.stops_candidate),
        "stops_both": len(found.stops_in_force & found.stops_candidate),
        "runs": _runs(found),
    }


def _runs(found: Comparison) -> list[dict[str, Any]]:
    """Return the runs that would have started at another time, the greatest differences first."""
    rows: list[dict[str, Any]] = [
        {"run_id": each.run_id, "generation": each.generation, "earlier_s": each.earlier_s, "reason": each.reason}
        for each in found.starts
        if each.earlier_s is None or each.earlier_s > SAME_START_S
    ]
    return sorted(rows, key=lambda row: -(row["earlier_s"] or 0.0))


def _print_report(found: dict[str, Any]) -> None:
    candidate, in_force = found["candidate"]["name"], found["in_force"]["name"]
    made = Table.grid(padding=(0, 2))
    points, earlier = found["points"], f"{found['earlier']:,}"
    if found["earlier"]:
        earlier += f", on average by {render.span(found['earlier_avg_s'])}"
    rows = [
        ("points at which both decided", f"{points:,}"),
        ("  the same", f"{found['agreeing']:,} ({_share(found['agreeing'], points)})"),
        ("  the same runs on other slots", f"{found['agreeing_but_where']:,}"),
        ("runs started", f"{found['starts']:,}"),
        (f"  {candidate} would have earlier", earlier),
        (f"  {candidate} would not have by then", f"{found['not_yet']:,}"),
        (f"waiting now that {candidate} would start", f"{found['would_start_now']:,}"),
        (
            "runs stopped for others",
            f"{found['stops_in_force']:,}; by {candidate} {found['stops_candidate']:,}, both {found['stops_both']:,}",
        ),
        ("published under shadow.>", f"{found['published']:,}"),
    ]
    if found["missed"]:
        rows.append(("cycles that came too late", f"{found['missed']:,}"))
    for name, value in rows:
        made.add_row(render.escape(name), value)
    console = render.console()
    title = f"{candidate} beside {in_force}, {render.span(found['seconds'])}"
    console.print(f"[bold]{render.escape(title)}[/]", made, sep="\n")
    for key, text in (
        ("candidate_starts_while", f"{candidate} would start runs that {in_force} keeps waiting for"),
        ("candidate_waits_for", f"{candidate} would keep runs waiting that {in_force} started, for"),
    ):
        if found[key]:
            reasons = ", ".join(f"{reason} ({count})" for reason, count in Counter(found[key]).most_common())
            console.print(f"{render.escape(text)}: {reasons}", soft_wrap=True)
    for row in found["runs"][:MAX_NAMED_RUNS]:
        when = "not by then" if row["earlier_s"] is None else f"{render.span(row['earlier_s'])} earlier"
        console.print(f"  {row['run_id']} [dim]placement {row['generation']}[/] {when} {row['reason']}".rstrip())


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"
