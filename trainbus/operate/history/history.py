"""What happened in a stretch of the log: the requests, their times and work, and the nodes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from statistics import median
from typing import NamedTuple

from contracts.events.capacity import PolicyAdopted
from contracts.events.node import NodeDraining, NodeFact, NodeJoined, NodeLeft, NodeLost
from contracts.events.run import RunAccepted, RunFact, RunPlaced, RunStarted, RunStopping, queue_reason_of
from contracts.scheduling import Policy
from contracts.spec.run import RunSpec
from services.scheduler.core.state.cluster import Cluster
from services.scheduler.core.state.run import TERMINAL
from trainbus.operate.history.log import Entry, fold_entry

#: Label of a node that names the pool it comes from.
POOL = "pool"
#: Restarts needed to measure how long one takes.
ENOUGH_RESTARTS = 5
LEAST_RESTART_S = 0.001
USUAL_RESUME_COST_S = 60.0
#: Long enough that no node is lost where no lease is renewed.
LEASE_TTL_S = 1e9
_NEVER, _FOR_EVER = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)


class NodeKind(NamedTuple):
    """What a node's price depends on."""

    pool: str
    accelerator: str

    @classmethod
    def of(cls, node: NodeJoined) -> NodeKind:
        return cls(node.labels.get(POOL, ""), node.accelerator)


def slots_by_kind(nodes: Iterable[NodeJoined]) -> dict[NodeKind, int]:
    """How many slots there are of each kind of node."""
    found: dict[NodeKind, int] = {}
    for node in nodes:
        found[NodeKind.of(node)] = found.get(NodeKind.of(node), 0) + node.slots
    return found


@dataclass(slots=True)
class RunRecord:
    """One run as it went. Times with slots count from the beginning of the stretch on."""

    run_id: str
    spec: RunSpec
    submitted_at: datetime
    #: Slots times the seconds for which it had them.
    work_slot_s: float = 0.0
    #: Seconds in which it had slots at all.
    held_s: float = 0.0
    first_placed_at: datetime | None = None
    ended_at: datetime | None = None
    preemptions: int = 0
    #: Slots of each placement after the first, added up: each of them took a while to go on.
    restart_slots: int = 0
    #: Its last word: completed, failed, cancelled; '' while it goes on.
    outcome: str = ""

    @property
    def wait_s(self) -> float | None:
        """Seconds without slots from its submission to its end; None if it has not ended."""
        if self.ended_at is None:
            return None
        return max((self.ended_at - self.submitted_at).total_seconds() - self.held_s, 0.0)


@dataclass(slots=True)
class Totals:
    """Sums over the stretch."""

    used_slot_s: float = 0.0
    #: By the kind of node.
    offered_slot_s: dict[NodeKind, float] = field(default_factory=dict)
    decisions: int = 0


class Nodes:
    """What becomes of nodes, as a simulation can play it.

    An agent that starts again and takes its ranks up again is no event. A node that is drained, unfit or under notice
    is closed: it is the same to those who wait.
    """

    def __init__(self) -> None:
        self._open: dict[str, bool] = {}
        self._lives: dict[str, int] = {}
        self._facts: dict[str, NodeJoined] = {}

    @property
    def present(self) -> tuple[NodeJoined, ...]:
        """Those on which something may be placed, as they joined last."""
        return tuple(self._facts[node_id] for node_id, is_open in self._open.items() if is_open)

    def changes(self, node_id: str, cluster: Cluster, joined: NodeJoined | None) -> list[NodeFact]:
        """What has happened to a node since it was looked at last."""
        node, was_open = cluster.nodes.get(node_id), self._open.get(node_id)
        if node is None or joined is None:
            return []
        if not node.alive:
            if self._open.pop(node_id, None) is None:
                return []
            kind = NodeLost if node.state == "lost" else NodeLeft
            return [kind(node_id=node_id, incarnation=self._facts[node_id].incarnation)]
        self._open[node_id] = node.is_schedulable
        if was_open == node.is_schedulable and joined.slots == self._facts[node_id].slots:
            return []
        if was_open and not node.is_schedulable:
            return [NodeDraining(node_id=node_id, incarnation=self._facts[node_id].incarnation)]
        self._lives[node_id] = self._lives.get(node_id, 0) + 1
        # Nothing of what really ran there is running in the simulation.
        life = {"incarnation": f"life-{self._lives[node_id]}", "running": (), "lease_ttl_s": LEASE_TTL_S}
        self._facts[node_id] = joined.model_copy(update=life)
        back: list[NodeFact] = [self._facts[node_id]]
        if not node.is_schedulable:
            back.append(NodeDraining(node_id=node_id, incarnation=self._facts[node_id].incarnation))
        return back


def offered(
    nodes: Iterable[NodeJoined], events: Iterable[tuple[float, NodeFact]], until_s: float
) -> tuple[dict[NodeKind, float], int]:
    """(slot-seconds that such nodes offer by their kind, the most slots at a time) until a time."""
    alive = {node.node_id: node for node in nodes}
    found: dict[NodeKind, float] = {}
    most, last_s = sum(node.slots for node in alive.values()), 0.0

    def count(now_s: float) -> None:
        for kind, slots in slots_by_kind(alive.values()).items():
            found[kind] = found.get(kind, 0.0) + slots * (now_s - last_s)

    for at_s, fact in events:
        now_s = min(at_s, until_s)
        count(now_s)
        last_s = now_s
        if isinstance(fact, NodeJoined):
            alive[fact.node_id] = fact
        elif isinstance(fact, NodeLost | NodeLeft):
            alive.pop(fact.node_id, None)
        most = max(most, sum(node.slots for node in alive.values()))
    count(until_s)
    return found, most


class History:
    """Folds the log and sums up the time from ``start`` to ``end``. ``feed`` it every entry.

    Without ``start`` and ``end`` it covers the whole log.
    """

    def __init__(self, start: datetime | None = None, end: datetime | None = None) -> None:
        self.start, self.end = start or _NEVER, end or _FOR_EVER
        self.cluster = Cluster()
        self.runs: dict[str, RunRecord] = {}
        self.totals = Totals()
        #: The policy in force when it began; the first one that there was, if there was none by then.
        self.policy: Policy | None = None
        #: The nodes when there were most slots.
        self.nodes: tuple[NodeJoined, ...] = ()
        #: The nodes that there were when it began, and what became of them and others (seconds since, what).
        self.first_nodes: tuple[NodeJoined, ...] = ()
        self.node_events: list[tuple[float, NodeFact]] = []
        self._nodes = Nodes()
        self._joined: dict[str, NodeJoined] = {}
        #: Run -> the placement after its first that has not started yet, and since when; how long the others took.
        self._restarting: dict[str, tuple[int, datetime]] = {}
        self._restarts_s: list[float] = []
        #: Run -> the number of its slots, and since when.
        self._held: dict[str, tuple[int, datetime]] = {}
        self._last: datetime | None = None
        self._most = -1
        #: Slots in use (shares of them added up), and slots offered.
        self._used = 0.0
        self._offered: dict[NodeKind, int] = {}

    def feed(self, entry: Entry) -> None:
        """Count the time since the entry before, then fold this one."""
        if self.start == _NEVER:
            self.start = entry.time
        self._pass_time(entry.time)
        if self.policy is None or entry.time <= self.start:
            self.policy = entry.fact.policy if isinstance(entry.fact, PolicyAdopted) else self.policy
        fold_entry(self.cluster, entry)
        fact = entry.fact
        if isinstance(fact, RunAccepted):
            self.runs.setdefault(fact.run_id, RunRecord(fact.run_id, fact.spec, entry.time))
        elif isinstance(fact, RunFact):
            self._on_run(fact, entry.time)
        elif isinstance(fact, NodeFact):
            self._on_node(fact, entry.time)

    def close(self) -> None:
        """Finish the sums: the log has ended."""
        if self._last is not None:
            # What was said at the very end was said in the stretch.
            self.end = min(self.end, self._last + timedelta(microseconds=1))
            self._most_slots(self._last)
            for run_id, (slots, since) in self._held.items():
                self._count(self.runs[run_id], slots, since, self._last)

    def resume_cost_s(self) -> float:
        """Return the median time from a repeated placement to its start; a usual value where there are too few."""
        measured_s = median(self._restarts_s) if len(self._restarts_s) >= ENOUGH_RESTARTS else 0.0
        # A simulation's runs start at once.
        return measured_s if measured_s > LEAST_RESTART_S else USUAL_RESUME_COST_S

    def nodes_until_last(self) -> tuple[tuple[float, NodeFact], ...]:
        """What became of nodes up to the last submission. Later they stay as they are, so that all can be played."""
        last_s = max(((run.submitted_at - self.start).total_seconds() for run in self.submitted), default=0.0)
        return tuple((at_s, fact) for at_s, fact in self.node_events if at_s <= last_s)

    @property
    def submitted(self) -> list[RunRecord]:
        """The runs that were asked for in the stretch, in that order."""
        return [run for run in self.runs.values() if self.start <= run.submitted_at < self.end]

    @property
    def carried(self) -> list[RunRecord]:
        """The runs that were asked for before, and were not over when it began."""
        return [
            run
            for run in self.runs.values()
            if run.submitted_at < self.start and (run.ended_at is None or run.ended_at > self.start)
        ]

    def _pass_time(self, time: datetime) -> None:
        last, self._last = self._last or time, max(time, self._last or time)
        if time <= self.start:
            return
        since = max(last, self.start)
        inside_s = (min(time, self.end) - since).total_seconds()
        if inside_s > 0:
            self.totals.used_slot_s += self._used * inside_s
            offered = self.totals.offered_slot_s
            for kind, slots in self._offered.items():
                offered[kind] = offered.get(kind, 0.0) + slots * inside_s
            if self._most < 0:
                # The stretch begins with what was there.
                self._most_slots(since)

    def _on_run(self, fact: RunFact, time: datetime) -> None:
        run = self.runs.get(fact.run_id)
        if run is None:
            return
        if isinstance(fact, RunPlaced):
            run.first_placed_at = run.first_placed_at or time
            if fact.generation > 1 and time > self.start:
                run.restart_slots += fact.world_size
                self._restarting[run.run_id] = (fact.generation, time)
        elif isinstance(fact, RunStarted):
            generation, since = self._restarting.get(run.run_id, (0, time))
            if generation == fact.generation:
                del self._restarting[run.run_id]
                self._restarts_s.append((time - since).total_seconds())
        elif isinstance(fact, RunStopping) and queue_reason_of(fact.reason) == "preempted" and fact.then == "queue":
            run.preemptions += 1
        if self.start <= time < self.end and getattr(fact, "decision", None) is not None:
            self.totals.decisions += 1
        self._update_slots(run, time)

    def _update_slots(self, run: RunRecord, time: datetime) -> None:
        """Update the run's slots, and its end, from the cluster."""
        known = self.cluster.runs[run.run_id]
        slots, (held, since) = known.slot_count, self._held.get(run.run_id, (0, time))
        if slots != held:
            self._count(run, held, since, time)
            self._used += (slots - held) * run.spec.resources.share
            self._held[run.run_id] = (slots, time)
            if not slots:
                del self._held[run.run_id]
        if known.phase in TERMINAL and run.ended_at is None:
            run.ended_at, run.outcome = time, str(known.phase)

    def _count(self, run: RunRecord, slots: int, since: datetime, until: datetime) -> None:
        """Add the slot-seconds between ``since`` and ``until``; time before the stretch does not count."""
        elapsed_s = max((until - max(since, self.start)).total_seconds(), 0.0) if slots else 0.0
        run.work_slot_s += slots * elapsed_s
        run.held_s += elapsed_s

    def _on_node(self, fact: NodeFact, time: datetime) -> None:
        if isinstance(fact, NodeJoined):
            self._joined[fact.node_id] = fact
        for run_id in list(self._held):
            self._update_slots(self.runs[run_id], time)
        self._offered = slots_by_kind(self._alive())
        at_s = (time - self.start).total_seconds()
        for change in self._nodes.changes(fact.node_id, self.cluster, self._joined.get(fact.node_id)):
            if at_s < 0:
                self.first_nodes = self._nodes.present
            elif time < self.end:
                self.node_events.append((at_s, change))
        if self.start <= time < self.end:
            self._most_slots(time)

    def _alive(self) -> tuple[NodeJoined, ...]:
        nodes = self.cluster.nodes
        return tuple(fact for node_id, fact in self._joined.items() if node_id in nodes and nodes[node_id].alive)

    def _most_slots(self, time: datetime | None) -> None:
        """Keep the nodes of the moment with most slots."""
        if time is None or (alive := self._alive()) == self.nodes:
            return
        if (slots := sum(node.slots for node in alive)) > self._most:
            self._most, self.nodes = slots, alive
