"""Worker agents that play training: they speak on the real bus, and time is virtual.

Each node joins, keeps its lease, starts what is placed on it and says that it exited after the
run's virtual duration. One process plays all nodes, over one connection.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from contracts import subjects, topology
from contracts.events.node import NodeJoined, NodeLeft
from contracts.events.run import RunExited, RunPlaced, RunReleased, RunStarted, RunStopping
from services.kit.bus import Bus, Message
from services.kit.lease import Lease

#: How often simulated nodes renew their leases, as a share of the time to live.
LEASE_TTL_S = 60.0


@dataclass(slots=True)
class SimulatedAgents:
    """``nodes`` nodes of ``slots`` slots. A virtual second lasts ``1 / speed`` real ones."""

    bus: Bus
    nodes: int
    slots: int
    duration_s: float
    speed: float = 1000.0
    _running: dict[tuple[str, int], RunPlaced] = field(default_factory=dict)
    _ends: list[tuple[float, str, int]] = field(default_factory=list)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def node_id(self, number: int) -> str:
        return f"sim-{number:04}"

    async def join(self) -> None:
        """Announce every node and take its lease."""
        bucket = await self.bus.open_bucket(topology.LEASES)
        for first in range(0, self.nodes, 50):
            numbers = range(first, min(first + 50, self.nodes))
            await asyncio.gather(*(self._join(number, bucket) for number in numbers))

    async def _join(self, number: int, bucket: object) -> None:
        node_id = self.node_id(number)
        await Lease(bucket, subjects.node_lease(node_id), node_id, LEASE_TTL_S).try_acquire()  # type: ignore[arg-type]
        joined = NodeJoined(
            node_id=node_id, incarnation="1", address="127.0.0.1", slots=self.slots, lease_ttl_s=LEASE_TTL_S
        )
        await self.bus.publish(joined)

    async def leave(self) -> None:
        for number in range(self.nodes):
            await self.bus.publish(NodeLeft(node_id=self.node_id(number), incarnation="1"))

    async def run(self) -> None:
        """Play until cancelled."""
        loop = asyncio.get_running_loop()
        last = await self.bus.js.stream_info("FACTS")
        async for batch in self.bus.follow(
            "FACTS", ("run.*.placed", "run.*.stopping"), last.state.last_seq + 1, idle_s=0.005
        ):
            for message in batch:
                await self._on(message, loop.time())
            while self._ends and self._ends[0][0] <= loop.time():
                _, run_id, generation = heapq.heappop(self._ends)
                if placed := self._running.pop((run_id, generation), None):
                    self._spawn(self._exit(placed))

    async def _on(self, message: Message[RunPlaced] | Message[RunStopping], now_s: float) -> None:
        event = message.event
        if isinstance(event, RunPlaced):
            self._running[event.run_id, event.generation] = event
            heapq.heappush(self._ends, (now_s + self.duration_s / self.speed, event.run_id, event.generation))
            self._spawn(self._start(event))
        elif placed := self._running.pop((event.run_id, event.generation), None):
            self._spawn(self._release(placed))

    async def _start(self, placed: RunPlaced) -> None:
        for member in placed.members:
            await self.bus.publish(
                RunStarted(run_id=placed.run_id, generation=placed.generation, node_id=member.node_id)
            )

    async def _exit(self, placed: RunPlaced) -> None:
        for member in placed.members:
            fact = RunExited(
                run_id=placed.run_id, generation=placed.generation, node_id=member.node_id, outcome="succeeded"
            )
            await self.bus.publish(fact)

    async def _release(self, placed: RunPlaced) -> None:
        for member in placed.members:
            fact = RunReleased(run_id=placed.run_id, generation=placed.generation, node_id=member.node_id)
            await self.bus.publish(fact)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
