"""Overload: a process is killed for a batch that hangs alone, and never for what waits."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio

from contracts.model_process import Frame, FrameReader, encode_answer, encode_frame, encode_started
from loadtest.served_models import draw_rows
from services.serving.process import ModelProcess, ProcessError, ProcessLimits
from tests.serving.conftest import House

ROWS = draw_rows(40, seed=5)
SAMPLE = {"json": json.dumps({"a": 1}).encode()}


@dataclass(slots=True)
class ProcessSide:
    """The other end of a ``ModelProcess``, which does what a test wants."""

    process: ModelProcess
    link: socket.socket
    _reader: FrameReader = field(default_factory=FrameReader)

    async def receive(self, count: int) -> list[Frame]:
        frames: list[Frame] = []
        while len(frames) < count:
            frames += self._reader.feed(await asyncio.get_running_loop().sock_recv(self.link, 2**16))
        return frames

    async def send(self, frame: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.link, frame)


@pytest_asyncio.fixture
async def side(request: pytest.FixtureRequest) -> AsyncIterator[ProcessSide]:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    limits = ProcessLimits(32, 0.0, 1, "cpu", 10.0, getattr(request, "param", 60.0))
    process = ModelProcess(limits)
    await asyncio.get_running_loop().create_connection(lambda: process, sock=ours)
    yield ProcessSide(process, theirs)
    process.kill("the test ended")
    theirs.close()


async def test_a_late_pong_ends_no_process(side: ProcessSide) -> None:
    with pytest.raises(ProcessError, match="did not answer"):
        await side.process.ping(0.01)
    assert side.process.is_alive
    answer = asyncio.create_task(side.process.predict([SAMPLE]))
    [_, predict] = await side.receive(2)
    await side.send(encode_answer(predict.header["id"], ()))
    assert await answer == ()


@pytest.mark.parametrize("side", [0.5], indirect=True)
async def test_a_request_that_waits_behind_batches_ends_no_process(side: ProcessSide) -> None:
    requests = [asyncio.create_task(side.process.predict([SAMPLE])) for _ in range(8)]
    frames = await side.receive(len(requests))
    for frame, request in zip(frames, requests, strict=True):
        # Together they take twice the timeout.
        await side.send(encode_started([frame.header["id"]]))
        await asyncio.sleep(0.125)
        await side.send(encode_answer(frame.header["id"], ()))
        await request
    assert side.process.is_alive


@pytest.mark.parametrize("side", [0.05], indirect=True)
async def test_a_batch_that_hangs_ends_the_process_and_names_its_requests(side: ProcessSide) -> None:
    requests = [asyncio.create_task(side.process.predict([SAMPLE])) for _ in range(3)]
    ids = [frame.header["id"] for frame in await side.receive(3)]
    await side.send(encode_started(ids[:2]))
    errors = await asyncio.gather(*requests, return_exceptions=True)
    assert [isinstance(each, ProcessError) and each.batch_size for each in errors] == [2, 2, 0]
    assert "did not answer for 0.05 s" in str(errors[0])


async def test_requests_of_a_process_that_is_stopped_are_not_to_blame(side: ProcessSide) -> None:
    request = asyncio.create_task(side.process.predict([SAMPLE]))
    [frame] = await side.receive(1)
    await side.send(encode_started([frame.header["id"]]) + encode_frame({"op": "pong", "id": 0}))
    side.process.kill("it was replaced")
    with pytest.raises(ProcessError) as raised:
        await request
    assert raised.value.batch_size == 0


@pytest.mark.shell
async def test_a_slow_model_that_gets_more_than_it_can_answer_is_not_killed(start_house: Any) -> None:
    house: House = await start_house(serving_timeout_s=2.0, serving_max_batch=1)
    await house.deploy("slow", wait_s=0.1)
    pid = house.host.process.pid
    answers = await asyncio.gather(*(house.http.post("/predict", json=[row]) for row in ROWS))
    assert {each.status_code for each in answers} <= {200, 503}
    assert house.host.process.pid == pid
