"""``trainbus checkpoints verify``."""

from __future__ import annotations

from contracts import subjects
from contracts.events.checkpoint import CheckpointRepaired
from trainbus.client.checkpoints import find_rotten, open_checkpoint_store, read_checkpoints, request_repair
from trainbus.client.client import AsyncClient
from trainbus.client.errors import TrainbusError
from trainbus.commands import render
from trainbus.commands.progress import byte_bar


async def verify_checkpoints(
    client: AsyncClient, name: str | None, *, repair: bool, wait_s: float, as_json: bool
) -> None:
    """Read checkpoints back and print what is rotten; with ``repair`` request its repair and wait."""
    run_id = await client.find_run(name) if name is not None else subjects.WILDCARD
    found = await read_checkpoints(client.connection, run_id)
    async with open_checkpoint_store(client.address) as objects:
        with byte_bar("reading back", quiet=as_json) as advance:
            rotten = await find_rotten(objects, found, advance)
    if as_json:
        print(render.as_json({"checkpoints": len(found), "rotten": {uri: sorted(bad) for uri, bad in rotten.items()}}))
    else:
        for uri, bad in rotten.items():
            print(f"rotten: {uri}")
            for each in sorted(bad):
                print(f"  {'its manifest' if each == uri else each}")
    if not rotten:
        if not as_json:
            print(f"{len(found)} checkpoints are as they were committed")
        return
    if not repair:
        raise TrainbusError(f"{len(rotten)} of {len(found)} checkpoints are rotten; --repair looks for other copies")
    runs = {found[uri].commit.run_id for uri in rotten}
    await request_repair(client.connection, runs, set().union(*rotten.values()), wait_s, _print_repaired)
    print("repaired: every rotten blob was written again from a node's copy, and read back")


def _print_repaired(fact: CheckpointRepaired) -> None:
    print(f"repaired by {fact.node_id}: {fact.blob}", flush=True)
