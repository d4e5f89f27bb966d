"""Facts about studies (searches over hyper-parameters), on ``study.<study_id>.<fact>``.

A study is the fold of these facts alone. What its runs report comes in as ``trial_reported`` and ``trial_ended``, so
the same facts lead to the same suggestions. Each is fenced on the last sequence of ``study.<study_id>.*``.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from contracts.base import Fact, FactPart, ObjectUri, Token
from contracts.problems import FieldProblem
from contracts.spec.study import StudySpec


class StudyFact(Fact, aggregate="study", id_field="study_id"):
    study_id: Token


class StudyRejected(StudyFact, fact="rejected"):
    """The study will not run; ``reason`` says what to do instead."""

    name: str | None = None
    reason: str
    problems: tuple[FieldProblem, ...] = ()


class KnownTrial(FactPart):
    """A finished trial of an earlier study, which the sampler knows from the start."""

    params: dict[str, Any]
    values: tuple[float, ...]
    violations: tuple[float, ...] = ()


class StudyAccepted(StudyFact, fact="accepted"):
    """The study runs from now on."""

    spec: StudySpec
    request_id: str
    request_source: str
    known: tuple[KnownTrial, ...] = ()


class TrialFact(StudyFact, occurrence="trial"):
    """A fact about one trial. Trials count from 0."""

    trial: int


class TrialSuggested(TrialFact, fact="trial_suggested"):
    """A trial with these parameters begins; ``train.requested`` for its run follows."""

    run_id: Token
    params: dict[str, Any]
    #: How far its first run trains; None: as far as the request says.
    until_epoch: int | None = None
    #: What the sampler keeps with the trial.
    attributes: dict[str, Any] = Field(default_factory=dict)
    #: ``repeat``: the best trial once more with another seed. It takes no part in the search.
    purpose: Literal["search", "repeat"] = "search"
    #: The seed of a repetition, and the trial that it repeats.
    seed: int | None = None
    repeats: int | None = None


class TrialReported(TrialFact, fact="trial_reported", occurrence="trial/step"):
    """The trial's run has reported the study's metrics of an epoch (or of a step, where it counts no epochs)."""

    step: int
    values: tuple[float, ...]
    #: The pruner's verdict: ``trial_pruned`` follows.
    prune: bool = False
    #: What the pruner keeps with the trial.
    attributes: dict[str, Any] = Field(default_factory=dict)


class TrialPruned(TrialFact, fact="trial_pruned"):
    """The trial ends early; ``cancel.requested`` for its run follows. What the run reports later does not count."""

    run_id: Token
    step: int
    reason: str


class TrialPaused(TrialFact, fact="trial_paused", occurrence="trial/step"):
    """The trial's run has trained up to a rung. It holds no slots, and can go on from its checkpoint."""

    run_id: Token
    step: int
    checkpoint_uri: ObjectUri
    #: The very data that it was trained on.
    dataset_id: str | None = None
    values: tuple[float, ...] = ()
    metrics: dict[str, float] = Field(default_factory=dict)


class TrialResumed(TrialFact, fact="trial_resumed", occurrence="trial/until_epoch"):
    """A paused trial goes on, as a new run from its checkpoint up to a higher rung."""

    run_id: Token
    until_epoch: int
    checkpoint_uri: ObjectUri


class TrialEnded(TrialFact, fact="trial_ended"):
    """The trial's run is over: with a value for each objective, or without."""

    run_id: Token
    outcome: Literal["completed", "failed", "cancelled"]
    values: tuple[float, ...] = ()
    metrics: dict[str, float] = Field(default_factory=dict)
    #: How far each constraint is broken: above 0 it is.
    violations: tuple[float, ...] = ()
    #: The objectives, or metrics of constraints, that its run has not reported.
    missing: tuple[str, ...] = ()
    reason: str = ""


class StudyCompleted(StudyFact, fact="completed"):
    """Every trial is over. ``best`` are the best trials: one, or a Pareto front."""

    best: tuple[int, ...] = ()
    reason: str = ""


class StudyStopped(StudyFact, fact="stopped"):
    """The study was stopped by request; its runs are cancelled."""

    reason: str
