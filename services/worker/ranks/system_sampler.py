"""System metrics of a generation, sampled and published every few seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import structlog

from contracts.events.run import Member, ProgressPoint, RunPlaced, RunProgress
from services.kit.bus import TransientError
from services.worker.node.system_metrics import SystemMeter
from services.worker.ranks.journal_follower import JournalFollower, Publish

log = structlog.get_logger(__name__)


class SystemSampler:
    """Publishes what the node and the ranks of one generation use."""

    def __init__(
        self,
        placed: RunPlaced,
        member: Member,
        meter: SystemMeter,
        follower: JournalFollower,
        pids: Callable[[], Sequence[int]],
        publish: Publish,
        now: Callable[[], float],
        interval_s: float,
    ) -> None:
        self._placed, self._member, self._meter, self._follower = placed, member, meter, follower
        self._pids, self._publish, self._now, self._interval_s = pids, publish, now, interval_s

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            point = await self._sample()
            try:
                await self._publish(point)
            except TransientError as error:
                log.warning("a system sample is lost", error=str(error))

    async def _sample(self) -> RunProgress:
        state = self._follower.state
        values = await asyncio.to_thread(self._meter.measure, self._pids(), self._member.slots)
        # Numbered on disk first: a restarted agent must not publish another sample under the same number.
        state.system_count += 1
        await self._follower.save()
        step = max((rank.step or 0 for rank in state.ranks.values()), default=0)
        return RunProgress(
            run_id=self._placed.run_id,
            generation=self._placed.generation,
            node_id=self._member.node_id,
            rank=self._member.ranks[0],
            offset=state.system_count,
            points=(ProgressPoint(step=step, time=self._now(), values=values),),
            kind="system",
            step=step,
        )
