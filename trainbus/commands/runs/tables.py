"""``trainbus ps`` and ``trainbus show``."""

from __future__ import annotations

from trainbus.client.client import AsyncClient
from trainbus.commands import render


async def print_runs(client: AsyncClient, *, everything: bool, as_json: bool) -> None:
    """Print the runs: those that have not ended and the newest that have, or all."""
    views = await client.runs(include_ended=everything)
    if as_json:
        print(render.as_json([render.summary(each) for each in views]))
    elif views:
        console = render.console()
        console.print(render.runs(views, render.utc_now(), console.width))
    else:
        print("no runs yet: `trainbus submit PROJECT task:Class`, or publish train.requested")


async def print_run(client: AsyncClient, name: str, *, as_json: bool) -> None:
    """Print all there is to know about one run."""
    view = await client.run(name)
    if as_json:
        print(render.as_json(render.whole(view)))
        return
    console = render.console()
    console.print(render.details(view, render.utc_now()))
    console.print(render.timeline(view.timeline, view.requested_at))
    if view.log_tail:
        console.print("the last lines of its output:", style="dim")
        console.print(render.visible("\n".join(view.log_tail)), markup=False, soft_wrap=True)
