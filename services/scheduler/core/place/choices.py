"""The order in which nodes are taken: pack, spread and balanced. (``fgd`` is in ``fragmentation.py``.)"""

from __future__ import annotations

from collections.abc import Callable, Collection

from services.scheduler.core.place.space import Room, Taken
from services.scheduler.core.state.slot_request import SlotRequest

Choose = Callable[[list[Room], SlotRequest, int, Collection[str]], list[Taken]]


def pack(rooms: list[Room], demand: SlotRequest, count: int, avoid: Collection[str] = ()) -> list[Taken]:
    """On few nodes, filling the fullest that fits.

    Best fit keeps large holes for large gangs; few nodes keep gradients off the network. The nodes to ``avoid`` are
    taken when there are no others.
    """
    free = {room.node.node_id: (room.fits(demand), room) for room in rooms}
    found: list[Taken] = []
    while count > 0:
        good = {node_id: each for node_id, each in free.items() if node_id not in avoid} if avoid else free
        good = good or free
        fitting = [(slots, node_id) for node_id, (slots, _) in good.items() if slots >= count]
        # The tightest node that holds the rest; where there is none, the roomiest, and go on.
        node_id = min(fitting)[1] if fitting else min((-slots, node_id) for node_id, (slots, _) in good.items())[1]
        slots, room = free.pop(node_id)
        found.append((node_id, room.pick(demand, min(slots, count))))
        count -= min(slots, count)
    return found


def spread(rooms: list[Room], demand: SlotRequest, count: int, avoid: Collection[str] = ()) -> list[Taken]:
    """One bundle after the other on the emptiest node."""
    return _by_turns(rooms, demand, count, lambda room, given: (room.node.node_id in avoid, -(room.whole - given)))


def balanced(rooms: list[Room], demand: SlotRequest, count: int, avoid: Collection[str] = ()) -> list[Taken]:
    """Fill a node to half, then the next; once all are half full, fill them up."""

    def standing(room: Room, given: int) -> tuple[float, ...]:
        used = room.node.slots - room.whole + given
        return (room.node.node_id in avoid, 2 * used >= room.node.slots, -used)

    return _by_turns(rooms, demand, count, standing)


def _by_turns(
    rooms: list[Room], demand: SlotRequest, count: int, standing: Callable[[Room, int], tuple[float, ...]]
) -> list[Taken]:
    """One bundle at a time on the node whose standing is least."""
    given = dict.fromkeys((room.node.node_id for room in rooms), 0)
    fits = {room.node.node_id: room.fits(demand) for room in rooms}
    for _ in range(count // demand.bundle):
        open_rooms = [room for room in rooms if given[room.node.node_id] + demand.bundle <= fits[room.node.node_id]]
        best = min(
            open_rooms, key=lambda room: (*standing(room, given[room.node.node_id]), room.node.node_id)
        ).node.node_id
        given[best] += demand.bundle
    by_id = {room.node.node_id: room for room in rooms}
    return [(node_id, by_id[node_id].pick(demand, slots)) for node_id, slots in given.items() if slots]


CHOICES: dict[str, Choose] = {"pack": pack, "spread": spread, "balanced": balanced}
