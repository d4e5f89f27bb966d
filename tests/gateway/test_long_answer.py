"""Work that is answered as events: one at a time, and none for a reader who has left."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import HTTPException
from pydantic import BaseModel

from services.gateway.long_answer import Advance, LongAnswers
from services.kit.messages import TransientError
from tests.kit.support import until


class Count(BaseModel):
    read: int


async def read_all(answers: LongAnswers, work: Any) -> str:
    return b"".join([part async for part in answers.respond(work, "test").body_iterator]).decode()  # type: ignore[misc]


async def test_progress_comes_before_the_result() -> None:
    async def work(advance: Advance) -> Count:
        advance(1, 2)
        await asyncio.sleep(0.3)
        return Count(read=2)

    assert await read_all(LongAnswers(asyncio.Event()), work) == (
        ': at work\n\nevent: progress\ndata: {"done": 1, "total": 2}\n\nevent: result\ndata: {"read":2}\n\n'
    )


async def test_what_goes_wrong_is_the_last_event() -> None:
    for error, says in (
        (HTTPException(404, "gone"), '{"status": 404, "detail": "gone"}'),
        (TransientError("refused"), '{"status": 503, "detail": "the object store does not answer: refused"}'),
        (ZeroDivisionError(), '{"status": 500, "detail": "the gateway failed (ZeroDivisionError): its log says more"}'),
    ):

        async def work(advance: Advance, error: Exception = error) -> Count:
            raise error

        assert (await read_all(LongAnswers(asyncio.Event()), work)).endswith(f"event: problem\ndata: {says}\n\n")


async def test_one_works_at_a_time_and_stops_when_its_reader_leaves() -> None:
    answers, ended = LongAnswers(asyncio.Event()), list[str]()

    async def endless(advance: Advance) -> Count:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("first")
        raise AssertionError

    async def short(advance: Advance) -> Count:
        ended.append("second")
        return Count(read=0)

    first: Any = answers.respond(endless, "test").body_iterator
    await anext(first)
    waiting = asyncio.create_task(anext(first))
    await asyncio.sleep(0)
    second = asyncio.create_task(read_all(answers, short))
    await asyncio.sleep(0)
    assert ended == []
    waiting.cancel()
    await until(lambda: len(ended) == 2, "the second has its turn")
    assert ended == ["first", "second"]
    assert "result" in await second


async def test_a_gateway_that_stops_leaves_the_work_without_a_result() -> None:
    stopping = asyncio.Event()
    stopping.set()

    async def endless(advance: Advance) -> Count:
        await asyncio.Event().wait()
        raise AssertionError

    assert await read_all(LongAnswers(stopping), endless) == ": at work\n\n"
