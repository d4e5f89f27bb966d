"""Estimates when each queued run will start, for queries."""

from __future__ import annotations

import asyncio
import time
from datetime import datetime
from typing import Any

from contracts.scheduling import Policy
from services.kit.bus import Bus
from services.scheduler.cluster_cache import ClusterCache
from services.scheduler.core.explain.estimate import Estimate, Estimator

#: Seconds between estimates while runs wait, and the share of the time that they may take.
INTERVAL_S = 20.0
PART = 0.002


class Forecast:
    """The newest estimates. They are shown and never decided on, so each instance has its own."""

    def __init__(self, bus: Bus, cache: ClusterCache, policy: Policy) -> None:
        self.bus, self.cache, self.policy = bus, cache, policy
        self._estimator = Estimator()
        self._found: dict[str, Estimate] = {}

    async def run(self) -> None:
        """Estimate for as long as the service runs; an empty queue costs nothing."""
        await self.cache.caught_up.wait()
        while True:
            took_s = await self.refresh() if self.cache.cluster.queued else 0.0
            await asyncio.sleep(max(INTERVAL_S, took_s / PART))

    async def refresh(self) -> float:
        """Compute the estimates; return the seconds it took."""
        started = time.perf_counter()
        self._found = await self.cache.compute(self._estimator.estimates, self.policy, self.cache.now())
        return time.perf_counter() - started

    def of(self, run_id: str, room_at: datetime | None = None) -> dict[str, Any]:
        """The estimate of a queued run as JSON, not before there is room for it; empty if there is none (yet)."""
        found = self._found.get(run_id)
        if found is None or run_id not in self.cache.cluster.queued:
            return {}
        names = ("start_p10", "start_p50", "start_p90")
        return {
            name: at.isoformat(timespec="seconds") for name, at in zip(names, found.not_before(room_at), strict=True)
        }
