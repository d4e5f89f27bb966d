"""Which facts concern this node, and what is to be done about each.

The state is small: the newest generation of each run that this node has taken up. Everything older
is ignored, whatever it says, and a newer one ends what is left of the old.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from contracts.base import Event
from contracts.events.checkpoint import CheckpointCommitted, CheckpointRefused
from contracts.events.node import NodeLost
from contracts.events.run import Member, RunCancelled, RunCompleted, RunFailed, RunPlaced, RunPreempting


@dataclass(frozen=True, slots=True)
class LocalGeneration:
    """A placement that this node has taken up, and where in the stream it was said."""

    run_id: str
    generation: int
    placed_sequence: int
    #: It was reported or dropped; kept so that a repeated fact does not start it again.
    over: bool = False


@dataclass(frozen=True, slots=True)
class NodeState:
    """What the agent knows when it reads the next fact."""

    node_id: str
    incarnation: str = ""
    #: Sequence of the last ``joined``; what was placed here before it and is not held is void.
    joined_sequence: int = 0
    held: Mapping[str, LocalGeneration] = field(default_factory=dict)

    def with_held(self, held: LocalGeneration) -> NodeState:
        return replace(self, held={**self.held, held.run_id: held})

    def without(self, run_id: str) -> NodeState:
        return replace(self, held={key: held for key, held in self.held.items() if key != run_id})

    def over(self, run_id: str, generation: int) -> NodeState:
        held = self.held.get(run_id)
        if held is None or held.generation != generation:
            return self
        return self.with_held(replace(held, over=True))


@dataclass(frozen=True, slots=True)
class StartGeneration:
    """Run this node's part of the placement."""

    placed: RunPlaced
    member: Member
    sequence: int


@dataclass(frozen=True, slots=True)
class DropGeneration:
    """Kill what is left of this generation; nobody waits for a report."""

    run_id: str
    generation: int
    why: str


@dataclass(frozen=True, slots=True)
class StopGeneration:
    """Make the ranks of this generation stop within their grace."""

    run_id: str
    generation: int
    grace_s: float
    reason: str
    #: Ranks elsewhere have failed, and another generation can use what these have.
    peer_lost: bool = False


@dataclass(frozen=True, slots=True)
class SettleCheckpoint:
    """The checkpoint of this step is committed, or never will be."""

    run_id: str
    generation: int
    step: int
    committed: bool


@dataclass(frozen=True, slots=True)
class CleanUpRun:
    """The run is over: its folders here are no longer needed."""

    run_id: str


@dataclass(frozen=True, slots=True)
class ForgetRun:
    """The run goes on without this node."""

    run_id: str


@dataclass(frozen=True, slots=True)
class RejoinCluster:
    """This life of the agent was declared lost: begin a new one."""

    reason: str


Decision = StartGeneration | DropGeneration | StopGeneration | SettleCheckpoint | CleanUpRun | ForgetRun | RejoinCluster


def decide(state: NodeState, event: Event, sequence: int) -> tuple[NodeState, list[Decision]]:
    """Fold one fact and say what it asks of this node. The same fact a second time asks nothing."""
    match event:
        case RunPlaced():
            return _on_placed(state, event, sequence)
        case RunPreempting():
            if _is_live(state, event.run_id, event.generation):
                peer_lost = event.then == "queue" and event.queue_reason in ("crashed", "node lost")
                return state, [StopGeneration(event.run_id, event.generation, event.grace_s, event.reason, peer_lost)]
        case CheckpointCommitted():
            if _is_live(state, event.run_id, event.generation):
                return state, [SettleCheckpoint(event.run_id, event.generation, event.checkpoint.step, True)]
        case CheckpointRefused():
            if _is_live(state, event.run_id, event.generation):
                return state, [SettleCheckpoint(event.run_id, event.generation, event.step, False)]
        case RunCompleted() | RunFailed() | RunCancelled():
            held = state.held.get(event.run_id)
            if held is not None:
                drop = [] if held.over else [DropGeneration(held.run_id, held.generation, f"the run is {event.fact}")]
                return state.without(event.run_id), [*drop, CleanUpRun(event.run_id)]
        case NodeLost() if event.node_id == state.node_id:
            return _on_lost(state, event, sequence)
        case _:
            pass
    return state, []


def still_running(state: NodeState) -> tuple[tuple[str, int], ...]:
    """(run, generation) that the agent holds and has not reported: what ``joined`` says."""
    return tuple(sorted((held.run_id, held.generation) for held in state.held.values() if not held.over))


def joining(state: NodeState, incarnation: str) -> NodeState:
    """A new life is about to be said; until it is, its place in the stream is unknown."""
    return replace(state, incarnation=incarnation)


def joined_at(state: NodeState, sequence: int) -> NodeState:
    return replace(state, joined_sequence=sequence)


def holding(node_id: str, held: Iterable[LocalGeneration]) -> NodeState:
    """The state that the folders on disk tell of: the newest generation of each run."""
    newest: dict[str, LocalGeneration] = {}
    for each in held:
        if each.run_id not in newest or newest[each.run_id].generation < each.generation:
            newest[each.run_id] = each
    return NodeState(node_id, held=newest)


def _on_placed(state: NodeState, placed: RunPlaced, sequence: int) -> tuple[NodeState, list[Decision]]:
    held = state.held.get(placed.run_id)
    if held is not None and held.generation >= placed.generation:
        return state, []
    decisions: list[Decision] = []
    if held is not None and not held.over:
        decisions.append(DropGeneration(held.run_id, held.generation, f"generation {placed.generation} was placed"))
        state = state.over(held.run_id, held.generation)
    member = next((m for m in placed.members if m.node_id == state.node_id and m.ranks), None)
    if member is None or sequence < state.joined_sequence:
        return state, [*decisions, ForgetRun(placed.run_id)] if held is not None else decisions
    decisions.append(StartGeneration(placed, member, sequence))
    return state.with_held(LocalGeneration(placed.run_id, placed.generation, sequence)), decisions


def _on_lost(state: NodeState, lost: NodeLost, sequence: int) -> tuple[NodeState, list[Decision]]:
    """Whatever was placed before it is taken for dead, also when an earlier life of ours is meant."""
    decisions: list[Decision] = []
    for held in tuple(state.held.values()):
        if held.placed_sequence < sequence and not held.over and sequence > 0:
            decisions.append(DropGeneration(held.run_id, held.generation, "the node was declared lost"))
            state = state.over(held.run_id, held.generation)
    if lost.incarnation == state.incarnation:
        decisions.append(RejoinCluster(lost.reason or "declared lost"))
    return state, decisions


def _is_live(state: NodeState, run_id: str, generation: int) -> bool:
    held = state.held.get(run_id)
    return held is not None and held.generation == generation and not held.over
