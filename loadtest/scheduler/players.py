"""Agents that play training, cheaply: thousands of them in one process, so that the service is what is measured.

    python -m loadtest.scheduler.players --nats URL --nodes 250 --slots 8 --mean-s 1.0

They say what real agents say, in real time, and keep no leases: nodes join with a time to live that outlasts the test.
What they say is not waited for; a fact that got lost would leave its run without an end, which the test would notice.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import random
import signal
import time
from typing import Any

import structlog

from contracts.events.node import NodeJoined
from services.kit.bus import Bus
from services.kit.follow import follow
from services.kit.settings import Settings

LEASE_TTL_S = 7 * 86_400.0
FILTERS = ("run.*.placed", "run.*.stopping")


class Players:
    """All agents of a cluster. A run lasts ``mean_s`` on average (uniform between half and one and a half)."""

    def __init__(self, bus: Bus, mean_s: float, seed: int = 0) -> None:
        self.bus, self.mean_s = bus, mean_s
        self._rng = random.Random(seed)
        self._members: dict[tuple[str, int], list[str]] = {}
        self._ends: list[tuple[float, str, int]] = []

    async def join(self, nodes: int, slots: int) -> None:
        for number in range(nodes):
            fact = NodeJoined(
                node_id=f"n{number:04}", incarnation="1", address="127.0.0.1", slots=slots, lease_ttl_s=LEASE_TTL_S
            )
            await self.bus.publish(fact)

    async def play(self, start_sequence: int = 1) -> None:
        """Play until cancelled."""
        messages = follow(lambda: self.bus.nc, "FACTS", FILTERS, start_sequence, idle_s=0.02, until_caught_up=False)
        async for batch in messages:
            for msg in batch:
                await self._on(msg.subject.rsplit(".", 1)[1], json.loads(msg.data))
            now = time.monotonic()
            while self._ends and self._ends[0][0] <= now:
                _, run_id, generation = heapq.heappop(self._ends)
                await self._end(run_id, generation, "exited", outcome="succeeded")

    async def _on(self, name: str, fact: dict[str, Any]) -> None:
        run_id, generation = fact["run_id"], fact["generation"]
        if name == "stopping":
            await self._end(run_id, generation, "released")
            return
        node_ids = [member["node_id"] for member in fact["members"]]
        self._members[run_id, generation] = node_ids
        for node_id in node_ids:
            await self._say(run_id, generation, node_id, "started")
        lasts_s = self.mean_s * self._rng.uniform(0.5, 1.5)
        heapq.heappush(self._ends, (time.monotonic() + lasts_s, run_id, generation))

    async def _end(self, run_id: str, generation: int, name: str, **more: str) -> None:
        for node_id in self._members.pop((run_id, generation), ()):
            await self._say(run_id, generation, node_id, name, **more)

    async def _say(self, run_id: str, generation: int, node_id: str, name: str, **more: str) -> None:
        body = {"run_id": run_id, "generation": generation, "node_id": node_id, **more}
        event_id = f"run/{run_id}/{name}/{generation}/{node_id}"
        headers = {
            "ce-id": event_id,
            "Nats-Msg-Id": event_id,
            "ce-source": "trainbus/worker",
            "ce-type": f"trainbus.run.{name}.v1",
            "content-type": "application/json",
        }
        await self.bus.nc.publish(f"run.{run_id}.{name}", json.dumps(body).encode(), headers=headers)


async def _main(given: argparse.Namespace) -> None:
    bus = Bus("players", Settings(nats_url=given.nats, http_port=-1))
    await bus.connect(reconcile_topology=False)
    players = Players(bus, given.mean_s)
    if given.nodes:
        await players.join(given.nodes, given.slots)
    start = given.start or (await bus.js.stream_info("FACTS")).state.last_seq + 1
    playing = asyncio.create_task(players.play(start))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, playing.cancel)
    print("playing", flush=True)
    await asyncio.wait({playing})
    await bus.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nats", required=True)
    parser.add_argument("--nodes", type=int, default=0)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--start", type=int, default=0, help="first fact to act on; 0: the next one")
    parser.add_argument("--mean-s", type=float, default=1.0)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    asyncio.run(_main(parser.parse_args()))


if __name__ == "__main__":
    main()
