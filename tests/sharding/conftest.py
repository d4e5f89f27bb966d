"""Both data services on a real bus and a real store, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest_asyncio

from contracts.base import Fact
from services.ingestion import app as ingestion_app
from services.kit.bus import Bus, Message
from services.kit.service import Service
from services.kit.settings import Settings
from services.kit.store.objects import ObjectStore
from services.sharding import app as sharding_app

Until = Callable[..., Awaitable[Message[Fact]]]


@asynccontextmanager
async def running(service: Service) -> AsyncIterator[Service]:
    """The service, started; stopped in good order at the end."""
    task = asyncio.create_task(service.run())
    try:
        while not all(service.check_readiness().values()) and not task.done():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        yield service
    finally:
        service.stopping.set()
        await task


@pytest_asyncio.fixture
async def data_services(s3_settings: Settings, objects: ObjectStore) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for build in (ingestion_app.build, sharding_app.build):
            await stack.enter_async_context(running(build(s3_settings)))
        yield


@pytest_asyncio.fixture
async def until(bus: Bus) -> Until:
    """Wait for the first fact on one of the subjects."""

    async def first(*subjects: str, within_s: float = 90.0) -> Message[Fact]:
        async with asyncio.timeout(within_s):
            async for batch in bus.follow("FACTS", subjects):
                if batch:
                    return batch[0]
        raise AssertionError("unreachable")

    return first
