"""Streams of the bus as server-sent events: history first, then live, each event with its sequence as id."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import structlog
from pydantic import BaseModel

from services.gateway import metrics
from services.kit.bus import Bus, Message

log = structlog.get_logger(__name__)

#: Seconds without an event after which a comment is sent, so that proxies keep the connection.
HEARTBEAT_S = 10.0
IDLE_S = 0.25
#: Seconds without a further event after which the stream of a finished run ends in any case.
QUIET_END_S = 2.0
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}

#: Returns the name and the data of the event that a message becomes.
Encode = Callable[[Message[Any]], tuple[str, BaseModel]]
Finished = Callable[[], Awaitable[bool]]


class EventStream:
    """One client's view of some subjects, from after a sequence on, until ``finished``; None: for ever."""

    def __init__(
        self,
        bus: Bus,
        stream: str,
        subjects: tuple[str, ...],
        after: int,
        finished: Finished | None,
        encode: Encode,
        route: str,
    ) -> None:
        self._bus, self._stream, self._subjects = bus, stream, subjects
        self._sent, self._finished, self._encode, self._route = after, finished, encode, route

    async def is_exhausted(self) -> bool:
        """Whether the run is finished and the client has seen everything: it need not come back."""
        return self._sent > 0 and await self._is_finished() and await self._sent_all()

    async def body(self, stopping: asyncio.Event) -> AsyncIterator[bytes]:
        """The events, comments while nothing happens, and ``end`` once nothing more can come."""
        clients = metrics.SSE_CLIENTS.labels(self._route)
        clients.inc()
        try:
            yield b"retry: 1000\n: " + " ".join(self._subjects).encode() + b"\n\n"
            spoken = time.monotonic()
            # Looks that found nothing, and not time: a question that the server is slow to answer counts as one.
            quiet_looks = 0
            follow = self._bus.follow(self._stream, self._subjects, self._sent + 1, idle_s=IDLE_S)
            async with aclosing(follow) as batches:
                async for batch in batches:
                    if stopping.is_set():
                        return  # without an end: the client comes back to another instance
                    if batch:
                        yield b"".join(self._event(item) for item in batch)
                        self._sent, spoken, quiet_looks = batch[-1].sequence, time.monotonic(), 0
                    if batch and batch[-1].pending:
                        continue
                    if await self._is_finished():
                        quiet_looks += 1
                        if await self._sent_all() or quiet_looks * IDLE_S > QUIET_END_S:
                            yield b"event: end\ndata: {}\n\n"
                            return
                    if time.monotonic() - spoken > HEARTBEAT_S:
                        yield b": heartbeat\n\n"
                        spoken = time.monotonic()
        except (asyncio.CancelledError, GeneratorExit):
            log.info("a reader of events has left", subjects=self._subjects, last_event_id=self._sent)
            raise
        finally:
            clients.dec()

    def _event(self, item: Message[Any]) -> bytes:
        """Return one event in the wire format. Its data is JSON and therefore one line."""
        name, data = self._encode(item)
        return f"id: {item.sequence}\nevent: {name}\ndata: {data.model_dump_json()}\n\n".encode()

    async def _is_finished(self) -> bool:
        return self._finished is not None and await self._finished()

    async def _sent_all(self) -> bool:
        last = [await self._bus.get_last_sequence(each, self._stream) for each in self._subjects]
        return max(last) <= self._sent
