"""The service on a real bus: it starts what is wanted, drains what is not, and stops what is empty."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from contracts.events.capacity import CapacityWanted
from contracts.events.node import NodeDraining
from contracts.events.run import RunReleased
from contracts.scheduling import Pool
from services.autoscaler.adapters import AdapterError
from services.autoscaler.app import build
from services.autoscaler.core.decide import Machine
from services.kit.bus import Bus
from services.kit.settings import Settings
from tests.autoscaler.test_core import adopted, joined, placed

NOW = datetime(2026, 1, 1, tzinfo=UTC)


class Cloud:
    """Machines that are there the moment they are asked for."""

    def __init__(self) -> None:
        self.machines: list[str] = []
        self.broken, self.refusals = False, 0

    async def nodes(self, pool: Pool) -> list[Machine]:
        if self.broken:
            self.refusals += 1
            raise AdapterError("the cloud is away")
        return [Machine(each, datetime.now(UTC)) for each in self.machines]

    async def start(self, pool: Pool, count: int) -> list[str]:
        new = [f"m{len(self.machines) + number}" for number in range(count)]
        self.machines += new
        return new

    async def stop(self, pool: Pool, node_ids: Sequence[str]) -> None:
        self.machines = [each for each in self.machines if each not in node_ids]


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it did not come about in time")


async def test_nodes_come_and_go(settings: Settings, bus: Bus) -> None:
    cloud = Cloud()
    # Said before it started, and by whoever was there then.
    await bus.publish(adopted())
    await bus.publish(CapacityWanted(pool="a", nodes=2, decided_at=NOW))
    service = build(settings, cloud)
    running = asyncio.create_task(service.run())
    try:
        await until(lambda: cloud.machines == ["m0", "m1"])
        for each in cloud.machines:
            await bus.publish(joined(each))
        await bus.publish(placed("m0"))
        await bus.publish(CapacityWanted(pool="a", nodes=0, spare=("m1",), decided_at=NOW, decided_at_sequence=1))
        requests = []
        async with asyncio.timeout(60):
            async for batch in bus.follow("REQUESTS", ("drain.requested",)):
                requests += batch
                if requests:
                    break
        # The one with a run on it is left alone.
        assert [each.event.node_id for each in requests] == ["m1"]
        cloud.broken = True
        await bus.publish(NodeDraining(node_id="m1", incarnation="1"))
        await until(lambda: cloud.refusals > 0)
        assert cloud.machines == ["m0", "m1"]
        cloud.broken = False
        await until(lambda: cloud.machines == ["m0"])
        await bus.publish(RunReleased(run_id="r", generation=1, node_id="m0"))
        await bus.publish(NodeDraining(node_id="m0", incarnation="1"))
        await until(lambda: cloud.machines == [])
    finally:
        service.stopping.set()
        await running
