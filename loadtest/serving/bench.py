"""A serving service of its own, on a NATS server and an object store of its own, with models of one kind."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from contracts.events.model import ModelDeployed, ModelDeployFailed
from contracts.events.run import CheckpointRef
from loadtest.served_models import SUMS, ModelStore, ServedKind
from loadtest.serving.client import Door, Query
from services.kit.bus import Bus
from services.kit.ports import free_ports
from services.kit.settings import Settings
from services.kit.store.objects import ObjectStore
from trainbus.embedded.servers import NatsServer, S3Server

KEYS = ("loadtest", "loadtest-secret")
PATIENCE_S = 180.0
#: Different requests that clients send.
QUERIES = 500


@dataclass(slots=True)
class Bench:
    """The service under test and what publishes to it."""

    store: ModelStore
    bus: Bus
    url: str
    door: Door
    #: Of the service.
    pid: int
    promoted_at: dict[int, float] = field(default_factory=dict)
    refs: dict[str, CheckpointRef] = field(default_factory=dict)

    async def promote(self, run_id: str, defect: str = "", **params: Any) -> ModelDeployed | ModelDeployFailed:
        """Train where that is not done, promote, and return how the deployment ended."""
        if run_id not in self.refs:
            self.refs[run_id] = await self.store.train(run_id, defect, **params)
        start = await self.bus.get_last_sequence(">") + 1
        self.promoted_at[max(self.store.promotions, default=0) + 1] = time.perf_counter()
        version = await self.store.promote(run_id, self.refs[run_id])
        return await self.conclusion(version, start)

    async def deploy(self, run_id: str, defect: str = "", **params: Any) -> ModelDeployed:
        """Promote, and return once it is served."""
        fact = await self.promote(run_id, defect, **params)
        assert isinstance(fact, ModelDeployed), fact
        return fact

    async def conclusion(self, version: int, start: int) -> ModelDeployed | ModelDeployFailed:
        """Return the next fact about the deployment of a version."""
        async with asyncio.timeout(PATIENCE_S):
            async for batch in self.bus.follow("FACTS", (f"model.{self.store.model}.*",), start, idle_s=0.05):
                for message in batch:
                    event = message.event
                    if isinstance(event, (ModelDeployed, ModelDeployFailed)) and event.version == version:
                        return event
        raise TimeoutError(f"version {version} is neither deployed nor refused")

    async def describe(self) -> dict[str, Any]:
        """Return what the service says of the model."""
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/models") as response:
            return next(each for each in await response.json() if each["model"] == self.store.model)

    def processes(self) -> set[int]:
        """Return the processes that the service has started, directly or not."""
        return {each.pid for each in psutil.Process(self.pid).children(recursive=True)}


def make_queries(kind: ServedKind) -> list[Query]:
    """Return the requests that clients send."""
    return [Query(*kind.encode(sample), answer) for sample, answer in kind.draw(QUERIES, 7)]


def read_prediction(content: Any) -> int:
    return int(content["predictions"][0]["prediction"])


@asynccontextmanager
async def start_bench(folder: Path, kind: ServedKind = SUMS, **settings: Any) -> AsyncIterator[Bench]:
    """Start the servers and the service, with settings by name (``max_queue=8``); stop them at the end."""
    nats = NatsServer(folder / "nats", free_ports(1)[0])
    s3 = S3Server(folder / "s3", free_ports(1)[0], *KEYS)
    port, health = free_ports(2)
    nats.start()
    s3.start()
    data = folder / "serving"
    data.mkdir()
    environment = _environment(nats, s3, data, port, health, settings)
    service: asyncio.subprocess.Process | None = None
    try:
        own = Settings(
            nats_url=nats.url,
            s3_endpoint=s3.endpoint,
            s3_access_key=KEYS[0],
            s3_secret_key=Settings(s3_secret_key=KEYS[1]).s3_secret_key,  # type: ignore[arg-type]
            data_dir=folder / "client",
        )
        bus = Bus("loadtest", own)
        await bus.connect()
        async with ObjectStore(own) as objects:
            for name in ("lake", "datasets", "models", "code"):
                await objects.ensure_bucket(name)
            with (folder / "serving.log").open("wb") as log:
                command = [sys.executable, "-m", "services.serving"]
                service = await asyncio.create_subprocess_exec(*command, env=environment, stdout=log, stderr=log)
            store = ModelStore(bus, objects, own, kind=kind)
            await store.write_shared()
            url = f"http://127.0.0.1:{port}"
            door = Door(f"{url}/predict", make_queries(kind), read_prediction)
            yield Bench(store, bus, url, door, service.pid)
        await bus.close()
    finally:
        if service is not None:
            service.terminate()
            await service.wait()
        s3.stop()
        nats.stop()


def _environment(
    nats: NatsServer, s3: S3Server, data: Path, port: int, health: int, settings: Mapping[str, Any]
) -> dict[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("TRAINBUS_")},
        "TRAINBUS_NATS_URL": nats.url,
        "TRAINBUS_S3_ENDPOINT": s3.endpoint,
        "TRAINBUS_S3_ACCESS_KEY": KEYS[0],
        "TRAINBUS_S3_SECRET_KEY": KEYS[1],
        "TRAINBUS_DATA_DIR": str(data),
        "TRAINBUS_HTTP_PORT": str(health),
        "TRAINBUS_SERVING_PORT": str(port),
        **{f"TRAINBUS_SERVING_{name.upper()}": str(value) for name, value in settings.items()},
    }
