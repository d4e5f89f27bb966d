"""A node's life as its facts add up."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from contracts.events.node import NodeFact, NodeJoined

#: How far a state is from use. Only one as far or further replaces it, until the node joins again.
SEVERITY = {"up": 0, "draining": 1, "notice": 2, "unfit": 3, "left": 4, "lost": 4}
GONE_STATES = frozenset({"left", "lost"})
#: How many past incarnations a node remembers: a late fact of one of them ends nothing.
MAX_PAST_INCARNATIONS = 16


class NodeLife(Protocol):
    """What every view of a node has."""

    @property
    def state(self) -> str: ...
    @property
    def incarnation(self) -> str: ...
    @property
    def past_incarnations(self) -> Collection[str]: ...


def next_node_state(node: NodeLife | None, fact: NodeFact) -> str | None:
    """Return the state of the node after ``fact``; None if the fact does not count.

    A fact of an old incarnation does not count, nor one that names a state nearer to use.
    """
    if isinstance(fact, NodeJoined):
        known = node is not None and fact.incarnation in (node.incarnation, *node.past_incarnations)
        return None if known else "up"
    if node is None or node.incarnation != fact.incarnation or fact.fact not in SEVERITY:
        return None
    return fact.fact if SEVERITY[fact.fact] >= SEVERITY[node.state] else None


def incarnations_before(node: NodeLife | None) -> list[str]:
    """Return the past incarnations of a node that has just joined again, the newest last."""
    return [] if node is None else [*node.past_incarnations, node.incarnation][-MAX_PAST_INCARNATIONS:]
