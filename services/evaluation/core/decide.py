"""What to do next about a candidate, derived from the facts alone.

The shell performs one step, reads the facts again and derives the next. So a kill between any two steps, or
an event that comes twice, changes nothing: what is done already is in the facts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pydantic import ValidationError

from contracts import subjects
from contracts.base import run_id_for
from contracts.events.model import ModelPromoted
from contracts.events.run import RunNotPromoted, RunPromoted
from contracts.events.train import TrainRequested
from contracts.problems import describe_problems, join_problems
from contracts.spec.base import Mode
from contracts.spec.data import DatasetRef
from contracts.spec.resources import Slots
from contracts.spec.run import RunSpec
from contracts.spec.training import EvaluationTarget
from services.evaluation.core.gate import Verdict, gate, metric_value
from services.evaluation.core.state import Candidate, Outcome, State, Version

#: An evaluation is short and a candidate waits for it: it goes before trainings of its run's own priority.
PRIORITY_BONUS = 10


@dataclass(frozen=True, slots=True)
class RequestEvaluation:
    """Ask for a run that measures ``target_run_id``'s checkpoint; ``event_id`` makes it one run for ever."""

    event_id: str
    target_run_id: str
    checkpoint_uri: str
    dataset_id: str | None
    priority: int
    #: What the two are compared by.
    metric: str | None = None
    mode: Mode | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """Write the report and publish ``evaluated``."""

    evaluation_run_id: str
    outcome: Outcome
    champion: Version | None
    champion_metrics: dict[str, float]
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class ConcludeCandidate:
    """Publish this fact, if ``sequence`` is (still) the last one of the model's promotions."""

    fact: ModelPromoted | RunPromoted | RunNotPromoted
    #: None: the fact depends on nothing that may change.
    sequence: int | None = None

    @property
    def fence(self) -> str:
        return subjects.fact("model", self.fact.model, ModelPromoted.fact)


Step = RequestEvaluation | Report | ConcludeCandidate


class UnmeasurableError(Exception):
    """A checkpoint cannot be measured; the text is the reason in words."""


def next_steps(state: State, candidate: Candidate, source: str) -> list[Step]:
    """What to do about a candidate now; nothing if it is waiting for a run or still trains."""
    spec, run_id = candidate.spec, candidate.run_id
    if candidate.completed is None or spec.model is None or spec.evaluation is None:
        return []
    history = state.models.get(spec.model, [])
    # 1. The result is a champion, by the gate or by request: publish it on the run.
    promoted = next((version for version in history if version.fact.run_id == run_id), None)
    if promoted is not None:
        return [ConcludeCandidate(run_promoted(promoted))]
    if candidate.checkpoint is None:
        return [_refuse(candidate, "the run completed without a committed checkpoint, so there is nothing to measure")]
    # 2. Measure it; measure the champion too where its numbers are of another dataset.
    champion = state.champion(spec.model)
    own_event = f"evaluate/{run_id}"
    own = RequestEvaluation(
        own_event,
        run_id,
        candidate.checkpoint.uri,
        candidate.dataset_id,
        spec.priority,
        spec.evaluation.metric,
        spec.evaluation.mode,
    )
    outcome, steps = _measure(state, source, own)
    if outcome is not None and outcome.error:
        return [_refuse(candidate, f"its evaluation {run_id_for(source, own_event)} {outcome.error}")]
    champion_metrics: dict[str, float] | None = None
    if champion is not None:
        fact = champion.fact
        if fact.dataset_id == candidate.dataset_id and metric_value(fact.metrics, spec.evaluation.metric) is not None:
            champion_metrics = fact.metrics
        else:
            event_id = f"evaluate/{fact.run_id}/{candidate.dataset_id or 'none'}"
            request = replace(own, event_id=event_id, target_run_id=fact.run_id, checkpoint_uri=fact.checkpoint_uri)
            measured, more = _measure(state, source, request)
            steps += more
            if measured is not None and measured.error:
                reason = (
                    f"the champion {fact.run_id} could not be measured on this dataset: its evaluation "
                    f"{run_id_for(source, event_id)} {measured.error}; "
                    "publish promote.requested to promote this run all the same"
                )
                return [_refuse(candidate, reason, champion)]
            champion_metrics = measured.metrics if measured else None
    if outcome is None or (champion is not None and champion_metrics is None):
        return steps
    # 3. Both are measured: report, then decide.
    verdict = gate(spec.evaluation, outcome.metrics, champion_metrics, champion.fact.run_id if champion else "")
    if not candidate.evaluated:
        return [Report(run_id_for(source, own_event), outcome, champion, champion_metrics or {}, verdict)]
    if not verdict.promote:
        return [_refuse(candidate, verdict.reason, champion)]
    promotion = ModelPromoted(
        model=spec.model,
        version=next_version(champion),
        run_id=run_id,
        checkpoint_uri=candidate.checkpoint.uri,
        dataset_id=candidate.dataset_id,
        metrics=outcome.metrics,
        previous_run_id=champion.fact.run_id if champion else None,
        reason=verdict.reason,
    )
    return [ConcludeCandidate(promotion, champion.sequence if champion else 0)]


def run_promoted(version: Version) -> RunPromoted:
    """The fact on the run that belongs to a promotion."""
    fact = version.fact
    return RunPromoted(run_id=fact.run_id, model=fact.model, version=fact.version, reason=fact.reason)


def next_version(champion: Version | None) -> int:
    return champion.fact.version + 1 if champion else 1


def evaluation_request(step: RequestEvaluation, trained: RunSpec) -> TrainRequested:
    """Return the request for a run that measures a checkpoint, with the code and parameters of its training.

    Raises:
        UnmeasurableError: the rules for requests refuse the recorded spec; they may be stricter now than they were.
    """
    try:
        return TrainRequested(
            name=f"evaluate {trained.name}"[:200],
            kind="evaluate",
            experiment=trained.experiment,
            user=trained.user,
            team=trained.team,
            priority=min(step.priority + PRIORITY_BONUS, 1000),
            slots=Slots(min=1, max=1),
            code=trained.code,
            packages=trained.packages,
            task=trained.task,
            params=trained.params,
            command=trained.command,
            metric_patterns=trained.metric_patterns,
            env=trained.env,
            data=DatasetRef(dataset_id=step.dataset_id) if step.dataset_id else None,
            training=trained.training,
            evaluate=EvaluationTarget(
                run_id=step.target_run_id,
                checkpoint_uri=step.checkpoint_uri,
                split="test",
                metric=step.metric,
                mode=step.mode,
            ),
            resume_from=step.checkpoint_uri,
            max_attempts=3,
            grace_s=trained.grace_s,
            tags=trained.tags,
        )
    except ValidationError as error:
        problems = join_problems(describe_problems(error, trained.model_dump()))
        raise UnmeasurableError(
            f"the evaluation of run {step.target_run_id} cannot be requested, because today's rules refuse the run's "
            f"recorded spec: {problems}"
        ) from error


def _measure(state: State, source: str, request: RequestEvaluation) -> tuple[Outcome | None, list[Step]]:
    """Return how the evaluation ended, if it has, and what to do until then: request it, once."""
    run_id = run_id_for(source, request.event_id)
    outcome = state.outcomes.get(run_id)
    return outcome, [] if outcome is not None or run_id in state.evaluations else [request]


def _refuse(candidate: Candidate, reason: str, champion: Version | None = None) -> ConcludeCandidate:
    assert candidate.spec.model is not None
    fact = RunNotPromoted(run_id=candidate.run_id, model=candidate.spec.model, reason=reason)
    return ConcludeCandidate(fact, champion.sequence if champion else None)
