"""Direct questions on core NATS: why does this run wait, and what does the cluster look like."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from nats.aio.msg import Msg

from contracts import subjects
from services.kit.bus import Bus
from services.scheduler.core import explain
from services.scheduler.core.decide import plan
from services.scheduler.core.policy import Policy
from services.scheduler.leader import Leader
from services.scheduler.memory import Memory

#: Instances share the questions; each has folded the same log.
GROUP = "scheduler"


@asynccontextmanager
async def answering(bus: Bus, memory: Memory, leader: Leader, policy: Policy) -> AsyncIterator[None]:
    """Answer ``why`` and ``state`` inside the block."""

    async def why(message: Msg) -> None:
        await message.respond(_json(_why(message.data)))

    def _why(body: bytes) -> dict[str, Any]:
        try:
            run_id = json.loads(body)["run_id"]
        except (ValueError, KeyError, TypeError):
            return {"state": "unknown", "code": "bad question", "message": 'ask with a body like {"run_id": "r..."}'}
        cluster = memory.cluster
        run = cluster.runs.get(run_id) if isinstance(run_id, str) else None
        # Only a run that waits needs a look at all the others.
        waits = plan(cluster, bus.clock.now(), policy).waits if run is not None and not run.parts else {}
        return explain.state(cluster, str(run_id), waits)

    async def state(message: Msg) -> None:
        leads = {"instance": bus.settings.instance, "leads": leader.leads}
        await message.respond(_json({**leads, **explain.summary(memory.cluster)}))

    asked = [
        await bus.nc.subscribe(subjects.service("scheduler", "why"), queue=GROUP, cb=why),
        await bus.nc.subscribe(subjects.service("scheduler", "state"), queue=GROUP, cb=state),
    ]
    # The service answers as soon as its subscriptions are at the server.
    await bus.nc.flush()
    try:
        yield
    finally:
        if bus.connected:
            for subscription in asked:
                await subscription.unsubscribe()


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode()
