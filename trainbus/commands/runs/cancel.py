"""``trainbus cancel``."""

from __future__ import annotations

from trainbus.client.client import AsyncClient


async def cancel_run(client: AsyncClient, name: str, reason: str) -> None:
    """Stop a run for good and print the scheduler's answer."""
    run_id = await client.find_run(name)
    answer = await client.cancel(run_id, reason)
    print(f"{run_id}: {answer or 'cancellation requested; the scheduler has not answered yet'}")
