"""``trainbus dead-letters retry`` and ``drop``."""

from __future__ import annotations

from collections.abc import Sequence

from trainbus.client import dead_letters
from trainbus.client.client import AsyncClient


async def retry_dead_letters(client: AsyncClient, sequences: Sequence[int]) -> None:
    """Retry dead letters one after the other and print each that was handled."""
    for sequence in sequences:
        await dead_letters.retry_dead_letter(client.connection, sequence)
        print(f"{sequence}: handled")


async def drop_dead_letters(client: AsyncClient, sequences: Sequence[int]) -> None:
    """Delete dead letters and print each."""
    for sequence in sequences:
        await dead_letters.drop_dead_letter(client.connection, sequence)
        print(f"{sequence}: dropped")
