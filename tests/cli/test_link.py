"""The command line's connection to the bus, when the bus is not what it should be."""

from __future__ import annotations

import asyncio

import nats.errors
import pytest

from contracts import topology
from services.kit.bus import Bus
from tests.conftest import NatsServer
from trainbus.cli import link
from trainbus.cli.address import Address
from trainbus.cli.errors import CliError


def address(url: str) -> Address:
    return Address(nats_url=url, s3_endpoint=None, s3_access_key=None, s3_secret_key=None)


async def test_a_server_that_listens_and_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "CONNECT_S", 0.2)
    silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    with pytest.raises(CliError, match=r"no answer in 0\.2 s"):
        async with link.connect(address(f"nats://127.0.0.1:{port}")):
            pytest.fail("there is nobody to talk to")
    silent.close()


async def test_who_waits_is_told_that_nats_is_away(
    bus: Bus, nats_server: NatsServer, capsys: pytest.CaptureFixture[str]
) -> None:
    async with link.connect(address(nats_server.url)) as connected:
        nats_server.kill()
        told = ""
        async with asyncio.timeout(10):
            while "is away" not in told:
                await asyncio.sleep(0.01)
                told += capsys.readouterr().err
            nats_server.start()
            while "is back" not in told:
                await asyncio.sleep(0.01)
                told += capsys.readouterr().err
        assert await connected.last_sequence(topology.FACTS) == 0
    assert capsys.readouterr().err == ""


async def test_a_question_without_an_answer(bus: Bus, nats_server: NatsServer) -> None:
    with pytest.raises(CliError, match="does not answer: nats: timeout"):
        async with link.connect(address(nats_server.url)):
            raise nats.errors.TimeoutError
