"""``trainbus wait``: wait until runs have come as far as was asked, and say how they came out."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

from contracts.formats import format_reason
from trainbus.client.errors import UsageError
from trainbus.client.runs import follow_run
from trainbus.client.views import RunView
from trainbus.commands import render
from trainbus.commands.options import MILESTONES

if TYPE_CHECKING:
    from trainbus.client.client import AsyncClient

EXIT_REACHED, EXIT_MISSED, EXIT_TIMED_OUT = 0, 1, 124
#: States in which a run ends, and what it passes before.
ENDS = ("completed", "failed", "cancelled")


async def wait_for_runs(
    client: AsyncClient, names: list[str], milestone: str, timeout_s: float | None, *, as_json: bool
) -> int:
    """Wait for every run, print how each came out, and return the exit code."""
    if milestone not in ("ended", *MILESTONES):
        raise UsageError(f"--for {milestone!r}: give ended, {', '.join(MILESTONES)}")
    views = {run_id: RunView(run_id) for run_id in [await client.find_run(name) for name in names]}

    async def wait_for(run_id: str) -> None:
        async for view, _ in follow_run(client.connection, run_id):
            views[run_id] = view
            if milestone not in ("ended", *ENDS) and has_reached(view, milestone):
                break

    code = EXIT_REACHED
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*map(wait_for, views))
    except TimeoutError:
        code = EXIT_TIMED_OUT
    reached = {run_id: has_reached(view, milestone) for run_id, view in views.items()}
    if code == EXIT_REACHED and not all(reached.values()):
        code = EXIT_MISSED
    if as_json:
        fields = ("run_id", "name", "state", "reason", "step", "metrics")
        plain = [{name: getattr(view, name) for name in fields} for view in views.values()]
        print(render.as_json([{**each, "reached": reached[each["run_id"]]} for each in plain]))
    for view in () if as_json else views.values():
        reason = render.escape(format_reason(view.reason))
        name = render.escape(view.name)
        render.console().print(f"{view.run_id} {name} {render.state(view.state)}{reason}", soft_wrap=True)
    if code == EXIT_TIMED_OUT:
        left = sum(not each for each in reached.values())
        print(f"trainbus: {left} of {len(views)} not {milestone} after {timeout_s:g} s; they go on", file=sys.stderr)
    return code


def has_reached(view: RunView, milestone: str) -> bool:
    """Return whether a run is as far as that: ``ended`` is well only if it completed."""
    match milestone:
        case "accepted":
            return view.state not in ("requested", "rejected")
        case "placed":
            return view.generation > 0
        case "started":
            return bool(view.starts)
        case "ended":
            return view.state == "completed"
    return view.state == milestone
