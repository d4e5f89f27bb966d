"""Direct questions on core NATS: why does this run wait, and what does the cluster look like."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

from nats.aio.msg import Msg

from contracts import subjects
from contracts.scheduling import Policy
from services.kit.bus import Bus
from services.scheduler.cluster_cache import ClusterCache
from services.scheduler.core import reasons
from services.scheduler.core.explain.why import answer
from services.scheduler.core.quarantine import describe_quarantine, explain_quarantine
from services.scheduler.forecast import Forecast
from services.scheduler.leader import Leader

#: Instances share the questions; each has folded the same log.
GROUP = "scheduler"


@asynccontextmanager
async def serve_queries(
    bus: Bus, cache: ClusterCache, leader: Leader, policy: Policy, forecast: Forecast
) -> AsyncIterator[None]:
    """Answer ``why`` and ``state`` inside the block."""

    async def why(message: Msg) -> None:
        await message.respond(_json(_why(message.data)))

    def _why(body: bytes) -> dict[str, Any]:
        try:
            run_id = json.loads(body)["run_id"]
        except (ValueError, KeyError, TypeError):
            return {"state": "unknown", "code": "bad question", "message": 'ask with a body like {"run_id": "r..."}'}
        if (quarantined := explain_quarantine(cache.cluster, str(run_id))) is not None:
            return quarantined
        said = answer(cache.cluster, str(run_id), bus.clock.now(), policy)
        room_at = datetime.fromisoformat(said["room_at"]) if "room_at" in said else None
        return said | forecast.of(str(run_id), room_at)

    async def state(message: Msg) -> None:
        leads = {"instance": bus.settings.instance, "leads": leader.leads}
        said = reasons.summary(cache.cluster)
        said["quarantine"] = describe_quarantine(cache.cluster)
        said["queue"] = [each | forecast.of(each["run_id"]) for each in said["queue"]]
        await message.respond(_json({**leads, "policy": policy.name, **said}))

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
