"""Commands about the cluster: its nodes, its models, and simulations of it."""

from __future__ import annotations

from typing import Annotated

import typer

from trainbus.commands.cluster import simulate
from trainbus.commands.options import DataDir, Json, with_client

app = typer.Typer()
PANEL = "Cluster"


@app.command(rich_help_panel=PANEL)
def nodes(data_dir: DataDir = None, as_json: Json = False) -> None:
    """List the nodes and what runs on them."""
    from trainbus.commands.cluster.nodes import print_nodes

    with_client(data_dir, lambda client: print_nodes(client, as_json=as_json))


app.command(rich_help_panel=PANEL)(simulate.simulate)


@app.command(rich_help_panel=PANEL)
def drain(
    node: Annotated[str, typer.Argument(help="Name of the node.")],
    reason: Annotated[str, typer.Option(help="Why; it is written into the log.")] = "drained by request",
    data_dir: DataDir = None,
) -> None:
    """Take a node out of use; its runs move to other nodes."""
    from trainbus.commands.cluster.nodes import drain_node

    with_client(data_dir, lambda client: drain_node(client, node, reason))


@app.command(rich_help_panel=PANEL)
def models(data_dir: DataDir = None, as_json: Json = False) -> None:
    """List the registered models and their champions."""
    from trainbus.commands.cluster.models import print_models

    with_client(data_dir, lambda client: print_models(client, as_json=as_json))
