"""``trainbus trace``: from the weights that answer back to checkpoint, run, request, code, dataset and sources."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from trainbus.commands import render
from trainbus.commands.options import Json, command
from trainbus.commands.progress import byte_bar

if TYPE_CHECKING:
    from trainbus.client.client import AsyncClient

app = typer.Typer()
PANEL = "Runs"
MARKS = {True: "[green]✓[/]", False: "[bold red]✗[/]", None: "[dim]·[/]"}


@command(app, rich_help_panel=PANEL)
async def trace(
    client: AsyncClient,
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODEL[@VERSION]|RUN", help="A model, whose version is a number or an alias; or a promoted run."
        ),
    ],
    url: Annotated[
        str | None,
        typer.Option("--url", help="A serving server, whose answers are traced; default: the stack's, if it serves."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Trace the weights that answer to where they came from, and verify every hash; exit code 1 if one differs."""
    from trainbus.client.trace import trace_model

    links = []
    with byte_bar("verifying", quiet=as_json) as advance:
        async for link in trace_model(client.connection, client.address, target, advance, url):
            links.append(link)
            if not as_json:
                detail = f": [dim]{render.escape(link.detail)}[/]" if link.detail else ""
                line = f"{MARKS[link.verified]} {link.name:<10} {render.escape(link.what)}{detail}"
                render.console().print(line, soft_wrap=True)
    failed = [link for link in links if link.verified is False]
    if as_json:
        print(render.as_json({"target": target, "verified": not failed, "links": links}))
    elif failed:
        render.console().print(f"[bold red]not verified: {', '.join(link.name for link in failed)}[/]")
    else:
        print("every recorded hash is verified")
    return 1 if failed else 0
