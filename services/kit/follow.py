"""Reading a stream in order, exactly once, for as long as one likes.

A pull consumer without acknowledgements that is made anew, one past the last message seen, whenever
anything goes wrong: a gap, a silent server, a restart. (nats-py's own ``fetch`` holds messages
back until a batch is full or a time has passed, and its ordered push consumer floods a slow reader.)
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import suppress

import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import api
from nats.js.errors import APIError
from nats.js.errors import Error as JetStreamError

log = structlog.get_logger(__name__)

BATCH = 500
#: Seconds a pull request stays open on the server.
EXPIRES_S = 30.0
#: The server says that it lives this often; after three times that without a word it is taken for gone.
HEARTBEAT_S = 1.0
SILENCE_S = 3.0
NANO = 1_000_000_000


class _Broken(Exception):
    """The consumer is gone or lost step: make a new one."""


async def follow(
    connection: Callable[[], Client],
    stream: str,
    filters: tuple[str, ...],
    start_sequence: int,
    *,
    idle_s: float,
    until_caught_up: bool,
) -> AsyncGenerator[list[Msg], None]:
    """Yield batches of raw messages; see ``Bus.follow``."""
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
                if until_caught_up and (batch[-1].metadata.num_pending == 0 if batch else await reader.drained()):
                    return
        except (TimeoutError, _Broken, nats.errors.Error, APIError, JetStreamError, OSError) as error:
            log.info("following anew", stream=stream, position=position, reason=repr(error))
            # The reader's clock goes on while the server is away.
            if not until_caught_up:
                yield []
            await asyncio.sleep(0.1)
        finally:
            if reader is not None:
                await reader.close()


class _Reader:
    """One ephemeral consumer and the requests on it."""

    def __init__(self, nc: Client, stream: str, name: str, inbox: Subscription, pending: int) -> None:
        self._nc, self._stream, self._name, self._inbox = nc, stream, name, inbox
        self.pending_at_start = pending
        self._requested = 0
        self._consumed = 0
        self._heard = time.monotonic()
        self._reconnects = nc.stats["reconnects"]

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
        inbox = await nc.subscribe(nc.new_inbox())
        return cls(nc, stream, info.name, inbox, info.num_pending or 0)

    async def close(self) -> None:
        with suppress(Exception):
            await self._inbox.unsubscribe()
        with suppress(Exception):
            await self._nc.jetstream(timeout=0.5).delete_consumer(self._stream, self._name)

    async def drained(self) -> bool:
        """Whether no more will come: what was pending at the start may have been deleted before it was sent."""
        info = await self._nc.jetstream(timeout=2).consumer_info(self._stream, self._name)
        return info.num_pending == 0 and info.delivered is not None and info.delivered.consumer_seq == self._consumed

    async def batches(self, idle_s: float) -> AsyncIterator[list[Msg]]:
        while True:
            await self._request()
            batch = await self._take(idle_s)
            yield batch

    async def _request(self) -> None:
        if self._requested > BATCH // 2:
            return
        request = {
            "batch": BATCH - self._requested,
            "expires": int(EXPIRES_S * NANO),
            "idle_heartbeat": int(HEARTBEAT_S * NANO),
        }
        self._requested = BATCH
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._name}"
        await self._nc.publish(subject, json.dumps(request).encode(), self._inbox.subject)

    async def _take(self, idle_s: float) -> list[Msg]:
        """Whatever has arrived, at least one message, or nothing after ``idle_s``."""
        batch: list[Msg] = []
        deadline = time.monotonic() + idle_s
        while not batch:
            try:
                msg = await self._inbox.next_msg(timeout=max(deadline - time.monotonic(), 0.001))
            except (TimeoutError, nats.errors.TimeoutError):
                if self._nc.stats["reconnects"] != self._reconnects:
                    # The server that has the consumer and our request in its memory is perhaps no more.
                    raise _Broken("connected anew") from None
                if time.monotonic() - self._heard > SILENCE_S:
                    raise _Broken("the server is silent") from None
                return batch
            self._accept(msg, batch)
            while len(batch) < BATCH and (waiting := self._waiting()) is not None:
                self._accept(waiting, batch)
            if time.monotonic() > deadline:
                break
        return batch

    def _waiting(self) -> Msg | None:
        """A message that has arrived already. ``next_msg`` makes a task for each, at ten times the cost."""
        queue = self._inbox._pending_queue
        if queue.empty():
            return None
        msg = queue.get_nowait()
        self._inbox._pending_size -= len(msg.data)
        queue.task_done()
        return msg

    def _accept(self, msg: Msg, batch: list[Msg]) -> None:
        self._heard = time.monotonic()
        headers = msg.headers or {}
        status = headers.get("Status")
        if status is None:
            self._requested -= 1
            self._consumed += 1
            if msg.metadata.sequence.consumer != self._consumed:
                raise _Broken("a message is missing")
            batch.append(msg)
        elif status in ("404", "408"):
            # The request ended; what of it was not delivered is asked for again.
            self._requested = 0
        elif status != "100":
            raise _Broken(f"{status} {headers.get('Description', '')}")
        elif int(headers.get(api.Header.LAST_CONSUMER, self._consumed)) != self._consumed:
            # nats-py drops what does not fit its limits; without a message behind it nothing else would tell.
            raise _Broken("the last messages are missing")
