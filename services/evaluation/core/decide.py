"""What to do next about a candidate, derived from the facts alone.

The shell performs one step, reads the facts again and derives the next. So a kill between any two steps, or
an event that comes twice, changes nothing: what is done already is in the facts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pydantic import ValidationError

from contracts import subjects
from contracts.base import run_id_for
from contracts.best_checkpoint import find_judged, ranking_metrics
from contracts.events.model import ModelPromoted
from contracts.events.run import Artifact, GateVerdict, RunNotPromoted, RunPromoted, RunPromotionPending
from contracts.events.train import TrainRequested
from contracts.predictions import PREDICTIONS_FILE
from contracts.problems import describe_problems, join_problems
from contracts.spec.base import Mode
from contracts.spec.data import DatasetRef
from contracts.spec.resources import Gang, Slots
from contracts.spec.run import RunSpec
from contracts.spec.training import EvaluationTarget
from services.evaluation.core.gate import Criteria, Verdict, metric_value
from services.evaluation.core.state import Candidate, Outcome, State, Version

#: An evaluation is short and a candidate waits for it: it goes before trainings of its run's own priority.
PRIORITY_BONUS = 10
#: Runs the command that follows, and makes what it wrote the run's result.
MEASURE_SCRIPT = ("python", "-m", "trainbus.script_evaluation")


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
    #: By name, where the data has names; ``dataset_id`` then stands for all of them.
    dataset_ids: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JudgeCandidate:
    """Judge the candidate by the gates; publish the report and ``evaluated`` if that is not done, else the result."""

    criteria: Criteria
    #: Version of the model's configuration that the criteria are of.
    configuration: int
    evaluation_run_id: str
    outcome: Outcome
    champion: Version | None
    champion_metrics: dict[str, float] | None
    #: What was measured.
    checkpoint_uri: str
    #: Of the champion's evaluation on this dataset, where its facts are known.
    champion_outcome: Outcome | None = None


@dataclass(frozen=True, slots=True)
class ConcludeCandidate:
    """Publish this fact, if ``sequence`` is (still) the last one of the model's promotions."""

    fact: ModelPromoted | RunPromoted | RunNotPromoted | RunPromotionPending
    #: None: the fact depends on nothing that may change.
    sequence: int | None = None

    @property
    def fence(self) -> str:
        return subjects.fact("model", self.fact.model, ModelPromoted.fact)


Step = RequestEvaluation | JudgeCandidate | ConcludeCandidate


@dataclass(frozen=True, slots=True)
class JudgedGates:
    """The gates' verdicts about a candidate, and what they were given against."""

    gates: tuple[GateVerdict, ...]
    champion_version: int | None
    configuration: int

    def stand_for(self, step: JudgeCandidate) -> bool:
        """Return whether the champion and the gates are still those of the verdicts."""
        champion_version = step.champion.version if step.champion else None
        return bool(self.gates) and (self.champion_version, self.configuration) == (
            champion_version,
            step.configuration,
        )


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
    checkpoint_uri = judged_checkpoint(state, candidate, run_id_for(source, own_event))
    if checkpoint_uri is None:
        names = " or ".join(metric.name for metric in ranking_metrics(spec))
        reason = (
            f"evaluation.checkpoint is 'best', but no checkpoint of the run was measured by {names}: set "
            "retention.metric to a metric that training validates, or evaluation.checkpoint to 'final'"
        )
        return [_refuse(candidate, reason)]
    own = RequestEvaluation(
        own_event,
        run_id,
        checkpoint_uri,
        candidate.dataset_id,
        spec.priority,
        spec.evaluation.metric,
        spec.evaluation.mode,
        candidate.dataset_ids,
    )
    outcome, steps = _measure(state, source, own)
    if outcome is not None and outcome.error:
        return [_refuse(candidate, f"its evaluation {run_id_for(source, own_event)} {outcome.error}")]
    settings = state.settings_of(spec.model)
    criteria = Criteria(spec.evaluation, settings.gates)
    champion_metrics: dict[str, float] | None = None
    champion_outcome: Outcome | None = None
    if champion is not None:
        fact = champion.fact
        known = state.outcomes.get(run_id_for(source, f"evaluate/{fact.run_id}"))
        lacks_pairs = (
            criteria.needs_pairs
            and outcome is not None
            and find_predictions(outcome) is not None
            and (known is None or find_predictions(known) is None)
        )
        is_measured = metric_value(fact.metrics, spec.evaluation.metric) is not None
        if fact.dataset_id == candidate.dataset_id and is_measured and not lacks_pairs:
            champion_metrics, champion_outcome = fact.metrics, known
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
            champion_metrics, champion_outcome = (measured.metrics, measured) if measured else (None, None)
    if outcome is None or (champion is not None and champion_metrics is None):
        return steps
    # 3. Both are measured: judge them.
    evaluation_run_id = run_id_for(source, own_event)
    configuration = settings.configuration
    return [
        JudgeCandidate(
            criteria,
            configuration,
            evaluation_run_id,
            outcome,
            champion,
            champion_metrics,
            checkpoint_uri,
            champion_outcome,
        )
    ]


def conclude_candidate(step: JudgeCandidate, candidate: Candidate, verdict: Verdict) -> ConcludeCandidate | None:
    """Return what to publish about a judged candidate; None if it waits for somebody and that is published."""
    model, champion = candidate.spec.model, step.champion
    assert model is not None
    if verdict.awaits is not None:
        if verdict.awaits in candidate.awaited:
            return None
        pending = RunPromotionPending(
            run_id=candidate.run_id, model=model, awaits=verdict.awaits, reason=verdict.reason, gates=verdict.gates
        )
        return ConcludeCandidate(pending)
    if not verdict.promote:
        refusal = RunNotPromoted(run_id=candidate.run_id, model=model, reason=verdict.reason, gates=verdict.gates)
        return ConcludeCandidate(refusal, champion.sequence if champion else None)
    promotion = ModelPromoted(
        model=model,
        version=next_version(champion),
        run_id=candidate.run_id,
        checkpoint_uri=step.checkpoint_uri,
        dataset_id=candidate.dataset_id,
        metrics=step.outcome.metrics,
        previous_run_id=champion.fact.run_id if champion else None,
        reason=verdict.reason,
    )
    return ConcludeCandidate(promotion, champion.sequence if champion else 0)


def find_predictions(outcome: Outcome) -> Artifact | None:
    """Return the predictions that an evaluation kept."""
    return next((each for each in outcome.artifacts if each.name.rsplit("/", 1)[-1] == PREDICTIONS_FILE), None)


def judged_checkpoint(state: State, candidate: Candidate, evaluation_run_id: str) -> str | None:
    """Return the checkpoint that stands for the candidate; None if it has none of the kind that was asked for.

    Once its evaluation is accepted that is what it measures, whatever retention deletes meanwhile.
    """
    if measured := state.measured.get(evaluation_run_id):
        return measured
    if (best := find_judged(candidate.spec, candidate.committed)) is not None:
        return best.checkpoint.uri
    wants_best = candidate.spec.evaluation is not None and candidate.spec.evaluation.checkpoint == "best"
    return None if wants_best or candidate.checkpoint is None else candidate.checkpoint.uri


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
    slots = _choose_slots(trained)
    try:
        return TrainRequested(
            name=f"evaluate {trained.name}"[:200],
            kind="evaluate",
            experiment=trained.experiment,
            user=trained.user,
            team=trained.team,
            priority=min(step.priority + PRIORITY_BONUS, 1000),
            slots=slots,
            resources=trained.resources,
            gang=_choose_gang(trained.gang, slots),
            scheduling=trained.scheduling,
            code=trained.code,
            packages=trained.packages,
            task=trained.task,
            params=trained.params,
            command=_choose_command(trained),
            metric_patterns=trained.metric_patterns,
            env=trained.env,
            data=DatasetRef(dataset_id=step.dataset_id) if step.dataset_id and not step.dataset_ids else None,
            datasets={name: DatasetRef(dataset_id=each) for name, each in step.dataset_ids.items()},
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


def _choose_slots(trained: RunSpec) -> Slots:
    """Return the slots of an evaluation: its own, those of training for a model in shards, else one."""
    if trained.evaluation is not None and trained.evaluation.slots is not None:
        return trained.evaluation.slots
    training = trained.training
    is_sharded = training is not None and (
        training.strategy == "fsdp2" or (training.strategy == "deepspeed" and training.zero_stage == 3)
    )
    return trained.slots if is_sharded else Slots(min=1, max=1)


def _choose_gang(gang: Gang, slots: Slots) -> Gang:
    """Return how the slots lie together: as in training, unless they do not fill its bundles."""
    fits = slots.min % gang.bundle == 0 and slots.max % gang.bundle == 0
    return gang if fits else gang.model_copy(update={"bundle": 1, "apart": False})


def _choose_command(trained: RunSpec) -> list[str] | None:
    """Return what runs: for a script its evaluation's command; None for a Task."""
    own = trained.evaluation.command if trained.evaluation is not None else None
    return trained.command if trained.command is None or own is None else [*MEASURE_SCRIPT, *own]


def _measure(state: State, source: str, request: RequestEvaluation) -> tuple[Outcome | None, list[Step]]:
    """Return how the evaluation ended, if it has, and what to do until then: request it, once."""
    run_id = run_id_for(source, request.event_id)
    outcome = state.outcomes.get(run_id)
    return outcome, [] if outcome is not None or run_id in state.evaluations else [request]


def _refuse(candidate: Candidate, reason: str, champion: Version | None = None) -> ConcludeCandidate:
    assert candidate.spec.model is not None
    fact = RunNotPromoted(run_id=candidate.run_id, model=candidate.spec.model, reason=reason)
    return ConcludeCandidate(fact, champion.sequence if champion else None)
