"""Work that takes longer than a request may: its progress as server-sent events, and at last its result."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import structlog
from fastapi import HTTPException
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from services.gateway import metrics
from services.gateway.sse import HEADERS, HEARTBEAT_S
from services.kit.concurrency import cancel_and_wait
from services.kit.messages import TransientError

log = structlog.get_logger(__name__)

#: Seconds between two looks at how far it is.
LOOK_EVERY_S = 0.1

#: Gets (bytes done, all bytes).
Advance = Callable[[int, int], None]
Work = Callable[[Advance], Awaitable[BaseModel]]


class LongAnswers:
    """Answers that read much from the store: one at a time in this process, and the others wait for their turn.

    The events are ``progress`` (``done`` and ``total`` bytes), then ``result``, or ``problem`` with a status and what
    is wrong. Who goes away before has stopped the work.
    """

    def __init__(self, stopping: asyncio.Event) -> None:
        self._stopping, self._turn = stopping, asyncio.Semaphore(1)

    def respond(self, work: Work, route: str) -> StreamingResponse:
        """Return the answer that does the work while it is read."""
        return StreamingResponse(self._body(work, route), media_type="text/event-stream", headers=HEADERS)

    async def _body(self, work: Work, route: str) -> AsyncIterator[bytes]:
        progress = told = (0, 0)

        def advance(done: int, total: int) -> None:
            nonlocal progress
            progress = done, total

        async def run() -> BaseModel:
            async with self._turn:
                return await work(advance)

        clients = metrics.SSE_CLIENTS.labels(route)
        clients.inc()
        task = asyncio.create_task(run())
        try:
            yield b": at work\n\n"
            spoken = time.monotonic()
            while not task.done():
                await asyncio.wait({task}, timeout=LOOK_EVERY_S)
                if self._stopping.is_set():
                    return  # without a result: the client asks another instance
                if progress != told:
                    told, spoken = progress, time.monotonic()
                    yield _event("progress", json.dumps({"done": told[0], "total": told[1]}))
                elif time.monotonic() - spoken > HEARTBEAT_S:
                    spoken = time.monotonic()
                    yield b": heartbeat\n\n"
            yield _result(task)
        finally:
            clients.dec()
            await cancel_and_wait(task)


def _result(task: asyncio.Task[BaseModel]) -> bytes:
    try:
        return _event("result", task.result().model_dump_json())
    except HTTPException as error:
        status, detail = error.status_code, str(error.detail)
    except TransientError as error:
        status, detail = 503, f"the object store does not answer: {error}"
    except Exception as error:
        log.exception("work failed")
        status, detail = 500, f"the gateway failed ({type(error).__name__}): its log says more"
    return _event("problem", json.dumps({"status": status, "detail": detail}))


def _event(name: str, data: str) -> bytes:
    return f"event: {name}\ndata: {data}\n\n".encode()
