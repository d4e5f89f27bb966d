"""Progress of an ingestion: a log line and a fact on the bus, every few seconds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal

import structlog

from contracts.events.dataset import DatasetProgress
from services.kit.clock import Clock

log = structlog.get_logger(__name__)

EVERY_S = 2.0
Phase = Literal["listing", "joining", "validating"]
Publish = Callable[[DatasetProgress], Awaitable[object]]


class Progress:
    """Reports for one ingestion, at most one every ``EVERY_S``."""

    def __init__(self, ingestion_id: str, clock: Clock, publish: Publish | None) -> None:
        self._ingestion_id, self._clock, self._publish = ingestion_id, clock, publish
        self._number = 0
        self._reported_at = self._started_at = clock.monotonic()
        self._phase: Phase | None = None

    async def report(
        self,
        phase: Phase,
        done: int,
        total: int | None = None,
        *,
        done_bytes: int = 0,
        total_bytes: int = 0,
    ) -> None:
        """Report how much of a phase is done, if it is time. Bytes estimate the remaining time, else records do."""
        now = self._clock.monotonic()
        if phase != self._phase:
            self._phase, self._started_at = phase, now
            return
        if now - self._reported_at < EVERY_S:
            return
        self._reported_at, self._number = now, self._number + 1
        took_s = max(now - self._started_at, 1e-9)
        whole, part = (total_bytes, done_bytes) if total_bytes else (total or 0, done)
        progress = DatasetProgress(
            ingestion_id=self._ingestion_id,
            phase=phase,
            number=self._number,
            done=done,
            total=total,
            done_bytes=done_bytes,
            records_per_s=round(done / took_s, 1),
            eta_s=round(took_s * max(0, whole - part) / part, 1) if whole and part else None,
            time=self._clock.now().timestamp(),
        )
        log.info("ingesting", **progress.model_dump(include={"phase", "done", "total", "records_per_s", "eta_s"}))
        if self._publish is not None:
            await self._publish(progress)
