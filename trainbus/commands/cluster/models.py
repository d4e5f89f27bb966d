"""``trainbus models``."""

from __future__ import annotations

from trainbus.client.client import AsyncClient
from trainbus.commands import render


async def print_models(client: AsyncClient, *, as_json: bool) -> None:
    """Print each model's champion."""
    found = await client.models()
    if as_json:
        print(render.as_json(found))
    elif found:
        render.console().print(render.models(found, render.utc_now()))
    else:
        print("no champions yet: a run with `evaluation` competes for one")
