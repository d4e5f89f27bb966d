"""Evaluation's view of runs and models, on their reducers. Each start folds it again from the facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from contracts.base import Event
from contracts.envelope import Envelope
from contracts.events.checkpoint import CheckpointCommitted, CheckpointDeleted
from contracts.events.model import ModelApproved, ModelConfigured, ModelFact, ModelPromoted, ModelStaged
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
    RunPromoted,
    RunPromotionPending,
    RunRejected,
)
from contracts.spec.run import RunSpec
from contracts.state.model import ModelSettings, champion_of, rollback_target
from contracts.state.run import RunStates

#: The facts that ``State.apply`` folds.
FOLDED: tuple[type[Event], ...] = (
    RunAccepted,
    RunRejected,
    RunPrepared,
    RunPlaced,
    RunExited,
    CheckpointCommitted,
    CheckpointDeleted,
    RunCompleted,
    RunFailed,
    RunCancelled,
    RunEvaluated,
    RunPromoted,
    RunNotPromoted,
    RunPromotionPending,
    ModelPromoted,
    ModelConfigured,
    ModelApproved,
    ModelStaged,
)
#: The tag of a run that trains another one's request again (``trainbus reproduce``), with that run.
REPRODUCES = "reproduces"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A training whose result competes for a model, until that is settled."""

    run_id: str
    spec: RunSpec
    dataset_id: str | None = None
    #: By name, where the run's data has names; ``dataset_id`` then stands for all of them.
    dataset_ids: Mapping[str, str] = field(default_factory=dict)
    #: The last one.
    checkpoint: CheckpointRef | None = None
    #: Those that retention has not deleted, in stream order.
    committed: tuple[CheckpointCommitted, ...] = ()
    #: The envelope of its ``completed``: what everything done about it goes back to. None: it still trains.
    completed: Envelope | None = None
    evaluated: RunEvaluated | None = None
    #: What it was published to wait for.
    awaited: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run of kind evaluate ended: with metrics, or with an error."""

    metrics: dict[str, float] = field(default_factory=dict)
    artifacts: tuple[Artifact, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class Version:
    """One entry of a model's history, where it stands, and which event led to it."""

    fact: ModelPromoted
    sequence: int
    caused_by: str

    @property
    def version(self) -> int:
        return self.fact.version

    @property
    def rollback(self) -> bool:
        return self.fact.rollback


@dataclass(slots=True)
class State:
    """Open candidates, ended evaluations, and each model's history."""

    runs: RunStates = field(default_factory=RunStates)
    open: dict[str, Candidate] = field(default_factory=dict)
    #: Runs of kind evaluate that the scheduler has accepted, and the run that each measures.
    evaluations: dict[str, str] = field(default_factory=dict)
    #: The checkpoint that each of them measures.
    measured: dict[str, str] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    models: dict[str, list[Version]] = field(default_factory=dict)
    settings: dict[str, ModelSettings] = field(default_factory=dict)
    #: Run -> the runs that train its request again.
    reproductions: dict[str, list[str]] = field(default_factory=dict)
    #: Requests about models that are answered, by their event ids.
    answered: set[str] = field(default_factory=set)

    def apply(self, event: Event, envelope: Envelope, sequence: int) -> None:
        """Fold one fact. Every fact must come once, in stream order; those that do not count change nothing."""
        if isinstance(event, RunFact) and not self.runs.apply(event):
            return
        match event:
            case RunAccepted(spec=spec, run_id=run_id):
                if spec.kind == "evaluate":
                    self.evaluations[run_id] = spec.evaluate.run_id if spec.evaluate else ""
                    if spec.evaluate is not None:
                        self.measured[run_id] = spec.evaluate.checkpoint_uri
                elif (original := spec.tags.get(REPRODUCES)) is not None:
                    self.reproductions.setdefault(original, []).append(run_id)
                elif spec.evaluation is not None and spec.model is not None:
                    self.open.setdefault(run_id, Candidate(run_id, spec))
            case RunPrepared():
                named = {name: each.dataset_id for name, each in event.datasets.items()}
                self._change(event.run_id, dataset_id=event.identity, dataset_ids=named)
            case RunCompleted():
                self._change(event.run_id, checkpoint=event.checkpoint, completed=envelope)
                self._record_outcome(event.run_id, Outcome(dict(event.metrics), event.artifacts))
            case CheckpointCommitted() | CheckpointDeleted():
                self._change_checkpoints(event)
            case RunFailed() | RunCancelled():
                self.open.pop(event.run_id, None)
                verb = "failed" if isinstance(event, RunFailed) else "was cancelled"
                self._record_outcome(event.run_id, Outcome(error=f"{verb}: {event.reason}"))
            case RunRejected():
                # A rejected run was never accepted, so it is unknown here whether it was an evaluation.
                self.outcomes[event.run_id] = Outcome(error=f"was rejected: {event.reason[:500]}")
            case RunEvaluated():
                self._change(event.run_id, evaluated=event)
            case RunPromotionPending():
                if (candidate := self.open.get(event.run_id)) is not None:
                    self._change(event.run_id, awaited=candidate.awaited | {event.awaits})
            case RunPromoted() | RunNotPromoted():
                self.open.pop(event.run_id, None)
            case ModelPromoted():
                version = Version(event, sequence, envelope.causation_id)
                self.models.setdefault(event.model, []).append(version)
            case ModelFact():
                self.settings_of(event.model).apply(event)
                self.answered.add(envelope.causation_id)

    def settings_of(self, model: str) -> ModelSettings:
        """What people have set for a model."""
        return self.settings.setdefault(model, ModelSettings())

    def champion(self, model: str) -> Version | None:
        """The version that counts now."""
        return champion_of(self.models.get(model, ()))

    def before_champion(self, model: str) -> Version | None:
        """What a rollback brings back."""
        return rollback_target(self.models.get(model, ()))

    def _change(self, run_id: str, **fields: object) -> None:
        if (candidate := self.open.get(run_id)) is not None:
            self.open[run_id] = replace(candidate, **fields)  # type: ignore[arg-type]

    def _change_checkpoints(self, event: CheckpointCommitted | CheckpointDeleted) -> None:
        if (candidate := self.open.get(event.run_id)) is None:
            return
        uri = event.uri if isinstance(event, CheckpointDeleted) else event.checkpoint.uri
        others = tuple(each for each in candidate.committed if each.checkpoint.uri != uri)
        added = (event,) if isinstance(event, CheckpointCommitted) else ()
        self._change(event.run_id, committed=(*others, *added))

    def _record_outcome(self, run_id: str, outcome: Outcome) -> None:
        if run_id in self.evaluations:
            self.outcomes.setdefault(run_id, outcome)
