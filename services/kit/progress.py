"""Progress of a dataset's making: counters of a job's work, a log line and a fact on the bus every few seconds."""

from __future__ import annotations

import asyncio
import time
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
Phase = Literal["listing", "joining", "validating", "sharding", "uploading"]


class Progress:
    """Counters of one job, which sets them as it works."""

    def __init__(self, phase: Phase) -> None:
        self.enter_phase(phase)

    def enter_phase(self, phase: Phase) -> None:
        """Count from zero, because another phase has another speed."""
        self.phase = phase
        #: Records of all; 0 if unknown. Those done, and of them found done by an earlier attempt.
        self.total = self.done = self.found = 0
        #: Bytes; where their total is known, they estimate the remaining time in place of records.
        self.total_bytes = self.done_bytes = 0
        self._began_s = time.monotonic()

    @asynccontextmanager
    async def publish_periodically(self, bus: Bus, ingestion_id: str, cause: Envelope) -> AsyncIterator[None]:
        """Publish progress during the block. A failure to publish does not stop the work."""
        task = asyncio.create_task(self._publish(bus, ingestion_id, cause))
        try:
            yield
        finally:
            await cancel_and_wait(task)

    async def _publish(self, bus: Bus, ingestion_id: str, cause: Envelope) -> None:
        number = 0
        while True:
            await asyncio.sleep(EVERY_S)
            fact = self.fact(ingestion_id, number, time.monotonic() - self._began_s, bus.clock.now().timestamp())
            number += 1
            log.info("progress", **fact.model_dump(include={"phase", "done", "total", "records_per_s", "eta_s"}))
            try:
                await bus.publish(fact, cause)
            except (TransientError, Conflict, PoisonMessage) as error:
                log.info("progress not published", error=repr(error))

    def fact(self, ingestion_id: str, number: int, elapsed_s: float, at: float) -> DatasetProgress:
        """Return the progress fact."""
        rate = (self.done - self.found) / elapsed_s if elapsed_s > 0 else 0.0
        left, speed = max(self.total - self.done, 0), rate
        if self.total_bytes and elapsed_s > 0:
            left, speed = max(self.total_bytes - self.done_bytes, 0), self.done_bytes / elapsed_s
        return DatasetProgress(
            ingestion_id=ingestion_id,
            phase=self.phase,
            number=number,
            done=self.done,
            total=self.total or None,
            done_bytes=self.done_bytes,
            records_per_s=round(rate, 1),
            eta_s=round(left / speed, 1) if (self.total or self.total_bytes) and speed > 0 else None,
            time=at,
        )
