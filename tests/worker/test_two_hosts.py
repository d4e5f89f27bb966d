"""A gang over two hosts with networks of their own, which reach each other through one cable."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from contracts.events.node import NodeJoined
from contracts.events.run import Member, RunExited, RunReleased, RunStarted, RunStopping
from services.kit.ports import free_ports
from services.kit.settings import Settings
from services.worker.settings import WorkerSettings
from tests.conftest import ACCESS_KEY, SECRET_KEY
from tests.kit.support import until as eventually
from tests.worker.conftest import World
from tests.worker.cuttable_proxy import CuttableProxy
from tests.worker.test_real_ranks import prepare
from tests.worker.two_hosts import HERE, THERE, NamespacesUnavailable, TwoHosts, two_hosts
from trainbus.embedded.servers import NatsServer, S3Server

pytestmark = pytest.mark.shell


@pytest.fixture(params=[4, 6], ids=["IPv4", "IPv6"])
def hosts(request: pytest.FixtureRequest) -> Iterator[TwoHosts]:
    try:
        with two_hosts(request.param) as hosts:
            yield hosts
    except NamespacesUnavailable as error:
        pytest.skip(f"needs network namespaces: {error}")


@pytest.fixture
def nats_server(hosts: TwoHosts, tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path / "nats", free_ports(1)[0])
    server.start()
    yield server
    server.stop()


@pytest.fixture
def s3_server(hosts: TwoHosts, tmp_path: Path) -> Iterator[S3Server]:
    server = S3Server(tmp_path / "s3", free_ports(1)[0], ACCESS_KEY, SECRET_KEY)
    server.start()
    yield server
    server.stop()


class TwoAgents:
    """An agent on each of the hosts, as processes; both reach the servers by an address of the first host."""

    def __init__(
        self, hosts: TwoHosts, settings: WorkerSettings, nats: CuttableProxy, s3: CuttableProxy | None = None
    ) -> None:
        self._hosts, self._settings, self._nats, self._s3 = hosts, settings, nats, s3
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, node_id: str, *, on_the_other: bool, **changes: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "services.worker"]
        folder = self._settings.data_dir / node_id
        folder.mkdir(parents=True)
        with (folder / "agent.log").open("wb") as log:
            process = subprocess.Popen(
                self._hosts.on_the_other(*command) if on_the_other else command,
                env={**os.environ, **self._environment(node_id, folder), **changes},
                stdout=log,
                stderr=log,
            )
        self._processes.append(process)
        return process

    def log_of(self, node_id: str) -> str:
        return (self._settings.data_dir / node_id / "agent.log").read_text()

    def _environment(self, node_id: str, folder: Path) -> dict[str, str]:
        values = self._settings.model_dump(mode="json", exclude_none=True)
        values |= {
            "node_id": node_id,
            "data_dir": str(folder),
            "memory_dir": str(folder / "memory"),
            "instance": node_id,
            "nats_url": self._nats.url,
            "s3_endpoint": self._s3.url.replace("nats:", "http:") if self._s3 else values["s3_endpoint"],
            "s3_secret_key": SECRET_KEY,
        }
        return {f"TRAINBUS_{k.upper()}": json.dumps(v) if isinstance(v, dict) else str(v) for k, v in values.items()}

    async def stop(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            await asyncio.to_thread(process.wait, 90)  # what they publish at their end comes through the proxies here


async def wait_for_all(world: World, kind: type[Any], count: int) -> list[Any]:
    """Return the first facts of a kind about the run."""
    await world.wait_for(kind, count=count, timeout_s=300)
    return [fact for fact in await world.facts() if isinstance(fact, kind)][:count]


async def test_a_gang_over_two_hosts_trains_is_stopped_and_resumes_from_what_both_have(
    hosts: TwoHosts, world: World, tmp_path: Path
) -> None:
    """Rendezvous, the exchange of exact mode, collectives, and the share of survivor state, by one cable."""
    prepared = await prepare(world, tmp_path / "dataset")
    ports = [int(url.rpartition(":")[2]) for url in (world.settings.nats_url, str(world.settings.s3_endpoint))]
    async with CuttableProxy(ports[0], hosts.here) as nats, CuttableProxy(ports[1], hosts.here) as s3:
        agents = TwoAgents(hosts, world.settings, nats, s3)
        try:
            for node_id in ("n1", "n2"):
                agents.start(node_id, on_the_other=node_id == "n2")
            await eventually(lambda: addresses(world, 2), "both agents to join", 90)
            assert await addresses(world, 2) == {"n1": hosts.here, "n2": hosts.there}

            training: dict[str, Any] = {"max_steps": 1_000_000, "global_batch": 16, "checkpoint_every_steps": 100_000}
            training |= {"logical_ranks": 2, "strategy": "zero1", "validate_every_steps": 100_000}
            members = tuple(Member(node_id=f"n{n + 1}", slots=(0,), ranks=(n,)) for n in (0, 1))
            fields: dict[str, Any] = {"grace_s": 10, "dataset": prepared, "training": training, "members": members}
            fields |= {"task": "task:Linear"}
            await world.place(**fields)
            await world.wait_steps(20)
            environments = [read_rank_environment(tmp_path, node_id) for node_id in ("n1", "n2")]
            assert [each["GLOO_SOCKET_IFNAME"] for each in environments] == [HERE, THERE]
            assert {each["MASTER_ADDR"] for each in environments} == {hosts.here}
            before_bytes = hosts.exchanged_bytes()
            await world.wait_steps(len(await world.steps()) + 20)
            assert hosts.exchanged_bytes() > before_bytes

            await world.bus.publish(
                RunStopping(run_id="r1", generation=1, reason="preempted", message="room", grace_s=10)
            )
            released = await wait_for_all(world, RunReleased, 2)
            assert {each.node_id: each.clean for each in released} == {"n1": False, "n2": False}  # nothing is committed
            steps = training["max_steps"] = released[0].step + 30
            # Each node has one part of the state.
            await world.place(generation=2, **fields)
            exited = await wait_for_all(world, RunExited, 2)
            assert {(each.outcome, each.step) for each in exited} == {("succeeded", steps)}, exited
            started = [fact for fact in await world.facts() if isinstance(fact, RunStarted)]
            assert (started[-1].generation, started[-1].resumed_from) == (2, "memory")
            assert started[-1].step == released[0].step
            assert sorted(set(await world.steps())) == [*range(1, steps + 1)]
        finally:
            await agents.stop()


async def test_a_loopback_address_is_refused_where_the_bus_is_on_another_host(
    hosts: TwoHosts, settings: Settings
) -> None:
    loopback = "::1" if ":" in hosts.here else "127.0.0.1"
    async with CuttableProxy(int(settings.nats_url.rpartition(":")[2]), hosts.here) as nats:
        agents = TwoAgents(hosts, WorkerSettings.of(settings), nats)
        try:
            refused = agents.start("n2", on_the_other=True, TRAINBUS_ADDRESS=loopback, TRAINBUS_WARM="false")
            await eventually(lambda: refused.poll() is not None, "the agent to end", 90)
            assert refused.returncode != 0
            assert f"TRAINBUS_ADDRESS is '{loopback}', a loopback address" in agents.log_of("n2")
            assert f"the bus ({hosts.here}) is on another machine" in agents.log_of("n2")
        finally:
            await agents.stop()


async def addresses(world: World, count: int) -> dict[str, str] | None:
    """Return what the nodes announce, once there are ``count``."""
    joined = [each.event for each in await world.bus.read_history("node.*.joined")]
    found = {fact.node_id: fact.address for fact in joined if isinstance(fact, NodeJoined)}
    return found if len(found) == count else None


def read_rank_environment(folder: Path, node_id: str) -> dict[str, str]:
    """Return the environment of the rank on a node."""
    found = next(
        path
        for path in Path("/proc").glob("[0-9]*/environ")
        if f"{folder}".encode() in (content := read(path)) and f"/{node_id}/runs/".encode() in content
    )
    return dict(line.partition("=")[::2] for line in read(found).decode().split("\0") if line)


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
