"""What a study does next, derived from its facts alone: one fact at a time, and the requests that follow from them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from contracts.base import run_id_for
from contracts.events.run import RunCompleted
from contracts.events.study import (
    StudyCompleted,
    TrialEnded,
    TrialFact,
    TrialPaused,
    TrialPruned,
    TrialReported,
    TrialResumed,
    TrialSuggested,
)
from contracts.events.train import TrainRequested
from contracts.metric_names import suggest_metric
from contracts.spec.data import DatasetRef
from contracts.spec.run import RunFields
from contracts.spec.study import StudyFields
from contracts.state.study import Study, Trial
from services.tuning.core.curves import choose_thaw

#: Who requests the runs of trials.
SOURCE = "trainbus/tuning"
TRAINING = "training."
VALIDATION = "validation/"
STUDY_TAG, TRIAL_TAG = "trainbus.study", "trainbus.trial"
MAX_NAME_CHARS = 200
NO_METRICS = "it reported nothing. A script calls trainbus.report(), or --metric-pattern finds its lines"
#: Where a command wants the value of a parameter.
PLACEHOLDER = re.compile(r"\{([^{}]+)\}")

Decision = TrialFact | StudyCompleted


def event_id(study_id: str, trial: int, leg: int) -> str:
    """Return the id of the request for a trial's run; a trial has one run more each time it is resumed."""
    return f"study/{study_id}/{trial}/{leg}"


def run_id_of(study_id: str, trial: int, leg: int) -> str:
    return run_id_for(SOURCE, event_id(study_id, trial, leg))


def next_decision(study: Study) -> Decision | None:
    """Return the next fact about a study; None while it waits for its runs."""
    if study.state != "running":
        return None
    for trial in study.running:
        if trial.prune:
            return TrialPruned(
                study_id=study.study_id,
                trial=trial.number,
                run_id=trial.run_id,
                step=trial.last_step,
                reason=f"pruned by {study.spec.pruning.name} at epoch {trial.last_step}",
            )
    if failures := _describe_failures(study):
        return None if study.running else _complete(study, failures)
    if len(study.running) < study.spec.parallel and (begun := _begin_trial(study)) is not None:
        return begun
    return None if study.running else _complete(study, "")


def _begin_trial(study: Study) -> TrialSuggested | TrialResumed | None:
    spec, number = study.spec, len(study.trials)
    if (thaw := choose_thaw(study)) is not None:
        trial, until_epoch = thaw
        assert trial.checkpoint_uri is not None
        return TrialResumed(
            study_id=study.study_id,
            trial=trial.number,
            run_id=run_id_of(study.study_id, trial.number, len(trial.run_ids)),
            until_epoch=until_epoch,
            checkpoint_uri=trial.checkpoint_uri,
        )
    run_id = run_id_of(study.study_id, number, 0)
    if len(study.search_trials) < spec.trials and not _is_grid_exhausted(study):
        from services.tuning.core.optuna_study import suggest  # imports Optuna

        params, attributes = suggest(study, number)
        return TrialSuggested(
            study_id=study.study_id,
            trial=number,
            run_id=run_id,
            params=params,
            until_epoch=spec.rungs[0] if spec.rungs else None,
            attributes=attributes,
        )
    if any(trial.state == "running" for trial in study.search_trials):
        return None
    return _repeat_best(study, number, run_id)


def _repeat_best(study: Study, number: int, run_id: str) -> TrialSuggested | None:
    from services.tuning.core.optuna_study import best_trials

    done = {trial.seed for trial in study.trials if trial.purpose == "repeat"}
    seeds = [seed for seed in study.spec.repeat_seeds if seed not in done]
    best = best_trials(study)
    if not seeds or not best:
        return None
    return TrialSuggested(
        study_id=study.study_id,
        trial=number,
        run_id=run_id,
        params=study.trials[best[0]].params,
        until_epoch=study.spec.trial_epochs,
        purpose="repeat",
        seed=seeds[0],
        repeats=best[0],
    )


def _is_grid_exhausted(study: Study) -> bool:
    """Return whether every point of the grid has been suggested."""
    if study.spec.sampler.name != "grid":
        return False
    from services.tuning.core.optuna_study import grid_of

    points = 1
    for parameter in study.spec.space.values():
        points *= len(grid_of(parameter))
    return len(study.search_trials) >= points


def _describe_failures(study: Study) -> str:
    """Return why the study ends early: a metric that no trial reports, too many failures in a row; '' otherwise."""
    for trial in study.search_trials:
        if any(not _has_reported(study, name) for name in trial.missing):
            return f"no trial can be judged: {trial.reason}"
    last = [trial for trial in study.search_trials if trial.state in ("completed", "pruned", "paused", "failed")]
    failed = 0
    for trial in reversed(last):
        if trial.state != "failed":
            break
        failed += 1
    if failed < study.spec.max_failures:
        return ""
    return f"the last {failed} trials failed: {last[-1].reason}"


def _has_reported(study: Study, metric: str) -> bool:
    """Return whether any trial has reported a metric of the study."""
    is_objective = any(each.metric == metric for each in study.spec.objectives)
    return any(metric in trial.metrics or (is_objective and trial.reports) for trial in study.search_trials)


def _complete(study: Study, reason: str) -> StudyCompleted:
    from services.tuning.core.optuna_study import best_trials

    best = best_trials(study)
    if not best and not reason:
        reason = "no trial completed" + (" within the constraints" if study.spec.constraints else "")
    return StudyCompleted(study_id=study.study_id, best=best, reason=reason)


# -- what the runs report -----------------------------------------------------


def objective_values(study: Study, metrics: Mapping[str, float]) -> tuple[float, ...] | None:
    """Return the value of each objective; None unless all of them are there."""
    found = [metrics.get(objective.metric) for objective in study.spec.objectives]
    return None if any(value is None for value in found) else tuple(value for value in found if value is not None)


def report_trial(study: Study, trial: Trial, step: int, metrics: Mapping[str, float]) -> TrialReported | None:
    """Return the fact of what a trial's run reports at an epoch; None if it says nothing new about the study."""
    values = objective_values(study, metrics)
    if values is None or study.state != "running" or trial.state != "running" or step <= trial.last_step or trial.prune:
        return None
    prune = False
    attributes: dict[str, Any] = {}
    if study.spec.pruning.name in ("median", "asha", "hyperband") and trial.purpose == "search":
        from services.tuning.core.optuna_study import judge_report

        prune, attributes = judge_report(study, trial, step, values[0])
        last = study.spec.trial_epochs
        prune = prune and (last is None or step < last)
    return TrialReported(
        study_id=study.study_id, trial=trial.number, step=step, values=values, prune=prune, attributes=attributes
    )


def end_run(study: Study, trial: Trial, completed: RunCompleted, dataset_id: str | None) -> TrialEnded | TrialPaused:
    """Return what follows when a trial's run has completed: the trial is over, or pauses at its rung."""
    values = objective_values(study, completed.metrics)
    if values is None and trial.reports:
        values = trial.reports[trial.last_step]
    last = study.spec.trial_epochs
    paused = trial.until_epoch is not None and last is not None and trial.until_epoch < last
    about: dict[str, Any] = {"study_id": study.study_id, "trial": trial.number, "run_id": trial.run_id}
    if values is None:
        return _end_without(_missing_objectives(study, completed.metrics), study, trial, completed.metrics)
    if not all(map(math.isfinite, values)):
        told = ", ".join(f"{value:g}" for value in values)
        reason = f"the objective is {told}, which is no finite number"
        return TrialEnded(**about, outcome="failed", reason=reason, metrics=completed.metrics)
    if paused and trial.until_epoch is not None:
        if completed.checkpoint is None:
            reason = "the run kept no checkpoint, so it cannot go on: keep one with trainbus.checkpoint()"
            return TrialEnded(**about, outcome="failed", reason=reason, metrics=completed.metrics)
        return TrialPaused(
            **about,
            step=trial.until_epoch,
            checkpoint_uri=completed.checkpoint.uri,
            dataset_id=dataset_id,
            values=values,
            metrics=completed.metrics,
        )
    violations = _violations(study, completed.metrics)
    missing = tuple(c.metric for c in study.spec.constraints if c.metric not in completed.metrics)
    if missing:
        reason = f"the run reported no {missing[0]!r}, which a constraint names: "
        reason += suggest_metric(missing[0], completed.metrics)
        return TrialEnded(**about, outcome="failed", reason=reason, metrics=completed.metrics, missing=missing)
    return TrialEnded(**about, outcome="completed", values=values, metrics=completed.metrics, violations=violations)


def end_without_objectives(study: Study, trial: Trial, metrics: Mapping[str, float]) -> TrialEnded | None:
    """Return the end of a trial whose objectives will never come; None while they may.

    ``metrics`` are what its run reports at one point. A Task reports all metrics of a validation together, and the same
    ones each time. A script may report its objective at its very end.
    """
    if study.state != "running" or trial.state != "running" or trial.reports or study.spec.run.task is None:
        return None
    is_validation = any(name.startswith(VALIDATION) for name in metrics)
    absent = tuple(each for each in _missing_objectives(study, metrics) if each.startswith(VALIDATION))
    return _end_without(absent, study, trial, metrics) if is_validation and absent else None


def _end_without(missing: tuple[str, ...], study: Study, trial: Trial, metrics: Mapping[str, float]) -> TrialEnded:
    known = suggest_metric(missing[0], metrics) if metrics else NO_METRICS
    reason = f"the run reported no {', '.join(missing)}: {known}"
    return TrialEnded(
        study_id=study.study_id,
        trial=trial.number,
        run_id=trial.run_id,
        outcome="failed",
        reason=reason,
        metrics=dict(metrics),
        missing=missing,
    )


def _missing_objectives(study: Study, metrics: Mapping[str, float]) -> tuple[str, ...]:
    return tuple(each.metric for each in study.spec.objectives if each.metric not in metrics)


def _violations(study: Study, metrics: Mapping[str, float]) -> tuple[float, ...]:
    found = []
    for constraint in study.spec.constraints:
        value = metrics.get(constraint.metric, 0.0)
        over = [value - constraint.max] if constraint.max is not None else []
        under = [constraint.min - value] if constraint.min is not None else []
        found.append(max(over + under))
    return tuple(found)


# -- the runs of trials -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrialRequest:
    """The request for a trial's run; ``event_id`` makes it one run for ever."""

    event_id: str
    run_id: str
    request: TrainRequested


def overlay_params(spec: StudyFields, params: Mapping[str, Any], seed: int | None = None) -> dict[str, Any]:
    """Return the study's run as the body of a request, with these parameters in their places."""
    body = RunFields.model_validate(spec.run.model_dump()).model_dump(exclude_unset=True)
    own = {name: value for name, value in params.items() if not name.startswith(TRAINING)}
    training = {name.removeprefix(TRAINING): v for name, v in params.items() if name.startswith(TRAINING)}
    if seed is not None:
        if spec.run.task is not None:
            training["seed"] = seed
        else:
            own["seed"] = seed
    body["params"] = {**(body.get("params") or {}), **own}
    if training:
        body["training"] = {**(body.get("training") or {}), **training}
    return body


def fill_command(body: dict[str, Any], defaults: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Put the values of a request's ``params`` where its command names them, as in ``--lr {lr}``; other braces stay.

    So a script that parses arguments is searched as it is. ``defaults`` are values of what is no parameter.
    """
    values = {**defaults, **(body.get("params") or {})}
    if body.get("command"):
        body["command"] = [
            PLACEHOLDER.sub(lambda found: str(values.get(found[1], found[0])), each) for each in body["command"]
        ]


def trial_request(study: Study, trial: Trial) -> TrialRequest:
    """Return the request for the present run of a trial. It competes for no model: the study's best one may."""
    spec, leg = study.spec, len(trial.run_ids) - 1
    body = overlay_params(spec, trial.params, trial.seed)
    body |= {
        "name": f"{spec.name} #{trial.number}"[-MAX_NAME_CHARS:],
        "study": study.study_id,
        "trial": trial.number,
        "evaluation": None,
        "model": None,
        "tags": {**(body.get("tags") or {}), STUDY_TAG: study.study_id, TRIAL_TAG: str(trial.number)},
    }
    if trial.until_epoch is not None:
        if spec.epochs_param:
            body["params"][spec.epochs_param] = trial.until_epoch
        elif body.get("training"):
            body["training"]["epochs"] = trial.until_epoch
    fill_command(body)
    if leg > 0:
        body |= {"resume_from": trial.checkpoint_uri, "init_from": None, "init_exclude": ()}
        if trial.dataset_id is not None:
            body["data"] = DatasetRef(dataset_id=trial.dataset_id)
    request = TrainRequested.model_validate(body)
    return TrialRequest(event_id(study.study_id, trial.number, leg), trial.run_id, request)


def best_request(study: Study, trial: Trial) -> TrainRequested:
    """Return the study's request with a trial's parameters, as one would submit it by hand."""
    spec, body = study.spec, overlay_params(study.spec, trial.params)
    fill_command(body, {} if spec.epochs_param is None else {spec.epochs_param: spec.trial_epochs})
    return TrainRequested.model_validate(body | {"name": f"{study.spec.name} best"[:MAX_NAME_CHARS]})
