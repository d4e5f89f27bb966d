"""What really happened in a stretch of the log: who asked for what and when, how much work it was, on which nodes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from contracts.events.node import NodeFact, NodeJoined
from contracts.events.run import RunAccepted, RunFact, RunPlaced, RunPreempting
from contracts.events.train import TrainRequested
from services.scheduler.core.cluster import TERMINAL, Cluster
from services.scheduler.past.log import Entry, fold_entry

#: Label of a node that names the pool it comes from.
POOL = "pool"


@dataclass(slots=True)
class Lived:
    """One run as it went. Times with slots count from the beginning of the stretch on."""

    run_id: str
    spec: TrainRequested
    submitted_at: datetime
    #: Slots times the seconds for which it had them.
    work_slot_s: float = 0.0
    #: Seconds in which it had slots at all.
    held_s: float = 0.0
    first_placed_at: datetime | None = None
    ended_at: datetime | None = None
    preemptions: int = 0
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
    offered_slot_s: float = 0.0
    cost: float = 0.0
    decisions: int = 0


@dataclass(frozen=True, slots=True)
class Prices:
    """What a slot costs for an hour: by the node's pool, else by its accelerator."""

    per_slot_hour: Mapping[str, float] = field(default_factory=dict)

    def of(self, node: NodeJoined) -> float:
        """The price of one slot of this node for an hour; 0 if nobody said."""
        by_pool = self.per_slot_hour.get(node.labels.get(POOL, ""))
        return self.per_slot_hour.get(node.accelerator, 0.0) if by_pool is None else by_pool

    def of_nodes(self, nodes: tuple[NodeJoined, ...]) -> float:
        """What all these nodes cost for an hour."""
        return math.fsum(node.slots * self.of(node) for node in nodes)


class History:
    """Folds the log and adds up what it says about the time from ``start`` to ``end``. ``feed`` it every entry."""

    def __init__(self, start: datetime, end: datetime, prices: Prices | None = None) -> None:
        self.start, self.end, self.prices = start, end, prices or Prices()
        self.cluster = Cluster()
        self.runs: dict[str, Lived] = {}
        self.totals = Totals()
        #: The nodes when there were most slots.
        self.nodes: tuple[NodeJoined, ...] = ()
        self._joined: dict[str, NodeJoined] = {}
        self._held: dict[str, int] = {}
        self._last: datetime | None = None
        self._most = -1
        #: Slots in use, slots offered, and what these cost an hour.
        self._used, self._offered, self._price = 0, 0, 0.0

    def feed(self, entry: Entry) -> None:
        """Count the time since the entry before, then fold this one."""
        self._pass_time(entry.time)
        fold_entry(self.cluster, entry)
        fact = entry.fact
        if isinstance(fact, RunAccepted):
            self.runs.setdefault(fact.run_id, Lived(fact.run_id, fact.spec, entry.time))
        elif isinstance(fact, RunFact):
            self._on_run(fact, entry.time)
        elif isinstance(fact, NodeFact):
            self._on_node(fact, entry.time)

    def close(self) -> None:
        """Nothing more comes: the stretch may still go on for a while."""
        self._most_slots(self._last)

    @property
    def submitted(self) -> list[Lived]:
        """The runs that were asked for in the stretch, in that order."""
        return [run for run in self.runs.values() if self.start <= run.submitted_at < self.end]

    @property
    def carried(self) -> list[Lived]:
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
        elapsed_s = (time - since).total_seconds()
        if elapsed_s <= 0:
            return
        for run_id, slots in self._held.items():
            run = self.runs[run_id]
            run.work_slot_s += slots * elapsed_s
            run.held_s += elapsed_s
        inside_s = (min(time, self.end) - since).total_seconds()
        if inside_s > 0:
            self.totals.used_slot_s += self._used * inside_s
            self.totals.offered_slot_s += self._offered * inside_s
            self.totals.cost += self._price * inside_s / 3600
            if self._most < 0:
                # The stretch begins with what was there.
                self._most_slots(since)

    def _on_run(self, fact: RunFact, time: datetime) -> None:
        run = self.runs.get(fact.run_id)
        if run is None:
            return
        if isinstance(fact, RunPlaced):
            run.first_placed_at = run.first_placed_at or time
        elif isinstance(fact, RunPreempting) and fact.queue_reason == "preempted" and fact.then == "queue":
            run.preemptions += 1
        if self.start <= time < self.end and getattr(fact, "decided", None) is not None:
            self.totals.decisions += 1
        self._hold(run, time)

    def _hold(self, run: Lived, time: datetime) -> None:
        """Bring what a run holds in step with the cluster."""
        known = self.cluster.runs[run.run_id]
        slots = known.slot_count
        self._used += slots - self._held.get(run.run_id, 0)
        if slots:
            self._held[run.run_id] = slots
        else:
            self._held.pop(run.run_id, None)
        if known.phase in TERMINAL and run.ended_at is None:
            run.ended_at, run.outcome = time, str(known.phase)

    def _on_node(self, fact: NodeFact, time: datetime) -> None:
        if isinstance(fact, NodeJoined):
            self._joined[fact.node_id] = fact
        for run_id in list(self._held):
            self._hold(self.runs[run_id], time)
        alive = self._alive()
        self._offered, self._price = sum(node.slots for node in alive), self.prices.of_nodes(alive)
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
