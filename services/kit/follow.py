"""The ordered reader of a stream: it yields each message exactly once.

A pull consumer without acknowledgements that is created again, one past the last message seen, when
anything goes wrong: a gap, a silent server, a restart. (nats-py's own ``fetch`` holds messages
back until a batch is full or a time has passed, and its ordered push consumer floods a slow reader.)
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import suppress

import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import api
from nats.js.errors import APIError
from nats.js.errors import Error as JetStreamError

import services.kit.nats_wire  # noqa: F401 - reads what any client has published
from services.kit.pull import PullBroken, PullSubscription

log = structlog.get_logger(__name__)

BATCH = 500
#: The server's numbers for filters that it refuses: twice the same, overlapping ones, an empty one.
REFUSED_FILTERS = frozenset({10136, 10138, 10139})


async def follow(
    connection: Callable[[], Client],
    stream: str,
    filters: tuple[str, ...],
    start_sequence: int,
    *,
    idle_s: float,
    until_caught_up: bool,
) -> AsyncGenerator[list[Msg], None]:
    """Yield batches of raw messages; see ``Bus.follow``.

    Raises:
        ValueError: the server refuses the filters. No later attempt would change that.
    """
    position = start_sequence - 1
    while True:
        reader: _Reader | None = None
        try:
            reader = await _Reader.open(connection(), stream, filters, position + 1)
            if until_caught_up and reader.pending_at_start == 0:
                return
            async for batch in reader.batches(idle_s):
                if batch:
                    position = batch[-1].metadata.sequence.stream
                yield batch
                if until_caught_up and (batch[-1].metadata.num_pending == 0 if batch else await reader.is_drained()):
                    return
        except (TimeoutError, PullBroken, nats.errors.Error, APIError, JetStreamError, OSError) as error:
            if getattr(error, "err_code", None) in REFUSED_FILTERS:
                raise ValueError(f"stream {stream} cannot be read by the filters {filters}: {error}") from error
            log.info("following again", stream=stream, position=position, reason=repr(error))
            # The reader's clock goes on while the server is away.
            if not until_caught_up:
                yield []
            await asyncio.sleep(0.1)
        finally:
            if reader is not None:
                await reader.close()


class _Reader:
    """One ephemeral consumer and the subscription on it."""

    def __init__(self, nc: Client, stream: str, name: str, pending: int) -> None:
        self.pending_at_start = pending
        self._nc = nc
        self._arrived: deque[Msg] = deque()
        self._pull = PullSubscription(nc, stream, name, self._accept)
        self._consumed = 0

    @classmethod
    async def open(cls, nc: Client, stream: str, filters: tuple[str, ...], start_sequence: int) -> _Reader:
        config = api.ConsumerConfig(
            deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=start_sequence,
            ack_policy=api.AckPolicy.NONE,
            filter_subjects=list(filters) or None,
            inactive_threshold=60.0,
            mem_storage=True,
            num_replicas=1,
            max_deliver=1,
        )
        info = await nc.jetstream(timeout=2).add_consumer(stream, config)
        reader = cls(nc, stream, info.name, info.num_pending or 0)
        await reader._pull.open()
        return reader

    def _accept(self, msg: Msg) -> None:
        self._arrived.append(msg)
        self._pull.activity.set()

    async def close(self) -> None:
        await self._pull.unsubscribe()
        with suppress(Exception):
            await self._nc.jetstream(timeout=0.5).delete_consumer(self._pull.stream, self._pull.consumer)

    async def is_drained(self) -> bool:
        """Return whether no more will come. Messages that were pending at the start may have been deleted since."""
        info = await self._nc.jetstream(timeout=2).consumer_info(self._pull.stream, self._pull.consumer)
        return info.num_pending == 0 and info.delivered is not None and info.delivered.consumer_seq == self._consumed

    async def batches(self, idle_s: float) -> AsyncIterator[list[Msg]]:
        while True:
            if self._pull.outstanding <= BATCH // 2:
                await self._pull.request(BATCH - self._pull.outstanding)
            yield await self._next_batch(idle_s)

    async def _next_batch(self, idle_s: float) -> list[Msg]:
        """Return what has arrived, at least one message, or nothing after ``idle_s``."""
        deadline = time.monotonic() + idle_s
        while not self._arrived and (left_s := deadline - time.monotonic()) > 0:
            await self._pull.wait_for_activity(left_s)
        if not self._arrived:
            self._pull.check()
            if self._pull.last_sent > self._consumed:
                # nats-py drops what does not fit its limits; without a message behind it only the heartbeat shows it.
                raise PullBroken("the last messages are missing")
        batch = [self._arrived.popleft() for _ in range(min(len(self._arrived), BATCH))]
        for msg in batch:
            self._consumed += 1
            if msg.metadata.sequence.consumer != self._consumed:
                raise PullBroken("a message is missing")
        return batch
