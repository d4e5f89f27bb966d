"""Which slots a gang gets."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from contracts.events.run import Member
from services.scheduler.core.cluster import Cluster, Run
from services.scheduler.core.policy import Policy

#: Node -> its free slots, ascending.
Free = dict[str, list[int]]
#: Kind of machine (``Node.machine``) -> a number of slots on such machines.
Counts = dict[str, int]


def avoided(cluster: Cluster, run: Run, policy: Policy) -> frozenset[str]:
    """The nodes on which the run kept failing by no fault of its own, or is not to be again."""
    # It may be queued and placed in one pass: the strike is then not folded yet.
    left = {run.stalled.node_id} if run.stalled is not None and run.stalled.on_stall == "exclude" else set()
    if not run.strikes:
        return frozenset(left)
    return frozenset(left).union(
        node.node_id
        for node in cluster.nodes.values()
        if run.strikes.get(node.incarnation, 0) >= policy.avoid_node_after
    )


def free_slots(cluster: Cluster) -> dict[str, Free]:
    """The free slots of every node on which something new may be placed, by the kind of machine."""
    pools: dict[str, Free] = {}
    for node in cluster.nodes.values():
        if node.open and (free := node.free):
            pools.setdefault(node.machine, {})[node.node_id] = free
    return pools


def capacities(cluster: Cluster) -> Counts:
    """Slots on which something may be placed, free or not, by the kind of machine."""
    found: Counts = {}
    for node in cluster.nodes.values():
        if node.open:
            found[node.machine] = found.get(node.machine, 0) + node.slots
    return found


def counts(pools: Mapping[str, Free]) -> Counts:
    return {machine: sum(map(len, free.values())) for machine, free in pools.items()}


def kinds(run: Run, capacity: Counts) -> list[str]:
    """The kinds of machines of which the run may have slots; none if there can never be enough of them.

    An exact run stays on one kind: on that where its state came about, once it has any. A run that starts
    from another one's checkpoint goes to the kind of that where it can, else anywhere, and says so.
    """
    need = run.spec.slots.min
    if not run.exact:
        return list(capacity) if sum(capacity.values()) >= need else []
    enough = [machine for machine, slots in capacity.items() if slots >= need]
    # Without a checkpoint, too, ranks may have left their state in the memory of such machines.
    only = run.machine or run.inherited_machine
    if run.bound or only in enough:
        return [machine for machine in enough if machine == only]
    return sorted(enough, key=lambda machine: (-capacity[machine], machine))


def useful(run: Run, slots: int) -> int:
    """The slots out of ``slots`` that make the run's step shorter; never below its minimum.

    A step takes as long as the process with the most logical ranks: of four logical ranks one has two, on two
    processes as on three.
    """
    training = run.spec.training
    if training is None or training.logical_ranks is None or run.spec.kind != "train":
        return slots
    logical = training.logical_ranks
    most = -(-logical // min(slots, logical))
    return max(-(-logical // most), run.spec.slots.min)


def reserve(run: Run, need: int, machines: Collection[str], idle: Counts) -> Counts | None:
    """Take ``need`` slots out of ``idle``: of one kind of machine where possible; None if there are too few."""
    fitting = [machine for machine in machines if idle.get(machine, 0) >= need]
    # An exact run can grow on its own kind alone; any other should leave the large holes to those.
    one = (max if run.exact else min)(fitting, key=lambda machine: idle[machine], default=None)
    if one is None and (run.exact or sum(idle.get(machine, 0) for machine in machines) < need):
        return None
    taken: Counts = {}
    for machine in (one,) if one is not None else machines:
        if (part := min(need - sum(taken.values()), idle.get(machine, 0))) > 0:
            taken[machine] = part
            idle[machine] -= part
    return taken


def take(pools: Mapping[str, Free], wanted: Mapping[str, int], avoid: Collection[str] = ()) -> tuple[Member, ...]:
    """Take so many slots of each kind of machine out of ``pools`` for one gang; ranks count on."""
    members: list[Member] = []
    for machine, count in wanted.items():
        rank = sum(len(member.ranks) for member in members)
        members += take_alike(pools[machine], count, avoid, rank)
    return tuple(members)


def take_alike(free: Free, count: int, avoid: Collection[str] = (), first_rank: int = 0) -> list[Member]:
    """Take ``count`` slots out of ``free`` for one gang: on few nodes, filling the fullest that fits.

    Best fit keeps large holes for large gangs; few nodes keep gradients off the network. The nodes
    to ``avoid`` are taken when there are no others.
    """
    members: list[Member] = []
    taken = 0
    while count > taken:
        wanted = count - taken
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
        ranks = tuple(range(first_rank + taken, first_rank + taken + len(slots)))
        members.append(Member(node_id=node_id, slots=tuple(slots), ranks=ranks))
        taken += len(slots)
    return members
