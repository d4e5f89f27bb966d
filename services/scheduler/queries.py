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
from services.scheduler.child_process import ChildError
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
        await message.respond(_json(await _why(message.data)))

    async def _why(body: bytes) -> dict[str, Any]:
        try:
            run_id = str(json.loads(body)["run_id"])
        except (ValueError, KeyError, TypeError):
            return {"state": "unknown", "code": "bad question", "message": 'ask with a body like {"run_id": "r..."}'}
        if (quarantined := explain_quarantine(cache.cluster, run_id)) is not None:
            return quarantined
        try:
            # It tries many changes of the request: in a process of its own, so that no cycle waits for it.
            found = await cache.compute_in_child(answer, run_id, cache.now(), policy)
        except ChildError as error:
            return {"state": "unknown", "code": "failed", "message": f"the answer could not be computed: {error}"}
        room_at = datetime.fromisoformat(found["room_at"]) if "room_at" in found else None
        return found | forecast.of(run_id, room_at)

    async def state(message: Msg) -> None:
        leads = {"instance": bus.settings.instance, "leads": leader.leads}
        said = await cache.compute(reasons.summary)
        said["quarantine"] = describe_quarantine(cache.cluster)
        said["queue"] = [each | forecast.of(each["run_id"]) for each in said["queue"]]
        await message.respond(_json({**leads, "policy": policy.name, **said}))

    endpoints = {subjects.service("scheduler", "why"): why, subjects.service("scheduler", "state"): state}
    for subject, callback in endpoints.items():
        await bus.add_endpoint(subject, GROUP, callback)
    # The service answers as soon as its subscriptions are at the server.
    await bus.nc.flush()
    try:
        yield
    finally:
        for subject in endpoints:
            await bus.remove_endpoint(subject)


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode()
