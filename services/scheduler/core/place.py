"""Which slots a gang gets."""

from __future__ import annotations

from collections.abc import Collection

from contracts.events.run import Member
from services.scheduler.core.cluster import Cluster, Run
from services.scheduler.core.policy import Policy

#: Node -> its free slots, ascending.
Free = dict[str, list[int]]


def avoided(cluster: Cluster, run: Run, policy: Policy) -> frozenset[str]:
    """The nodes on which the run kept failing by no fault of its own."""
    if not run.strikes:
        return frozenset()
    return frozenset(
        node.node_id
        for node in cluster.nodes.values()
        if run.strikes.get(node.incarnation, 0) >= policy.avoid_node_after
    )


def free_slots(cluster: Cluster) -> Free:
    """The free slots of every node on which something new may be placed."""
    return {node.node_id: free for node in cluster.nodes.values() if node.open and (free := node.free)}


def take(free: Free, count: int, avoid: Collection[str] = ()) -> tuple[Member, ...]:
    """Take ``count`` slots out of ``free`` for one gang: on few nodes, filling the fullest that fits.

    Best fit keeps large holes for large gangs; few nodes keep gradients off the network. The nodes
    to ``avoid`` are taken when there are no others.
    """
    members: list[Member] = []
    rank = 0
    while count > rank:
        wanted = count - rank
        good = {node_id: slots for node_id, slots in free.items() if node_id not in avoid} if avoid else free
        good = good or free
        fitting = [(len(slots), node_id) for node_id, slots in good.items() if len(slots) >= wanted]
        # The tightest node that holds the rest; where there is none, the roomiest, and go on.
        roomiest = min((-len(slots), node_id) for node_id, slots in good.items())
        node_id = min(fitting)[1] if fitting else roomiest[1]
        slots = free[node_id][:wanted]
        free[node_id] = free[node_id][wanted:]
        if not free[node_id]:
            del free[node_id]
        ranks = tuple(range(rank, rank + len(slots)))
        members.append(Member(node_id=node_id, slots=tuple(slots), ranks=ranks))
        rank += len(slots)
    return tuple(members)
