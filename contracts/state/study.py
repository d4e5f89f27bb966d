"""A study as its facts add up. Nothing else decides what it does next."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from contracts.base import Event
from contracts.events.study import (
    KnownTrial,
    StudyAccepted,
    StudyCompleted,
    StudyFact,
    StudyRejected,
    StudyStopped,
    TrialEnded,
    TrialFact,
    TrialPaused,
    TrialPruned,
    TrialReported,
    TrialResumed,
    TrialSuggested,
)
from contracts.spec.study import StudySpec

TrialState = Literal["running", "paused", "pruned", "completed", "failed", "cancelled"]


@dataclass(slots=True)
class Trial:
    """One set of parameters, and what is known of how good it is."""

    number: int
    run_id: str
    params: dict[str, Any]
    #: How far its present run trains; None: as far as the request says.
    until_epoch: int | None = None
    state: TrialState = "running"
    #: Epoch (or step) -> a value for each objective.
    reports: dict[int, tuple[float, ...]] = field(default_factory=dict)
    #: What sampler and pruner keep with it.
    attributes: dict[str, Any] = field(default_factory=dict)
    values: tuple[float, ...] = ()
    violations: tuple[float, ...] = ()
    #: Metrics of the study that its run has not reported.
    missing: tuple[str, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    #: The pruner has decided: ``trial_pruned`` is still to be published.
    prune: bool = False
    purpose: Literal["search", "repeat"] = "search"
    seed: int | None = None
    repeats: int | None = None
    checkpoint_uri: str | None = None
    dataset_id: str | None = None
    #: All runs of the trial, the present one last.
    run_ids: list[str] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        """The last epoch (or step) that it has reported; 0 before the first."""
        return max(self.reports, default=0)

    @property
    def is_feasible(self) -> bool:
        return all(violation <= 0 for violation in self.violations)


@dataclass(slots=True)
class Study:
    """A study and its trials."""

    study_id: str
    spec: StudySpec
    known: tuple[KnownTrial, ...] = ()
    state: Literal["running", "completed", "stopped"] = "running"
    trials: list[Trial] = field(default_factory=list)
    best: tuple[int, ...] = ()
    reason: str = ""
    request_id: str = ""

    @property
    def search_trials(self) -> list[Trial]:
        """The trials that take part in the search."""
        return [trial for trial in self.trials if trial.purpose == "search"]

    @property
    def running(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.state == "running"]

    def apply(self, fact: TrialFact | StudyCompleted | StudyStopped) -> None:
        """Fold one fact. What comes after a trial's end changes nothing."""
        if self.state != "running":
            return
        if isinstance(fact, StudyCompleted):
            self.state, self.best, self.reason = "completed", fact.best, fact.reason
        elif isinstance(fact, StudyStopped):
            self.state, self.reason = "stopped", fact.reason
            for trial in self.trials:
                if trial.state in ("running", "paused"):
                    trial.state, trial.reason = "cancelled", fact.reason
        elif isinstance(fact, TrialSuggested):
            if fact.trial == len(self.trials):
                self.trials.append(_make_trial(fact))
        elif fact.trial < len(self.trials):
            _change(self.trials[fact.trial], fact)


@dataclass(slots=True)
class Studies:
    """Every study on the bus, and the last sequence of each one's facts."""

    studies: dict[str, Study] = field(default_factory=dict)
    sequences: dict[str, int] = field(default_factory=dict)
    #: Run -> (study, trial).
    runs: dict[str, tuple[str, int]] = field(default_factory=dict)

    def apply(self, event: Event, sequence: int) -> None:
        """Fold one fact about a study; others are ignored."""
        if not isinstance(event, StudyFact):
            return
        self.sequences[event.study_id] = sequence
        if isinstance(event, StudyAccepted):
            if event.study_id not in self.studies:
                self.studies[event.study_id] = Study(
                    event.study_id, event.spec, event.known, request_id=event.request_id
                )
        elif not isinstance(event, StudyRejected) and (study := self.studies.get(event.study_id)) is not None:
            study.apply(event)  # type: ignore[arg-type]
            if isinstance(event, TrialSuggested | TrialResumed):
                self.runs[event.run_id] = (event.study_id, event.trial)

    def trial_of(self, run_id: str) -> tuple[Study, Trial] | None:
        """Return the trial whose present run this is, if any."""
        found = self.runs.get(run_id)
        if found is None:
            return None
        study = self.studies[found[0]]
        trial = study.trials[found[1]]
        return (study, trial) if trial.run_id == run_id else None


def _make_trial(fact: TrialSuggested) -> Trial:
    return Trial(
        fact.trial,
        fact.run_id,
        fact.params,
        fact.until_epoch,
        attributes=dict(fact.attributes),
        purpose=fact.purpose,
        seed=fact.seed,
        repeats=fact.repeats,
        run_ids=[fact.run_id],
    )


def _change(trial: Trial, fact: TrialFact) -> None:
    match fact:
        case TrialReported() if trial.state == "running" and fact.step > trial.last_step:
            trial.reports[fact.step] = fact.values
            trial.attributes |= fact.attributes
            trial.prune = fact.prune
        case TrialPruned() if trial.state == "running":
            trial.state, trial.reason, trial.prune = "pruned", fact.reason, False
        case TrialPaused() if trial.state == "running":
            trial.state, trial.metrics = "paused", fact.metrics
            trial.checkpoint_uri, trial.dataset_id = fact.checkpoint_uri, fact.dataset_id
            if fact.values:
                trial.reports[fact.step] = fact.values
        case TrialResumed() if trial.state == "paused":
            trial.state, trial.run_id, trial.until_epoch = "running", fact.run_id, fact.until_epoch
            trial.run_ids.append(fact.run_id)
        case TrialEnded() if trial.state in ("running", "paused"):
            trial.state, trial.reason = fact.outcome, fact.reason
            trial.values, trial.metrics, trial.violations = fact.values, fact.metrics, fact.violations
            trial.missing = fact.missing
            if fact.values and trial.until_epoch is not None:
                trial.reports[trial.until_epoch] = fact.values
