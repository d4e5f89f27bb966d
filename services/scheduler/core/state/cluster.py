"""The scheduler's state: runs, nodes and slots, folded from the facts by ``fold.py``."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, NamedTuple

from contracts.events import node
from contracts.events.capacity import PolicyAdopted
from contracts.scheduling import Policy
from contracts.state.node import NodeDrain, is_drained
from services.scheduler.core.state.arrays import RunArrays
from services.scheduler.core.state.durations import History
from services.scheduler.core.state.fifo_waits import FifoWaits
from services.scheduler.core.state.index import Index
from services.scheduler.core.state.pool_demand import PoolDemand
from services.scheduler.core.state.run import EPOCH, Phase
from services.scheduler.core.state.runs import Runs
from services.scheduler.core.state.slot_spec import SLOT_MILLI, SlotSpec
from services.scheduler.core.state.suspects import note_suspect
from services.scheduler.core.state.usage import TeamUsage
from services.scheduler.core.state.workload import Workload


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
    #: Datasets whose shards it has; and those whose plain files it has.
    datasets: set[str] = field(default_factory=set)
    data_folders: set[str] = field(default_factory=set)
    #: Whether its agent copies the files of runs that are staged.
    stages_data: bool = False
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
