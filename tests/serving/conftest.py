"""A serving service in this process, on a real nats-server and object store, with models of the load test."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import pytest_asyncio

from contracts.events.model import ModelDeployed, ModelDeployFailed
from contracts.events.run import CheckpointRef
from loadtest.served_models import ModelStore
from services.kit.bus import Bus
from services.kit.settings import Settings
from services.kit.socket_files import socket_path
from services.kit.store.objects import ObjectStore
from services.kit.warm_server import WarmServer
from services.serving.app import ServingService, build
from services.serving.process import PYTHON_ROOT
from services.serving.router import Router, ServedModel
from services.serving.settings import ServingSettings
from services.serving.version import ModelHost

PATIENCE_S = 90.0
AnyFact = TypeVar("AnyFact")


class SharedWarmServer(WarmServer):
    """The connection to a warm server that goes on when a service ends: importing torch takes seconds."""

    async def close(self) -> None:
        self._closing = True
        if self._writer is not None:
            self._writer.close()


@pytest.fixture(scope="session")
def warm_socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A warm server for all tests."""
    path = socket_path(tmp_path_factory.mktemp("warm"), "warm.sock")
    environment = {**os.environ, "PYTHONPATH": str(PYTHON_ROOT), "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen([sys.executable, "-m", "trainbus.ranks.warm", "--socket", str(path)], env=environment)
    with socket.socket(socket.AF_UNIX) as link:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            try:
                link.connect(str(path))  # while a connection is open it stays
                break
            except OSError:
                assert server.poll() is None
                time.sleep(0.1)
        yield path
    server.terminate()
    server.wait()


@pytest.fixture(autouse=True)
def shared_warm_server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the services of a test fork from the one warm server."""
    if "start_house" in request.fixturenames:
        path: Path = request.getfixturevalue("warm_socket")
        make = lambda settings: SharedWarmServer(path, settings.data_dir / "warm.log", {})  # noqa: E731
        monkeypatch.setattr("services.serving.app._warm_server", make)
        monkeypatch.setattr("services.serving.deployer.PING_S", 60.0)


async def wait_until(condition: Callable[[], Any], what: str) -> Any:
    """Return what ``condition`` returns once that is true."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {PATIENCE_S:.0f} s: {what}")
        await asyncio.sleep(0.02)
    return found


@dataclass(slots=True)
class House:
    """A running service, its models, and a client."""

    store: ModelStore
    settings: ServingSettings
    service: ServingService
    http: httpx.AsyncClient
    bus: Bus
    router: Router
    runs: dict[str, CheckpointRef] = field(default_factory=dict)

    @property
    def served(self) -> ServedModel:
        return self.router.models["sums"]

    @property
    def host(self) -> ModelHost:
        """The host of the version that answers."""
        assert self.served.primary is not None
        return self.served.primary.host

    async def promote(self, run_id: str, defect: str = "", **params: Any) -> int:
        """Train where that is not done yet, and promote; return the version."""
        if run_id not in self.runs:
            self.runs[run_id] = await self.store.train(run_id, defect, **params)
        return await self.store.promote(run_id, self.runs[run_id])

    async def conclusion(self, version: int) -> ModelDeployed | ModelDeployFailed:
        """Return the newest fact about the deployment of a version, once there is one."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            found = [each.event for each in await self.bus.read_history("model.sums.*")]
            mine = [
                each
                for each in found
                if isinstance(each, (ModelDeployed, ModelDeployFailed)) and each.version == version
            ]
            if mine:
                return mine[-1]
            await asyncio.sleep(0.05)
        raise AssertionError(f"version {version} is neither deployed nor refused: {await self.models()}")

    async def taken_back(self, version: int) -> ModelDeployFailed:
        """Return why a version that was deployed is not served any more, once that is so."""
        async with asyncio.timeout(PATIENCE_S):
            async for batch in self.bus.follow("FACTS", ("model.sums.deploy_failed",)):
                for message in batch:
                    if message.event.version == version:
                        assert isinstance(message.event, ModelDeployFailed)
                        return message.event
        raise AssertionError(f"version {version} is served")

    async def find_facts(self, kind: type[AnyFact]) -> list[AnyFact]:
        """Return the facts of one kind about the model."""
        history = await self.bus.read_history("model.sums.*")
        return [each.event for each in history if isinstance(each.event, kind)]

    async def deploy(self, run_id: str, defect: str = "", **params: Any) -> ModelDeployed:
        """Promote and wait until it is served."""
        fact = await self.conclusion(await self.promote(run_id, defect, **params))
        assert isinstance(fact, ModelDeployed), fact
        return fact

    async def wait_ready(self) -> None:
        """Wait until the model is served."""
        for _ in range(int(PATIENCE_S / 0.05)):
            if (await self.http.get("/v2/models/sums/ready")).status_code == 200:
                return
            await asyncio.sleep(0.05)
        raise AssertionError(await self.models())

    async def models(self) -> Any:
        return (await self.http.get("/models")).json()

    async def predict(self, *rows: dict[str, Any]) -> Any:
        """Return the body of a successful answer."""
        response = await self.http.post("/predict", json={"rows": list(rows)})
        assert response.status_code == 200, response.text
        return response.json()


@pytest_asyncio.fixture
async def store(bus: Bus, objects: ObjectStore, s3_settings: Settings) -> ModelStore:
    found = ModelStore(bus, objects, s3_settings)
    await found.write_shared()
    return found


@pytest_asyncio.fixture
async def start_house(
    store: ModelStore, s3_settings: Settings, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Callable[..., Any]]:
    """Start services; each ends with the test, or by the second result."""
    routers: list[Router] = []

    def make_router(*arguments: Any, **named: Any) -> Router:
        routers.append(Router(*arguments, **named))
        return routers[-1]

    monkeypatch.setattr("services.serving.app.Router", make_router)
    running: list[tuple[ServingService, asyncio.Task[None], httpx.AsyncClient]] = []

    async def stop(service: ServingService, task: asyncio.Task[None], http: httpx.AsyncClient) -> None:
        await http.aclose()
        service.stopping.set()
        await task

    async def start(**changes: Any) -> House:
        fields = {**s3_settings.model_dump(), "serving_port": 0, "serving_timeout_s": 60.0, **changes}
        own = ServingSettings(**fields)
        service = build(own)
        task = asyncio.create_task(service.run())
        await wait_until(lambda: service.serving_port or task.done(), "the port")
        if task.done():
            task.result()
        http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{service.serving_port}", timeout=60)
        running.append((service, task, http))
        return House(store, own, service, http, bus, routers[-1])

    async def stop_all() -> None:
        while running:
            await stop(*running.pop())

    start.stop_all = stop_all  # type: ignore[attr-defined]
    yield start
    await stop_all()


@pytest_asyncio.fixture
async def house(start_house: Callable[..., Any]) -> House:
    return await start_house()  # type: ignore[no-any-return]
