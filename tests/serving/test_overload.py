"""Overload: what would wait for too long is refused before any work, and kills no process."""

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
from services.serving.admission import ClientDisconnected, HostQueue, OverloadedError, ServerLoad
from services.serving.core.batch_times import BatchTimes
from services.serving.early_refusal import count_missing_bytes, find_refusal
from services.serving.process import ModelProcess, ProcessError, ProcessLimits
from services.serving.router import Router
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


def test_batch_times_tell_work_that_grows_with_the_samples_from_work_that_does_not() -> None:
    constant, linear = BatchTimes(32), BatchTimes(32)
    for samples in (1, 32, 7, 16, 2, 30) * 10:
        constant.observe(samples, 0.1)
        linear.observe(samples, 0.01 * samples)
    assert constant.estimate_s(64) == pytest.approx(0.2)
    assert linear.estimate_s(64) == pytest.approx(0.64)
    assert BatchTimes(32).estimate_s(1000) == 0


async def test_the_queue_hands_over_a_window_in_order_and_refuses_what_would_wait_too_long() -> None:
    queue = HostQueue("m", max_batch=1, max_wait_s=0.25)
    queue.batch_times.observe(1, 0.1)
    await queue.wait_turn(1)
    await queue.wait_turn(1)
    third = asyncio.create_task(queue.wait_turn(1))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="would wait for") as raised:
        await queue.wait_turn(1)
    assert raised.value.retry_after_s == 1
    queue.end_turn(1)
    await third
    late = asyncio.create_task(queue.wait_turn(1))
    with pytest.raises(OverloadedError):
        await late
    queue.end_turn(1)
    queue.end_turn(1)
    await queue.wait_turn(1)


async def test_what_waited_for_a_client_that_is_gone_is_not_computed() -> None:
    async def is_disconnected() -> bool:
        return True

    queue = HostQueue("m", max_batch=1, max_wait_s=60)
    await queue.wait_turn(2)
    gone, cancelled, waiting = (
        asyncio.create_task(each)
        for each in (queue.wait_turn(1, is_disconnected), queue.wait_turn(1), queue.wait_turn(1))
    )
    await asyncio.sleep(0)
    cancelled.cancel()
    queue.end_turn(2)
    await waiting
    with pytest.raises(ClientDisconnected):
        await gone
    queue.end_turn(1)
    assert queue.expected_wait_s == 0


@pytest.mark.parametrize(
    ("request_bytes", "missing_bytes"),
    [
        (b"POST /predict HTTP/1.1\r\nContent-Length: 3\r\nhost: x\r\n\r\nabc", 0),
        (b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-length:3\r\n\r\n", 3),
        (b"POST /predict HTTP/1.1\r\ncontent-length: 3\r\n\r\nabcPOST", None),
        (b"POST /predict HTTP/1.1\r\ncontent-length: 3\r\n", None),
        (b"POST /predict HTTP/1.1\r\ncontent-length: 3\r\ncontent-length: 9\r\n\r\n", None),
        (b"POST /predict HTTP/1.1\r\nhost: x\r\n\r\ncontent-length: 3\r\n", None),
        (b"POST /predict HTTP/1.1\r\ncontent-length: 3\r\nExpect: 100-continue\r\n\r\n", None),
        (b"POST /predict HTTP/1.1\r\ntransfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n", None),
    ],
)
def test_only_the_plain_kind_of_request_is_refused_by_its_head(request_bytes: bytes, missing_bytes: int | None) -> None:
    assert count_missing_bytes(request_bytes) == missing_bytes


async def open_connection(house: House) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    assert house.service.serving_port is not None
    return await asyncio.open_connection("127.0.0.1", house.service.serving_port)


async def read_answer(reader: asyncio.StreamReader) -> tuple[str, dict[str, str], bytes]:
    """Return the status line, headers and body of an answer."""
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return status, headers, await reader.readexactly(int(headers["content-length"]))


@pytest.mark.shell
async def test_a_slow_model_that_gets_more_than_it_can_answer_is_not_killed(start_house: Any) -> None:
    house: House = await start_house(serving_timeout_s=2.0, serving_max_batch=1, serving_max_wait_s=60.0)
    await house.deploy("slow", wait_s=0.1)
    pid = house.host.process.pid
    answers = await asyncio.gather(*(house.http.post("/predict", json=[row]) for row in ROWS))
    assert {each.status_code for each in answers} == {200}
    assert house.host.process.pid == pid


@pytest.mark.shell
async def test_what_would_wait_for_too_long_is_refused_and_is_no_fault_of_the_version(start_house: Any) -> None:
    house: House = await start_house(serving_max_batch=1, serving_max_wait_s=0.5)
    await house.deploy("slow", wait_s=0.1)
    answers = await asyncio.gather(*(house.http.post("/predict", json=[row]) for row in ROWS))
    refused = [each for each in answers if each.status_code != 200]
    assert {each.status_code for each in refused} == {503}
    assert {each.headers["retry-after"] for each in refused} <= {"1", "2"}
    assert "is overloaded" in refused[0].json()["error"]
    assert (await house.models())[0]["errors"] == 0


@pytest.mark.shell
async def test_a_full_server_refuses_before_the_body_is_read(start_house: Any) -> None:
    house: House = await start_house(serving_max_queue=1)
    await house.deploy("good")
    house.router.load.begin_request()  # as an open request does
    row = json.dumps([ROWS[0]]).encode()
    head = b"POST /predict/sums HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
    for sent in (head % len(row) + row, head % 10**6, head % len(row) + row[:3]):
        reader, writer = await open_connection(house)
        writer.write(sent)
        status, headers, body = await read_answer(reader)
        assert "503" in status
        assert headers["retry-after"] == "1"
        assert "the server is overloaded" in json.loads(body)["error"]
        writer.close()
    assert (await house.http.get("/models")).status_code == 200
    reader, writer = await open_connection(house)
    for parts in ((head % len(row) + row,), (head % len(row), row[:3], row[3:])):  # the connection goes on
        for part in parts:
            writer.write(part)
            await writer.drain()
        assert "503" in (await read_answer(reader))[0]
    house.router.load.end_request()
    writer.write(head % len(row) + row)
    assert "200" in (await read_answer(reader))[0]
    writer.close()


@pytest.mark.parametrize(
    ("path", "is_prediction"),
    [
        ("/predict", True),
        ("/predict/sums", True),
        ("/v1/models/sums:predict", True),
        ("/v2/models/sums/infer", True),
        ("/v2/models/sums/versions/1/infer", True),
        ("/v2/models/sums", False),
        ("/models", False),
    ],
)
def test_a_full_server_refuses_every_request_for_a_prediction(path: str, is_prediction: bool) -> None:
    router = Router(1.0, ServerLoad(max_open=1, max_wait_s=1.0))
    router.load.begin_request()
    assert (find_refusal(router, path, "") is not None) == is_prediction


async def test_of_many_heads_that_are_read_at_once_no_more_pass_than_may_be_open() -> None:
    router = Router(1.0, ServerLoad(max_open=3, max_wait_s=1.0))

    def count_refused(requests: int) -> int:
        found = [find_refusal(router, "/predict", "", is_arrival=True) for _ in range(requests)]
        return sum(each is not None for each in found)

    assert count_refused(5) == 2
    await asyncio.sleep(0)  # the next round of the event loop: what was read is open, or has ended
    assert count_refused(3) == 0
