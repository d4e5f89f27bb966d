"""What the autoscaler knows of nodes and of what is wanted, as the facts add up."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from contracts.base import Fact
from contracts.events.capacity import CapacityWanted, PolicyAdopted
from contracts.events.node import NodeDraining, NodeFact, NodeJoined, NodeLeft, NodeLost, NodeNotice
from contracts.events.run import RunExited, RunPlaced, RunReleased
from contracts.scheduling import Pool

#: Facts that say what there is and what is wanted; and those that say what lies on a node.
STATE_FACTS: tuple[type[Fact], ...] = (
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeDraining,
    NodeNotice,
    CapacityWanted,
    PolicyAdopted,
)
ALLOCATION_FACTS: tuple[type[Fact], ...] = (RunPlaced, RunReleased, RunExited)


@dataclass(slots=True)
class Node:
    """A node of a pool, in its present incarnation."""

    node_id: str
    pool: str
    incarnation: str
    #: Sequence and time of ``joined``; what was placed before lies there no more, but for what it says itself.
    joined_sequence: int
    holders: set[tuple[str, int]]
    #: Since when it is gone, if it is.
    gone_at: datetime | None = None
    #: It takes nothing new: it is drained, or its machine is taken away.
    closing: bool = False


@dataclass(slots=True)
class State:
    """Everything the autoscaler knows; folding a fact once more changes nothing."""

    pools: dict[str, Pool] = field(default_factory=dict)
    wanted: dict[str, CapacityWanted] = field(default_factory=dict)
    nodes: dict[str, Node] = field(default_factory=dict)
    sequence: int = 0

    def first_relevant_sequence(self) -> int:
        """From where on facts about runs say what lies on the nodes that there are."""
        present = (node.joined_sequence for node in self.nodes.values() if node.gone_at is None)
        return min(present, default=self.sequence + 1)


def apply(state: State, fact: Fact, sequence: int, time: datetime) -> None:
    """Fold one fact, in stream order."""
    state.sequence = max(state.sequence, sequence)
    match fact:
        case NodeJoined():
            _apply_joined(state, fact, sequence)
        case NodeFact():
            _on_node(state, fact, time)
        case CapacityWanted():
            state.wanted[fact.pool] = fact
        case PolicyAdopted():
            state.pools = {pool.name: pool for pool in fact.policy.pools.pools}
        case RunPlaced():
            for member in fact.members:
                if (node := state.nodes.get(member.node_id)) is not None and sequence > node.joined_sequence:
                    node.holders.add((fact.run_id, fact.generation))
        case RunReleased() | RunExited():
            if (node := state.nodes.get(fact.node_id)) is not None:
                node.holders.discard((fact.run_id, fact.generation))
        case _:
            pass


def _apply_joined(state: State, fact: NodeJoined, sequence: int) -> None:
    known = state.nodes.get(fact.node_id)
    pool = fact.labels.get("pool", "")
    if known is not None and known.incarnation == fact.incarnation:
        return
    if not pool:
        state.nodes.pop(fact.node_id, None)
        return
    state.nodes[fact.node_id] = Node(fact.node_id, pool, fact.incarnation, sequence, set(fact.running))


def _on_node(state: State, fact: NodeFact, time: datetime) -> None:
    node = state.nodes.get(fact.node_id)
    if node is None or node.incarnation != fact.incarnation:
        return
    if isinstance(fact, NodeLost | NodeLeft):
        node.gone_at = node.gone_at or time
        node.holders.clear()
    elif isinstance(fact, NodeDraining | NodeNotice):
        node.closing = True
