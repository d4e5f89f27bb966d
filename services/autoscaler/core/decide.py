"""``decide``: which machines to start, drain and stop, so that a pool has as many nodes as are wanted.

No run is stopped: a node is drained first, and its machine is stopped once the node is empty. The same state gives the
same decisions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from services.autoscaler.core.state import Node, State


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine that an adapter has started for a pool and not stopped; its agent's node has the same id."""

    node_id: str
    started_at: datetime


@dataclass(frozen=True, slots=True)
class StartMachines:
    pool: str
    count: int


@dataclass(frozen=True, slots=True)
class DrainNode:
    """Ask the scheduler to place nothing more on the node."""

    node_id: str
    incarnation: str
    reason: str


@dataclass(frozen=True, slots=True)
class StopMachine:
    """Stop a machine on which nothing runs."""

    pool: str
    node_id: str
    reason: str


Decision = StartMachines | DrainNode | StopMachine


def decide(
    state: State, machines: Mapping[str, Sequence[Machine]], now: datetime, *, silence_s: float
) -> list[Decision]:
    """Return what to do about each pool for which there is a demand.

    Args:
        machines: pool -> the machines that there are.
        silence_s: how long a machine may be without a node, while it starts or once its node was lost, before another
            one replaces it.
    """
    pools = (_Pool(state, pool, machines.get(pool, ()), now, silence_s) for pool in sorted(state.wanted))
    return [decision for pool in pools for decision in pool.list_decisions()]


class _Pool:
    """One pool, with its machines by the state of their nodes."""

    def __init__(self, state: State, pool: str, machines: Sequence[Machine], now: datetime, silence_s: float) -> None:
        known = state.pools.get(pool)
        # A pool that the policy no longer has gets no nodes.
        self.most = known.max_nodes if known is not None else 0
        self.wanted = state.wanted[pool]
        self.name, self.count = pool, len(machines)
        self.coming: list[Machine] = []
        self.empty: list[Node] = []
        self.busy: list[Node] = []
        self.stops: list[StopMachine] = []
        for machine in machines:
            node = state.nodes.get(machine.node_id)
            if node is None or node.gone_at is not None:
                since = max(machine.started_at, node.gone_at) if node and node.gone_at else machine.started_at
                if now - since > timedelta(seconds=silence_s):
                    self._stop(machine.node_id, f"it has had no node for {silence_s:g} s")
                else:
                    self.coming.append(machine)
            elif node.is_closing:
                # A new machine under the same name would be drained too, and stopped again.
                if not node.holders and not node.is_kept:
                    self._stop(node.node_id, "it is drained and empty")
            else:
                (self.busy if node.holders else self.empty).append(node)

    def _stop(self, node_id: str, reason: str) -> None:
        self.stops.append(StopMachine(self.name, node_id, reason))

    def list_decisions(self) -> list[Decision]:
        target = min(self.wanted.nodes, self.most)
        have = len(self.coming) + len(self.empty) + len(self.busy)
        if have < target:
            # Machines that are drained are still there, and may cost something.
            count = min(target - have, self.most - (self.count - len(self.stops)))
            return [*self.stops, *([StartMachines(self.name, count)] if count > 0 else [])]
        return [*self.stops, *self._scale_down(have - target)]

    def _scale_down(self, surplus: int) -> list[Decision]:
        """Remove ``surplus`` nodes: first machines without a node, newest first; then empty nodes, spare first."""
        newest = sorted(self.coming, key=lambda machine: (machine.started_at, machine.node_id), reverse=True)
        found: list[Decision] = [
            StopMachine(self.name, each.node_id, "it is not wanted any more") for each in newest[:surplus]
        ]
        spare = {node_id: place for place, node_id in enumerate(self.wanted.spare)}
        order = sorted(self.empty, key=lambda node: (spare.get(node.node_id, len(spare)), node.node_id))
        for node in order[: surplus - len(found)]:
            found.append(DrainNode(node.node_id, node.incarnation, f"pool {self.name} has more nodes than are wanted"))
        return found
