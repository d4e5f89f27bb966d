"""Follow the log of a live stack with a candidate policy and publish what it would decide.

It publishes under ``shadow.<digest>.>`` only, each decision once, also after a restart.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, Callable
from datetime import UTC, datetime

from contracts import topology
from contracts.envelope import Envelope, encode
from contracts.scheduling import Policy
from trainbus.client.errors import TrainbusError
from trainbus.operate.connection import Connection
from trainbus.operate.history.fact_log import BusLog, FactLog
from trainbus.operate.history.log import FOLLOWED, Entry, entry_of
from trainbus.operate.history.shadow import Shadow, ShadowFact, prefix
from trainbus.operate.nats_import import aiohttp_hidden

with aiohttp_hidden():
    from nats.js.errors import NotFoundError

SOURCE = "trainbus/shadow"
#: Least seconds between two comparisons while the leader decides nothing; each plans twice.
IDLE_COMPARISON_S = 1.0


class ShadowFollower:
    """Feeds the log to the shadow and publishes its decisions."""

    def __init__(self, connection: Connection, shadow: Shadow, position: int) -> None:
        self.connection, self.shadow, self.position = connection, shadow, position
        self.published = 0

    @classmethod
    async def start(
        cls, connection: Connection, candidate: Policy, read_log: Callable[[FactLog], AsyncIterable[Entry]]
    ) -> ShadowFollower:
        """Fold the log so far, and read what an earlier shadow of the same policy has published.

        ``read_log`` yields the entries of the log, and may show how far it is.

        Raises:
            TrainbusError: the server has no stream for the decisions.
        """
        try:
            await connection.last_sequence(topology.SHADOW)
        except NotFoundError:
            raise TrainbusError(
                f"the server has no stream {topology.SHADOW.name}: start a scheduler of this version once"
            ) from None
        earlier = await connection.read(f"{prefix(candidate)}>", stream=topology.SHADOW)
        published = [message.envelope.id for message in earlier if message.envelope.id]
        log = await BusLog.open(connection)
        made = Shadow(candidate, Policy(), published)
        async for entry in read_log(log):
            made.catch_up([entry])
        return cls(connection, made, log.length)

    async def follow(self, stop: asyncio.Event, for_s: float | None, show: Callable[[], None]) -> None:
        """Follow the log until the time is over or ``stop`` is set; call ``show`` after each batch."""
        reading = asyncio.create_task(self._read(show))
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({reading, stopping}, timeout=for_s, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()
        finally:
            for task in (reading, stopping):
                task.cancel()
            await asyncio.gather(reading, stopping, return_exceptions=True)

    async def _read(self, show: Callable[[], None]) -> None:
        rested = time.monotonic()
        async for batch in self.connection.follow_raw(topology.FACTS, *FOLLOWED, start_sequence=self.position + 1):
            entries: list[Entry] = [entry_of(raw) for raw in batch]
            await self._publish(self.shadow.process(entries))
            if not batch and time.monotonic() - rested >= IDLE_COMPARISON_S:
                rested = time.monotonic()
                await self._publish(self.shadow.process_idle(datetime.now(UTC)))
            show()

    async def _publish(self, decisions: list[ShadowFact]) -> None:
        for each in decisions:
            envelope = Envelope(
                id=each.message_id,
                source=SOURCE,
                type=each.fact.type,
                time=datetime.now(UTC),
                subject=each.fact.aggregate_id,
            )
            headers, body = encode(each.fact, envelope)
            await self.connection.js.publish(each.subject, body, headers=headers)
            self.published += 1
