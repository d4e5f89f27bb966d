"""The instance that holds the lease: decides, publishes, and waits until it has folded what it said."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any

import nats.errors
import structlog
from nats.js.errors import APIError
from nats.js.kv import KeyValue

from contracts import subjects, topology
from contracts.envelope import Envelope
from contracts.events.run import Decided, RunPlaced, RunQueued
from contracts.scheduling import Policy
from services.kit.bus import Ack, Bus, Conflict, Expect, Transient
from services.kit.concurrency import end
from services.kit.lease import Lease, Watch, read_all
from services.kit.settings import Settings
from services.scheduler import metrics
from services.scheduler.core.cluster import Cluster
from services.scheduler.core.decide import deaf_nodes, decide, lost_nodes
from services.scheduler.core.decisions import (
    PASS_LIMIT,
    Decision,
    ExplainRun,
    LoseNode,
    PlaceRun,
    PreemptRun,
    decided,
    fact_of,
    in_order,
    lost_fact,
)
from services.scheduler.memory import Memory

log = structlog.get_logger(__name__)

LEASE_KEY = "scheduler"
NODE_LEASES = subjects.node_lease()
#: How often the clock alone is a reason to decide (growing, retries, a final checkpoint that never comes).
TICK_S = 0.5
#: Publishes under way at a time.
WIDTH = 64
#: How often the node leases are read. A longer silence than twice this, ours or the server's,
#: is no node's fault, and the leases' age is counted anew.
LEASE_POLL_S = 0.5


class Leader:
    """Decides while it holds the lease."""

    def __init__(self, bus: Bus, memory: Memory, policy: Policy, settings: Settings) -> None:
        self.bus, self.memory, self.policy = bus, memory, policy
        self._ttl_s = settings.lease_ttl_s
        # Two processes with the same instance name are two holders all the same.
        self._holder = f"{settings.instance}-{uuid.uuid4().hex[:8]}"
        self._lease: Lease | None = None
        #: Since when the bus has carried what agents say to us, without a pause.
        self._hearing_since = bus.clock.now()

    @property
    def leads(self) -> bool:
        return self._lease is not None and self._lease.held

    async def lead(self) -> None:
        """Wait for the lease, decide while it lasts, and wait again."""
        await self.memory.caught_up.wait()
        bucket = await self.bus.bucket(topology.LEASES)
        while True:
            lease = Lease(bucket, LEASE_KEY, self._holder, self._ttl_s, clock=self.bus.clock)
            async with lease.leadership() as keeper:
                self._lease = lease
                deciding = asyncio.create_task(self._decide_while_held())
                try:
                    await asyncio.wait({keeper, deciding}, return_when=asyncio.FIRST_COMPLETED)
                    if deciding.done():
                        deciding.result()
                finally:
                    self._lease = None
                    await end(deciding)

    async def _decide_while_held(self) -> None:
        # What a former leader has published must be folded before anything is added to it.
        await self.memory.catch_up()
        while self.leads:
            seen = self.memory.cluster.sequence
            started = time.perf_counter()
            published = await self.step()
            # Half of the time is for folding and answering: with a long queue, what comes in
            # meanwhile is decided on together.
            await asyncio.sleep(min(time.perf_counter() - started, TICK_S))
            if published:
                await self.memory.until(published)
            else:
                await self.memory.changed(seen, TICK_S)

    async def step(self) -> int:
        """One pass: decide and publish. Returns the highest sequence published, 0 if nothing was."""
        cluster = self.memory.cluster
        now = self.bus.clock.now()
        started = time.perf_counter()
        decisions = decide(cluster, now, self.policy, self._hearing_since)
        metrics.DECIDE_SECONDS.observe(time.perf_counter() - started)
        if not decisions:
            return 0
        # The facts are made now: while they are on their way the cluster goes on changing.
        made = decided(cluster, now, self.policy, self._hearing_since)
        said = [Saying.of(decision, cluster, now, made) for decision in in_order(decisions)[:PASS_LIMIT]]
        placements = [saying for saying in said if isinstance(saying.decision, PlaceRun)]
        explanations = [saying for saying in said if isinstance(saying.decision, ExplainRun)]
        others = [saying for saying in said if not isinstance(saying.decision, PlaceRun | ExplainRun)]
        fence = cluster.placed_sequence
        highest, complete = await self._publish_all(others)
        if complete:
            highest = max(highest, await self._publish_placements(placements, fence))
        explained, _ = await self._publish_all(explanations)
        return max(highest, explained)

    async def _publish_all(self, said: list[Saying]) -> tuple[int, bool]:
        """Publish what is independent side by side; (highest sequence, whether all of it was taken)."""
        gate = asyncio.Semaphore(WIDTH)

        async def one(saying: Saying) -> Ack | None:
            async with gate:
                return await self._publish(saying, saying.fence)

        acks = await asyncio.gather(*(one(saying) for saying in said))
        return max((ack.sequence for ack in acks if ack), default=0), all(acks)

    async def _publish_placements(self, said: list[Saying], fence: int) -> int:
        """Publish placements one by one, each expecting the one before: nobody else placed in between."""
        highest = 0
        for saying in said:
            if not self.leads:
                break
            ack = await self._publish(saying, Expect(fence, RunPlaced.subject_filter()))
            if ack is None:
                break
            highest = fence = ack.sequence
            if ack.duplicate:
                # Another leader's placement of the same generation stands; ours were made without it.
                break
        return highest

    async def _publish(self, saying: Saying, expect: Expect) -> Ack | None:
        try:
            ack = await self.bus.publish(saying.fact, saying.cause, expect=expect)
        except Conflict:
            metrics.CONFLICTS.inc()
            log.info("a newer fact was there first, deciding anew", run_id=saying.decision.run_id)
            return None
        except Transient as error:
            log.warning("not published, deciding anew", run_id=saying.decision.run_id, error=str(error))
            return None
        saying.count()
        return ack

    # -- nodes --------------------------------------------------------------

    async def watch_nodes(self) -> None:
        """Take nodes for lost whose lease has run out, while we lead.

        Standbys watch as well, so that a new leader need not start counting.
        """
        bucket = await self.bus.bucket(topology.LEASES)
        watch, last_read = Watch(self.bus.clock), self.bus.clock.monotonic()
        while True:
            await asyncio.sleep(LEASE_POLL_S)
            try:
                expired = await asyncio.wait_for(self._expired(bucket, watch), 2.0)
            except (nats.errors.Error, APIError, TimeoutError, OSError) as error:
                log.info("node leases not read", error=repr(error))
                continue
            silence_s, last_read = self.bus.clock.monotonic() - last_read, self.bus.clock.monotonic()
            if silence_s > 4 * LEASE_POLL_S:
                # Nobody could renew, or we could not look: every node gets its whole time again.
                watch, self._hearing_since = Watch(self.bus.clock), self.bus.clock.now()
            elif self.leads:
                deaf = deaf_nodes(self.memory.cluster, self.bus.clock.now(), self.policy, self._hearing_since)
                await self._lose(lost_nodes(self.memory.cluster, expired) + deaf)

    async def _expired(self, bucket: KeyValue, watch: Watch) -> set[str]:
        alive = [node for node in self.memory.cluster.nodes.values() if node.alive]
        records = await read_all(bucket, NODE_LEASES) if alive else {}
        expired = set()
        for node in alive:
            key = f"{NODE_LEASES}{node.node_id}"
            # A new incarnation has its own time, whatever the last one left behind.
            if watch.expired(f"{key}/{node.incarnation}", records.get(key), node.lease_ttl_s):
                expired.add(node.node_id)
        return expired

    async def _lose(self, decisions: list[LoseNode]) -> None:
        for decision in decisions:
            log.warning("node lost", node_id=decision.node_id, reason=decision.reason)
            try:
                ack = await self.bus.publish(lost_fact(decision))
            except Transient as error:
                log.warning("not published, trying again", node_id=decision.node_id, error=str(error))
                return
            await self.memory.until(ack.sequence)


class Saying:
    """A decision on its way to being a fact."""

    __slots__ = ("cause", "decision", "fact", "fence")

    def __init__(self, decision: Decision, fact: Any, cause: Envelope, fence: Expect) -> None:
        self.decision, self.fact, self.cause, self.fence = decision, fact, cause, fence

    @classmethod
    def of(cls, decision: Decision, cluster: Cluster, now: Any, made: Decided) -> Saying:
        """The fact, what led to it, and the run's last sequence: it only counts if nothing has changed."""
        run = cluster.runs[decision.run_id]
        fact = fact_of(decision, cluster, now, made)
        # A placement in the pass that queues the run follows from a fact which is still on its way.
        queued = isinstance(decision, PlaceRun)
        cause = Envelope(
            id=RunQueued(run_id=run.run_id, next_generation=run.next_generation).event_id
            if queued
            else run.last_event_id,
            source="",
            type="",
            time=now,
            correlation_id=run.correlation_id,
            traceparent=run.traceparent,
        )
        return cls(decision, fact, cause, Expect(run.last_sequence, subjects.run(run.run_id)))

    def count(self) -> None:
        if isinstance(self.decision, PlaceRun):
            metrics.PLACEMENTS.inc()
        elif isinstance(self.decision, PreemptRun):
            metrics.PREEMPTIONS.labels(self.decision.queue_reason).inc()
