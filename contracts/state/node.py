"""A node's life as its facts add up.

What is decided about a node is bound to its id or to one incarnation of its agent:

- A drain by an operator is bound to the id. Neither a restart nor the loss of the node ends it; ``undrained`` does.
- A drain of scope ``incarnation`` (a machine that is about to be stopped), a notice and a failed check end with the
  incarnation. An agent repeats the notices that still hold when it joins, and checks devices again before a run uses
  them, so a restart hides neither.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Protocol

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from contracts.base import Token
from contracts.events.node import DrainScope, NodeDraining, NodeFact, NodeJoined, NodeUndrained

#: How far a state is from use. Only one as far or further replaces it, until the node joins again or is undrained.
SEVERITY = {"up": 0, "draining": 1, "notice": 2, "unfit": 3, "left": 4, "lost": 4}
GONE_STATES = frozenset({"left", "lost"})
#: How many past incarnations a node remembers: a late fact of one of them ends nothing.
MAX_PAST_INCARNATIONS = 16
#: (run, generation), as facts let them in: what an agent says becomes a fact.
_RUNNING = TypeAdapter(tuple[tuple[Token, Annotated[int, Field(ge=1)]], ...])
_POSITION = TypeAdapter(Annotated[int, Field(ge=0)])


class NodeDrain(BaseModel):
    """The last decision about a node's drain: that it is drained, or that it is so no more."""

    model_config = ConfigDict(frozen=True)

    is_drained: bool = True
    scope: DrainScope = "node"
    #: The one that the decision was made in.
    incarnation: str
    reason: str = ""
    user: str = ""
    requested_at: datetime | None = None

    def holds_for(self, incarnation: str) -> bool:
        """Whether the node is drained in this incarnation."""
        return self.is_drained and (self.scope == "node" or self.incarnation == incarnation)


class NodeLife(Protocol):
    """What every view of a node has."""

    @property
    def state(self) -> str: ...
    @property
    def incarnation(self) -> str: ...
    @property
    def past_incarnations(self) -> Collection[str]: ...
    @property
    def last_drain(self) -> NodeDrain | None:
        """The last decision about its drain. It stays when the node joins again."""


def next_node_state(node: NodeLife | None, fact: NodeFact) -> str | None:
    """Return the state of the node after ``fact``; None if the fact does not change the state.

    A fact of an old incarnation does not count, nor one that names a state nearer to use.
    """
    if isinstance(fact, NodeJoined):
        if node is not None and fact.incarnation in (node.incarnation, *node.past_incarnations):
            return None
        return "draining" if is_drained(node, fact.incarnation) else "up"
    if node is None:
        return None
    if isinstance(fact, NodeDraining | NodeUndrained):
        counts = next_drain(node, fact) is not node.last_drain and SEVERITY[node.state] <= SEVERITY["draining"]
        return None if not counts else "draining" if isinstance(fact, NodeDraining) else "up"
    if node.incarnation != fact.incarnation or fact.fact not in SEVERITY:
        return None
    return fact.fact if SEVERITY[fact.fact] >= SEVERITY[node.state] else None


def next_drain(node: NodeLife | None, fact: NodeFact) -> NodeDrain | None:
    """Return the last decision about the node's drain after ``fact``; the one before if the fact does not count.

    Of two requests the later one holds, also when a late delivery answers the earlier one once more.
    """
    if node is None or not isinstance(fact, NodeDraining | NodeUndrained):
        return node.last_drain if node is not None else None
    last, is_drain = node.last_drain, isinstance(fact, NodeDraining)
    scope = fact.scope if isinstance(fact, NodeDraining) else "node"
    if last is not None and last.requested_at and fact.requested_at and fact.requested_at < last.requested_at:
        return last
    if scope == "incarnation":
        # It ends before a drain of the node would, and does not take the place of one.
        is_held = last is not None and last.is_drained and last.scope == "node"
        if is_held or fact.incarnation != node.incarnation:
            return last
    return NodeDrain(
        is_drained=is_drain,
        scope=scope,
        incarnation=fact.incarnation,
        reason=fact.reason,
        user=fact.user,
        requested_at=fact.requested_at,
    )


def is_drained(node: NodeLife | None, incarnation: str | None = None) -> bool:
    """Whether the node is drained, in its present incarnation or in another one."""
    if node is None or node.last_drain is None:
        return False
    return node.last_drain.holds_for(node.incarnation if incarnation is None else incarnation)


def drain_in_force(node: NodeLife) -> NodeDrain | None:
    """Return the drain of a node; None if it is not drained."""
    return node.last_drain if is_drained(node) else None


def incarnations_before(node: NodeLife | None) -> list[str]:
    """Return the past incarnations of a node that has just joined again, the newest last."""
    return [] if node is None else [*node.past_incarnations, node.incarnation][-MAX_PAST_INCARNATIONS:]


@dataclass(frozen=True, slots=True)
class NodeStatement:
    """What an agent says of itself at each renewal of its lease. The scheduler compares it with what it believes."""

    #: The agent has acted on every fact up to this sequence.
    position: int
    #: (run, generation) of what it runs, or has not reported yet.
    running: tuple[tuple[str, int], ...]

    def as_lease_data(self) -> dict[str, str]:
        """Return it as the record of a lease holds it."""
        return {"position": str(self.position), "running": _RUNNING.dump_json(self.running).decode()}

    @classmethod
    def from_lease_data(cls, data: Mapping[str, str]) -> NodeStatement | None:
        """Return what a record says; None if it says nothing, as that of an older agent.

        Raises:
            ValueError: it says what no fact could hold.
        """
        if "running" not in data:
            return None
        position = _POSITION.validate_json(data.get("position", ""))
        return cls(position, _RUNNING.validate_json(data["running"], strict=True))
