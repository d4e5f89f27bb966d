"""``trainbus nodes`` and ``trainbus drain``."""

from __future__ import annotations

from trainbus.client.client import AsyncClient
from trainbus.commands import render


async def print_nodes(client: AsyncClient, *, as_json: bool) -> None:
    """Print the nodes and what runs on them."""
    views = await client.nodes()
    if as_json:
        print(render.as_json(views))
    elif views:
        names = {view.run_id: view.name for view in await client.runs()}
        render.console().print(render.nodes(views, names, render.utc_now()))
    else:
        print("no node has joined yet: `trainbus service worker` starts one")


async def drain_node(client: AsyncClient, node_id: str, reason: str) -> None:
    """Take a node out of use and print the scheduler's answer."""
    answer = await client.drain(node_id, reason)
    print(f"{node_id}: {answer or 'drain requested; the scheduler has not answered yet'}")
