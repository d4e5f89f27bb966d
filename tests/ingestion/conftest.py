"""One ingestion at a time on the real store, without a bus."""

from __future__ import annotations

import random
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from contracts.events.train import DataSource
from services.ingestion.ingest import Ingest, Ingested
from services.kit.objects import ObjectInfo, Objects
from services.kit.reader import Reader
from services.kit.settings import Settings

Ingesting = Callable[..., Awaitable[Ingested]]


class Shuffled:
    """The store, with listings in any order."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objects, name)

    async def list(self, uri: str) -> AsyncIterator[ObjectInfo]:
        infos = [info async for info in self._objects.list(uri)]
        random.shuffle(infos)
        for info in infos:
            yield info


@pytest_asyncio.fixture
async def reader(s3_settings: Settings) -> AsyncIterator[Reader]:
    async with Reader(s3_settings) as opened:
        yield opened


@pytest.fixture
def ingest(s3_settings: Settings, objects: Objects, reader: Reader, tmp_path: Path) -> Ingesting:
    """Run one ingestion; ``bucket`` takes the result, so that it need not be the earlier one's."""

    async def run(
        data: DataSource, *, concurrency: int = 8, bucket: str | None = None, shuffled: bool = False, **replaced: Any
    ) -> Ingested:
        settings = s3_settings.model_copy(update={"bucket_datasets": bucket or s3_settings.bucket_datasets})
        store: Any = Shuffled(objects) if shuffled else objects
        with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
            work = Ingest(settings, store, replaced.get("reader", reader), Path(folder), data, concurrency)
            return await work.run()

    return run
