"""What the facts of the stream require of this node.

The state is small: the newest generation of each run that was placed here. Facts about older generations are ignored,
and a newer generation ends an older one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from contracts.base import Event
from contracts.events.checkpoint import CheckpointCommitted, CheckpointRefused
from contracts.events.node import NodeJoined, NodeLost
from contracts.events.run import (
    BREAKS,
    RunCancelled,
    RunCompleted,
    RunExited,
    RunFailed,
    RunPlaced,
    RunReleased,
    RunStopping,
)


@dataclass(frozen=True, slots=True)
class LocalGeneration:
    """A generation that was placed on this node, and the sequence of its placement in the stream."""

    run_id: str
    generation: int
    placed_sequence: int
    #: It is reported or dropped; kept so that a repeated fact does not start it again.
    has_ended: bool = False
    #: How its ranks ended is on disk, and only to be published.
    has_report: bool = False
    #: Its run has failed or was cancelled: what is here of it goes once the generation has ended.
    run_has_ended: bool = False


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

    def is_live(self, run_id: str, generation: int) -> bool:
        """Whether the generation is the run's newest here, and has not ended."""
        found = self.generations.get(run_id)
        return found is not None and found.generation == generation and not found.has_ended

    def is_training(self, run_id: str) -> bool:
        """Whether the run has ranks here of whose end nothing is known yet."""
        found = self.generations.get(run_id)
        return found is not None and not found.has_ended and not found.has_report

    def end_generation(self, run_id: str, generation: int) -> NodeState:
        """Return the state in which a generation has ended, if it is still the run's newest here."""
        if not self.is_live(run_id, generation):
            return self
        return self.with_generation(replace(self.generations[run_id], has_ended=True))


@dataclass(frozen=True, slots=True)
class StartGeneration:
    """Run this node's part of the placement."""

    placed: RunPlaced
    sequence: int


@dataclass(frozen=True, slots=True)
class GenerationDecision:
    """A decision about one generation that was placed here."""

    run_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class DropGeneration(GenerationDecision):
    """Kill the ranks of this generation; nothing waits for a report."""

    reason: str


@dataclass(frozen=True, slots=True)
class StopGeneration(GenerationDecision):
    """Stop the ranks of this generation within their grace."""

    grace_s: float
    reason: str
    #: Ranks elsewhere have failed, and another generation can use what these have.
    peer_lost: bool = False


@dataclass(frozen=True, slots=True)
class SettleCheckpoint(GenerationDecision):
    """Note that the checkpoint of this step is committed, or was refused."""

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
        case NodeLost() if event.node_id == state.node_id:
            return _on_lost(state, event, sequence)
        case NodeJoined() if event.node_id == state.node_id and sequence > state.joined_sequence:
            # We hold the lease. An agent that joins under our name beside us takes the node away from the scheduler.
            is_other = event.incarnation != state.incarnation
            return state, [RejoinCluster("somebody else has joined under this name")] if is_other else []
        case RunCompleted() | RunFailed() | RunCancelled() if found := state.generations.get(event.run_id):
            return _on_run_ended(state, event, found)
        case RunExited() | RunReleased():
            return _on_reported(state, event)
        case RunStopping() | CheckpointCommitted() | CheckpointRefused():
            if state.is_live(event.run_id, event.generation):
                return state, [_decide_live(event)]
        case _:
            pass
    return state, []


def _decide_live(event: RunStopping | CheckpointCommitted | CheckpointRefused) -> Decision:
    match event:
        case RunStopping():
            peer_lost = event.then == "queue" and event.reason in BREAKS
            return StopGeneration(event.run_id, event.generation, event.grace_s, event.message, peer_lost)
        case CheckpointCommitted():
            return SettleCheckpoint(event.run_id, event.generation, event.checkpoint.step, True)
        case CheckpointRefused():
            return SettleCheckpoint(event.run_id, event.generation, event.step, False)


def completion_problem(state: NodeState, event: Event) -> str:
    """Return why a run cannot have been completed; '' if it can. Anybody can publish that it was."""
    is_false = isinstance(event, RunCompleted) and state.is_training(event.run_id)
    return "its ranks have not ended on this node" if is_false else ""


def end_generation(state: NodeState, run_id: str, generation: int) -> tuple[NodeState, list[Decision]]:
    """A generation has come to its end here, reported or not."""
    found = state.generations.get(run_id)
    if found is not None and found.generation == generation and found.run_has_ended:
        return state.without_run(run_id), [CleanUpRun(run_id)]
    return state.end_generation(run_id, generation), []


def running_generations(state: NodeState) -> tuple[tuple[str, int], ...]:
    """Return (run, generation) of those that are not reported, as ``joined`` names them."""
    return tuple(sorted((each.run_id, each.generation) for each in state.generations.values() if not each.has_ended))


def restore_state(node_id: str, generations: Iterable[LocalGeneration]) -> NodeState:
    """Return the state that the folders on disk show: the newest generation of each run."""
    ordered = sorted(generations, key=lambda each: each.generation)
    return NodeState(node_id, generations={each.run_id: each for each in ordered})


def _on_placed(state: NodeState, placed: RunPlaced, sequence: int) -> tuple[NodeState, list[Decision]]:
    older = state.generations.get(placed.run_id)
    if older is not None and older.generation >= placed.generation:
        return state, []
    decisions: list[Decision] = []
    if older is not None and not older.has_ended:
        decisions.append(DropGeneration(older.run_id, older.generation, f"generation {placed.generation} was placed"))
        state = state.end_generation(older.run_id, older.generation)
    is_member = any(member.node_id == state.node_id and member.ranks for member in placed.members)
    if not is_member or sequence < state.joined_sequence:
        return state, [*decisions, ForgetRun(placed.run_id)] if older is not None else decisions
    decisions.append(StartGeneration(placed, sequence))
    return state.with_generation(LocalGeneration(placed.run_id, placed.generation, sequence)), decisions


def _on_run_ended(
    state: NodeState, event: RunCompleted | RunFailed | RunCancelled, here: LocalGeneration
) -> tuple[NodeState, list[Decision]]:
    reason = f"the run is {event.fact}"
    if state.is_training(event.run_id) and not isinstance(event, RunCompleted):
        # It holds slots until the scheduler is told that it has ended here, too; what is left of it goes then.
        stop = StopGeneration(here.run_id, here.generation, 0, reason)
        is_known = here.run_has_ended
        return state.with_generation(replace(here, run_has_ended=True)), [] if is_known else [stop]
    drop, cleaning = DropGeneration(here.run_id, here.generation, reason), CleanUpRun(here.run_id)
    return state.without_run(event.run_id), [cleaning] if here.has_ended else [drop, cleaning]


def _on_reported(state: NodeState, event: RunExited | RunReleased) -> tuple[NodeState, list[Decision]]:
    """Drop ranks of which somebody else has said that they ended: the scheduler gives their slots to others."""
    is_ours = event.node_id == state.node_id and state.is_live(event.run_id, event.generation)
    if not is_ours or not state.is_training(event.run_id):
        return state, []
    drop = DropGeneration(event.run_id, event.generation, f"it is said to have {event.fact} here")
    return state.end_generation(event.run_id, event.generation), [drop]


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
