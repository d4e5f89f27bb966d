"""Requests and the facts that answer them."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from contracts import streams
from contracts.base import Request
from trainbus.client.connection import Connection, PublishedRequest
from trainbus.client.errors import TrainbusError

#: Seconds for which the fact is awaited that a request leads to.
REQUEST_TIMEOUT_S = 20.0


async def publish_and_wait(connection: Connection, request: Request, answers: str, service: str) -> Any:
    """Publish a request and return the fact that it led to; ``answers`` is the subject of such facts.

    Raises:
        TrainbusError: the service refused it, or does not answer.
    """
    start = await connection.last_sequence(streams.FACTS) + 1
    published = await connection.publish_request(request)
    waiting = [
        asyncio.ensure_future(_find_fact(connection, start, answers, published.event_id)),
        asyncio.ensure_future(find_refusal(connection, start, published)),
    ]
    try:
        done, _ = await asyncio.wait(waiting, timeout=REQUEST_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waiting:
            each.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await each
    if not done:
        raise TrainbusError(
            f"requested, but the {service} has not answered yet: it does so once it runs (`trainbus doctor`)"
        )
    answer = done.pop().result()
    if isinstance(answer, str):
        raise TrainbusError(answer)
    return answer


async def _find_fact(connection: Connection, start: int, subject: str, event_id: str) -> Any:
    async for batch in connection.follow(streams.FACTS, subject, start_sequence=start):
        for message in batch:
            if message.envelope.causation_id == event_id:
                return message.event
    raise AssertionError("following a stream does not end")


async def find_refusal(connection: Connection, start: int, published: PublishedRequest) -> str:
    """Wait until a request of this client is refused; return why."""
    assert published.refusal is not None
    async for batch in connection.follow(streams.FACTS, published.refusal, start_sequence=start):
        for message in batch:
            return str(message.event.reason)
    raise AssertionError("following a stream does not end")
