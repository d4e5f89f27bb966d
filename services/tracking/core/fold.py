"""A run as tracking sees it: a fold over the run's facts, in any order and any number of times."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Generic, TypeVar

from contracts import exactness, subjects, topology
from contracts.base import Event
from contracts.events.checkpoint import CheckpointCommitted
from contracts.events.run import (
    Artifact,
    CheckpointRef,
    RunAccepted,
    RunCancelled,
    RunCompleted,
    RunEvaluated,
    RunExited,
    RunFact,
    RunFailed,
    RunNotPromoted,
    RunPlaced,
    RunPrepared,
    RunStarted,
)
from contracts.state.run import change_run

#: The attempt that exists from ``accepted`` on, before anything is placed.
FIRST_ATTEMPT = 1


#: MLflow's status for each end of a run.
STATUS: dict[type[RunFact], str] = {RunCompleted: "FINISHED", RunFailed: "FAILED", RunCancelled: "KILLED"}

F = TypeVar("F", covariant=True)


@dataclass(frozen=True, slots=True)
class DatedFact(Generic[F]):
    """A fact and when it was published."""

    fact: F
    at: datetime

    @property
    def at_s(self) -> float:
        """Seconds since the epoch."""
        return self.at.timestamp()


@dataclass(slots=True)
class Run:
    """Everything that tracking has to know of a run. ``sequence`` is the last fact folded in."""

    run_id: str
    sequence: int = 0
    state: str = "requested"
    #: Nodes of its placement whose ranks have not ended well.
    unfinished: tuple[str, ...] = ()
    accepted: RunAccepted | None = None
    accepted_at_s: float = 0.0
    prepared: RunPrepared | None = None
    placements: dict[int, DatedFact[RunPlaced]] = field(default_factory=dict)
    #: What the nodes reported when the ranks of a generation started, by generation and node.
    starts: dict[tuple[int, str], RunStarted] = field(default_factory=dict)
    #: The furthest committed checkpoint of each generation, and of each checkpoint its state's digest.
    committed: dict[int, CheckpointRef] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    #: Manifest -> the hash of its bytes: it identifies the checkpoint to readers of MLflow.
    manifests: dict[str, str] = field(default_factory=dict)
    ended: DatedFact[RunCompleted | RunFailed | RunCancelled] | None = None
    evaluated: DatedFact[RunEvaluated] | None = None
    not_promoted: RunNotPromoted | None = None

    @property
    def live(self) -> bool:
        """Whether points are logged as they come: a command restarts from scratch, not from a checkpoint."""
        return self.accepted is not None and self.accepted.spec.command is not None

    @property
    def generation(self) -> int:
        """The newest placement, 0 before the first."""
        return max(self.placements, default=0)

    @property
    def next_generation(self) -> None:
        """``queued`` is not read: nothing is shown of it."""

    def start_generation(self, generation: int) -> int:
        """Return the newest generation up to ``generation`` whose start is known; otherwise the first one.

        Only its ranks know: they may have taken up state from memory that is newer than any checkpoint.
        """
        if self.live or self.ended is not None:
            return generation
        known = {number for number, _ in self.starts} | set(self.committed)
        return max((number for number in known if number <= generation), default=min(self.placements, default=0))

    def resume_step(self, generation: int) -> int | None:
        """The step after which a generation trained, None: from scratch."""
        for (number, _), start in self.starts.items():
            if number == generation and start.resumed_from == "memory":
                return start.step
        return self.placed_step(generation)

    def placed_step(self, generation: int) -> int | None:
        """The step of the checkpoint that a generation was given, None: from scratch."""
        placed = self.placements.get(generation)
        return placed.fact.resume.step if placed and placed.fact.resume else None

    @property
    def artifacts(self) -> tuple[Artifact, ...]:
        return self.ended.fact.artifacts if self.ended and isinstance(self.ended.fact, RunCompleted) else ()

    @property
    def last_checkpoint(self) -> CheckpointRef | None:
        return max(self.committed.values(), key=lambda ref: ref.step, default=None)

    @property
    def exactness(self) -> exactness.Assessment | None:
        """How exact the run is by how each of its generations started."""
        if self.accepted is None or not self.starts:
            return None
        return exactness.assess(self.accepted.spec, self.starts.values())

    def attempts(self) -> list[tuple[int, int]]:
        """The MLflow runs this run has, oldest first, as (attempt, its last generation).

        A task has one: its generations continue each other. A command has one more for each placement that begins
        again; one that resumes what the script kept continues the MLflow run before it.
        """
        generations = sorted(self.placements)
        if not self.live or len(generations) < 2:
            return [(FIRST_ATTEMPT, self.generation)]
        last = {FIRST_ATTEMPT: generations[0]}
        for number in generations[1:]:
            last[max(last) if self.placed_step(number) is not None else number] = number
        return sorted(last.items())


def filters(run_id: str) -> tuple[str, ...]:
    """The subjects that hold what ``fold`` reads of one run."""
    # With ``exited``: whether a run can have completed follows from it.
    events: tuple[type[Event], ...] = (*topology.TRACKING.events, RunExited)
    wanted = [event for event in events if issubclass(event, RunFact)]
    return tuple(subjects.fact(event.aggregate, run_id, event.fact) for event in wanted)


def fold(run: Run, event: RunFact, at: datetime, sequence: int) -> None:
    """Fold one fact. A fact that comes again changes nothing, nor does one that does not count in the run's life."""
    run.sequence = max(run.sequence, sequence)
    changes = change_run(run, event)
    if changes is None:
        return
    run.state, run.unfinished = changes.get("state", run.state), changes.get("unfinished", run.unfinished)
    match event:
        case RunAccepted():
            run.accepted, run.accepted_at_s = event, at.timestamp()
        case RunPrepared() if run.prepared is None:
            run.prepared = event
        case RunPlaced():
            run.placements.setdefault(event.generation, DatedFact(event, at))
        case RunStarted():
            run.starts.setdefault((event.generation, event.node_id), event)
        case CheckpointCommitted():
            if event.state_digest is not None:
                run.digests[event.checkpoint.uri] = event.state_digest
            if event.manifest_sha256 is not None:
                run.manifests[event.checkpoint.uri] = event.manifest_sha256
            known = run.committed.get(event.generation)
            if known is None or event.checkpoint.step > known.step:
                run.committed[event.generation] = event.checkpoint
        case RunCompleted() | RunFailed() | RunCancelled():
            run.ended = DatedFact(event, at)
        case RunEvaluated() if run.evaluated is None:
            run.evaluated = DatedFact(event, at)
        case RunNotPromoted() if run.not_promoted is None:
            run.not_promoted = event
