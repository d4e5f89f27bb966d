"""Studies whose runs are functions: they report what a formula says, and complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from contracts.events.run import CheckpointRef, RunCompleted
from contracts.events.study import StudyFact
from contracts.spec.study import StudySpec
from contracts.state.study import Study, Trial
from services.tuning.core.decide import end_run, next_decision, report_trial

Formula = Callable[[dict[str, Any], int], float]
METRIC = "validation/loss"


def spec_of(**changes: Any) -> StudySpec:
    body: dict[str, Any] = {
        "name": "study",
        "run": {"name": "run", "command": ["python", "train.py"]},
        "space": {"lr": "1e-4..1e-1 log", "width": "4..64"},
        "trials": 12,
        "parallel": 3,
        "epochs": 8,
        "epochs_param": "epochs",
        "sampler": {"name": "tpe", "startup_trials": 4},
    }
    return StudySpec.model_validate({**body, **changes})


def study_of(**changes: Any) -> Study:
    return Study("sabc", spec_of(**changes))


def formula(params: dict[str, Any], epoch: int) -> float:
    return float(abs(params["lr"] - 0.01) * 10 + abs(params["width"] - 32) / 64 + 1 / epoch)


def decide_all(study: Study) -> list[StudyFact]:
    """Decide until the study waits for its runs; return the facts."""
    facts: list[StudyFact] = []
    while (fact := next_decision(study)) is not None:
        study.apply(fact)  # type: ignore[arg-type]
        facts.append(fact)
    return facts


def finish_run(study: Study, trial: Trial, value: Formula = formula) -> list[StudyFact]:
    """Let a trial's run report its epochs and complete, unless it is pruned on its way."""
    facts: list[StudyFact] = []
    last = trial.until_epoch or study.spec.trial_epochs or 1
    for epoch in range(trial.last_step + 1, last + 1):
        if (reported := report_trial(study, trial, epoch, {METRIC: value(trial.params, epoch)})) is not None:
            study.apply(reported)
            facts.append(reported)
        if trial.prune:
            return facts
    checkpoint = CheckpointRef(uri=f"s3://models/{trial.run_id}.json", step=last, epoch=last, samples_consumed=0)
    metrics = {METRIC: value(trial.params, last)}
    completed = RunCompleted(run_id=trial.run_id, generation=1, metrics=metrics, checkpoint=checkpoint)
    ended = end_run(study, trial, completed, None)
    study.apply(ended)
    return [*facts, ended]


def run_study(study: Study, value: Formula = formula) -> list[StudyFact]:
    """Bring a study to its end; return all its facts."""
    facts = decide_all(study)
    while study.state == "running":
        facts += finish_run(study, study.running[0], value)
        facts += decide_all(study)
    return facts
