"""Garbage collection: one instance at a time, periodically or once by command."""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import structlog
from prometheus_client import Counter

from contracts import topology
from services.kit import telemetry
from services.kit.bus import Bus, TransientError
from services.kit.concurrency import cancel_and_wait
from services.kit.lease import Lease
from services.kit.service import Service
from services.kit.settings import Settings
from services.kit.store.objects import ObjectStore

log = structlog.get_logger(__name__)

T = TypeVar("T")
S = TypeVar("S", bound=Settings)


@dataclass(frozen=True, slots=True)
class GarbageCollector(Generic[S, T]):
    """Runs a service's ``collect`` under a lease."""

    lease: str
    runs: Counter
    #: Raises ``ValueError`` if it cannot decide what is garbage.
    collect: Callable[[Bus, ObjectStore, S], Awaitable[T]]
    summary: Callable[[T], str]
    #: The bucket that it collects in.
    bucket: Callable[[S], str]

    async def run_exclusive(self, bus: Bus, objects: ObjectStore, settings: S) -> T | None:
        """Collect under the lease; return None if another instance is collecting.

        Raises:
            TransientError: the lease was lost meanwhile.
        """
        bucket = await bus.open_bucket(topology.LEASES)
        owner = f"{settings.instance}-{uuid.uuid4().hex[:8]}"
        lease = Lease(bucket, self.lease, owner, settings.lease_ttl_s * 3)
        if not await lease.try_acquire():
            return None
        renewal = asyncio.create_task(lease.renew_until_lost())
        work = asyncio.ensure_future(self._collect(bus, objects, settings))
        try:
            await asyncio.wait({renewal, work}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise TransientError("the lease was lost while garbage was collected")
            found = await work
            self.runs.labels("done").inc()
            return found
        finally:
            await cancel_and_wait(renewal, work)
            await lease.release()

    async def _collect(self, bus: Bus, objects: ObjectStore, settings: S) -> T:
        bucket = self.bucket(settings)
        await objects.ensure_bucket(bucket)
        await objects.probe_conditional_deletes(bucket)
        return await self.collect(bus, objects, settings)

    async def run_periodically(self, every_s: float, bus: Bus, objects: ObjectStore, settings: S) -> None:
        """Collect every ``every_s`` until cancelled. Any failure is logged, counted and tried again."""
        while True:
            await asyncio.sleep(every_s)
            try:
                await self.run_exclusive(bus, objects, settings)
            except Exception as error:
                self.runs.labels("failed").inc()
                log.error("garbage was not collected", reason=str(error) or repr(error), exc_info=error)

    async def run_once(self, settings: S) -> str:
        """Collect once over a connection of its own; return a summary."""
        bus = Bus(self.lease, settings)
        await bus.connect()
        try:
            async with ObjectStore(settings) as objects:
                found = await self.run_exclusive(bus, objects, settings)
        finally:
            await bus.close()
        return "another instance is collecting: nothing done" if found is None else self.summary(found)


def main(name: str, build: Callable[[Settings], Service], settings: S, collector: GarbageCollector[S, T]) -> None:
    """``python -m services.NAME [gc]``: run the service, or collect garbage once."""
    match sys.argv[1:]:
        case []:
            build(settings).main()
        case ["gc"]:
            telemetry.set_up(collector.lease, settings)
            print(asyncio.run(collector.run_once(settings)))
        case _:
            sys.exit(f"usage: python -m services.{name} [gc]")
