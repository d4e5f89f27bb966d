"""What the speed, recovery and crash tests share: a real server, the real service in a process of its own, a watch."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from contracts.base import run_id_for
from services.kit.bus import Bus
from services.kit.follow import follow
from services.kit.settings import Settings
from trainbus.cli.embedded.servers import NatsServer

SOURCE = "loadtest"


class Watch:
    """Follows the facts and keeps, by kind, when each was stored (seconds, the server's clock)."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        #: Fact -> run -> the first time it was stored.
        self.at: dict[str, dict[str, float]] = {}
        self.bodies: dict[str, dict[str, bytes]] = {"waiting": {}}
        self.facts = 0
        self._moved = asyncio.Condition()

    async def run(self, start_sequence: int) -> None:
        messages = follow(
            lambda: self.bus.nc, "FACTS", ("run.*.*",), start_sequence, idle_s=0.25, until_caught_up=False
        )
        async for batch in messages:
            for msg in batch:
                _, run_id, name = msg.subject.split(".")
                # The last nine digits of the timestamp are nanoseconds.
                at = int(msg.reply.split(".")[-3]) / 1e9
                self.at.setdefault(name, {}).setdefault(run_id, at)
                if name in self.bodies:
                    self.bodies[name][run_id] = msg.data
            self.facts += len(batch)
            async with self._moved:
                self._moved.notify_all()

    async def until(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s), self._moved:
                await self._moved.wait_for(condition)
        except TimeoutError:
            counts = {name: len(runs) for name, runs in self.at.items()}
            raise RuntimeError(f"waited {timeout_s:.0f} s for {what}; facts so far: {counts}") from None


async def submit(bus: Bus, bodies: list[dict[str, Any]], prefix: str, rate: float = 0) -> dict[str, float]:
    """Publish requests, as fast as can be or ``rate`` a second; run -> when it was sent (wall clock)."""
    gate = asyncio.Semaphore(64)
    sent: dict[str, float] = {}

    async def one(number: int, body: dict[str, Any]) -> None:
        async with gate:
            event_id = f"{prefix}-{number}"
            sent[run_id_for(SOURCE, event_id)] = time.time()
            headers = {"ce-source": SOURCE, "ce-id": event_id, "Nats-Msg-Id": event_id}
            await bus.js.publish("train.requested", json.dumps(body).encode(), headers=headers, timeout=30)

    started, tasks = time.perf_counter(), []
    for number, body in enumerate(bodies):
        if rate and (ahead := started + number / rate - time.perf_counter()) > 0:
            await asyncio.sleep(ahead)
        tasks.append(asyncio.create_task(one(number, body)))
    await asyncio.gather(*tasks)
    return sent


async def raw_publish_rate(bus: Bus, count: int = 3000, at_once: int = 64) -> float:
    """Messages a second that the bare server acknowledges to this client, with nothing else going on."""
    body, gate = b"x" * 300, asyncio.Semaphore(at_once)

    async def one(number: int) -> None:
        async with gate:
            await bus.js.publish(f"log.raw.{number % 10}", body)

    started = time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(count)))
    return count / (time.perf_counter() - started)


@contextmanager
def process(module: str, *arguments: str, log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A Python module in a process of its own; it is ended with the block."""
    with log.open("ab") as err:
        child = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=err,
        )
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def service(server: NatsServer, **settings: str) -> Any:
    """The scheduler in a process of its own."""
    environment = {"TRAINBUS_NATS_URL": server.url, "TRAINBUS_HTTP_PORT": "-1", **settings}
    return process("services.scheduler", log=server.folder / "scheduler.log", **environment)


@asynccontextmanager
async def connected(server: NatsServer, name: str = "loadtest") -> AsyncIterator[Bus]:
    bus = Bus(name, Settings(nats_url=server.url, http_port=-1))
    await bus.connect()
    try:
        yield bus
    finally:
        await bus.close()


async def ask(bus: Bus, what: str, timeout_s: float = 5.0) -> dict[str, Any]:
    """The scheduler's answer to a direct question."""
    answer = await bus.nc.request(f"svc.scheduler.{what}", b"{}", timeout=timeout_s)
    return dict(json.loads(answer.data))


async def until_leading(bus: Bus, timeout_s: float = 120.0) -> None:
    """Wait until a scheduler answers that it leads."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with suppress(Exception):
            if (await ask(bus, "state", 1.0))["leads"]:
                return
        await asyncio.sleep(0.02)
    raise RuntimeError(f"no scheduler leads after {timeout_s:.0f} s")


def resident_mb(pid: int) -> float:
    return float(psutil.Process(pid).memory_info().rss) / 1e6


def cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)
