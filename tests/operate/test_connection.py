"""An operator's connection to the bus, when the bus is not what it should be."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import nats.errors
import pytest

from contracts import topology
from services.kit.bus import Bus
from services.kit.ports import free_ports, port_is_free
from tests.conftest import NatsServer
from tests.kit.support import until
from trainbus.client.address import StackAddress
from trainbus.client.errors import TrainbusError
from trainbus.operate import connection


def address(url: str) -> StackAddress:
    return StackAddress(nats_url=url)


async def test_a_server_that_listens_and_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CONNECT_S", 0.2)
    silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    with pytest.raises(TrainbusError, match="no answer"):
        async with connection.connect(address(f"nats://127.0.0.1:{port}")):
            pytest.fail("no server to connect to")
    silent.close()


class GuardedServer(NatsServer):
    def command(self) -> list[str]:
        return [*super().command(), "--user", "me", "--pass", "secret"]

    def answers(self) -> bool:
        return not port_is_free(self.port)


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[NatsServer]:
    server = GuardedServer(tmp_path / "nats", free_ports(1)[0])
    server.start()
    yield server
    server.stop()


async def test_a_server_that_wants_to_know_who_asks(guarded: NatsServer) -> None:
    with pytest.raises(TrainbusError, match=r"Authorization Violation.*TRAINBUS_NATS_USER"):
        async with connection.connect(address(guarded.url)):
            pytest.fail("it lets everybody in")


async def test_a_refusal_whose_reason_is_cut_off_is_asked_for_again() -> None:
    """The server closes with our PING unread, and the reset may overtake its word for it."""
    asked = 0

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        writer.write(b'INFO {"server_id": "x", "version": "2.11.0", "max_payload": 1048576}\r\n')
        if await reader.readline():
            asked += 1
            if asked > 1:
                writer.write(b"-ERR 'Authorization Violation'\r\n")
                await writer.drain()
                await reader.read(100)
            else:
                writer.transport.abort()
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(TrainbusError, match=r"Authorization Violation.*TRAINBUS_NATS_USER"):
            async with connection.connect(address(f"nats://127.0.0.1:{port}")):
                pytest.fail("the server refuses every client")
    assert asked >= 2


async def test_who_waits_is_told_that_nats_is_away(
    bus: Bus, nats_server: NatsServer, capsys: pytest.CaptureFixture[str]
) -> None:
    async with connection.connect(address(nats_server.url)) as connected:
        nats_server.kill()
        told = ""
        async with asyncio.timeout(60):
            while "is away" not in told:
                await asyncio.sleep(0.01)
                told += capsys.readouterr().err
            nats_server.start()
            while "is back" not in told:
                await asyncio.sleep(0.01)
                told += capsys.readouterr().err
        assert await connected.last_sequence(topology.FACTS) == 0
        await until(lambda: bus.connected, "the bus, which was not asked about, to be back too")
    assert capsys.readouterr().err == ""


async def test_a_question_without_an_answer(bus: Bus, nats_server: NatsServer) -> None:
    with pytest.raises(TrainbusError, match="does not answer: nats: timeout"):
        async with connection.connect(address(nats_server.url)):
            raise nats.errors.TimeoutError
