"""Streams of events through what happens to them: a slow reader, a gateway that is killed, two behind one address."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from contextlib import suppress

import httpx
import pytest
from prometheus_client import REGISTRY

from contracts import topology
from contracts.events.run import RunAccepted, RunLog, RunQueued
from contracts.events.train import TrainRequested
from services.gateway.settings import GatewaySettings
from services.kit import http_server
from services.kit.bus import Bus
from services.kit.ports import free_ports
from tests.gateway.conftest import RUN, SPEC, Running, until
from tests.gateway.gateway_process import spawn_gateway
from tests.tcp_proxy import PORTION, TcpProxy
from trainbus.client import connection
from trainbus.client.connection import Connection

#: Messages of output that no socket of the machine holds: 20 MB.
MESSAGES, LINES = 200, ("x" * 1000,) * 100
GATEWAYS = 2


def count_cut_off() -> float:
    return REGISTRY.get_sample_value("trainbus_http_readers_cut_off_total") or 0.0


async def read_sequences(reader: asyncio.StreamReader, count: int) -> list[int]:
    """Return the sequences of whole events; of fewer than ``count`` where the connection ends."""
    seen: list[int] = []
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while len(seen) < count:
            line = await reader.readuntil(b"\n")
            if line.startswith(b"data: "):
                seen.append(json.loads(line.removeprefix(b"data: "))["sequence"])
    return seen


async def test_a_slow_reader_is_cut_off_and_goes_on_where_it_was(
    gateway: Running, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    for offset in range(MESSAGES):
        await bus.publish(RunLog(run_id=RUN, generation=1, rank=0, offset=offset, lines=LINES))
    monkeypatch.setattr(http_server, "READER_PATIENCE_S", 0.2)
    before = count_cut_off()

    async def ask(after: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        with socket.socket() as plain:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            plain.connect(("127.0.0.1", gateway.service.gateway_port))
            reader, writer = await asyncio.open_connection(sock=plain.dup(), limit=2**20)
        head = f"GET /events?stream=logs HTTP/1.1\r\nHost: x\r\nLast-Event-ID: {after}\r\n\r\n"
        writer.write(head.encode())
        return reader, writer

    async with asyncio.timeout(90):
        reader, writer = await ask(0)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await until(lambda: count_cut_off() > before)
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        seen = await read_sequences(reader, MESSAGES)
        writer.close()
        assert len(seen) < MESSAGES
        monkeypatch.setattr(http_server, "READER_PATIENCE_S", 60.0)
        reader, writer = await ask(seen[-1] if seen else 0)
        seen += await read_sequences(reader, MESSAGES - len(seen))
        writer.close()
    assert seen == list(range(1, MESSAGES + 1))


class TwoGateways(TcpProxy):
    """One address before several gateways, of which it asks the next with each connection, as a load balancer does."""

    def __init__(self, ports: list[int]) -> None:
        super().__init__(0)
        self._ports, self._turn = ports, 0

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        for _ in self._ports:
            self._turn = (self._turn + 1) % len(self._ports)
            with suppress(OSError):
                return await asyncio.open_connection("127.0.0.1", self._ports[self._turn])
        raise ConnectionError("no gateway answers")

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_gateway, from_client = writer, reader
        upstream_reader, upstream_writer = await self.connect()

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            with suppress(OSError):
                while portion := await source.read(PORTION):
                    sink.write(portion)
                    await sink.drain()
            sink.close()

        await asyncio.gather(pump(from_client, upstream_writer), pump(upstream_reader, to_gateway))


async def test_two_gateways_behind_one_address_are_one(
    bus: Bus, gateway_settings: GatewaySettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request of one is known to the other; one that is killed takes no event of a follower with it."""
    monkeypatch.setattr(connection, "PATIENCE_S", 60.0)
    ports = free_ports(GATEWAYS)
    seen: list[int] = []

    async def follow(link: Connection) -> None:
        async for batch in link.follow(topology.FACTS, "run.>"):
            seen.extend(each.sequence for each in batch)

    async with (
        asyncio.timeout(100),
        spawn_gateway(gateway_settings, ports[0]) as first,
        spawn_gateway(gateway_settings, ports[1]),
        TwoGateways(ports) as address,
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{address.port}", timeout=60, limits=httpx.Limits(max_keepalive_connections=0)
        ) as http,
    ):
        link = Connection(http, lambda text: None)
        following = [asyncio.create_task(follow(link)) for _ in range(GATEWAYS)]
        for number in range(4):
            sent = await link.publish_request(TrainRequested(name=f"run {number}", command=["true"]))
            for _ in range(GATEWAYS):
                listed = (await link.get("/training-runs"))["runs"]
                assert listed[0]["run_id"] == sent.run_id
                assert (await link.get(f"/training-runs/run {number}"))["run_id"] == sent.run_id
        await bus.publish(RunAccepted(run_id=RUN, spec=SPEC, request_id="q", request_source="t"))
        await until(lambda: len(seen) == GATEWAYS)
        first.send_signal(signal.SIGKILL)
        for generation in range(1, 20):
            await bus.publish(RunQueued(run_id=RUN, next_generation=generation))
        await until(lambda: len(seen) >= 20 * GATEWAYS)
        assert (await link.get(f"/training-runs/{RUN}"))["state"] == "queued"
        for task in following:
            assert not task.done()
            task.cancel()
    assert sorted(seen) == sorted([*range(1, 21)] * GATEWAYS)
