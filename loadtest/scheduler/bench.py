"""What the speed, recovery and crash tests share: a real server, the real service in a process of its own, a watch."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from contracts.base import Fact, run_id_for
from contracts.events.node import NodeJoined
from contracts.events.run import Member, RunAccepted, RunQueued
from contracts.spec.resources import Slots
from contracts.spec.run import RunSpec
from loadtest.run_facts import SOURCE, make_run_facts
from services.kit.batch import MAX_BATCH_MESSAGES, BatchPublisher
from services.kit.bus import Bus, OutgoingMessage
from services.kit.follow import follow
from services.kit.settings import Settings
from trainbus.embedded.servers import NatsServer

CODE = {"uri": "s3://code/" + "ab" * 32 + ".tar.gz", "sha256": "ab" * 32}


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
                at = msg.metadata.timestamp.timestamp()
                self.at.setdefault(name, {}).setdefault(run_id, at)
                if name in self.bodies:
                    self.bodies[name][run_id] = msg.data
            self.facts += len(batch)
            async with self._moved:
                self._moved.notify_all()

    def _has_facts_since(self, known: int) -> bool:
        return self.facts != known

    async def until(self, condition: Callable[[], bool], what: str, patience_s: float) -> None:
        """Wait until it is so, for as long as facts come.

        Raises:
            RuntimeError: it is not so, and none has come for ``patience_s``.
        """
        async with self._moved:
            while not condition():
                known = self.facts
                try:
                    async with asyncio.timeout(patience_s):
                        await self._moved.wait_for(partial(self._has_facts_since, known))
                except TimeoutError:
                    counts = {name: len(runs) for name, runs in self.at.items()}
                    text = f"waited for {what}, and no fact came for {patience_s:.0f} s; facts so far: {counts}"
                    raise RuntimeError(text) from None


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


class Prefill:
    """Writes a history into the log as a scheduler would have, without one: many thousand runs in seconds."""

    def __init__(self, bus: Bus) -> None:
        self.bus, self._batches = bus, BatchPublisher(bus)
        self._waiting: list[OutgoingMessage] = []

    async def say(self, *facts: Fact) -> None:
        self._waiting += [self.bus.build_message(fact) for fact in facts]
        if len(self._waiting) >= MAX_BATCH_MESSAGES - 10:
            await self.flush()

    async def flush(self) -> None:
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            await self._batches.publish(waiting)

    async def nodes(self, count: int, slots: int) -> None:
        for number in range(count):
            await self.say(
                NodeJoined(
                    node_id=f"n{number:04}", incarnation="1", address="127.0.0.1", slots=slots, lease_ttl_s=7 * 86_400
                )
            )
        await self.flush()

    async def queued(self, count: int, slots: Callable[[int], int], prefix: str = "q") -> list[str]:
        """Runs that wait (commands: they are over as soon as they end); the run ids."""
        found = []
        for number in range(count):
            run_id = f"{prefix}{number:06}"
            spec = RunSpec(name=run_id, command=["true"], slots=Slots(min=slots(number), max=slots(number)))
            accepted = RunAccepted(run_id=run_id, spec=spec, request_id=run_id, request_source=SOURCE)
            await self.say(accepted, RunQueued(run_id=run_id, next_generation=1))
            found.append(run_id)
        await self.flush()
        return found

    async def placed(self, run_id: str, node_ids: list[str], slots: int) -> int:
        """A run that holds all slots of these nodes; the sequence of its placement."""
        members = tuple(
            Member(node_id=node_id, slots=tuple(range(slots)), ranks=tuple(range(index * slots, (index + 1) * slots)))
            for index, node_id in enumerate(node_ids)
        )
        await self.say(*self._facts(run_id, members)[:3])
        await self.flush()
        return await self.bus.get_last_sequence(f"run.{run_id}.placed")

    async def past(self, count: int, progress: Callable[[int], None] = lambda done: None) -> None:
        """Runs that are over, each with a checkpoint, as a training has them."""
        for number in range(count):
            run_id = f"past{number:06}"
            members = (Member(node_id=f"n{number % 250:04}", slots=(number // 250 % 8,), ranks=(0,)),)
            await self.say(*self._facts(run_id, members))
            if number % 1000 == 999:
                progress(number + 1)
        await self.flush()

    def _facts(self, run_id: str, members: tuple[Member, ...]) -> list[Fact]:
        user = f"user{zlib.crc32(run_id.encode()) % 50}"
        slots = sum(len(member.slots) for member in members)
        training = {"task": "project.train:Task", "code": CODE, "training": {"epochs": 3, "global_batch": 256}}
        spec = RunSpec.model_validate(
            {"name": f"train-{run_id}", "user": user, "team": "research/vision", "slots": slots, **training}
        )
        return make_run_facts(run_id, spec, members)
