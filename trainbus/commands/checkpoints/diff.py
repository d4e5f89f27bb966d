"""``trainbus checkpoints diff``."""

from __future__ import annotations

from services.checkpoint.core import digests
from trainbus.client.checkpoints import find_checkpoint, read_digests_of
from trainbus.client.client import AsyncClient
from trainbus.client.errors import TrainbusError
from trainbus.commands import render

#: Differences that the table shows; JSON has them all.
MAX_SHOWN = 40


async def diff_checkpoints(client: AsyncClient, one: str, other: str, *, as_json: bool) -> None:
    """Print which tensors differ between two checkpoints, and fail if any does."""
    pair = [await find_checkpoint(client.connection, target) for target in (one, other)]
    first, second = await read_digests_of(client.address, pair)
    found = digests.differences(first, second)
    names = {*first, *second}
    if as_json:
        print(render.as_json({"same": not found, "names": len(names), "different": dict(found)}))
    elif not found:
        print(f"the same state, to the bit: all {len(first)} digests are equal")
    else:
        table = render.table("name", "", "first", "second")
        for name, how in found[:MAX_SHOWN]:
            table.add_row(render.escape(name), how, first.get(name, "")[:12], second.get(name, "")[:12])
        render.console().print(table)
    if found:
        more = f" (the first {MAX_SHOWN} are shown)" if len(found) > MAX_SHOWN and not as_json else ""
        raise TrainbusError(f"{len(found)} of {len(names)} differ{more}")
