"""``trainbus logs``."""

from __future__ import annotations

import sys

from contracts import subjects, topology
from contracts.events.run import RunCompleted
from trainbus.client.client import AsyncClient
from trainbus.client.errors import TrainbusError
from trainbus.client.runs import read_end
from trainbus.client.views import describe


async def print_logs(client: AsyncClient, name: str, *, follow: bool) -> None:
    """Print a run's output; with ``follow`` until the run ends, and fail if it fails."""
    run_id = await client.find_run(name)
    placed = await client.connection.read_last(topology.FACTS, subjects.fact("run", run_id, "placed"))
    has_several_ranks = placed is not None and placed.event.world_size > 1
    silent = True
    async for rank, line in client.logs(run_id, follow=follow):
        silent = False
        print(f"[{rank}] {line}" if has_several_ranks else line, flush=follow)
    if silent:
        print(f"run {run_id} has printed nothing; `trainbus events --run {run_id}` shows its facts", file=sys.stderr)
    if follow:
        end = await read_end(client.connection, run_id)
        if not isinstance(end, RunCompleted):
            raise TrainbusError(f"run {run_id} {describe(end)}")
