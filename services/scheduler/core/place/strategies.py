"""The order in which nodes are taken: pack, spread and balanced. (``fgd`` is in ``fragmentation.py``.)"""

from __future__ import annotations

from collections.abc import Callable, Collection

from services.scheduler.core.place.snapshot import NodeCapacity, NodeSlots
from services.scheduler.core.state.slot_spec import SlotSpec

Choose = Callable[[list[NodeCapacity], SlotSpec, int, Collection[str]], list[NodeSlots]]


def pack(
    capacities: list[NodeCapacity], slot_spec: SlotSpec, count: int, avoid: Collection[str] = ()
) -> list[NodeSlots]:
    """On few nodes, filling the fullest that fits.

    Best fit keeps large holes for large gangs; few nodes keep gradients off the network. The nodes to ``avoid`` are
    taken when there are no others.
    """
    free = {capacity.node.node_id: (capacity.fits(slot_spec), capacity) for capacity in capacities}
    found: list[NodeSlots] = []
    while count > 0:
        good = {node_id: each for node_id, each in free.items() if node_id not in avoid} if avoid else free
        good = good or free
        fitting = [(slots, node_id) for node_id, (slots, _) in good.items() if slots >= count]
        # The tightest node that holds the rest; where there is none, the roomiest, and go on.
        node_id = min(fitting)[1] if fitting else min((-slots, node_id) for node_id, (slots, _) in good.items())[1]
        slots, capacity = free.pop(node_id)
        found.append((node_id, capacity.pick(slot_spec, min(slots, count))))
        count -= min(slots, count)
    return found


def spread(
    capacities: list[NodeCapacity], slot_spec: SlotSpec, count: int, avoid: Collection[str] = ()
) -> list[NodeSlots]:
    """One bundle after the other on the emptiest node."""
    return _by_turns(
        capacities,
        slot_spec,
        count,
        lambda capacity, given: (capacity.node.node_id in avoid, -(capacity.whole_slots - given)),
    )


def balanced(
    capacities: list[NodeCapacity], slot_spec: SlotSpec, count: int, avoid: Collection[str] = ()
) -> list[NodeSlots]:
    """Fill a node to half, then the next; once all are half full, fill them up."""

    def standing(capacity: NodeCapacity, given: int) -> tuple[float, ...]:
        used = capacity.node.slots - capacity.whole_slots + given
        return (capacity.node.node_id in avoid, 2 * used >= capacity.node.slots, -used)

    return _by_turns(capacities, slot_spec, count, standing)


def _by_turns(
    capacities: list[NodeCapacity],
    slot_spec: SlotSpec,
    count: int,
    standing: Callable[[NodeCapacity, int], tuple[float, ...]],
) -> list[NodeSlots]:
    """One bundle at a time on the node whose standing is least."""
    given = dict.fromkeys((capacity.node.node_id for capacity in capacities), 0)
    fits = {capacity.node.node_id: capacity.fits(slot_spec) for capacity in capacities}
    for _ in range(count // slot_spec.bundle):
        open_capacities = [
            capacity
            for capacity in capacities
            if given[capacity.node.node_id] + slot_spec.bundle <= fits[capacity.node.node_id]
        ]
        best = min(
            open_capacities,
            key=lambda capacity: (*standing(capacity, given[capacity.node.node_id]), capacity.node.node_id),
        ).node.node_id
        given[best] += slot_spec.bundle
    by_id = {capacity.node.node_id: capacity for capacity in capacities}
    return [(node_id, by_id[node_id].pick(slot_spec, slots)) for node_id, slots in given.items() if slots]


CHOICES: dict[str, Choose] = {"pack": pack, "spread": spread, "balanced": balanced}
