"""``trainbus checkpoints pin`` and ``unpin``."""

from __future__ import annotations

from trainbus.client import checkpoints
from trainbus.client.client import AsyncClient


async def pin_checkpoint(client: AsyncClient, target: str, *, pinned: bool, reason: str) -> None:
    """Pin or unpin a checkpoint and print which."""
    fact = await checkpoints.pin_checkpoint(client.connection, target, pinned=pinned, reason=reason)
    print(f"{fact.run_id}: step {fact.step} is {'pinned' if pinned else 'unpinned'}: {fact.uri}")
