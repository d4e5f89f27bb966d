"""Commands about the cluster: its nodes, and simulations of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from trainbus.commands import render
from trainbus.commands.options import Json, command, user_name
from trainbus.commands.simulate import simulate

if TYPE_CHECKING:
    from trainbus.client.client import AsyncClient

app = typer.Typer()
PANEL = "Cluster"


@command(app, rich_help_panel=PANEL)
async def nodes(client: AsyncClient, as_json: Json = False) -> None:
    """List the nodes and what runs on them."""
    from trainbus.commands.run_tables import render_nodes

    views = await client.nodes()
    if as_json:
        print(render.as_json(views))
    elif views:
        names = {run_id: name for view in views for run_id, name in view.run_names.items()}
        render.console().print(render_nodes(views, names, render.utc_now()))
    else:
        print("no node has joined yet: `trainbus service worker` starts one")


app.command(rich_help_panel=PANEL)(simulate)


Node = Annotated[str, typer.Argument(help="Name of the node.")]


@command(app, rich_help_panel=PANEL)
async def drain(
    client: AsyncClient,
    node: Node,
    reason: Annotated[str, typer.Option(help="Why; it is written into the log.")] = "drained by request",
) -> None:
    """Take a node out of use until it is undrained; its runs move to other nodes."""
    answer = await client.drain(node, reason, user=user_name())
    print(f"{node}: {answer or 'drain requested; the scheduler has not answered yet'}")


@command(app, rich_help_panel=PANEL)
async def undrain(
    client: AsyncClient,
    node: Node,
    reason: Annotated[str, typer.Option(help="Why; it is written into the log.")] = "undrained by request",
) -> None:
    """Put a drained node back into use."""
    answer = await client.undrain(node, reason, user=user_name())
    print(f"{node}: {answer or 'undrain requested; the scheduler has not answered yet'}")
