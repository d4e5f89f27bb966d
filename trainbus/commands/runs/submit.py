"""``trainbus submit``."""

from __future__ import annotations

from typing import Any

from trainbus.client.client import AsyncClient
from trainbus.client.errors import RunFailedError
from trainbus.client.runs import follow_run
from trainbus.client.submission import SubmittedRun
from trainbus.client.views import RunView, describe_milestone
from trainbus.commands import render


async def submit_run(client: AsyncClient, *, follow: bool, as_json: bool, **what: Any) -> None:
    """Submit a run and print its id; with ``follow`` stay until it ends, and fail if it fails."""
    submitted = await client.submit(**what)
    if as_json:
        named = {"run_id": submitted.run_id, "name": submitted.name, "event_id": submitted.event_id}
        print(render.as_json({**named, "code": submitted.request.code}))
    else:
        print(f"{submitted.run_id}  {submitted.name}{_describe_package(submitted)}", flush=True)
    if follow:
        await print_until_ended(client, submitted.run_id)


def _describe_package(submitted: SubmittedRun) -> str:
    package = submitted.package
    if package is None:
        return ""
    commit = f", commit {package.git_commit[:10]}" if package.git_commit else ""
    dirty = " with uncommitted changes" if package.git_dirty else ""
    return f" ({len(package.files)} files, {render.size(len(package.body))} packed{commit}{dirty})"


async def print_until_ended(client: AsyncClient, run_id: str) -> None:
    """Print what happens to a run until it has ended (and its verdict is out).

    Raises:
        RunFailedError: it did not complete.
    """
    console = render.console()
    view = RunView(run_id)
    async for newest, batch in follow_run(client.connection, run_id):
        view = newest
        for message in batch:
            if text := describe_milestone(message.event):
                console.print(f"[dim]{message.envelope.time:%H:%M:%S}[/] {render.escape(text)}", soft_wrap=True)
    for line in view.log_tail:
        console.print(render.visible(line), markup=False, style="dim")
    if view.state != "completed":
        raise RunFailedError(run_id, view.state, view.reason)
