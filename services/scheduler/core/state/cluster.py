"""The scheduler's state: runs, nodes and slots, folded from the facts by ``fold.py``."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Literal, NamedTuple

from contracts.events import node
from contracts.events.capacity import PolicyAdopted
from contracts.events.run import CheckpointRef, RunExited, RunPreempting, RunPrepared, RunReserved, RunStalled
from contracts.scheduling import Policy
from contracts.spec.run import RunSpec
from contracts.state.node import NodeDrain, is_drained
from services.scheduler.core.state.arrays import RunArrays
from services.scheduler.core.state.durations import History, RunKind
from services.scheduler.core.state.fifo_waits import FifoWaits
from services.scheduler.core.state.index import Index
from services.scheduler.core.state.pool_demand import PoolDemand
from services.scheduler.core.state.runs import Runs
from services.scheduler.core.state.slot_spec import SLOT_MILLI, SlotSpec
from services.scheduler.core.state.staged_checkpoints import StagedCheckpoints
from services.scheduler.core.state.suspects import note_suspect
from services.scheduler.core.state.usage import TeamUsage
from services.scheduler.core.state.workload import Workload

Ending = Literal["released", "succeeded", "failed", "lost"]
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Phase(StrEnum):
    """Where a run is in its life."""

    PREPARING = "preparing"
    READY = "ready"
    QUEUED = "queued"
    PLACED = "placed"
    RUNNING = "running"
    PREEMPTING = "preempting"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REJECTED = "rejected"


TERMINAL = frozenset({Phase.COMPLETED, Phase.FAILED, Phase.CANCELLED, Phase.REJECTED})


@dataclass(slots=True)
class MemberState:
    """One node's part of a run's current generation."""

    node_id: str
    slots: tuple[int, ...]
    ranks: tuple[int, ...]
    ended: Ending | None = None
    exit: RunExited | None = None
    #: It failed on its own: before the generation was asked to stop.
    unprovoked: bool = False
    #: Its ranks have started.
    started: bool = False
    #: The kind of accelerator that the ledger has it under; None: it has had nothing.
    accelerator: str | None = None


@dataclass(frozen=True, slots=True)
class CommittedCheckpoint:
    """A committed checkpoint and the generation that made it."""

    generation: int
    ref: CheckpointRef


@dataclass(slots=True)
class Run:
    """One run, folded from its facts."""

    run_id: str
    spec: RunSpec
    #: Sequence of its acceptance: the submit order.
    submitted: int
    submitted_at: datetime
    #: What one slot of it needs; and where it may be placed (``place.resource_request``).
    slot_spec: SlotSpec = field(default_factory=SlotSpec)
    request: object = field(default=None, compare=False, repr=False)
    #: The fewest slots that it needs, and the most that it can use.
    least: int = 1
    most: int = 1
    #: Those of its kind take about as long.
    kind: RunKind = field(default_factory=RunKind)
    #: What it was expected to take yet when it was queued, where the policy orders by that.
    predicted_s: float = 0.0
    correlation_id: str = ""
    #: The span of its last fact, within the trace of its acceptance.
    traceparent: str = ""
    phase: Phase = Phase.READY
    dataset: RunPrepared | None = None
    prepare_problem: str | None = None
    cancel_reason: str | None = None
    generation: int = 0
    #: The generation that it was queued for last: no other one can be placed.
    queued_generation: int = 0
    failures: int = 0
    queued_at: datetime = EPOCH
    queue_reason: str = "new"
    #: When it was first queued: its data was there. Waiting counts from then; EPOCH: it was not queued yet.
    ready_at: datetime = EPOCH
    #: Sequence at which others last took its slots: where runs take turns it stands behind those that waited then.
    yielded_at: int = 0
    #: The parts of the current generation, also those that ended, until what follows is decided.
    parts: dict[str, MemberState] = field(default_factory=dict)
    placed_at: datetime = EPOCH
    placed_sequence: int = 0
    preempting: RunPreempting | None = None
    preempting_at: datetime = EPOCH
    ended_at: datetime | None = None
    checkpoints: dict[str, CommittedCheckpoint] = field(default_factory=dict)
    newest: CommittedCheckpoint | None = None
    committed_at: datetime = EPOCH
    #: The final checkpoint of the current generation, and what its ranks have staged.
    final: CheckpointRef | None = None
    staged: StagedCheckpoints = field(default_factory=StagedCheckpoints)
    #: Where the first generation starts, when the request named a checkpoint.
    initial: CheckpointRef | None = None
    #: Generations in a row that broke without a new checkpoint, and when the last one did.
    setbacks: int = 0
    #: All generations that ended without a request to stop, and the seconds in which it had slots.
    failures_seen: int = 0
    run_s: float = 0.0
    #: Slot-seconds that it has had in parts that are over.
    served_slot_s: float = 0.0
    #: The first run of those that were submitted in one go.
    array_id: str = ""
    #: Its promised start, for the next generation.
    reserved: RunReserved | None = None
    #: Those of them that were no fault of the run.
    infrastructure_failures: int = 0
    #: Why the generation before failed before its first step; '' if it did not.
    last_start_failure: str = ""
    #: How often in a row each node was at fault, by its incarnation: a restart may mend a full disk or a broken driver,
    #: and a node that still fails the run is avoided again after as many failures.
    strikes: Counter[str] = field(default_factory=Counter)
    #: Nodes that the run is to leave out, since it stalled there (``on_stall: exclude``), until it commits a checkpoint
    #: there. By their ids: a restart of the agent does not show that the cause is gone.
    excluded_nodes: set[str] = field(default_factory=set)
    #: Whom its ranks wait for, where, before they can begin; '' once they have.
    held_up: str = ""
    #: Why the current generation must restart: one of its ranks makes no step.
    stalled: RunStalled | None = None
    #: Digest of the machines on which its state came about; '' before it has any.
    machine: str = ""
    #: The same of the checkpoint that it was asked to start from.
    inherited_machine: str = ""
    #: Its ranks have reported that the state is no longer exact to the bit.
    inexact: bool = False
    #: The code of the last ``waiting``, and for which generation.
    waiting_code: str = ""
    waiting_generation: int = 0
    outcome: str = ""
    last_sequence: int = 0
    last_event_id: str = ""

    @property
    def terminal(self) -> bool:
        return self.phase in TERMINAL

    @property
    def live(self) -> list[MemberState]:
        return [part for part in self.parts.values() if part.ended is None]

    @property
    def culprit(self) -> MemberState | None:
        """The part that failed first, rather than because another part had failed."""
        failed = [part for part in self.parts.values() if part.ended == "failed"]
        return max(failed, key=lambda part: (part.unprovoked, 0 in part.ranks), default=None)

    @property
    def start_failure(self) -> str:
        """Why the current generation failed before its first step; '' if it did not."""
        exited = self.culprit.exit if self.culprit else None
        return exited.reason if exited is not None and exited.made_no_step else ""

    @property
    def next_generation(self) -> int:
        return self.generation + 1

    @property
    def awaited_steps(self) -> list[int]:
        """The checkpoints that are to be committed before it is complete, though all its ranks have ended well."""
        succeeded = bool(self.parts) and all(part.ended == "succeeded" for part in self.parts.values())
        return sorted(self.staged.open) if succeeded and not self.terminal else []

    @property
    def slot_count(self) -> int:
        """Slots that this run holds now."""
        held = 0
        for part in self.parts.values():  # asked for all the time: a loop is twice as fast as a sum
            if part.ended is None:
                held += len(part.slots)
        return held

    def ran_s(self, now: datetime) -> float:
        """Seconds in which it has had slots, all in all."""
        return self.run_s + (max((now - self.placed_at).total_seconds(), 0.0) if self.live else 0.0)

    def attained_slot_s(self, now: datetime) -> float:
        """Slot-seconds that it has had, all in all."""
        held = self.slot_count
        return self.served_slot_s + (held * max((now - self.placed_at).total_seconds(), 0.0) if held else 0.0)

    def waited_s(self, now: datetime) -> float:
        """Return the seconds since it was ready in which it had no slots."""
        if self.ready_at == EPOCH:
            return 0.0
        return max((now - self.ready_at).total_seconds() - self.ran_s(now), 0.0)

    @property
    def exact(self) -> bool:
        """Whether it matters on which kind of machine it runs."""
        training = self.spec.training
        exact_mode = (
            training is not None and training.logical_ranks is not None and training.heterogeneous_nodes == "avoid"
        )
        # A run that starts from scratch is exact again.
        lost = self.inexact and self.resume is not None
        return exact_mode and self.spec.kind == "train" and not lost

    @property
    def bound(self) -> bool:
        """Whether it is tied to the kind of machine on which the state came about that it goes on from."""
        return self.exact and bool(self.machine) and self.newest is not None

    @property
    def resume(self) -> CheckpointRef | None:
        """Where its next generation goes on: the last committed checkpoint."""
        if self.newest is not None:
            return self.newest.ref
        return self.initial if self.spec.init_from is None else None

    @property
    def init(self) -> CheckpointRef | None:
        """Whose weights its next generation begins with, as long as there is nothing to go on from."""
        return self.initial if self.spec.init_from is not None and self.newest is None else None


@dataclass(frozen=True, slots=True)
class QuarantineRecord:
    """Why a run or a node is in quarantine (see ``core/quarantine.py``)."""

    step: Literal["fold", "cycle"]
    reason: str


class Allocation(NamedTuple):
    """What one generation of a run has of a node."""

    slots: tuple[int, ...]
    slot_spec: SlotSpec


@dataclass(slots=True)
class Node:
    """A node in its present incarnation."""

    node_id: str
    incarnation: str
    slots: int
    lease_ttl_s: float
    state: Literal["alive", "lost", "left"] = "alive"
    #: The last decision about its drain; it outlives incarnations.
    last_drain: NodeDrain | None = None
    #: The provider is about to take the machine away; and since when that is known. Of this incarnation: an agent that
    #: joins again repeats the notices that it has, and looks for those that its provider still shows.
    notice: node.NodeNotice | None = None
    noticed_at: datetime = EPOCH
    #: A check of its devices failed. Of this incarnation: a new agent trusts no earlier check, and makes its own before
    #: the ranks of a run start on a device.
    unfit: node.NodeUnfit | None = None
    #: A step failed on it: nothing is placed here until it joins again, with new facts to decide on. If a step fails on
    #: those too, the node is quarantined again.
    quarantined: bool = False
    accelerator: str = "cpu"
    #: Nodes with the same one do arithmetic with the same last bits.
    machine: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    #: MIG profile of each slot, '' for a whole accelerator.
    profiles: tuple[str, ...] = ()
    #: All in all; 0: not counted.
    cpu_milli: int = 0
    memory_bytes: int = 0
    #: Datasets whose shards it has.
    datasets: set[str] = field(default_factory=set)
    #: Free thousandths of each slot, and free processors and memory.
    free_milli: list[int] = field(default_factory=list)
    free_cpu_milli: int = 0
    free_memory_bytes: int = 0
    #: (run_id, generation) -> what it has.
    allocations: dict[tuple[str, int], Allocation] = field(default_factory=dict)
    #: Counts allocations and releases.
    version: int = field(default=0, compare=False)
    past_incarnations: set[str] = field(default_factory=set)
    #: Since when it has had a free slot; EPOCH: it has none. Since when it has had nothing on it; EPOCH: it has.
    free_since: datetime = EPOCH
    idle_since: datetime = EPOCH

    def __post_init__(self) -> None:
        self.free_milli = self.free_milli or [SLOT_MILLI] * self.slots
        self.free_cpu_milli = self.free_cpu_milli or self.cpu_milli
        self.free_memory_bytes = self.free_memory_bytes or self.memory_bytes

    @property
    def alive(self) -> bool:
        return self.state == "alive"

    @property
    def draining(self) -> bool:
        """Whether its runs are to leave it."""
        return is_drained(self)

    @property
    def is_schedulable(self) -> bool:
        """Whether something new may be placed here."""
        return (
            self.state == "alive"
            and not self.draining
            and self.notice is None
            and self.unfit is None
            and not self.quarantined
        )

    @property
    def display_state(self) -> str:
        """One word for people."""
        if not self.alive:
            return self.state
        if self.quarantined:
            return "quarantined"
        return "unfit" if self.unfit else "notice" if self.notice else "draining" if self.draining else "alive"

    @property
    def used(self) -> dict[int, tuple[str, int]]:
        """Slot -> one of the (run_id, generation) that have it or a share of it."""
        return {
            slot: holder for holder, held in self.allocations.items() for slot in held.slots if held.slot_spec.milli
        }

    @property
    def used_slots(self) -> int:
        """Return the number of slots that are allocated at least in part."""
        return sum(milli < SLOT_MILLI for milli in self.free_milli)

    @property
    def free(self) -> list[int]:
        return [slot for slot, milli in enumerate(self.free_milli) if milli == SLOT_MILLI]

    def allocate(self, holder: tuple[str, int], held: Allocation) -> None:
        """Allocate the slots to the holder."""
        if holder in self.allocations:
            return
        self.allocations[holder] = held
        self._count(held, -1)

    def release(self, holder: tuple[str, int]) -> None:
        held = self.allocations.pop(holder, None)
        if held is not None:
            self._count(held, 1)

    def _count(self, held: Allocation, sign: int) -> None:
        self.version += 1
        for slot in held.slots:
            if slot < self.slots:
                self.free_milli[slot] += sign * held.slot_spec.milli
        self.free_cpu_milli += sign * held.slot_spec.cpu_milli * len(held.slots)
        self.free_memory_bytes += sign * held.slot_spec.memory_bytes * len(held.slots)

    def update_idle_times(self, time: datetime) -> None:
        """Keep ``free_since`` and ``idle_since`` in step with what is held."""
        if self.allocations:
            self.idle_since = EPOCH
        elif self.idle_since == EPOCH:
            self.idle_since = time
        if SLOT_MILLI not in self.free_milli:
            self.free_since = EPOCH
        elif self.free_since == EPOCH:
            self.free_since = time


@dataclass(slots=True)
class Cluster:
    """Everything the scheduler knows; indexes are kept so that deciding need not look at every run."""

    runs: Runs = field(default_factory=Runs)
    nodes: dict[str, Node] = field(default_factory=dict)
    #: Accepted and not queued yet; waiting for slots; with parts whose outcome is not decided.
    unqueued: dict[str, None] = field(default_factory=dict)
    queued: dict[str, None] = field(default_factory=dict)
    active: dict[str, None] = field(default_factory=dict)
    #: Queued runs whose start was promised, and for when.
    promised: dict[str, datetime] = field(default_factory=dict)
    #: The manifest of every committed checkpoint that was not deleted -> the run that has it.
    checkpoints: dict[str, str] = field(default_factory=dict)
    #: The machines' digest of those of them that are exact.
    machines: dict[str, str] = field(default_factory=dict)
    phases: Counter[Phase] = field(default_factory=Counter)
    #: How long the runs took that are over.
    history: History = field(default_factory=History)
    #: What runs ask of one node.
    workload: Workload = field(default_factory=Workload)
    #: How long those waited that have got slots.
    waits: History = field(default_factory=History)
    #: Runs that were submitted in one go.
    arrays: RunArrays = field(default_factory=RunArrays)
    #: How long they would wait in strict order of submission.
    fifo_waits: FifoWaits = field(default_factory=FifoWaits)
    #: Sequence of the last fact folded, and of the last ``placed``: the fence of a placement.
    sequence: int = 0
    placed_sequence: int = 0
    #: When slots last changed hands.
    moved_at: datetime = EPOCH
    #: The adoption of the policy in force; and the sequence of the last message about that, readable or not.
    adopted: PolicyAdopted | None = None
    policy_sequence: int = 0
    #: Who uses, and has used, how many slots.
    usage: TeamUsage = field(default_factory=TeamUsage)
    #: Runs and nodes on which a step failed.
    quarantined_runs: dict[str, QuarantineRecord] = field(default_factory=dict)
    quarantined_nodes: dict[str, QuarantineRecord] = field(default_factory=dict)
    #: Pool -> what was last said of the nodes that are wanted of it.
    capacity: dict[str, PoolDemand] = field(default_factory=dict)
    #: What one cycle caches for the next; it follows from all the rest.
    index: Index = field(default_factory=Index, compare=False, repr=False)

    @property
    def policy(self) -> Policy | None:
        """Return the policy in force; None if none has been adopted."""
        return self.adopted.policy if self.adopted is not None else None

    @property
    def quarantined(self) -> set[str]:
        """The runs and nodes in quarantine."""
        return {*self.quarantined_runs, *self.quarantined_nodes}

    @property
    def slots_total(self) -> int:
        return sum(node.slots for node in self.nodes.values() if node.alive)

    @property
    def slots_used(self) -> int:
        return sum(node.used_slots for node in self.nodes.values() if node.alive)


def schedulable_nodes(cluster: Cluster) -> dict[str, Node]:
    """Return the nodes on which something new may be placed."""
    found, node_id = {}, ""
    try:
        for node_id, node in cluster.nodes.items():
            if node.is_schedulable:
                found[node_id] = node
    except Exception as error:
        note_suspect(error, node_id=node_id)
        raise
    return found
