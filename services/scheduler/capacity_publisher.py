"""Publishes the demand for nodes while this instance leads: periodically, and only what has changed."""

from __future__ import annotations

import asyncio
import time

import structlog

from services.kit.bus import Bus, TransientError
from services.scheduler import metrics
from services.scheduler.cluster_cache import ClusterCache
from services.scheduler.core.capacity.demand import capacity_fact, compute_demand, wake_at
from services.scheduler.core.decisions import decision_record
from services.scheduler.leader import Leader

log = structlog.get_logger(__name__)

#: Seconds between computations: nodes take a minute to join.
INTERVAL_S = 1.0
#: Share of the time that the computations may take, with a long queue.
SHARE = 0.05


class CapacityPublisher:
    """Keeps ``capacity.<pool>.wanted`` in step with the queue."""

    def __init__(self, bus: Bus, cache: ClusterCache, leader: Leader) -> None:
        self.bus, self.cache, self.leader = bus, cache, leader

    async def run(self) -> None:
        """Compute the demand for as long as the service runs; a policy without pools costs nothing."""
        await self.cache.caught_up.wait()
        computed_s, seen, wake = 0.0, -1, None
        while True:
            await asyncio.sleep(max(INTERVAL_S, computed_s / SHARE))
            if not self.leader.leads or not self.leader.policy.pools.pools:
                continue
            cluster, now = self.cache.cluster, self.cache.now()
            if cluster.sequence == seen and (wake is None or now < wake):
                continue  # nothing has happened, and no time has come
            seen, started = cluster.sequence, time.perf_counter()
            published = await self.step()
            computed_s = 0.0 if published else time.perf_counter() - started
            wake = wake_at(cluster, now, self.leader.policy)

    async def step(self) -> int:
        """Publish the changed demand; return the number of facts published."""
        cluster, policy, now = self.cache.cluster, self.leader.policy, self.cache.now()
        if cluster.adopted is None or cluster.adopted.digest != policy.digest:
            return 0  # not adopted yet: the autoscaler must know the pools first
        made = decision_record(cluster, now, policy, self.leader.reachable_since)
        published = 0
        for each in await self.cache.compute(compute_demand, now, policy):
            fact = capacity_fact(each, now, made)
            try:
                # Without a fence: if a former leader publishes after us, we fold its fact and publish ours again.
                ack = await self.bus.publish(fact)
            except TransientError as error:
                log.info("demand not published, trying again", pool=each.pool, error=str(error))
                continue
            published += 1
            metrics.NODES_WANTED.labels(each.pool).set(each.nodes)
            log.info("nodes wanted", pool=each.pool, nodes=each.nodes, spare=len(each.spare), reason=each.reason)
            await self.cache.wait_for_sequence(ack.sequence)
        return published
