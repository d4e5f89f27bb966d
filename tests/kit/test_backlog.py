"""A backlog that hangs makes a service not ready; one that moves does not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from contracts import topology
from contracts.events.run import RunAccepted
from contracts.spec.run import RunSpec
from services.kit.backlog import BacklogWatch
from services.kit.bus import Bus, Message
from services.kit.concurrency import cancel_and_wait
from tests.kit.support import until


async def test_messages_that_wait_while_none_is_finished_are_noticed(make_bus: Callable[..., Any]) -> None:
    bus: Bus = await make_bus(service="sharding")
    other: Bus = await make_bus()
    released = asyncio.Event()

    async def handle(_: Message[RunAccepted]) -> None:
        await released.wait()

    bus.subscriber(topology.SHARDING, RunAccepted)(handle)
    await bus.start()
    watch = BacklogWatch(bus, every_s=0.02, stuck_s=0.1)
    watching = asyncio.create_task(watch.run())
    try:
        # More than the service holds at a time: some wait at the server.
        for number in range(60):
            spec = RunSpec(name="a", command=["true"])
            await other.publish(RunAccepted(run_id=f"r{number}", spec=spec, request_id=str(number), request_source="t"))
        await until(lambda: bool(watch.stuck), "the backlog to be noticed")
        assert watch.stuck == {"sharding"}
        released.set()
        await until(lambda: not watch.stuck, "the backlog to be gone")
    finally:
        await cancel_and_wait(watching)
