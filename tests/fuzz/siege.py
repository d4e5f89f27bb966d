"""A stack under siege: messages of any kind are published, and afterwards everything works as before."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import nats.errors

from contracts import subjects, topology
from contracts.base import Fact
from contracts.events.capacity import PolicyAdopted
from contracts.events.train import AdoptPolicyRequested, DrainRequested
from services.kit.messages import Message as Received
from services.scheduler.core import reasons
from services.scheduler.core.fold import apply, seen
from services.scheduler.core.state.cluster import Cluster
from tests.e2e.support import Stack
from tests.fuzz.grammar import Known, Message, draw_messages
from trainbus.embedded.launch import read_stack

#: What an operator does in earnest: who may publish it may also stop a cluster. Such messages are left out.
DECISIONS = tuple(event.subject_filter() for event in (DrainRequested, AdoptPolicyRequested, PolicyAdopted))
COMMANDS = (
    ("ps",),
    ("nodes",),
    ("models",),
    ("datasets", "ls"),
    ("dead-letters", "ls"),
    ("events", "--tail", "5"),
)
PAGES = ("/training-runs", "/training-runs?counts=true&limit=200", "/nodes", "/models", "/datasets", "/", "/metrics")
SECONDS = 300.0


@dataclass
class Siege:
    """What was found wrong after it."""

    stack: Stack
    published: int = 0
    problems: list[str] = field(default_factory=list)
    #: Seconds from a normal run's request to its verdict, before and after.
    before_s: float = 0.0
    after_s: float = 0.0

    async def publish(self, count: int, number: int, runs: Sequence[str]) -> None:
        """Publish ``count`` messages, as fast as the server takes them."""
        info = read_stack(self.stack.data_dir)
        assert info is not None
        known = Known(tuple(runs), tuple(f"node-{place}" for place in range(info.nodes)))
        for message in draw_messages(count, number, known):
            if not any(subjects.matches(pattern, message.subject) for pattern in DECISIONS):
                await self._publish(message)
        await self.stack.bus.nc.flush()

    async def _publish(self, message: Message) -> None:
        try:
            await self.stack.bus.nc.publish(message.subject, message.body, headers=message.headers or None)
        except (nats.errors.Error, ValueError):
            return  # the client itself refuses such a subject or header
        self.published += 1

    async def look_around(self) -> None:
        """Use everything once."""
        self.after_s = await self.time_a_run()
        for command in COMMANDS:
            done = await self.stack.cli(*command)
            if done.code != 0:
                self.problems.append(f"trainbus {' '.join(command)} ends with {done.code}: {done.text[-500:]}")
        doctor = json.loads((await self.stack.cli("doctor", "--json")).out)
        self.problems += [f"doctor: {each['what']}: {each['found']}" for each in doctor if each["grade"] == "missing"]
        await self._look_at_pages()
        await self._compare_folds()

    async def time_a_run(self) -> float:
        """Return the seconds from a normal run's request to its verdict."""
        started = time.perf_counter()
        run_id = await self.stack.publish(await self.stack.slow_run(epochs=2, step_s=0.0))
        try:
            await self.stack.wait_for(run_id, "completed", SECONDS)
            await self.stack.wait_for(run_id, "promoted", SECONDS, or_else=("not_promoted",))
        except AssertionError as error:
            why = await self.stack.cli("why", run_id)
            self.problems.append(f"a normal run does not go through: {error}; {why.text[-500:]}")
        return time.perf_counter() - started

    async def _look_at_pages(self) -> None:
        info = read_stack(self.stack.data_dir)
        assert info is not None
        async with httpx.AsyncClient(base_url=info.gateway_url, timeout=60) as client:
            for page in PAGES:
                try:
                    answer = await client.get(page)
                except httpx.HTTPError as error:
                    self.problems.append(f"{page} does not answer: {error!r}")
                    continue
                if answer.status_code != 200:
                    self.problems.append(f"{page} answers {answer.status_code}: {answer.text[:300]}")

    async def _compare_folds(self) -> None:
        """Fold the log anew, as a standby does, and compare; and see who holds slots."""
        async with asyncio.timeout(SECONDS):
            while True:
                live = await self._scheduler_state()
                cluster = Cluster()
                async for batch in self.stack.bus.follow(
                    topology.FACTS.name, ("run.*.*", "node.*.*", "capacity.*.*", "policy.*.*"), until_caught_up=True
                ):
                    for message in batch:
                        _fold(cluster, message)
                if cluster.sequence == live["sequence"]:
                    break
        anew = reasons.summary(cluster)
        for name in ("runs", "queue_length", "nodes"):
            if anew[name] != live[name]:
                self.problems.append(f"{name} folded anew: {anew[name]}, not {live[name]}")
        held = {node["node_id"]: node["used"] for node in live["nodes"] if node["state"] == "alive" and node["used"]}
        if held and not live["active"]:
            self.problems.append(f"slots that no run holds: {held}")

    async def _scheduler_state(self) -> dict[str, Any]:
        reply = await self.stack.bus.nc.request(subjects.service("scheduler", "state"), b"{}", timeout=30)
        found: dict[str, Any] = json.loads(reply.data)
        return found


def _fold(cluster: Cluster, message: Received[Any]) -> None:
    if isinstance(message.event, Fact) and message.stored_at is not None:
        apply(cluster, message.event, message.sequence, message.stored_at, message.envelope)
    seen(cluster, message.subject, message.sequence)
