"""The cluster as this instance has folded it so far."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import Any, TypeVar

import structlog

from contracts import subjects, topology
from contracts.base import Fact
from contracts.events.capacity import CapacityWanted, PolicyAdopted
from contracts.events.run import RunPlaced
from services.kit.bus import Bus, Message
from services.kit.concurrency import run_in_thread
from services.scheduler import metrics
from services.scheduler.child_process import read_child, start_child
from services.scheduler.core.fold import apply, seen
from services.scheduler.core.state.cluster import Cluster
from services.scheduler.core.state.run import Phase
from services.scheduler.log_clock import SYNC_S, LogClock
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
#: Answers that are computed in children at a time, and how long one may take.
MAX_CHILDREN = 2
CHILD_TIMEOUT_S = 30.0

T = TypeVar("T")


class ClusterCache:
    """A cluster that grows with the log, and ways to wait for it."""

    def __init__(self, bus: Bus, virtual: bool = False) -> None:
        self.bus = bus
        #: Whether facts count from when their publishers say rather than from when they were stored (simulations).
        self._virtual = virtual
        self._observed_at = 0.0
        self.clock = LogClock(bus.clock, virtual)
        #: Held while the cluster must not change: a cycle runs in a thread, and folding waits for it.
        self._lock = asyncio.Lock()
        self._children = asyncio.Semaphore(MAX_CHILDREN)
        self.cluster = Cluster()
        #: The sequence of the snapshot that we began with; 0: with none.
        self.snapshot_sequence = 0
        self.caught_up = asyncio.Event()
        self._progress = asyncio.Condition()

    async def follow(self) -> None:
        """Fold the log for as long as the service runs, from the newest snapshot on."""
        if not self._virtual:
            await self._load_snapshot()
        await self.clock.synchronize(self.bus)
        target = max([await self.bus.get_last_sequence(subject) for subject in FOLLOWED])
        self._check_caught_up(target)
        messages = self.bus.follow(topology.FACTS.name, FOLLOWED, self.cluster.sequence + 1, include_undecodable=True)
        async for batch in messages:
            if batch:
                async with self._lock:
                    for received in batch:
                        self._fold(received)
            self._check_caught_up(target)
            self._observe(idle=not batch)
            if batch:
                async with self._progress:
                    self._progress.notify_all()

    async def keep_time(self) -> None:
        """Ask the server for its time now and then, for as long as the service runs."""
        while True:
            await asyncio.sleep(SYNC_S)
            await self.clock.synchronize(self.bus)

    def now(self) -> datetime:
        """Return the time of the log."""
        return self.clock.now()

    async def compute(self, function: Callable[..., T], *arguments: Any, inline: bool = False) -> T:
        """Call ``function(cluster, *arguments)`` in a thread; nothing is folded before it returns.

        The event loop goes on: leases are renewed and requests are answered, however long it takes. ``inline``: it is
        known to be short, and is called here, which saves handing over to a thread.
        """
        async with self._lock:
            if inline:
                return function(self.cluster, *arguments)
            return await run_in_thread(function, self.cluster, *arguments)

    async def compute_in_child(self, function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
        """Call ``function(cluster, *arguments)`` on a copy of the cluster, in a process of its own."""
        async with self._children:
            async with self._lock:
                # A fork copies the cluster as it is now; what is folded afterwards does not reach the child.
                started = start_child(lambda: function(self.cluster, *arguments))
            return await read_child(started, CHILD_TIMEOUT_S)

    async def _load_snapshot(self) -> None:
        """Begin with the newest snapshot."""
        found = await SnapshotStore(self.bus).newest()
        if found is not None:
            self.cluster, self.snapshot_sequence = found, found.sequence
            log.info("recalled a snapshot", sequence=found.sequence, runs=found.runs.total)

    def _check_caught_up(self, target: int) -> None:
        """Note when everything is folded that was in the log at the start."""
        if not self.caught_up.is_set() and self.cluster.sequence >= target:
            log.info("folded the log", sequence=self.cluster.sequence, runs=self.cluster.runs.total)
            self.caught_up.set()

    async def wait_for_sequence(self, sequence: int) -> None:
        """Wait until the fact of that sequence is folded."""
        async with self._progress:
            await self._progress.wait_for(lambda: self.cluster.sequence >= sequence)

    async def wait_for_change(self, since: int, timeout_s: float) -> None:
        """Wait until something newer than ``since`` is folded, at most ``timeout_s``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.wait_for_sequence(since + 1)

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
            observe(self.cluster, self.now())

    def _fold(self, received: Message[Any]) -> None:
        """Fold a fact; of anything else on these subjects only the place counts, for the fences."""
        if isinstance(received.event, Fact):
            self._apply(received.event, received)
        seen(self.cluster, received.subject, received.sequence)

    def _apply(self, fact: Fact, received: Message[Any]) -> None:
        stored_at = received.envelope.time if self._virtual else received.stored_at
        if stored_at is not None and self.caught_up.is_set():
            self.clock.observe(stored_at)
        time = stored_at or self.now()
        if isinstance(fact, RunPlaced) and (run := self.cluster.runs.get(fact.run_id)) and self.caught_up.is_set():
            metrics.WAITING_SECONDS.observe(max((time - run.queued_at).total_seconds(), 0))
        before = self.cluster.quarantined
        apply(self.cluster, fact, received.sequence, time, received.envelope)
        if self.cluster.quarantined - before:
            log.error("a fact cannot be applied", subject=fact.subject, sequence=received.sequence)


def observe(cluster: Cluster, now: datetime) -> None:
    """Bring the gauges in step with the cluster."""
    metrics.FOLDED_SEQUENCE.set(cluster.sequence)
    metrics.QUEUE_LENGTH.set(len(cluster.queued))
    metrics.SLOTS.labels("total").set(cluster.slots_total)
    metrics.SLOTS.labels("used").set(cluster.slots_used)
    metrics.QUARANTINED.labels("run").set(len(cluster.quarantined_runs))
    metrics.QUARANTINED.labels("node").set(len(cluster.quarantined_nodes))
    for phase in Phase:
        metrics.RUNS.labels(str(phase)).set(cluster.phases[phase])
    active = [cluster.runs[run_id] for run_id in cluster.active]
    oldest_s = min((at_s for run in active for at_s in run.staged.open.values()), default=now.timestamp())
    metrics.COMMIT_LAG_SECONDS.set(max(now.timestamp() - oldest_s, 0.0))
    metrics.COMMIT_LAG_STEPS.set(max((run.staged.behind_steps for run in active), default=0))
    metrics.HELD_UP_RUNS.set(sum(bool(run.held_up) for run in active))
    states = [node.display_state for node in cluster.nodes.values()]
    for state in ("alive", "draining", "notice", "unfit", "quarantined", "lost", "left"):
        metrics.NODES.labels(state).set(states.count(state))
