"""A service opens a connection that NATS has closed again, each time; where it cannot, it ends with an error."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

import nats
import pytest
from nats.aio.client import Client

from contracts import subjects
from services.kit import bus as bus_module
from services.kit.bus import ConnectionLost
from services.kit.service import Service
from services.kit.settings import Settings
from tests.kit.support import until
from tests.tcp_proxy import PORTION, TcpProxy


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise OSError("refused")

    monkeypatch.setattr(bus_module, "REOPEN_ATTEMPTS", 2)
    monkeypatch.setattr(bus_module, "REOPEN_INTERVAL_S", 0.05)
    monkeypatch.setattr(Client, "connect", refuse)


async def start(service: Service) -> asyncio.Task[None]:
    running = asyncio.create_task(service.run())
    await until(lambda: service.check_readiness()["started"], "the service to start")
    return running


async def test_a_service_ends_with_an_error_when_the_connection_is_lost_for_good(
    settings: Settings, request: pytest.FixtureRequest
) -> None:
    service = Service("test", settings)
    running = await start(service)
    request.getfixturevalue("refused")
    await service.bus.nc._process_err("'Maximum Payload Violation'")
    with pytest.raises(ConnectionLost):
        async with asyncio.timeout(30):
            await running


async def test_a_service_stops_when_asked_while_its_connection_is_closed(
    settings: Settings, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service("test", settings)
    running = await start(service)
    request.getfixturevalue("refused")
    monkeypatch.setattr(bus_module, "REOPEN_ATTEMPTS", 1000)
    await service.bus.nc._process_err("'Maximum Payload Violation'")
    await until(lambda: service.bus.nc.is_closed, "the end of the connection")
    service.stopping.set()
    async with asyncio.timeout(30):
        await running


@pytest.mark.parametrize("moment", ["connected", "opened"])
async def test_a_connection_is_opened_again_that_is_closed_while_it_is_opened(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    service = Service("test", settings)
    running = await start(service)
    bus, opened = service.bus, 0
    owner, name = (Client, "connect") if moment == "connected" else (bus, "_on_reconnected")
    plain = getattr(owner, name)

    async def run_and_be_closed(*arguments: Any, **options: Any) -> None:
        nonlocal opened
        await plain(*arguments, **options)
        opened += 1
        if opened < 3:
            await bus.nc.close()

    monkeypatch.setattr(owner, name, run_and_be_closed)
    await bus.nc._process_err("'Maximum Payload Violation'")
    await until(lambda: opened == 3 and bus.connected, "the third connection")
    await check_answers(service)
    service.stopping.set()
    await running


class RefusingProxy(TcpProxy):
    """Forwards everything; can end all connections, and refuse the next ones as a server does that has too many."""

    def __init__(self, upstream: int) -> None:
        super().__init__(upstream)
        self.refusals = 0
        self._writers: list[asyncio.StreamWriter] = []

    def end_connections(self, refusals: int) -> None:
        self.refusals = refusals
        for writer in self._writers:
            writer.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, requests = await self.connect()
        if self.refusals:
            self.refusals -= 1
            writer.write(await answers.readline() + b"-ERR 'maximum connections exceeded'\r\n")
            await writer.drain()
            writer.close()
            requests.close()
            return
        self._writers += [writer, requests]
        await asyncio.gather(self._forward(reader, requests), self._forward(answers, writer))

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while portion := await reader.read(PORTION):
            writer.write(portion)
            await writer.drain()
        writer.close()


async def test_a_refusal_by_a_server_that_is_back_does_not_end_the_tries(settings: Settings) -> None:
    port = urlsplit(settings.nats_url).port
    assert port is not None
    async with RefusingProxy(port) as proxy:
        through = settings.model_copy(update={"nats_url": f"nats://127.0.0.1:{proxy.port}"})
        service = Service("test", through)
        running = await start(service)
        proxy.end_connections(refusals=3)
        await until(lambda: not proxy.refusals, "the refusals")
        await until(lambda: service.bus.connected, "a connection")
        await check_answers(service)
        service.stopping.set()
        await running


async def test_a_connection_is_opened_again_that_ends_with_something_to_send(settings: Settings) -> None:
    service = Service("test", settings)
    running = await start(service)
    connection = service.bus.nc
    # As ``publish`` leaves it, until the flusher has its turn.
    command = b"PUB elsewhere 0\r\n\r\n"
    connection._pending.append(command)
    connection._pending_data_size += len(command)
    connection._transport._io_writer.transport.abort()
    await connection._process_err("'Maximum Payload Violation'")
    await until(lambda: connection.is_closed, "the end of the connection")
    await until(lambda: service.bus.connected, "the next one")
    await check_answers(service)
    service.stopping.set()
    await running


async def check_answers(service: Service) -> None:
    """Ask the service on the bus whether it is ready."""
    client = await nats.connect(service.settings.nats_url)
    answer = await client.request(subjects.service(service.name, subjects.PRESENCE), timeout=30)
    assert json.loads(answer.data)["ready"]
    await client.close()
