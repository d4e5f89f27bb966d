"""Progress of a dataset, published periodically."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

import structlog

from contracts.envelope import Envelope
from contracts.events.dataset import DatasetProgress
from services.kit.bus import Bus, Conflict, PoisonMessage, TransientError
from services.kit.concurrency import cancel_and_wait

log = structlog.get_logger(__name__)
EVERY_S = 2.0


class Progress:
    """Counters of the work, reported every few seconds."""

    def __init__(self) -> None:
        self.phase: Literal["sharding", "uploading"] = "sharding"
        self.total = 0
        #: Samples that are in shards, of them found there from an earlier attempt; and their bytes.
        self.done = self.found = 0
        self.done_bytes = 0

    def rate(self, elapsed_s: float) -> float:
        """Return the samples per second of this attempt."""
        return (self.done - self.found) / elapsed_s if elapsed_s > 0 else 0.0

    def eta_s(self, elapsed_s: float) -> float | None:
        """Return the estimated seconds to the end; None if unknown."""
        rate = self.rate(elapsed_s)
        return max(self.total - self.done, 0) / rate if rate > 0 and self.total else None

    @asynccontextmanager
    async def publish_periodically(self, bus: Bus, ingestion_id: str, cause: Envelope) -> AsyncIterator[None]:
        """Publish progress during the block. A failure to publish does not stop the work."""
        task = asyncio.create_task(self._publish(bus, ingestion_id, cause))
        try:
            yield
        finally:
            await cancel_and_wait(task)

    async def _publish(self, bus: Bus, ingestion_id: str, cause: Envelope) -> None:
        began, number = bus.clock.monotonic(), 0
        while True:
            await asyncio.sleep(EVERY_S)
            elapsed_s = bus.clock.monotonic() - began
            fact = self.fact(ingestion_id, number, elapsed_s, bus.clock.now().timestamp())
            try:
                await bus.publish(fact, cause)
            except (TransientError, Conflict, PoisonMessage) as error:
                log.info("progress not said", error=repr(error))
            log.info("sharding", samples=self.done, of=self.total, samples_per_s=round(fact.records_per_s))
            number += 1

    def fact(self, ingestion_id: str, number: int, elapsed_s: float, time: float) -> DatasetProgress:
        """Return the progress fact."""
        return DatasetProgress(
            ingestion_id=ingestion_id,
            phase=self.phase,
            number=number,
            done=self.done,
            total=self.total or None,
            done_bytes=self.done_bytes,
            records_per_s=round(self.rate(elapsed_s), 1),
            eta_s=None if (eta_s := self.eta_s(elapsed_s)) is None else round(eta_s, 1),
            time=time,
        )
