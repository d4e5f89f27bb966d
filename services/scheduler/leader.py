"""The instance that holds the lease: decides, publishes, and waits until it has folded what it published."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Protocol

import nats.errors
import structlog
from nats.js.errors import APIError

from contracts import subjects, topology
from contracts.events.capacity import PolicyAdopted
from contracts.events.run import RunReleased
from contracts.scheduling import Policy
from contracts.state.node import NodeStatement
from services.kit.bus import Bus, Conflict, ExpectedSequence, TransientError
from services.kit.concurrency import cancel_and_wait
from services.kit.lease import Lease, LeaseRecord, LeaseWatch, lift_revocation, read_records, revoke
from services.kit.settings import Settings
from services.scheduler import metrics
from services.scheduler.cluster_cache import ClusterCache
from services.scheduler.core.decide import disputed_parts, lost_nodes, unresponsive_nodes
from services.scheduler.core.decisions import (
    MAX_FACTS_PER_CYCLE,
    NOTHING_LEFT,
    LoseNode,
    decision_record,
    in_order,
    lost_fact,
)
from services.scheduler.core.quarantine import describe_quarantine, run_cycle
from services.scheduler.core.state.cluster import Cluster, Node
from services.scheduler.phase_timer import PhaseTimer
from services.scheduler.policy_in_force import PolicyInForce
from services.scheduler.publisher import PendingFact, Publisher, pending_facts
from services.scheduler.snapshot import SnapshotTaker

log = structlog.get_logger(__name__)

LEASE_KEY = "scheduler"
NODE_LEASES = subjects.node_lease()
#: How often the clock alone is a reason to decide, besides the times that a cycle itself names.
TICK_S = 0.5
#: Part of the lease that a cycle may take before it is reported.
CYCLE_SHARE = 0.1
#: A cycle runs in the event loop after one that was shorter than this, with fewer runs than this.
INLINE_CYCLE_S = 0.02
INLINE_CYCLE_RUNS = 1000
#: Seconds between reads of the node leases. A pause of more than four times this, of ours or the server's,
#: is no node's fault: the leases' age is counted from its end.
LEASE_POLL_S = 0.5


class CyclePacer(Protocol):
    """Releases one cycle at a time: a simulation runs them in lock-step."""

    async def before_cycle(self) -> None:
        """Return when the next cycle may run. All that was published before is folded."""

    def after_cycle(self, published: int, wake_at: datetime | None) -> None:
        """Report a cycle: the highest sequence that it published, 0 if none; and when the next one is due."""


class Leader:
    """Decides while it holds the lease."""

    def __init__(
        self, bus: Bus, cache: ClusterCache, in_force: PolicyInForce, settings: Settings, pace: CyclePacer | None = None
    ) -> None:
        self.bus, self.cache, self._in_force = bus, cache, in_force
        self.pace = pace
        self._publisher = Publisher(bus, lambda: self.leads)
        self._taker = SnapshotTaker(settings)
        self._instance = settings.instance
        self._ttl_s = settings.lease_ttl_s
        # Two processes with the same instance name are two holders all the same.
        self._holder = f"{settings.instance}-{uuid.uuid4().hex[:8]}"
        self._lease: Lease | None = None
        #: Since when the bus has carried the agents' facts to us without a pause, in the log's time.
        self._reachable_since: datetime | None = None
        #: The revision of each node's lease that was compared with the log last, by the node.
        self._compared: dict[str, int] = {}
        self._last_cycle_s = 0.0
        self._left_over = NOTHING_LEFT
        #: Nodes whose lease was revoked, and why they are lost once it has expired.
        self._revoked: dict[str, LoseNode] = {}

    @property
    def leads(self) -> bool:
        return self._lease is not None and self._lease.is_held

    @property
    def policy(self) -> Policy:
        """Return the policy in force; known once the log is folded."""
        return self._in_force.choose(self.cache.cluster)

    @property
    def unused_settings(self) -> str:
        """Return which settings of this process have no effect on the policy; '' if none."""
        return self._in_force.describe_unused(self.cache.cluster)

    @property
    def reachable_since(self) -> datetime:
        if self._reachable_since is None:
            self._reachable_since = self.cache.now()
        return self._reachable_since

    async def lead(self) -> None:
        """Wait for the lease, decide while it lasts, and wait again."""
        await self.cache.caught_up.wait()
        if unused := self.unused_settings:
            log.warning(unused)
        bucket = await self.bus.open_bucket(topology.LEASES)
        while True:
            lease = Lease(bucket, LEASE_KEY, self._holder, self._ttl_s, clock=self.bus.clock)
            async with lease.leadership() as keeper:
                self._lease = lease
                self._taker.recalled(self.cache.snapshot_sequence)
                taking = asyncio.create_task(self._taker.take_while(self.cache.cluster))
                deciding = asyncio.create_task(self._decide_while_held())
                try:
                    await asyncio.wait({keeper, deciding}, return_when=asyncio.FIRST_COMPLETED)
                    if deciding.done():
                        deciding.result()
                finally:
                    self._lease = None
                    await cancel_and_wait(deciding, taking)

    async def _decide_while_held(self) -> None:
        # What a former leader has published must be folded before anything is added to it.
        await self.cache.catch_up()
        while self.leads:
            await self._adopt()
            if self.pace is not None:
                await self.pace.before_cycle()
            seen, started = self.cache.cluster.sequence, time.perf_counter()
            published, wake_at, decide_s = await self._cycle()
            if self.pace is not None:
                self.pace.after_cycle(published, wake_at)
            # Fold and answer for at least as long as the cycle took: the next one decides on all that came meanwhile.
            await asyncio.sleep(min(max(2 * decide_s - (time.perf_counter() - started), 0), TICK_S))
            if published:
                with metrics.PHASE_SECONDS.labels("fold").time():
                    await self.cache.wait_for_sequence(published)
            else:
                await self.cache.wait_for_change(seen, self._rest_s(wake_at))

    def _rest_s(self, wake_at: datetime | None) -> float:
        """Return how long to wait for a fact at most."""
        if wake_at is None:
            return TICK_S
        return min(max((wake_at - self.cache.now()).total_seconds(), 0.001), TICK_S)

    async def step(self) -> int:
        """One cycle: decide and publish. Returns the highest sequence published, 0 if nothing was."""
        return (await self._cycle())[0]

    async def _cycle(self) -> tuple[int, datetime | None, float]:
        """Return (highest sequence published, time of the next cycle, seconds that the decisions took)."""
        pending, fence, wake_at, decide_s = await self.cache.compute(self._decide, inline=self._is_short_cycle())
        self._last_cycle_s = decide_s
        metrics.DECIDE_SECONDS.observe(decide_s)
        if decide_s > self._ttl_s * CYCLE_SHARE:
            metrics.LONG_CYCLES.inc()
            log.warning("a long scheduling cycle", seconds=round(decide_s, 3), facts=len(pending))
        if not pending:
            return 0, wake_at, decide_s
        with metrics.PHASE_SECONDS.labels("publish").time():
            published = await self._publisher.publish(pending, fence)
        return published, wake_at, decide_s

    def _is_short_cycle(self) -> bool:
        """Whether the next cycle will be over in a moment: few runs, and the last one was."""
        cluster = self.cache.cluster
        return self._last_cycle_s < INLINE_CYCLE_S and len(cluster.queued) + len(cluster.active) < INLINE_CYCLE_RUNS

    def _decide(self, cluster: Cluster) -> tuple[list[PendingFact], int, datetime | None, float]:
        """Decide on the cluster as it is; runs in a thread. The facts are made here, before the cluster changes."""
        started, now, reachable_since = time.perf_counter(), self.cache.now(), self.reachable_since
        quarantined, left_over, policy = cluster.quarantined, self._left_over, self.policy
        timer = PhaseTimer()
        made = run_cycle(cluster, now, policy, reachable_since, left_over=left_over, begin_phase=timer.begin_phase)
        timer.begin_phase("record")
        self._left_over = made.left_over
        record = decision_record(cluster, now, policy, reachable_since, left_over)
        pending = pending_facts(cluster, in_order(made.decisions)[:MAX_FACTS_PER_CYCLE], now, record)
        timer.end_phase()
        if cluster.quarantined != quarantined:
            log.error("the scheduling cycle fails on something", **describe_quarantine(cluster))
        return pending, cluster.placed_sequence, made.wake_at, time.perf_counter() - started

    async def _adopt(self) -> None:
        """Publish the policy before a decision that would name one that no fact of the log holds."""
        while self.leads:
            cluster = self.cache.cluster
            if (adoption := self._in_force.next_adoption(cluster, self._instance)) is None:
                return
            expected = ExpectedSequence(cluster.policy_sequence, PolicyAdopted.subject_filter())
            try:
                ack = await self.bus.publish(adoption, expected=expected)
            except Conflict:
                await self.cache.catch_up()
            except TransientError as error:
                log.warning("policy not published, trying again", error=str(error))
            else:
                log.info("policy adopted", policy=adoption.policy.name, digest=adoption.digest, origin=adoption.origin)
                await self.cache.wait_for_sequence(ack.sequence)
                return

    # -- nodes --------------------------------------------------------------

    async def watch_nodes(self) -> None:
        """Publish the nodes whose leases have expired as lost, while this instance leads.

        Standbys watch as well, so that a new leader need not start counting.
        """
        watch, last_read = LeaseWatch(self.bus.clock), self.bus.clock.monotonic()
        while True:
            await asyncio.sleep(LEASE_POLL_S)
            try:
                alive = [node for node in self.cache.cluster.nodes.values() if node.alive]
                records = await asyncio.wait_for(read_records(self.bus, NODE_LEASES), 2.0) if alive else {}
            except (nats.errors.Error, APIError, TimeoutError, OSError) as error:
                log.info("node leases not read", error=repr(error))
                continue
            expired = _expired(watch, alive, records)
            silence_s, last_read = self.bus.clock.monotonic() - last_read, self.bus.clock.monotonic()
            if silence_s > 4 * LEASE_POLL_S:
                # No node could renew, or we could not read: every lease gets its full time again.
                watch, self._reachable_since = LeaseWatch(self.bus.clock), self.cache.now()
            elif self.leads:
                unresponsive = await self.cache.compute(
                    unresponsive_nodes, self.cache.now(), self.policy, self.reachable_since
                )
                try:
                    await self._revoke(unresponsive)
                    await self._lose(lost_nodes(self.cache.cluster, expired))
                    await self._settle_disputes(records)
                except (nats.errors.Error, APIError, TimeoutError, OSError, TransientError) as error:
                    log.warning("node leases not settled, trying again", error=repr(error))

    async def _settle_disputes(self, records: Mapping[str, LeaseRecord]) -> None:
        """Free what only a node's agent, or only we take to run: an agent that reads it ends what it runs of it."""
        # The key names the node, which only its own agent writes.
        by_node = {key.removeprefix(NODE_LEASES): record for key, record in records.items()}
        said = [
            (node_id, record.holder, statement)
            for node_id, record in by_node.items()
            if (statement := self._new_statement(node_id, record)) is not None
        ]
        if any(disputed_parts(self.cache.cluster, *each) for each in said):
            # What was said may follow from facts that we have not folded yet.
            await self.cache.catch_up()
        for node_id, incarnation, statement in said:
            for run_id, generation in disputed_parts(self.cache.cluster, node_id, incarnation, statement):
                await self._release(node_id, run_id, generation)
        self._compared = {node_id: record.revision for node_id, record in by_node.items()}

    def _new_statement(self, node_id: str, record: LeaseRecord) -> NodeStatement | None:
        if self._compared.get(node_id) == record.revision:
            return None
        try:
            return NodeStatement.from_lease_data(record.data)
        except ValueError as error:
            log.warning("a node's lease says what cannot be", node_id=node_id, error=str(error))
            metrics.INVALID_STATEMENTS.inc()
            return None

    async def _release(self, node_id: str, run_id: str, generation: int) -> None:
        runs = (run_id, generation) not in self.cache.cluster.nodes[node_id].allocations
        who = "agent" if runs else "scheduler"
        detail = "its agent ran what was not placed there" if runs else "its agent does not run it"
        log.error("a node and the log disagree", node_id=node_id, run_id=run_id, generation=generation, detail=detail)
        released = RunReleased(run_id=run_id, generation=generation, node_id=node_id, clean=False, detail=detail)
        await self.bus.publish(released)
        metrics.DISPUTES.labels(who).inc()

    async def _revoke(self, decisions: list[LoseNode]) -> None:
        """Take the leases from nodes that are to be lost although they renew.

        Their ranks may still run: they are lost once the lease has expired, by which time their agents, or the guards
        of their ranks, have ended them.
        """
        bucket = await self.bus.open_bucket(topology.LEASES)
        for decision in decisions:
            if self._revoked.get(decision.node_id) != decision:
                log.warning("revoking a node's lease", node_id=decision.node_id, reason=decision.reason)
            self._revoked[decision.node_id] = decision
            # Twice its time: the agent must not have it back before the node is lost.
            ttl_s = 2 * self.cache.cluster.nodes[decision.node_id].lease_ttl_s
            await revoke(bucket, f"{NODE_LEASES}{decision.node_id}", decision.incarnation, ttl_s)

    async def _lose(self, decisions: list[LoseNode]) -> None:
        bucket = await self.bus.open_bucket(topology.LEASES)
        for decision in decisions:
            revoked = self._revoked.pop(decision.node_id, decision)
            if revoked.incarnation == decision.incarnation:
                decision = revoked
            log.warning("node lost", node_id=decision.node_id, reason=decision.reason)
            ack = await self.bus.publish(lost_fact(decision))
            await self.cache.wait_for_sequence(ack.sequence)
            await lift_revocation(bucket, f"{NODE_LEASES}{decision.node_id}")


def _expired(watch: LeaseWatch, alive: Sequence[Node], records: Mapping[str, LeaseRecord]) -> set[str]:
    keys = {node.node_id: f"{NODE_LEASES}{node.node_id}" for node in alive}
    # A new incarnation has its own lease, independent of the last one's record.
    return {
        node.node_id
        for node in alive
        if watch.is_expired(
            f"{keys[node.node_id]}/{node.incarnation}", records.get(keys[node.node_id]), node.lease_ttl_s
        )
    }
