"""A service whose connection NATS closes for good ends with an error, and stops when asked until then."""

from __future__ import annotations

import asyncio

import pytest
from nats.aio.client import Client

from services.kit import bus as bus_module
from services.kit.bus import ConnectionLost
from services.kit.service import Service
from services.kit.settings import Settings
from tests.kit.support import until


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
