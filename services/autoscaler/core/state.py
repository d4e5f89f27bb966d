"""The nodes of pools and the demand for them, folded from the facts."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from contracts.base import Fact
from contracts.events.capacity import CapacityWanted, PolicyAdopted
from contracts.events.node import NodeDraining, NodeFact, NodeJoined, NodeLeft, NodeLost, NodeNotice, NodeUndrained
from contracts.events.run import RunExited, RunPlaced, RunReleased
from contracts.scheduling import Pool
from contracts.state.node import (
    GONE_STATES,
    SEVERITY,
    NodeDrain,
    drain_in_force,
    incarnations_before,
    next_drain,
    next_node_state,
)

#: Facts about nodes and the demand for them; and those about what is placed on a node.
STATE_FACTS: tuple[type[Fact], ...] = (
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeDraining,
    NodeUndrained,
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
    #: Sequence of ``joined``: of the runs placed before, only those that it names are still there.
    joined_sequence: int
    #: (run_id, generation) of what is placed on it.
    holders: set[tuple[str, int]]
    past_incarnations: list[str] = field(default_factory=list)
    state: str = "up"
    last_drain: NodeDrain | None = None
    #: Since when it is lost, or has left.
    gone_at: datetime | None = None

    @property
    def is_closing(self) -> bool:
        """Whether it gets no new runs: it is drained, or its machine is taken away."""
        return SEVERITY[self.state] > SEVERITY["up"]

    @property
    def is_kept(self) -> bool:
        """Whether an operator has drained it: it stays as it is until it is undrained, so that it can be looked at."""
        drain = drain_in_force(self)
        return drain is not None and drain.scope == "node"


@dataclass(slots=True)
class State:
    """Everything that the autoscaler decides from; folding a fact again changes nothing."""

    pools: dict[str, Pool] = field(default_factory=dict)
    wanted: dict[str, CapacityWanted] = field(default_factory=dict)
    nodes: dict[str, Node] = field(default_factory=dict)
    sequence: int = 0

    def first_relevant_sequence(self) -> int:
        """Return the sequence from which on facts about runs concern the present nodes."""
        present = (node.joined_sequence for node in self.nodes.values() if node.gone_at is None)
        return min(present, default=self.sequence + 1)


def apply(state: State, fact: Fact, sequence: int, time: datetime) -> None:
    """Fold one fact, in stream order."""
    state.sequence = max(state.sequence, sequence)
    match fact:
        case NodeFact():
            _apply_node(state, fact, sequence, time)
        case CapacityWanted():
            state.wanted[fact.pool] = fact
        case PolicyAdopted():
            state.pools = {pool.name: pool for pool in fact.policy.pools.pools}
        case RunPlaced():
            for member in fact.members:
                if (node := state.nodes.get(member.node_id)) is not None and sequence > node.joined_sequence:
                    node.holders.add((fact.run_id, fact.generation))
        case RunReleased() | RunExited() if (node := state.nodes.get(fact.node_id)) is not None:
            node.holders.discard((fact.run_id, fact.generation))


def _apply_node(state: State, fact: NodeFact, sequence: int, time: datetime) -> None:
    known = state.nodes.get(fact.node_id)
    node_state, last_drain = next_node_state(known, fact), next_drain(known, fact)
    if known is not None:
        known.last_drain = last_drain
    if node_state is None:
        return
    if isinstance(fact, NodeJoined):
        state.nodes.pop(fact.node_id, None)
        if pool := fact.labels.get("pool", ""):
            past = incarnations_before(known)
            state.nodes[fact.node_id] = Node(
                fact.node_id,
                pool,
                fact.incarnation,
                sequence,
                set(fact.running),
                past_incarnations=past,
                state=node_state,
                last_drain=last_drain,
            )
    elif known is not None:
        known.state = node_state
        if node_state in GONE_STATES:
            known.gone_at = known.gone_at or time
            known.holders.clear()
