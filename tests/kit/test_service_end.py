"""The end of a service: what its handlers use outlives them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from contracts import topology
from contracts.events.train import CancelRequested
from services.kit.bus import Message
from services.kit.service import Service
from services.kit.settings import Settings
from tests.kit.support import until


async def test_a_handler_ends_before_what_it_uses(settings: Settings) -> None:
    service = Service("test", settings)
    happened: list[str] = []
    stopped = asyncio.Event()

    @asynccontextmanager
    async def store() -> AsyncIterator[None]:
        yield
        happened.append("store left")

    async def on_cancel_requested(_: Message[CancelRequested]) -> None:
        happened.append("handler begins")
        await stopped.wait()
        # A turn for everything else that the end brings with it.
        for _turn in range(100):
            await asyncio.sleep(0)
        happened.append("handler ends")

    async def notice_the_end() -> None:
        stopped.set()

    service.add_resource(store())
    service.add_stop_action(notice_the_end)
    service.bus.subscriber(topology.SCHEDULER_REQUESTS, CancelRequested)(on_cancel_requested)
    running = asyncio.create_task(service.run())
    await until(lambda: service.check_readiness()["started"], "the start")
    await service.bus.nc.publish("cancel.requested", b'{"run_id": "r1"}')
    await until(lambda: happened == ["handler begins"], "the handler")
    service.stopping.set()
    await asyncio.wait_for(running, 60)
    assert happened == ["handler begins", "handler ends", "store left"]
