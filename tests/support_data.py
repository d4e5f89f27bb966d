"""A tiny lake for tests: real images, written to the real store."""

from __future__ import annotations

import asyncio
import io
import random

from PIL import Image

from contracts.events.run import RunAccepted
from contracts.spec.data import DatasetRef, DataSource
from contracts.spec.run import RunSpec
from services.kit.store.objects import ObjectStore


def image_bytes(seed: int, kind: str = "PNG", size: int = 8) -> bytes:
    """A small grey image whose pixels depend on ``seed``."""
    pixels = random.Random(seed).randbytes(size * size)
    buffer = io.BytesIO()
    Image.frombytes("L", (size, size), pixels).save(buffer, kind)
    return buffer.getvalue()


def digits_lake(count: int = 60, classes: int = 3) -> dict[str, bytes]:
    """Path -> content of ``count`` sound images, one folder a class."""
    return {f"{i % classes}/scan_{i:04d}.png": image_bytes(i) for i in range(count)}


async def fill(objects: ObjectStore, prefix_uri: str, files: dict[str, bytes]) -> None:
    """Write files under a prefix."""
    gate = asyncio.Semaphore(8)

    async def put(path: str, content: bytes) -> None:
        async with gate:
            await objects.put(f"{prefix_uri.rstrip('/')}/{path}", content)

    await asyncio.gather(*(put(path, content) for path, content in files.items()))


def accepted(run_id: str, data: DataSource | DatasetRef | None) -> RunAccepted:
    """A run that brings ``data``; what it would train is no matter here."""
    spec = RunSpec(name="test", command=["true"], data=data)
    return RunAccepted(run_id=run_id, spec=spec, request_id=run_id, request_source="test")
