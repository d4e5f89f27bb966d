"""The client's connection to the gateway, when the gateway is not what it should be."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from contracts import topology
from contracts.events.run import RunAccepted, RunQueued, RunStopping
from contracts.events.train import CancelRequested
from contracts.spec.run import RunSpec
from services.gateway.settings import GatewaySettings
from services.kit.bus import Bus
from services.kit.ports import free_ports
from services.kit.settings import Settings
from tests.gateway.conftest import running, until
from trainbus.client import connection
from trainbus.client.address import StackAddress
from trainbus.client.connection import Connection, connect
from trainbus.client.errors import NotFoundError, StackUnreachableError, TrainbusError, UsageError

SPEC = RunSpec(name="digits", command=["true"])


def at(url: str | None) -> StackAddress:
    return StackAddress(gateway_url=url)


async def test_a_gateway_that_is_away_is_named_with_what_to_do() -> None:
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    began = time.monotonic()
    with pytest.raises(StackUnreachableError, match=rf"gateway at {url} does not answer.*trainbus doctor"):
        async with connect(at(url)):
            pytest.fail("nobody listens")
    # The patience is a constant; a slow machine may add to it.
    assert time.monotonic() - began >= connection.PATIENCE_S
    assert connection.PATIENCE_S + connection.RETRY_S < 2
    with pytest.raises(StackUnreachableError, match="set TRAINBUS_GATEWAY_URL"):
        async with connect(at(None)):
            pytest.fail("there is no address")


async def test_something_else_that_answers_is_no_gateway() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(StackUnreachableError, match="is no gateway of trainbus"):
            async with connect(at(f"http://127.0.0.1:{port}")):
                pytest.fail("it is no gateway")


def answering(
    answer: Callable[[httpx.Request], httpx.Response], report: Callable[[str], None] = lambda text: None
) -> Connection:
    http = httpx.AsyncClient(base_url="http://gateway", transport=httpx.MockTransport(answer))
    return Connection(http, report)


async def test_an_event_that_cannot_be_read_is_left_out_and_told_once() -> None:
    event = {
        "id": "e1",
        "source": "trainbus/later",
        "type": "trainbus.run.teleported.v1",
        "time": "2026-01-01T00:00:00Z",
        "subject": "",
        "correlationid": "",
        "causationid": "",
        "natssubject": "run.r1.x",
        "data": {},
    }
    known = {**event, "type": "trainbus.run.queued.v1", "data": {"run_id": "r1", "next_generation": 1}}
    broken = {**known, "data": {"run_id": 7}}
    events = [{**each, "sequence": number} for number, each in enumerate([event, broken, event, known, broken], 1)]
    said: list[str] = []
    page = {"events": events, "last_event_id": 5, "has_more": False}
    found = await answering(lambda request: httpx.Response(200, json=page), said.append).read()
    assert [each.sequence for each in found] == [4]
    assert [line.split(",")[0] for line in said] == [
        "left out trainbus.run.teleported.v1 at 1",
        "left out trainbus.run.queued.v1 at 2",
    ]


async def test_an_event_of_an_earlier_version_is_read_as_todays() -> None:
    """A gateway of that version serves it as it was."""
    event = {
        "id": "run/r1/preempting/1",
        "source": "trainbus/scheduler",
        "type": "trainbus.run.preempting.v1",
        "time": "2026-01-01T00:00:00Z",
        "subject": "r1",
        "correlationid": "",
        "causationid": "",
        "natssubject": "run.r1.preempting",
        "sequence": 4,
        "data": {"run_id": "r1", "generation": 1, "reason": "node n1 is being drained", "grace_s": 30},
    }
    page = {"events": [event], "last_event_id": 4, "has_more": False}
    [found] = await answering(lambda request: httpx.Response(200, json=page)).read()
    assert isinstance(found.event, RunStopping)
    assert (found.event.reason, found.envelope.type) == ("drained", RunStopping.type)


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (404, {"detail": "there is no run 'x'"}, NotFoundError),
        (409, {"type": connection.AMBIGUOUS, "detail": "'x' is the start of 2 runs"}, NotFoundError),
        (409, {"detail": "run x is already completed"}, UsageError),
        (422, {"detail": "slots: give a number"}, UsageError),
        (503, {"detail": "NATS does not answer"}, StackUnreachableError),
        (500, {"detail": "the gateway failed"}, TrainbusError),
    ],
)
async def test_a_problem_becomes_an_error_with_its_text(
    status: int, body: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error) as raised:
        await answering(lambda request: httpx.Response(status, json=body)).get("/training-runs/x")
    assert type(raised.value) is error
    assert body["detail"] in str(raised.value)


async def test_a_proxy_without_a_problem_document_is_told_by_its_status() -> None:
    with pytest.raises(TrainbusError, match="http://gateway/events answers 502"):
        await answering(lambda request: httpx.Response(502, text="<html>")).get("/events")


async def test_a_request_is_sent_again_under_the_same_key() -> None:
    keys = []

    def answer(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers["Idempotency-Key"])
        if len(keys) == 1:
            raise httpx.ReadError("the connection broke")
        return httpx.Response(202, json={"refusal": "request.q.refused"})

    sent = await answering(answer).publish_request(CancelRequested(run_id="r1"))
    assert keys == [sent.event_id, sent.event_id]
    with pytest.raises(UsageError, match="printable ASCII"):
        await answering(answer).publish_request(CancelRequested(run_id="r1"), "é")


async def test_who_waits_is_told_that_the_gateway_is_away(settings: Settings, bus: Bus) -> None:
    port = free_ports(1)[0]
    own = GatewaySettings(**{**settings.model_dump(), "gateway_port": port})
    said: list[str] = []
    seen: list[int] = []
    url = f"http://127.0.0.1:{port}"

    async def follow(link: Connection) -> None:
        async for batch in link.follow(topology.FACTS):
            seen.extend(each.sequence for each in batch)
            if len(seen) == 2:
                return

    async with httpx.AsyncClient(base_url=url, timeout=60) as http, asyncio.timeout(90):
        link = Connection(http, said.append)
        async with running(own):
            following = asyncio.create_task(follow(link))
            await bus.publish(RunAccepted(run_id="r1", spec=SPEC, request_id="q", request_source="t"))
            await until(lambda: bool(seen))
        await until(lambda: bool(said))
        await bus.publish(RunQueued(run_id="r1", next_generation=1))
        async with running(own):
            await following
    assert seen == [1, 2]
    assert said == [f"the gateway at {url} is away; waiting for it", "the gateway is back"]
