"""One ingestion at a time on the real store, without a bus."""

from __future__ import annotations

import random
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from contracts.spec.data import DataSource
from services.ingestion.decoders import DecoderPool
from services.ingestion.features.source import FeatureSource
from services.ingestion.job import IngestionJob, IngestionResult
from services.ingestion.sources import open_source
from services.kit.settings import Settings
from services.kit.store.objects import ObjectInfo, ObjectStore

Ingesting = Callable[..., Awaitable[IngestionResult]]


class Shuffled:
    """The store, with listings in any order."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objects, name)

    async def list(self, uri: str) -> AsyncIterator[ObjectInfo]:
        infos = [info async for info in self._objects.list(uri)]
        random.shuffle(infos)
        for info in infos:
            yield info


@pytest_asyncio.fixture
async def decoders() -> AsyncIterator[DecoderPool]:
    async with DecoderPool(1) as opened:
        yield opened


@pytest.fixture
def ingest(s3_settings: Settings, objects: ObjectStore, decoders: DecoderPool, tmp_path: Path) -> Ingesting:
    """Run one ingestion; ``bucket`` takes the result, so that it need not be the earlier one's."""

    async def run(
        data: DataSource,
        *,
        concurrency: int = 8,
        bucket: str | None = None,
        shuffled: bool = False,
        folders: tuple[Path, ...] = (),
        **replaced: Any,
    ) -> IngestionResult:
        bucket = bucket or s3_settings.bucket_datasets
        store: Any = Shuffled(objects) if shuffled else objects
        opened = partial(open_source, objects=replaced.get("read_from", store), folders=folders)
        source = opened(data.source)
        features = FeatureSource(opened, data.features) if data.features is not None else None
        with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
            work = IngestionJob(
                bucket, store, source, decoders, Path(folder), data, concurrency=concurrency, features=features
            )
            return await work.run()

    return run
