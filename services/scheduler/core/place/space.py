"""Room on nodes: what is free during one pass, what fits, and what is taken out of it.

A ``Space`` is a copy: placements are tried in it before they are decided, and the future (runs that leave, a
reservation) is a space as well.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from services.scheduler.core.state.cluster import Cluster, Node, Run
from services.scheduler.core.state.slot_request import SLOT_MILLI, SlotRequest

#: Slots of a node that a run takes.
Taken = tuple[str, tuple[int, ...]]


@dataclass(slots=True)
class Room:
    """What is left of one node."""

    node: Node
    #: Thousandths of each slot.
    left: list[int]
    cpu_milli: int
    memory_bytes: int
    #: How many slots nobody has anything of, and thousandths of all of them together.
    whole: int
    milli: int
    #: Of which state of the node it is.
    version: int = 0
    #: What was found out about it, as long as nothing is taken or given back.
    _fits: dict[SlotRequest, int] = field(default_factory=dict)
    state: Any = None

    @classmethod
    def of(cls, node: Node, *, empty: bool = False) -> Room:
        left = [SLOT_MILLI] * node.slots if empty else list(node.free_milli)
        cpu, memory = (node.cpu_milli, node.memory_bytes) if empty else (node.free_cpu_milli, node.free_memory_bytes)
        return cls(node, left, cpu, memory, left.count(SLOT_MILLI), sum(left), node.version)

    def copy(self) -> Room:
        return Room(self.node, list(self.left), self.cpu_milli, self.memory_bytes, self.whole, self.milli, self.version)

    def fits(self, demand: SlotRequest) -> int:
        """How many slots of this demand there is room for, in whole bundles."""
        found = self._fits.get(demand)
        if found is None:
            found = self._fits[demand] = self._fitting(demand)
        return found

    def _fitting(self, demand: SlotRequest) -> int:
        if demand.milli == SLOT_MILLI and not self.node.profiles:
            count = self.whole
        elif demand.milli == 0:
            count = self.node.slots if not demand.cpu_milli else 1_000_000
        elif not self.node.profiles:
            milli = demand.milli
            # (In one go: this is asked of every node for each share that is placed.)
            count = 0 if demand.profile else len([each for each in self.left if each >= milli])
        else:
            count = sum(1 for _ in self._usable(demand))
        if count and demand.cpu_milli and self.node.cpu_milli:
            count = min(count, self.cpu_milli // demand.cpu_milli)
        if count and demand.memory_bytes and self.node.memory_bytes:
            count = min(count, self.memory_bytes // demand.memory_bytes)
        if demand.bundle > 1:
            count -= count % demand.bundle
            return min(count, demand.bundle) if demand.apart else count
        return min(count, 1) if demand.apart else max(count, 0)

    def _usable(self, demand: SlotRequest) -> Iterator[int]:
        profiles = self.node.profiles
        for slot, milli in enumerate(self.left):
            if milli >= demand.milli and (profiles[slot] if profiles else "") == demand.profile:
                yield slot

    def pick(self, demand: SlotRequest, count: int) -> tuple[int, ...]:
        """The slots to take: whole ones in order, shares where the least is left over."""
        if demand.milli == 0:
            return tuple(range(count))
        usable = list(self._usable(demand))
        if demand.milli < SLOT_MILLI:
            usable.sort(key=lambda slot: (self.left[slot], slot))
        return tuple(sorted(usable[:count]))

    def take(self, demand: SlotRequest, slots: tuple[int, ...]) -> None:
        self._count(demand, slots, -1)

    def give(self, demand: SlotRequest, slots: tuple[int, ...]) -> None:
        self._count(demand, slots, 1)

    def _count(self, demand: SlotRequest, slots: tuple[int, ...], sign: int) -> None:
        left = self.left
        self._fits.clear()
        self.state = None
        if demand.milli:
            for slot in slots:
                if slot < len(left):
                    before = left[slot]
                    left[slot] = before + sign * demand.milli
                    self.milli += sign * demand.milli
                    self.whole += (left[slot] == SLOT_MILLI) - (before == SLOT_MILLI)
        self.cpu_milli += sign * demand.cpu_milli * len(slots)
        self.memory_bytes += sign * demand.memory_bytes * len(slots)


class Shelf:
    """Rooms by how many whole slots they have, so that the best one is found without a look at all of them."""

    def __init__(self, rooms: Iterable[Room]) -> None:
        self._order = sorted((room.whole, room.node.node_id) for room in rooms)
        self._whole = {node_id: whole for whole, node_id in self._order}
        #: Whole slots, all in all.
        self.total = sum(self._whole.values())

    def changed(self, room: Room) -> None:
        """Something was taken from the room, or given back."""
        node_id = room.node.node_id
        before = self._whole.get(node_id)
        if before is None or before == room.whole:
            return
        del self._order[bisect_left(self._order, (before, node_id))]
        insort(self._order, (room.whole, node_id))
        self._whole[node_id] = room.whole
        self.total += room.whole - before

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


class Space:
    """The rooms of all open nodes.

    Spaces share rooms that nothing was taken from: a copy costs next to nothing, and a room is copied when it changes.
    """

    def __init__(self, rooms: dict[str, Room]) -> None:
        self.rooms = rooms
        #: Thousandths of accelerators that are left, all in all.
        self.milli = sum(room.milli for room in rooms.values())
        #: Grows with whatever is taken or given back.
        self.changes = 0
        #: Nodes whose rooms nobody else has.
        self._own: set[str] = set()
        #: The shelves of cells of nodes that were asked for.
        self._shelves: dict[tuple[str, ...], Shelf] = {}

    def shelf(self, cell: tuple[str, ...]) -> Shelf:
        """The rooms of these nodes in order, kept so as they are taken from."""
        found = self._shelves.get(cell)
        if found is None:
            rooms = [self.rooms[node_id] for node_id in cell if node_id in self.rooms]
            found = self._shelves[cell] = Shelf(rooms)
        return found

    @classmethod
    def free(cls, cluster: Cluster) -> Space:
        """What is free now."""
        known, rooms = cluster.index.rooms, {}
        for node_id, node in cluster.nodes.items():
            if node.is_schedulable:
                room = known.get(node_id)
                if room is None or room.version != node.version or room.node is not node:
                    room = known[node_id] = Room.of(node)
                rooms[node_id] = room
        return cls(rooms)

    @classmethod
    def empty(cls, cluster: Cluster) -> Space:
        """What there would be if nobody had anything."""
        return cls({node.node_id: Room.of(node, empty=True) for node in cluster.nodes.values() if node.is_schedulable})

    def copy(self) -> Space:
        self._own.clear()
        copied = Space.__new__(Space)
        copied.rooms, copied.milli, copied.changes = dict(self.rooms), self.milli, 0
        copied._own, copied._shelves = set(), {}
        return copied

    def put(self, node_id: str, room: Room) -> None:
        """One more room."""
        self.rooms[node_id] = room
        self.changes += 1
        self.milli += room.milli
        self._own.add(node_id)

    def _room(self, node_id: str) -> Room:
        """The node's room, to be changed."""
        room = self.rooms[node_id]
        if node_id not in self._own:
            room = self.rooms[node_id] = room.copy()
            self._own.add(node_id)
        return room

    def whole(self) -> int:
        """Slots of which nobody has anything."""
        return sum(room.whole for room in self.rooms.values())

    def take(self, demand: SlotRequest, taken: Iterable[Taken]) -> None:
        for node_id, slots in taken:
            self._room(node_id).take(demand, slots)
            self.milli -= demand.milli * len(slots)
            self._changed(node_id)

    def give(self, demand: SlotRequest, taken: Iterable[Taken]) -> None:
        for node_id, slots in taken:
            if node_id in self.rooms:
                self._room(node_id).give(demand, slots)
                self.milli += demand.milli * len(slots)
                self._changed(node_id)

    def _changed(self, node_id: str) -> None:
        self.changes += 1
        for shelf in self._shelves.values():
            shelf.changed(self.rooms[node_id])

    def release(self, run: Run) -> None:
        """The run lets go of all that it still has."""
        self.give(run.demand, ((part.node_id, part.slots) for part in run.live))
