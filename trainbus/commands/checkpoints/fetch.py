"""``trainbus checkpoints fetch``."""

from __future__ import annotations

from pathlib import Path

from trainbus.client.client import AsyncClient
from trainbus.commands import render


async def fetch_checkpoint(client: AsyncClient, target: str, folder: Path, manifest_sha256: str | None) -> None:
    """Fetch a checkpoint's files into a folder and print how many there are."""
    fetched = await client.fetch(target, folder, manifest_sha256=manifest_sha256)
    print(f"{len(fetched.paths)} files, {render.size(fetched.stored.commit.size_bytes)}, verified: {folder}")
