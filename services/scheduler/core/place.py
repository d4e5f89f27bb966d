"""Which slots a gang gets."""

from __future__ import annotations

from contracts.events.run import Member
from services.scheduler.core.cluster import Cluster

#: Node -> its free slots, ascending.
Free = dict[str, list[int]]


def free_slots(cluster: Cluster) -> Free:
    """The free slots of every node on which something new may be placed."""
    return {node.node_id: free for node in cluster.nodes.values() if node.open and (free := node.free)}


def take(free: Free, count: int) -> tuple[Member, ...]:
    """Take ``count`` slots out of ``free`` for one gang: on few nodes, filling the fullest that fits.

    Best fit keeps large holes for large gangs; few nodes keep gradients off the network.
    """
    members: list[Member] = []
    rank = 0
    while count > rank:
        wanted = count - rank
        fitting = [(len(slots), node_id) for node_id, slots in free.items() if len(slots) >= wanted]
        # The tightest node that holds the rest; where there is none, the roomiest, and go on.
        roomiest = min((-len(slots), node_id) for node_id, slots in free.items())
        node_id = min(fitting)[1] if fitting else roomiest[1]
        slots = free[node_id][:wanted]
        free[node_id] = free[node_id][wanted:]
        if not free[node_id]:
            del free[node_id]
        ranks = tuple(range(rank, rank + len(slots)))
        members.append(Member(node_id=node_id, slots=tuple(slots), ranks=ranks))
        rank += len(slots)
    return tuple(members)
