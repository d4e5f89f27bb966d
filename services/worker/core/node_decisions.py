"""What the facts of the stream require of this node.

The state is small: the newest generation of each run that was placed here. Facts about older generations are ignored,
and a newer generation ends an older one.
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
    """A generation that was placed on this node, and the sequence of its placement in the stream."""

    run_id: str
    generation: int
    placed_sequence: int
    #: It is reported or dropped; kept so that a repeated fact does not start it again.
    has_ended: bool = False


@dataclass(frozen=True, slots=True)
class NodeState:
    """What the agent knows when it reads the next fact."""

    node_id: str
    incarnation: str = ""
    #: Sequence of the last ``joined``: a placement before it that is not among ``generations`` is void.
    joined_sequence: int = 0
    #: By run.
    generations: Mapping[str, LocalGeneration] = field(default_factory=dict)

    def with_generation(self, generation: LocalGeneration) -> NodeState:
        """Return the state with a generation in place of the run's older one."""
        return replace(self, generations={**self.generations, generation.run_id: generation})

    def without_run(self, run_id: str) -> NodeState:
        """Return the state without a run."""
        return replace(self, generations={key: each for key, each in self.generations.items() if key != run_id})

    def end_generation(self, run_id: str, generation: int) -> NodeState:
        """Return the state in which a generation has ended, if it is still the run's newest here."""
        found = self.generations.get(run_id)
        if found is None or found.generation != generation:
            return self
        return self.with_generation(replace(found, has_ended=True))


@dataclass(frozen=True, slots=True)
class StartGeneration:
    """Run this node's part of the placement."""

    placed: RunPlaced
    member: Member
    sequence: int


@dataclass(frozen=True, slots=True)
class DropGeneration:
    """Kill the ranks of this generation; nothing waits for a report."""

    run_id: str
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class StopGeneration:
    """Stop the ranks of this generation within their grace."""

    run_id: str
    generation: int
    grace_s: float
    reason: str
    #: Ranks elsewhere have failed, and another generation can use what these have.
    peer_lost: bool = False


@dataclass(frozen=True, slots=True)
class SettleCheckpoint:
    """Note that the checkpoint of this step is committed, or was refused."""

    run_id: str
    generation: int
    step: int
    committed: bool


@dataclass(frozen=True, slots=True)
class CleanUpRun:
    """Remove what is here of a run that has ended."""

    run_id: str


@dataclass(frozen=True, slots=True)
class ForgetRun:
    """Remove the state of a run that goes on without this node."""

    run_id: str


@dataclass(frozen=True, slots=True)
class RejoinCluster:
    """Join as a new incarnation: the scheduler declared this one lost."""

    reason: str


Decision = StartGeneration | DropGeneration | StopGeneration | SettleCheckpoint | CleanUpRun | ForgetRun | RejoinCluster


def decide(state: NodeState, event: Event, sequence: int) -> tuple[NodeState, list[Decision]]:
    """Fold one fact; return what it requires of this node. The same fact a second time requires nothing."""
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
            found = state.generations.get(event.run_id)
            if found is not None:
                reason = f"the run is {event.fact}"
                drop = [] if found.has_ended else [DropGeneration(found.run_id, found.generation, reason)]
                return state.without_run(event.run_id), [*drop, CleanUpRun(event.run_id)]
        case NodeLost() if event.node_id == state.node_id:
            return _on_lost(state, event, sequence)
        case _:
            pass
    return state, []


def running_generations(state: NodeState) -> tuple[tuple[str, int], ...]:
    """Return (run, generation) of those that are not reported, as ``joined`` names them."""
    return tuple(sorted((each.run_id, each.generation) for each in state.generations.values() if not each.has_ended))


def restore_state(node_id: str, generations: Iterable[LocalGeneration]) -> NodeState:
    """Return the state that the folders on disk show: the newest generation of each run."""
    newest: dict[str, LocalGeneration] = {}
    for each in generations:
        if each.run_id not in newest or newest[each.run_id].generation < each.generation:
            newest[each.run_id] = each
    return NodeState(node_id, generations=newest)


def _on_placed(state: NodeState, placed: RunPlaced, sequence: int) -> tuple[NodeState, list[Decision]]:
    older = state.generations.get(placed.run_id)
    if older is not None and older.generation >= placed.generation:
        return state, []
    decisions: list[Decision] = []
    if older is not None and not older.has_ended:
        decisions.append(DropGeneration(older.run_id, older.generation, f"generation {placed.generation} was placed"))
        state = state.end_generation(older.run_id, older.generation)
    member = next((m for m in placed.members if m.node_id == state.node_id and m.ranks), None)
    if member is None or sequence < state.joined_sequence:
        return state, [*decisions, ForgetRun(placed.run_id)] if older is not None else decisions
    decisions.append(StartGeneration(placed, member, sequence))
    return state.with_generation(LocalGeneration(placed.run_id, placed.generation, sequence)), decisions


def _on_lost(state: NodeState, lost: NodeLost, sequence: int) -> tuple[NodeState, list[Decision]]:
    """Drop what was placed before the fact, also when it names an earlier incarnation of this node."""
    decisions: list[Decision] = []
    for each in tuple(state.generations.values()):
        if each.placed_sequence < sequence and not each.has_ended and sequence > 0:
            decisions.append(DropGeneration(each.run_id, each.generation, "the node was declared lost"))
            state = state.end_generation(each.run_id, each.generation)
    if lost.incarnation == state.incarnation:
        decisions.append(RejoinCluster(lost.reason or "declared lost"))
    return state, decisions


def _is_live(state: NodeState, run_id: str, generation: int) -> bool:
    found = state.generations.get(run_id)
    return found is not None and found.generation == generation and not found.has_ended
