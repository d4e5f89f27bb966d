"""Queries on core NATS: why a run waits, when it will start, the state of the cluster, what a policy would change."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

from nats.aio.msg import Msg
from pydantic_core import from_json

from contracts import subjects
from services.scheduler import policies
from services.scheduler.child_process import ChildError
from services.scheduler.core import reasons
from services.scheduler.core.explain.estimate import Estimate, Estimator
from services.scheduler.core.explain.why import answer
from services.scheduler.core.quarantine import describe_quarantine, explain_quarantine
from services.scheduler.leader import Leader
from services.scheduler.policy_diff import diff_policy

#: Instances share the questions; each has folded the same log.
GROUP = "scheduler"
#: Seconds between estimates while runs wait, and the share of the time that they may take.
FORECAST_INTERVAL_S = 20.0
FORECAST_SHARE = 0.002


class Forecast:
    """The newest estimates. They are shown and never decided on, so each instance has its own."""

    def __init__(self, leader: Leader) -> None:
        self.cache, self._leader = leader.cache, leader
        self._estimator = Estimator()
        self._found: dict[str, Estimate] = {}

    async def run(self) -> None:
        """Estimate for as long as the service runs; an empty queue costs nothing."""
        await self.cache.caught_up.wait()
        while True:
            took_s = await self.refresh() if self.cache.cluster.queued else 0.0
            await asyncio.sleep(max(FORECAST_INTERVAL_S, took_s / FORECAST_SHARE))

    async def refresh(self) -> float:
        """Compute the estimates; return the seconds it took."""
        started = time.perf_counter()
        self._found = await self.cache.compute(self._estimator.estimates, self._leader.policy, self.cache.now())
        return time.perf_counter() - started

    def of(self, run_id: str, room_at: datetime | None = None) -> dict[str, Any]:
        """The estimate of a queued run as JSON, not before there is room for it; empty if there is none (yet)."""
        found = self._found.get(run_id)
        if found is None or run_id not in self.cache.cluster.queued:
            return {}
        names = ("start_p10", "start_p50", "start_p90")
        return {
            name: at.isoformat(timespec="seconds") for name, at in zip(names, found.not_before(room_at), strict=True)
        }


@asynccontextmanager
async def serve_queries(leader: Leader, forecast: Forecast) -> AsyncIterator[None]:
    """Answer ``why``, ``state`` and ``policy_diff`` inside the block."""
    bus, cache = leader.bus, leader.cache

    async def why(message: Msg) -> None:
        await message.respond(_json(await _why(message.data)))

    async def _why(body: bytes) -> dict[str, Any]:
        try:
            run_id = str(from_json(body)["run_id"])
        except (ValueError, KeyError, TypeError):
            return {"state": "unknown", "code": "bad question", "message": 'ask with a body like {"run_id": "r..."}'}
        if (quarantined := explain_quarantine(cache.cluster, run_id)) is not None:
            return quarantined
        try:
            # It tries many changes of the request: in a process of its own, so that no cycle waits for it.
            found = await cache.compute_in_child(answer, run_id, cache.now(), leader.policy)
        except ChildError as error:
            return {"state": "unknown", "code": "failed", "message": f"the answer could not be computed: {error}"}
        room_at = datetime.fromisoformat(found["room_at"]) if "room_at" in found else None
        return found | forecast.of(run_id, room_at)

    async def state(message: Msg) -> None:
        leads = {"instance": bus.settings.instance, "leads": leader.leads}
        summary = await cache.compute(reasons.summary)
        summary["quarantine"] = describe_quarantine(cache.cluster)
        summary["queue"] = [run | forecast.of(run["run_id"]) for run in summary["queue"]]
        policy = {"policy": leader.policy.name, "unused_settings": leader.unused_settings}
        await message.respond(_json({**leads, **policy, **summary}))

    async def policy_diff(message: Msg) -> None:
        await message.respond(_json(await _policy_diff(message.data)))

    async def _policy_diff(body: bytes) -> dict[str, Any]:
        try:
            policy = policies.parse(body.decode(), "the policy")
            # It changes the cluster: in a process of its own, on a copy.
            return await cache.compute_in_child(diff_policy, cache.now(), leader.policy, policy, leader.reachable_since)
        except (policies.PolicyError, UnicodeDecodeError) as error:
            return {"error": str(error)}
        except ChildError as error:
            return {"error": f"the cycle could not be simulated: {error}"}

    answers = {"why": why, "state": state, "policy_diff": policy_diff}
    endpoints = {subjects.service("scheduler", name): answer for name, answer in answers.items()}
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
