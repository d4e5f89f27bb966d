"""A nats-server of a load test's own, and what it can do with nothing else going on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.kit.bus import Bus
from services.kit.ports import free_ports
from trainbus.embedded.servers import NatsServer


@contextmanager
def nats_server(folder: Path) -> Iterator[NatsServer]:
    """A server with its data in ``folder``, until the block ends."""
    server = NatsServer(folder, free_ports(1)[0])
    server.start()
    try:
        yield server
    finally:
        server.stop()


async def raw_publish_rate(bus: Bus, count: int = 3000, at_once: int = 64) -> float:
    """Messages a second that the bare server acknowledges to this client."""
    body, gate = b"x" * 300, asyncio.Semaphore(at_once)

    async def one(number: int) -> None:
        async with gate:
            await bus.js.publish(f"log.raw.{number % 10}", body)

    started = time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(count)))
    return count / (time.perf_counter() - started)
