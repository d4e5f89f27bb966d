"""Clients of a server of predictions: one sends at a fixed rate, others send one request after the other."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from loadtest.common import percentile
from loadtest.serving.http_client import HttpClient

#: The first rate that is tried.
FIRST_PER_S = 120.0
#: By what the rate grows where it is near to the largest.
FINE_GROWTH = 7 / 6
#: Seconds after which a client gives a request up.
TIMEOUT_S = 30.0
#: What an answer names in its headers.
VERSION = re.compile(rb"\r\ntrainbus-version:[ \t]*(\d+)", re.IGNORECASE)
DIGEST = re.compile(rb"\r\ntrainbus-digest:[ \t]*(\w+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Query:
    """A request, and the prediction that is right."""

    body: bytes
    content_type: str
    answer: int


@dataclass(frozen=True, slots=True)
class Door:
    """Where a server takes requests, and where its answer has the prediction."""

    url: str
    queries: Sequence[Query]
    read: Callable[[Any], int]


@dataclass(frozen=True, slots=True)
class Reply:
    """What became of one request. ``status`` 0: there was no answer at all."""

    started: float
    seconds: float
    status: int
    is_right: bool
    version: int = 0
    digest: str = ""
    problem: str = ""


async def ask(client: HttpClient, door: Door, number: int) -> Reply:
    """Send one request, and compare its answer."""
    query = door.queries[number % len(door.queries)]
    started = time.perf_counter()
    try:
        response = await client.post(query.body, query.content_type)
        seconds = time.perf_counter() - started
        if response.status != 200:
            return Reply(started, seconds, response.status, True, problem=response.body.decode(errors="replace"))
        version, digest = VERSION.search(response.head), DIGEST.search(response.head)
        is_right = door.read(json.loads(response.body)) == query.answer
        named = (int(version[1]) if version else 0, digest[1].decode() if digest else "")
        return Reply(started, seconds, 200, is_right, *named)
    except (OSError, TimeoutError, ValueError) as error:
        return Reply(started, time.perf_counter() - started, 0, True, problem=repr(error))


@dataclass(slots=True)
class SteadyClient:
    """Sends at a fixed rate, whether or not earlier requests are answered."""

    door: Door
    rate: float
    replies: list[Reply] = field(default_factory=list)
    #: Version -> when its first answer arrived.
    first_answers: dict[int, asyncio.Future[float]] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self, seconds: float = float("inf")) -> list[Reply]:
        """Send until cancelled, or for so long; return the replies once all are there."""
        client = HttpClient(self.door.url, TIMEOUT_S)
        began = due = time.perf_counter()
        number = 0
        try:
            while due - began < seconds:
                task = asyncio.create_task(self._send(client, number))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                number += 1
                due += 1 / self.rate
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
        finally:
            await asyncio.gather(*self._tasks)
            client.close()
        return self.replies

    def first_answer(self, version: int) -> asyncio.Future[float]:
        """Return when the first answer of a version arrived, or will have."""
        return self.first_answers.setdefault(version, asyncio.get_running_loop().create_future())

    async def _send(self, client: HttpClient, number: int) -> None:
        reply = await ask(client, self.door, number)
        if reply.version and not (first := self.first_answer(reply.version)).done():
            first.set_result(reply.started + reply.seconds)
        self.replies.append(reply)


async def follow_connection(door: Door, gap_s: float, replies: list[Reply]) -> None:
    """Send one request after the other over one connection, until cancelled."""
    client = HttpClient(door.url, TIMEOUT_S)
    for number in itertools.count():
        replies.append(await ask(client, door, number))
        await asyncio.sleep(gap_s)


def answered(replies: Sequence[Reply]) -> list[Reply]:
    return [each for each in replies if each.status == 200]


def p99_s(replies: Sequence[Reply]) -> float:
    """Return the 99th percentile of the seconds of the answers; infinity where there are none."""
    found = [each.seconds for each in answered(replies)]
    return percentile(found, 0.99) if found else float("inf")


async def find_rate(door: Door, limit_s: float, seconds: float) -> tuple[float, list[list[float]]]:
    """Return the largest rate at which all requests are answered with a p99 within the limit, and the rates tried.

    The rate grows by half, and by a sixth behind the last that held, until one is too high; each is held for so many
    seconds. A rate that fails is tried once more: other work of the machine must not end the search.
    """
    tried: list[list[float]] = []
    best, rate, failed, growth = 0.0, FIRST_PER_S, 0, 1.5
    while failed < 2 or growth > FINE_GROWTH:
        if failed == 2:
            growth, rate, failed = FINE_GROWTH, best * FINE_GROWTH or FIRST_PER_S / 2, 0
        replies = await SteadyClient(door, rate).run(seconds)
        share, p99 = len(answered(replies)) / len(replies), p99_s(replies)
        tried.append([round(rate, 1), round(share, 4), round(p99 * 1000, 2)])
        if share == 1.0 and p99 <= limit_s:
            best, rate, failed = rate, rate * growth, 0
        else:
            failed += 1
        await asyncio.sleep(0.5)
    return best, tried
