"""``trainbus why``."""

from __future__ import annotations

import sys

from contracts.state.run import TERMINAL_STATES
from trainbus.client.client import AsyncClient
from trainbus.client.explanation import explain_past
from trainbus.client.fact_log import BusLog
from trainbus.commands import render
from trainbus.commands.progress import entries_with_bar
from trainbus.commands.times import parse_time


async def print_reason(client: AsyncClient, name: str, *, as_json: bool) -> None:
    """Print why a run is in its state."""
    found = await client.why(name)
    if as_json:
        named = {"run_id": found.run_id, "state": found.state, "why": found.reason, "answered_by": found.answered_by}
        print(render.as_json({**named, **found.details}))
        return
    verb = "" if found.state in TERMINAL_STATES else "is "
    head = f"{found.run_id} ({render.escape(found.name)}) {verb}{render.state(found.state)}"
    render.console().print(f"{head}: {render.escape(found.reason)}", soft_wrap=True)
    render.print_wait(found.details)
    if found.unanswered:
        print("(from the log: the scheduler does not answer; `trainbus doctor` shows what is wrong)", file=sys.stderr)


async def print_past_reason(client: AsyncClient, name: str, at: str, *, as_json: bool) -> None:
    """Print why a run was in its state at a time in the past."""
    time = parse_time(at, render.utc_now())
    run_id = await client.find_run(name)
    entries = entries_with_bar(await BusLog.open(client.connection), f"folding up to {time:%Y-%m-%d %H:%M:%S}")
    found = await explain_past(client.connection, run_id, entries, time)
    if as_json:
        print(render.as_json(found.details))
        return
    policy = f"[dim](policy {render.escape(found.details['policy']['name'])}, sequence {found.details['sequence']})[/]"
    head = f"{run_id} ({render.escape(found.name)}) was {render.state(found.state)}"
    text = f"{head} at {time:%Y-%m-%d %H:%M:%S} UTC {policy}: {render.escape(found.reason)}"
    render.console().print(text, soft_wrap=True)
