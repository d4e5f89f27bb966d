"""The free capacity of nodes in one cycle: what fits, and what is allocated and released.

A ``ClusterSnapshot`` is a copy: placements are tried in it before they are decided, and the future (after releases,
beside reservations) is a snapshot as well.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from services.scheduler.core.place.remainder import State
from services.scheduler.core.state.cluster import Cluster, Node, schedulable_nodes
from services.scheduler.core.state.run import Run
from services.scheduler.core.state.slot_spec import SLOT_MILLI, SlotSpec
from services.scheduler.core.state.suspects import note_suspect

#: Tells states of snapshots apart; no decision depends on it.
_STATE_IDS = itertools.count()
#: Slots of one node.
NodeSlots = tuple[str, tuple[int, ...]]


@dataclass(slots=True)
class NodeCapacity:
    """The free capacity of one node."""

    node: Node
    #: Free thousandths of each slot.
    free_milli: list[int]
    cpu_milli: int
    memory_bytes: int
    #: How many slots are free as a whole, and the free thousandths of all slots together.
    whole_slots: int
    total_milli: int
    #: The version of the node's allocations that it was made from.
    version: int = 0
    #: Cached until something is allocated or released.
    _fits: dict[SlotSpec, int] = field(default_factory=dict)
    #: What is left of it, as placement by fragmentation sees it.
    state: State | None = None

    @classmethod
    def of(cls, node: Node, *, empty: bool = False) -> NodeCapacity:
        try:
            left = [SLOT_MILLI] * node.slots if empty else list(node.free_milli)
            cpu, memory = (
                (node.cpu_milli, node.memory_bytes) if empty else (node.free_cpu_milli, node.free_memory_bytes)
            )
            return cls(node, left, cpu, memory, left.count(SLOT_MILLI), sum(left), node.version)
        except Exception as error:
            note_suspect(error, node_id=node.node_id)
            raise

    def copy(self) -> NodeCapacity:
        return NodeCapacity(
            self.node,
            list(self.free_milli),
            self.cpu_milli,
            self.memory_bytes,
            self.whole_slots,
            self.total_milli,
            self.version,
        )

    def fits(self, slot_spec: SlotSpec) -> int:
        """Return how many such slots fit, in whole bundles."""
        found = self._fits.get(slot_spec)
        if found is None:
            found = self._fits[slot_spec] = self._fitting(slot_spec)
        return found

    def _fitting(self, slot_spec: SlotSpec) -> int:
        try:
            if slot_spec.milli == SLOT_MILLI and not self.node.profiles:
                count = self.whole_slots
            elif slot_spec.milli == 0:
                count = self.node.slots if not slot_spec.cpu_milli else 1_000_000
            elif not self.node.profiles:
                milli = slot_spec.milli
                # (In one go: this is asked of every node for each share that is placed.)
                count = 0 if slot_spec.profile else len([each for each in self.free_milli if each >= milli])
            else:
                count = sum(1 for _ in self._usable(slot_spec))
            if count and slot_spec.cpu_milli and self.node.cpu_milli:
                count = min(count, self.cpu_milli // slot_spec.cpu_milli)
            if count and slot_spec.memory_bytes and self.node.memory_bytes:
                count = min(count, self.memory_bytes // slot_spec.memory_bytes)
            if slot_spec.bundle > 1:
                count -= count % slot_spec.bundle
                return min(count, slot_spec.bundle) if slot_spec.one_bundle_per_node else count
            return min(count, 1) if slot_spec.one_bundle_per_node else max(count, 0)
        except Exception as error:
            note_suspect(error, node_id=self.node.node_id)
            raise

    def _usable(self, slot_spec: SlotSpec) -> Iterator[int]:
        profiles = self.node.profiles
        for slot, milli in enumerate(self.free_milli):
            if milli >= slot_spec.milli and (profiles[slot] if profiles else "") == slot_spec.profile:
                yield slot

    def pick(self, slot_spec: SlotSpec, count: int) -> tuple[int, ...]:
        """Return the slots to allocate: whole ones in order, shares where the least is left over."""
        if slot_spec.milli == 0:
            return tuple(range(count))
        try:
            usable = list(self._usable(slot_spec))
            if slot_spec.milli < SLOT_MILLI:
                usable.sort(key=lambda slot: (self.free_milli[slot], slot))
            return tuple(sorted(usable[:count]))
        except Exception as error:
            note_suspect(error, node_id=self.node.node_id)
            raise

    def allocate(self, slot_spec: SlotSpec, slots: tuple[int, ...]) -> None:
        self._count(slot_spec, slots, -1)

    def release(self, slot_spec: SlotSpec, slots: tuple[int, ...]) -> None:
        self._count(slot_spec, slots, 1)

    def _count(self, slot_spec: SlotSpec, slots: tuple[int, ...], sign: int) -> None:
        left = self.free_milli
        self._fits.clear()
        self.state = None
        if slot_spec.milli:
            try:
                for slot in slots:
                    if slot < len(left):
                        before = left[slot]
                        left[slot] = before + sign * slot_spec.milli
                        self.total_milli += sign * slot_spec.milli
                        self.whole_slots += (left[slot] == SLOT_MILLI) - (before == SLOT_MILLI)
            except Exception as error:
                note_suspect(error, node_id=self.node.node_id)
                raise
        self.cpu_milli += sign * slot_spec.cpu_milli * len(slots)
        self.memory_bytes += sign * slot_spec.memory_bytes * len(slots)


class NodeCapacities(dict[str, NodeCapacity]):
    """What is free on each node, as of the last cycle in which it changed."""


class FreeSlotIndex:
    """Rooms by how many whole slots they have, so that the best one is found without a look at all of them."""

    def __init__(self, capacities: Iterable[NodeCapacity]) -> None:
        self._order = sorted((capacity.whole_slots, capacity.node.node_id) for capacity in capacities)
        self._whole = {node_id: whole for whole, node_id in self._order}
        #: Whole slots, all in all.
        self.total = sum(self._whole.values())

    def changed(self, capacity: NodeCapacity) -> None:
        """Something was taken from the room, or given back."""
        node_id = capacity.node.node_id
        before = self._whole.get(node_id)
        if before is None or before == capacity.whole_slots:
            return
        del self._order[bisect_left(self._order, (before, node_id))]
        insort(self._order, (capacity.whole_slots, node_id))
        self._whole[node_id] = capacity.whole_slots
        self.total += capacity.whole_slots - before

    def packed(self, count: int) -> list[tuple[str, int]]:
        """(node, slots) that ``count`` go to, filling the fullest that fits, on as few nodes as can be."""
        found: list[tuple[str, int]] = []
        order = self._order
        while count > 0:
            at = bisect_left(order, (count, ""))
            if at == len(order):
                # None holds the rest: the roomiest, and go on.
                at = bisect_left(order, (order[-1][0], ""))
            whole, node_id = order[at]
            found.append((node_id, min(whole, count)))
            count -= found[-1][1]
            if count > 0:
                order = order[:at] + order[at + 1 :]
        return found


class ClusterSnapshot:
    """The rooms of all open nodes.

    Spaces share rooms that nothing was taken from: a copy costs next to nothing, and a room is copied when it changes.
    """

    def __init__(self, capacities: dict[str, NodeCapacity]) -> None:
        self.nodes = capacities
        #: Thousandths of accelerators that are left, all in all.
        self.milli = sum(capacity.total_milli for capacity in capacities.values())
        #: Differs between states of the snapshot; a rollback restores it.
        self.state_id = next(_STATE_IDS)
        #: Nodes whose rooms nobody else has.
        self._own: set[str] = set()
        #: The shelves of cells of nodes that were asked for.
        self._indexes: dict[tuple[str, ...], FreeSlotIndex] = {}

    def free_slot_index(self, cell: tuple[str, ...]) -> FreeSlotIndex:
        """The rooms of these nodes in order, kept so as they are taken from."""
        found = self._indexes.get(cell)
        if found is None:
            capacities = [self.nodes[node_id] for node_id in cell if node_id in self.nodes]
            found = self._indexes[cell] = FreeSlotIndex(capacities)
        return found

    @classmethod
    def free(cls, cluster: Cluster) -> ClusterSnapshot:
        """Return the snapshot of the present."""
        known, capacities, node_id = cluster.index.find_cache(NodeCapacities), {}, ""
        try:
            for node_id, node in cluster.nodes.items():
                if node.is_schedulable:
                    capacity = known.get(node_id)
                    if capacity is None or capacity.version != node.version or capacity.node is not node:
                        capacity = known[node_id] = NodeCapacity.of(node)
                    capacities[node_id] = capacity
        except Exception as error:
            note_suspect(error, node_id=node_id)
            raise
        return cls(capacities)

    @classmethod
    def empty(cls, cluster: Cluster) -> ClusterSnapshot:
        """Return the snapshot of an empty cluster."""
        nodes = schedulable_nodes(cluster)
        return cls({node_id: NodeCapacity.of(node, empty=True) for node_id, node in nodes.items()})

    def copy(self) -> ClusterSnapshot:
        self._own.clear()
        copied = ClusterSnapshot.__new__(ClusterSnapshot)
        copied.nodes, copied.milli, copied.state_id = dict(self.nodes), self.milli, next(_STATE_IDS)
        copied._own, copied._indexes = set(), {}
        return copied

    def put(self, node_id: str, capacity: NodeCapacity) -> None:
        """One more room."""
        self.nodes[node_id] = capacity
        self.state_id = next(_STATE_IDS)
        self.milli += capacity.total_milli
        self._own.add(node_id)

    def remove(self, node_id: str) -> None:
        """Leave out a node that was ``put``."""
        self.milli -= self.nodes.pop(node_id).total_milli
        self.state_id = next(_STATE_IDS)
        self._own.discard(node_id)

    def _own_capacity(self, node_id: str) -> NodeCapacity:
        """The node's room, to be changed."""
        capacity = self.nodes[node_id]
        if node_id not in self._own:
            capacity = self.nodes[node_id] = capacity.copy()
            self._own.add(node_id)
        return capacity

    def whole(self) -> int:
        """Return the number of slots that are free as a whole."""
        return sum(capacity.whole_slots for capacity in self.nodes.values())

    def allocate(self, slot_spec: SlotSpec, taken: Iterable[NodeSlots]) -> None:
        for node_id, slots in taken:
            self._own_capacity(node_id).allocate(slot_spec, slots)
            self.milli -= slot_spec.milli * len(slots)
            self._changed(node_id)

    def release(self, slot_spec: SlotSpec, taken: Iterable[NodeSlots]) -> None:
        for node_id, slots in taken:
            if node_id in self.nodes:
                self._own_capacity(node_id).release(slot_spec, slots)
                self.milli += slot_spec.milli * len(slots)
                self._changed(node_id)

    def _changed(self, node_id: str) -> None:
        self.state_id = next(_STATE_IDS)
        for index in self._indexes.values():
            index.changed(self.nodes[node_id])

    def release_run(self, run: Run) -> None:
        """Release all slots that the run still has."""
        try:
            self.release(run.slot_spec, ((part.node_id, part.slots) for part in run.live))
        except Exception as error:
            note_suspect(error, run_id=run.run_id)
            raise


def has_profiles(node: Node) -> bool:
    """Whether the slots of the node are MIG slices."""
    try:
        return bool(node.profiles)
    except Exception as error:
        note_suspect(error, node_id=node.node_id)
        raise
