"""Work that one instance does at a time, now and then or once by hand: garbage collections."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import TypeVar

import nats.errors
import structlog
from nats.js.errors import APIError
from prometheus_client import Counter

from contracts import topology
from services.kit import telemetry
from services.kit.bus import Bus, Transient
from services.kit.concurrency import end
from services.kit.lease import Lease
from services.kit.objects import Objects
from services.kit.settings import Settings

log = structlog.get_logger(__name__)

T = TypeVar("T")
S = TypeVar("S", bound=Settings)


async def collect_alone(
    bus: Bus, lease_name: str, settings: Settings, runs: Counter, collect: Callable[[], Awaitable[T]]
) -> T | None:
    """Collect garbage under the lease; None if another instance is at it. ``runs`` counts it as done.

    Raises:
        Transient: the lease was lost meanwhile.
    """
    bucket = await bus.bucket(topology.LEASES)
    lease = Lease(bucket, lease_name, f"{settings.instance}-{uuid.uuid4().hex[:8]}", settings.lease_ttl_s * 3)
    if not await lease.try_acquire():
        return None
    keeper = asyncio.create_task(lease.keep())
    work = asyncio.ensure_future(collect())
    try:
        await asyncio.wait({keeper, work}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise Transient("the lease was lost while garbage was collected")
        found = await work
        runs.labels("done").inc()
        return found
    finally:
        await end(keeper, work)
        await lease.release()


async def collect_every(every_s: float, runs: Counter, collect: Callable[[], Awaitable[object]]) -> None:
    """Collect garbage every ``every_s``, for ever; what goes wrong is logged, counted by ``runs`` and tried again."""
    while True:
        await asyncio.sleep(every_s)
        try:
            await collect()
        except (ValueError, Transient, TimeoutError, OSError, nats.errors.Error, APIError) as error:
            runs.labels("failed").inc()
            log.error("garbage was not collected", reason=str(error))


def collect_once(
    name: str, settings: S, collect: Callable[[Bus, Objects, S], Awaitable[T | None]], told: Callable[[T], str]
) -> None:
    """Collect garbage once, in a process of its own, and print what went."""
    telemetry.setup(name, settings)

    async def once() -> T | None:
        bus = Bus(name, settings)
        await bus.connect()
        try:
            async with Objects(settings) as objects:
                return await collect(bus, objects, settings)
        finally:
            await bus.close()

    found = asyncio.run(once())
    print("another instance is collecting: nothing done" if found is None else told(found))
