"""The cluster as this instance has folded it so far."""

from __future__ import annotations

import asyncio
from typing import Any

import structlog

from contracts import subjects, topology
from contracts.base import Fact
from contracts.events.capacity import CapacityWanted, PolicyAdopted
from contracts.events.run import RunPlaced
from services.kit.bus import Bus, Message
from services.scheduler import metrics
from services.scheduler.core.fold import apply, seen
from services.scheduler.core.state.cluster import Cluster, Phase
from services.scheduler.snapshot import SnapshotStore

log = structlog.get_logger(__name__)

#: Every fact of a run is followed, also those that change nothing here: a run's last sequence is
#: what its next decision is fenced with.
FOLLOWED = (
    subjects.fact("run", subjects.WILDCARD, subjects.WILDCARD),
    subjects.fact("node", subjects.WILDCARD, subjects.WILDCARD),
    PolicyAdopted.subject_filter(),
    CapacityWanted.subject_filter(),
)
#: How often the gauges are brought in step while facts come in.
OBSERVE_S = 0.5


class ClusterCache:
    """A cluster that grows with the log, and ways to wait for it."""

    def __init__(self, bus: Bus, virtual: bool = False) -> None:
        self.bus = bus
        #: Whether facts count from when their publishers say rather than from when they were stored (simulations).
        self._virtual = virtual
        self._observed_at = 0.0
        self.cluster = Cluster()
        #: The sequence of the snapshot that we began with; 0: with none.
        self.snapshot_sequence = 0
        self.caught_up = asyncio.Event()
        self._progress = asyncio.Condition()

    async def follow(self) -> None:
        """Fold the log for as long as the service runs, from the newest snapshot on."""
        if not self._virtual:
            await self._load_snapshot()
        target = max([await self.bus.get_last_sequence(subject) for subject in FOLLOWED])
        self._check_caught_up(target)
        messages = self.bus.follow(topology.FACTS.name, FOLLOWED, self.cluster.sequence + 1, include_undecodable=True)
        async for batch in messages:
            for received in batch:
                self._fold(received)
            self._check_caught_up(target)
            self._observe(idle=not batch)
            if batch:
                async with self._progress:
                    self._progress.notify_all()

    async def _load_snapshot(self) -> None:
        """Begin with the newest snapshot."""
        found = await SnapshotStore(self.bus).newest()
        if found is not None:
            self.cluster, self.snapshot_sequence = found, found.sequence
            log.info("recalled a snapshot", sequence=found.sequence, runs=found.runs.total)

    def _check_caught_up(self, target: int) -> None:
        """Whether everything is folded that was in the log when we began."""
        if not self.caught_up.is_set() and self.cluster.sequence >= target:
            log.info("folded the log", sequence=self.cluster.sequence, runs=self.cluster.runs.total)
            self.caught_up.set()

    async def wait_for_sequence(self, sequence: int) -> None:
        """Wait until the fact of that sequence is folded."""
        async with self._progress:
            await self._progress.wait_for(lambda: self.cluster.sequence >= sequence)

    async def wait_for_change(self, since: int, timeout_s: float) -> None:
        """Wait until something newer than ``since`` is folded, at most ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.wait_for_sequence(since + 1)
        except TimeoutError:
            return

    async def catch_up(self) -> None:
        """Fold at least everything that is in the log now, so that "unknown" means unknown."""
        await self.caught_up.wait()
        for subject in FOLLOWED:
            await self.wait_for_sequence(await self.bus.get_last_sequence(subject))

    def _observe(self, *, idle: bool) -> None:
        """Bring the gauges in step now and then: it costs a look at every node."""
        now = self.bus.clock.monotonic()
        if idle or now - self._observed_at > OBSERVE_S:
            self._observed_at = now
            observe(self.cluster)

    def _fold(self, received: Message[Any]) -> None:
        """Fold a fact; of anything else on these subjects only the place counts, for the fences."""
        fact = received.event
        if isinstance(fact, Fact):
            self._apply(fact, received)
        seen(self.cluster, received.subject, received.sequence)

    def _apply(self, fact: Fact, received: Message[Any]) -> None:
        stored_at = received.envelope.time if self._virtual else received.stored_at
        time = stored_at or self.bus.clock.now()
        if isinstance(fact, RunPlaced) and (run := self.cluster.runs.get(fact.run_id)) and self.caught_up.is_set():
            metrics.WAITING_SECONDS.observe(max((time - run.queued_at).total_seconds(), 0))
        before = (len(self.cluster.quarantined_runs), len(self.cluster.quarantined_nodes))
        apply(self.cluster, fact, received.sequence, time, received.envelope)
        if (len(self.cluster.quarantined_runs), len(self.cluster.quarantined_nodes)) > before:
            log.error("a fact cannot be applied", subject=fact.subject, sequence=received.sequence)


def observe(cluster: Cluster) -> None:
    """Bring the gauges in step with the cluster."""
    metrics.FOLDED_SEQUENCE.set(cluster.sequence)
    metrics.QUEUE_LENGTH.set(len(cluster.queued))
    metrics.SLOTS.labels("total").set(cluster.slots_total)
    metrics.SLOTS.labels("used").set(cluster.slots_used)
    metrics.QUARANTINED.labels("run").set(len(cluster.quarantined_runs))
    metrics.QUARANTINED.labels("node").set(len(cluster.quarantined_nodes))
    for phase in Phase:
        metrics.RUNS.labels(str(phase)).set(cluster.phases[phase])
    states = [node.display_state for node in cluster.nodes.values()]
    for state in ("alive", "draining", "notice", "unfit", "quarantined", "lost", "left"):
        metrics.NODES.labels(state).set(states.count(state))
