"""The frame: health, readiness, metrics, an orderly end."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from prometheus_client import REGISTRY

from services.kit import service as service_module
from services.kit.concurrency import cancel_and_wait
from services.kit.service import Service
from services.kit.settings import Settings
from tests.kit.support import until
from trainbus.embedded.servers import NatsServer


@pytest.fixture
def http_settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"http_port": 0})


async def test_health_readiness_and_metrics(http_settings: Settings) -> None:
    service = Service("test", http_settings)
    warm = False
    service.add_readiness_check("warm", lambda: warm)
    running = asyncio.create_task(service.run())
    await until(lambda: service.check_readiness()["started"], "the start")
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{service.http_port}") as client:
        assert (await client.get("/health")).json()["status"] == "ok"
        assert (await client.get("/ready")).status_code == 503
        warm = True
        assert (await client.get("/ready")).json()["ready"] is True
        assert "trainbus_bus_connected 1.0" in (await client.get("/metrics")).text
    service.stopping.set()
    await asyncio.wait_for(running, 60)


async def test_a_service_waits_for_its_server_and_is_healthy_meanwhile(
    http_settings: Settings, nats_server: NatsServer
) -> None:
    nats_server.kill()
    service = Service("test", http_settings)
    running = asyncio.create_task(service.run())
    await until(lambda: service.http_port is not None, "the endpoints")
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{service.http_port}") as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 503
        nats_server.start()
        await until(lambda: service.check_readiness()["started"], "the start")
        assert (await client.get("/ready")).status_code == 200
    service.stopping.set()
    await asyncio.wait_for(running, 60)


async def test_a_broken_background_task_ends_the_service(settings: Settings) -> None:
    service = Service("test", settings)

    async def breaks() -> None:
        raise RuntimeError("broken")

    service.add_background_task(breaks)
    with pytest.raises(RuntimeError, match="broken"):
        await asyncio.wait_for(service.run(), 60)


@pytest.mark.parametrize("away", ["bus", "store"])
async def test_a_service_stopped_before_its_start_runs_the_early_stop_action(
    settings: Settings, nats_server: NatsServer, away: str
) -> None:
    service = Service("test", settings)
    ended: list[str] = []
    entering = asyncio.Event()

    @asynccontextmanager
    async def store() -> AsyncIterator[None]:
        entering.set()
        await asyncio.Event().wait()
        yield

    async def record(action: str) -> None:
        ended.append(action)

    service.add_stop_action(lambda: record("stopped"), before_start=lambda: record("stopped early"))
    if away == "bus":
        nats_server.kill()
    else:
        service.add_resource(store())
    running = asyncio.create_task(service.run())
    if away == "store":
        await asyncio.wait_for(entering.wait(), 60)
    else:
        await asyncio.sleep(0)
    service.stopping.set()
    await asyncio.wait_for(running, 60)
    assert ended == ["stopped early"]


async def test_stop_actions_run_while_the_bus_still_works(settings: Settings) -> None:
    service = Service("test", settings)
    was_connected: list[bool] = []

    async def record_connection() -> None:
        await service.bus.nc.flush()
        was_connected.append(service.bus.connected)

    service.add_stop_action(record_connection)
    running = asyncio.create_task(service.run())
    await until(lambda: service.check_readiness()["started"], "the start")
    service.stopping.set()
    await asyncio.wait_for(running, 60)
    assert was_connected == [True]


async def test_an_event_loop_that_is_held_up_shows_in_the_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    def late_s() -> float:
        return REGISTRY.get_sample_value("trainbus_loop_lag_seconds_sum") or 0.0

    monkeypatch.setattr(service_module, "LAG_INTERVAL_S", 0.01)
    before, measuring = late_s(), asyncio.create_task(service_module.measure_lag())
    await asyncio.sleep(0)
    time.sleep(0.2)  # noqa: ASYNC251  what no code may do on the loop
    await until(lambda: late_s() >= before + 0.15, "the delay to show")
    await cancel_and_wait(measuring)


def test_a_collection_passes_over_what_is_loaded_before_the_service_runs() -> None:
    """A full collection stops the event loop for as long as it walks through what never goes."""
    program = """
import gc
from services.kit.service import Service
from services.kit.settings import Settings

class ObjectCounter(Service):
    async def run(self):
        print(len(gc.get_objects()), gc.get_freeze_count())

ObjectCounter("counter", Settings()).main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    walked_through, passed_over = map(int, done.stdout.split())
    assert walked_through < passed_over / 100
