"""``trainbus checkpoints restore``."""

from __future__ import annotations

from trainbus.client.client import AsyncClient
from trainbus.client.errors import TrainbusError, UsageError


async def restore_run(client: AsyncClient, name: str, step: int | None, epoch: int | None) -> None:
    """Request a new run from a checkpoint of another and print its id."""
    if (step is None) == (epoch is None):
        raise UsageError("give exactly one of --step and --epoch")
    restored, answer = await client.restore(name, step=step, epoch=epoch)
    print(f"{restored}  {answer or 'requested; the scheduler has not answered yet'}")
    if answer and answer.startswith("rejected"):
        raise TrainbusError(f"the restore was {answer}")
