"""Agents that are cut off, stopped or killed: a command never runs twice at once, and comes to its end all the same.

The witness is a file to which each process of the command appends its token, again and again, until it may end: two
that live at the same time betray themselves, since the token of the first comes once more after one of the second.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from contracts.events.node import NodeJoined, NodeLost
from contracts.events.run import RunCompleted, RunPlaced
from services.kit.bus import Bus
from services.worker.settings import WorkerSettings
from tests.kit.support import until
from tests.scheduler.test_shell import request, running
from tests.worker.agent_process import SKEW_FILE
from tests.worker.conftest import ranks_of
from tests.worker.cuttable_proxy import CuttableProxy
from trainbus.embedded.servers import NatsServer

#: Seconds of the lease where it is to be over soon, and where it must not be.
SHORT_S, LONG_S = 2.0, 60.0
WITNESS = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the worst of commands
witness, end = sys.argv[1:]
node_id = os.environ["TRAINBUS_LAUNCH"].partition("/data/")[0].rpartition("/")[2]
while not os.path.exists(end):
    file = os.open(witness, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{node_id} {os.getpid()}\\n".encode())
    os.close(file)
    time.sleep(0.005)
"""


class Witness:
    """The file of a command, and the one that lets it end."""

    def __init__(self, folder: Path) -> None:
        self.path, self._end = folder / "witness", folder / "end"

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-S", "-c", WITNESS, str(self.path), str(self._end)]

    def tokens(self) -> list[str]:
        """What was written, in order."""
        return self.path.read_text().splitlines() if self.path.exists() else []

    def writers(self) -> list[str]:
        """Who has written, one entry for each time that another one writes."""
        tokens = self.tokens()
        return [token for before, token in zip(["", *tokens], tokens, strict=False) if token != before]

    @property
    def last_node(self) -> str:
        """Where it was written last."""
        return self.tokens()[-1].split()[0] if self.tokens() else ""

    def let_end(self) -> None:
        self._end.touch()


class Node:
    """One agent as a process, which reaches the bus through a proxy of its own."""

    def __init__(self, settings: WorkerSettings, proxy: CuttableProxy) -> None:
        self.settings, self.proxy = settings, proxy
        self._skew_file = settings.data_dir.parent / "skew"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def node_id(self) -> str:
        return self.settings.node_id

    def start(self) -> None:
        values = self.settings.model_dump(mode="json", exclude_none=True)
        values["s3_secret_key"] = self.settings.s3_secret_key.get_secret_value()  # type: ignore[union-attr]
        environment = {
            f"TRAINBUS_{name.upper()}": json.dumps(value) if isinstance(value, dict) else str(value)
            for name, value in values.items()
        }
        with (self.settings.data_dir.parent / f"{self.node_id}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.worker.agent_process"],
                env={**os.environ, **environment, SKEW_FILE: str(self._skew_file)},
                stdout=log,
                stderr=log,
            )

    def set_wall_clock(self, skew_s: float) -> None:
        """Set the agent's wall clock, now."""
        partial = self._skew_file.with_suffix(".partial")
        partial.write_text(str(skew_s))
        partial.replace(self._skew_file)

    @property
    def guard(self) -> psutil.Process | None:
        """The process that guards the ranks."""
        own = str(self.settings.data_dir)
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                command = " ".join(process.cmdline())
                if "rank_guard" in command and own in command and process.status() != psutil.STATUS_ZOMBIE:
                    return process
        return None

    def send(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def ranks(self) -> list[int]:
        return ranks_of(self.settings.data_dir.resolve())


class Cluster:
    """Two nodes of one slot each, a scheduler, and one run of the witness's command."""

    def __init__(self, bus: Bus, nodes: dict[str, Node], witness: Witness) -> None:
        self.bus, self.nodes, self.witness = bus, nodes, witness
        self.run_id = ""

    async def begin(self, **fields: Any) -> tuple[Node, Node]:
        """Submit the run; once it writes, return its node and the other one."""
        await self.submit(**fields)
        await until(lambda: bool(self.witness.tokens()), "the command to write")
        first = self.nodes[self.witness.writers()[0].split()[0]]
        return first, next(node for node in self.nodes.values() if node is not first)

    async def submit(self, **fields: Any) -> None:
        body = {"name": "witness", "command": self.witness.command, **fields}
        self.run_id = await request(self.bus, "train", body)

    async def facts(self, kind: type[Any]) -> list[Any]:
        found = await self.bus.read_history(kind.subject_filter())
        return [message.event for message in found if getattr(message.event, "run_id", self.run_id) == self.run_id]

    async def wait_for(self, kind: type[Any], count: int = 1) -> Any:
        async def found() -> bool:
            return len(await self.facts(kind)) >= count

        await until(found, f"{kind.__name__} #{count}", 90)
        return (await self.facts(kind))[count - 1]

    async def wait_for_writer(self, node: Node) -> None:
        """Wait until the command writes on a node, after whatever wrote before."""
        await until(lambda: self.witness.last_node == node.node_id, f"a writer on {node.node_id}", 90)

    async def end(self) -> list[str]:
        """Let the command end, and return who has written, in turn: never one again after another."""
        self.witness.let_end()
        await self.wait_for(RunCompleted)
        writers = self.witness.writers()
        assert len(writers) == len(set(writers)), f"two at once: {writers}"
        return [writer.split()[0] for writer in writers]


@pytest_asyncio.fixture
async def make_cluster(bus: Bus, objects: Any, worker_settings: WorkerSettings, tmp_path: Path) -> AsyncIterator[Any]:
    """Make the cluster of a test; the agents are ended with it."""
    nats_port = int(worker_settings.nats_url.rpartition(":")[2])
    proxies = [CuttableProxy(nats_port) for _ in range(2)]
    nodes: dict[str, Node] = {}
    async with running(worker_settings), proxies[0], proxies[1]:

        async def make(lease_ttl_s: float, *, start: bool = True) -> Cluster:
            for name, proxy in zip(("a", "b"), proxies, strict=True):
                own = {"node_id": name, "data_dir": tmp_path / name / "data", "nats_url": proxy.url, "slots": 1}
                (tmp_path / name).mkdir()
                settings = worker_settings.model_copy(update={**own, "lease_ttl_s": lease_ttl_s})
                nodes[name] = Node(settings, proxy)
                if start:
                    nodes[name].start()
            return Cluster(bus, nodes, Witness(tmp_path))

        yield make
        for node in nodes.values():
            node.proxy.heal()
            node.send(signal.SIGCONT)
            node.send(signal.SIGTERM)
        for node in nodes.values():
            assert node.process is not None
            await asyncio.to_thread(node.process.wait, 60)
            assert not node.ranks()
            if node.process.returncode == 0:
                await until(lambda node=node: node.guard is None, "the guard to end with its agent")  # type: ignore[misc]


async def test_an_agent_that_is_cut_off_ends_its_command_before_it_runs_elsewhere(make_cluster: Any) -> None:
    """Its wall clock is set back in the same moment: that changes nothing."""
    cluster: Cluster = await make_cluster(SHORT_S)
    first, other = await cluster.begin()
    first.proxy.cut()
    first.set_wall_clock(-3600.0)
    await cluster.wait_for_writer(other)
    assert not first.ranks()
    assert (await cluster.wait_for(NodeLost)).node_id == first.node_id
    first.proxy.heal()
    assert await cluster.end() == [first.node_id, other.node_id]


async def test_a_command_whose_agent_is_stopped_ends_before_it_runs_elsewhere(make_cluster: Any) -> None:
    """Its guard was killed before; the agent has started another one."""
    cluster: Cluster = await make_cluster(SHORT_S)
    first, other = await cluster.begin()
    guard = first.guard
    assert guard is not None
    guard.kill()
    await until(lambda: first.guard not in (None, guard), "another guard")
    first.send(signal.SIGSTOP)
    await cluster.wait_for_writer(other)
    assert not first.ranks()
    first.send(signal.SIGCONT)
    assert await cluster.end() == [first.node_id, other.node_id]


async def test_a_command_whose_agent_is_killed_ends_before_it_runs_elsewhere(make_cluster: Any) -> None:
    cluster: Cluster = await make_cluster(SHORT_S)
    first, other = await cluster.begin()
    first.kill()
    await cluster.wait_for_writer(other)
    assert not first.ranks()
    assert await cluster.end() == [first.node_id, other.node_id]


async def test_an_agent_that_is_restarted_within_its_lease_adopts_its_command(make_cluster: Any) -> None:
    """The wall clock was set meanwhile. The first guard is lost, too: the agent starts another one."""
    cluster: Cluster = await make_cluster(LONG_S)
    first, _ = await cluster.begin()
    ranks, guard = set(first.ranks()), first.guard
    assert guard is not None
    first.kill()
    guard.kill()
    first.set_wall_clock(-3600.0)
    first.start()
    await cluster.wait_for(NodeJoined, 3)
    await until(lambda: first.guard is not None, "another guard")
    first.set_wall_clock(3600.0)
    assert set(first.ranks()) == ranks
    assert await cluster.end() == [first.node_id]
    assert len(await cluster.facts(RunPlaced)) == 1
    assert await cluster.facts(NodeLost) == []


async def test_an_agent_that_was_stopped_starts_nothing_that_was_placed_meanwhile(make_cluster: Any) -> None:
    cluster: Cluster = await make_cluster(SHORT_S, start=False)
    first, other = cluster.nodes.values()
    first.start()
    await cluster.wait_for(NodeJoined)
    first.send(signal.SIGSTOP)
    await cluster.submit()
    await cluster.wait_for(RunPlaced)
    other.start()
    await cluster.wait_for_writer(other)
    first.send(signal.SIGCONT)
    # It has read by then that it was lost.
    await cluster.wait_for(NodeJoined, 3)
    assert await cluster.end() == [other.node_id]


async def test_a_bus_that_is_away_for_longer_than_the_lease_pauses_the_command(
    make_cluster: Any, nats_server: NatsServer
) -> None:
    """That is no failure of the run's own: it has one attempt."""
    cluster: Cluster = await make_cluster(SHORT_S)
    first, _ = await cluster.begin(max_attempts=1)
    nats_server.kill()
    await until(lambda: not first.ranks(), "the command to end")
    nats_server.start()
    await until(lambda: len(cluster.witness.writers()) == 2, "the command to go on", 90)
    assert len(await cluster.end()) == 2


@pytest.mark.parametrize("seed", range(1))
async def test_faults_in_any_order_never_make_two_of_one_command(make_cluster: Any, seed: int) -> None:
    cluster: Cluster = await make_cluster(SHORT_S)
    await cluster.begin()
    rng = random.Random(seed)
    for _ in range(3):
        node = rng.choice([*cluster.nodes.values()])
        begin, undo = rng.choice(
            (
                (node.proxy.cut, node.proxy.heal),
                (partial(node.send, signal.SIGSTOP), partial(node.send, signal.SIGCONT)),
                (node.kill, node.start),
            )
        )
        node.set_wall_clock(rng.choice((-3600.0, 0.0, 3600.0)))
        begin()
        await asyncio.sleep(rng.uniform(0.0, 2 * SHORT_S))
        undo()
    assert await cluster.end()
