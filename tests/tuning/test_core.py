"""A study is a fold: the same facts lead to the same suggestions, which are Optuna's."""

from __future__ import annotations

from typing import Any

import optuna
import pytest

from contracts.events.run import RunCompleted
from contracts.events.study import (
    StudyCompleted,
    TrialEnded,
    TrialPaused,
    TrialPruned,
    TrialReported,
    TrialResumed,
    TrialSuggested,
)
from contracts.events.train import TuneRequested
from contracts.state.study import Study
from services.tuning.core.admission import find_problems, known_trials, spec_of
from services.tuning.core.curves import predict, used_epochs
from services.tuning.core.decide import (
    best_request,
    end_run,
    end_without_objectives,
    next_decision,
    report_trial,
    trial_request,
)
from services.tuning.core.optuna_study import best_trials, seed_of, suggest
from tests.tuning import studies
from tests.tuning.studies import METRIC, decide_all, finish_run, formula, run_study, study_of

BODY: dict[str, Any] = {
    "name": "sweep",
    "run": {"name": "run", "command": ["python", "train.py"]},
    "space": {"lr": "1e-4..1e-1 log", "batch": [32, 64]},
}


@pytest.mark.parametrize("pruning", ["none", "median", "asha", "hyperband", "extrapolation"])
def test_a_study_goes_on_the_same_from_any_of_its_facts(pruning: str) -> None:
    study = study_of(pruning={"name": pruning, "startup_trials": 3}, trials=8)
    facts = run_study(study)
    assert study.state == "completed"
    replayed = study_of(pruning={"name": pruning, "startup_trials": 3}, trials=8)
    for fact in facts:
        if isinstance(fact, TrialSuggested | TrialPruned | TrialResumed | StudyCompleted):
            assert next_decision(replayed) == fact
        elif isinstance(fact, TrialReported):
            trial = replayed.trials[fact.trial]
            assert report_trial(replayed, trial, fact.step, {METRIC: fact.values[0]}) == fact
        replayed.apply(fact)  # type: ignore[arg-type]
    assert replayed == study


@pytest.mark.parametrize("sampler", ["tpe", "random", "cmaes"])
def test_a_suggestion_is_that_of_optuna_by_hand(sampler: str) -> None:
    study = study_of(sampler={"name": sampler, "startup_trials": 4, "seed": 7}, parallel=1)
    for _ in range(8):
        decide_all(study)
        finish_run(study, study.running[0])
    distributions = {
        "lr": optuna.distributions.FloatDistribution(1e-4, 1e-1, log=True),
        "width": optuna.distributions.IntDistribution(4, 64),
    }
    seed = seed_of(7, 8)
    samplers: dict[str, Any] = {
        "tpe": lambda: optuna.samplers.TPESampler(n_startup_trials=4, seed=seed, multivariate=True),
        "random": lambda: optuna.samplers.RandomSampler(seed=seed),
        "cmaes": lambda: optuna.samplers.CmaEsSampler(
            n_startup_trials=4, seed=seed, independent_sampler=optuna.samplers.RandomSampler(seed=seed)
        ),
    }
    by_hand = optuna.create_study(sampler=samplers[sampler]())
    for trial in study.trials[:8]:
        frozen = optuna.trial.create_trial(
            params=trial.params, distributions=distributions, values=trial.values, system_attrs=trial.attributes
        )
        by_hand.add_trial(frozen)
    assert suggest(_without_running(study), 8)[0] == by_hand.ask(distributions).params


def _without_running(study: Study) -> Study:
    study.trials = [trial for trial in study.trials if trial.state != "running"]
    return study


def test_a_late_result_of_a_pruned_trial_changes_nothing() -> None:
    study = study_of(pruning={"name": "asha", "reduction_factor": 2}, parallel=1)
    while not any(trial.state == "pruned" for trial in study.trials):
        decide_all(study)
        finish_run(study, study.running[0])
        for trial in study.running:
            if trial.prune:
                study.apply(next_decision(study))  # type: ignore[arg-type]
    pruned = next(trial for trial in study.trials if trial.state == "pruned")
    reports = dict(pruned.reports)
    about: dict[str, Any] = {"study_id": study.study_id, "trial": pruned.number}
    assert report_trial(study, pruned, 8, {METRIC: 0.0}) is None
    study.apply(TrialReported(**about, step=8, values=(0.0,)))
    study.apply(TrialEnded(**about, run_id=pruned.run_id, outcome="completed", values=(0.0,)))
    assert (pruned.state, pruned.reports, pruned.values) == ("pruned", reports, ())


def test_failed_trials_are_failures_and_end_a_study_that_has_nothing_else() -> None:
    study = study_of(max_failures=3, parallel=1)
    decide_all(study)
    while study.running:
        trial = study.running[0]
        failed = TrialEnded(
            study_id=study.study_id, trial=trial.number, run_id=trial.run_id, outcome="failed", reason="no such file"
        )
        study.apply(failed)
        decide_all(study)
    assert len(study.trials) == 3
    assert (study.state, study.best) == ("completed", ())
    assert "the last 3 trials failed: no such file" in study.reason


def test_a_run_without_the_metric_is_a_failed_trial_that_names_what_it_reported() -> None:
    study = study_of()
    decide_all(study)
    completed = RunCompleted(run_id=study.trials[0].run_id, generation=1, metrics={"accuracy": 1.0})
    ended = end_run(study, study.trials[0], completed, None)
    assert isinstance(ended, TrialEnded)
    assert (ended.outcome, ended.reason) == (
        "failed",
        "the run reported no validation/loss: there is: accuracy",
    )
    assert ended.missing == (METRIC,)


def test_a_study_whose_objective_no_trial_reports_ends_with_the_first() -> None:
    study = study_of()
    decide_all(study)
    for trial in list(study.running):
        assert next_decision(study) is None
        completed = RunCompleted(run_id=trial.run_id, generation=1, metrics={"validation/los": 1.0})
        study.apply(end_run(study, trial, completed, None))
    decide_all(study)
    assert (study.state, len(study.trials)) == ("completed", study.spec.parallel)
    assert "no trial can be judged" in study.reason
    assert "did you mean 'validation/los'" in study.reason


def test_one_trial_without_the_objective_ends_no_study_in_which_others_report_it() -> None:
    study = study_of(parallel=1)
    decide_all(study)
    finish_run(study, study.running[0])
    decide_all(study)
    trial = study.running[0]
    completed = RunCompleted(run_id=trial.run_id, generation=1, metrics={"loss": 1.0})
    study.apply(end_run(study, trial, completed, None))
    assert len(decide_all(study)) == 1
    assert study.state == "running"


TASK_RUN = {
    "name": "run",
    "task": "t:T",
    "code": {"uri": "s3://code/c", "sha256": "0" * 64},
    "data": {"source": "s3://lake/d/"},
    "training": {"epochs": 8},
}
#: What a run reports at one point -> whether its trial ends.
FIRST_REPORTS: list[tuple[dict[str, Any], dict[str, float], bool]] = [
    ({"run": TASK_RUN}, {"train/loss": 1.0}, False),
    ({"run": TASK_RUN}, {"validation/accuracy": 1.0}, True),
    ({"run": TASK_RUN}, {"validation/accuracy": 1.0, METRIC: 1.0}, False),
    ({}, {"validation/accuracy": 1.0}, False),
]


@pytest.mark.parametrize(("changes", "metrics", "ends"), FIRST_REPORTS)
def test_a_trial_of_a_task_ends_at_its_first_validation_without_the_objective(
    changes: dict[str, Any], metrics: dict[str, float], ends: bool
) -> None:
    study = study_of(**changes)
    decide_all(study)
    ended = end_without_objectives(study, study.trials[0], metrics)
    assert (ended is not None) == ends
    if ended is not None:
        assert (ended.outcome, ended.missing) == ("failed", (METRIC,))
        study.apply(ended)
        assert end_without_objectives(study, study.trials[0], metrics) is None


def test_a_paused_trial_goes_on_from_its_checkpoint_within_the_budget() -> None:
    study = study_of(pruning={"name": "extrapolation", "startup_trials": 3, "budget": 0.5}, trials=12)
    facts = run_study(study)
    paused = [fact for fact in facts if isinstance(fact, TrialPaused)]
    resumed = [fact for fact in facts if isinstance(fact, TrialResumed)]
    assert paused
    assert resumed
    assert used_epochs(study) <= 0.5 * 12 * 8
    assert any(trial.state == "completed" for trial in study.trials)
    trial = study.trials[resumed[0].trial]
    request = trial_request(study, trial)
    assert request.request.resume_from == trial.checkpoint_uri
    assert request.request.params["epochs"] == trial.until_epoch
    assert request.run_id == trial.run_id != trial.run_ids[0]


def test_a_conditional_parameter_exists_only_with_its_condition() -> None:
    space = {
        "optimizer": ["sgd", "adam"],
        "momentum": {"type": "float", "low": 0, "high": 1, "when": {"optimizer": ["sgd"]}},
    }
    study = study_of(space=space, trials=16)
    run_study(study, lambda params, epoch: params.get("momentum", 2.0) / epoch)
    assert {trial.params["optimizer"] for trial in study.trials} == {"sgd", "adam"}
    for trial in study.trials:
        assert ("momentum" in trial.params) == (trial.params["optimizer"] == "sgd")


def test_a_grid_is_searched_once_and_the_best_is_repeated_with_other_seeds() -> None:
    study = study_of(
        space={"lr": [0.001, 0.01, 0.1], "width": [16, 32]}, sampler={"name": "grid"}, trials=50, repeat_seeds=[11, 12]
    )
    run_study(study)
    points = {tuple(trial.params.values()) for trial in study.search_trials}
    assert len(study.search_trials) == len(points) == 6
    repeats = [trial for trial in study.trials if trial.purpose == "repeat"]
    assert [trial.seed for trial in repeats] == [11, 12]
    best = study.trials[study.best[0]]
    assert best.params == repeats[0].params == {"lr": 0.01, "width": 32}
    assert trial_request(study, repeats[0]).request.params["seed"] == 11


def test_several_objectives_have_a_front_and_constraints_leave_trials_out() -> None:
    study = study_of(
        objectives=[{"metric": METRIC}, {"metric": "accuracy", "mode": "max"}],
        constraints=[{"metric": "size", "max": 10}],
    )
    decide_all(study)
    for trial, metrics in zip(
        list(study.trials),
        [
            {METRIC: 1.0, "accuracy": 0.5, "size": 5.0},
            {METRIC: 2.0, "accuracy": 0.9, "size": 5.0},
            {METRIC: 0.1, "accuracy": 0.99, "size": 11.0},
        ],
        strict=True,
    ):
        study.apply(end_run(study, trial, RunCompleted(run_id=trial.run_id, generation=1, metrics=metrics), None))
    assert best_trials(study) == (0, 1)
    assert study.trials[2].violations == (1.0,)


def test_a_study_begins_warm_with_the_trials_of_another() -> None:
    earlier = study_of(trials=6)
    run_study(earlier)
    space = studies.spec_of().model_dump()["space"]
    body = {**BODY, "space": space, "warm_start": ["sabc"], "sampler": {"startup_trials": 4}}
    warm = spec_of(TuneRequested.model_validate(body))
    known = known_trials(warm, {"sabc": earlier})
    assert [each.params for each in known] == [trial.params for trial in earlier.trials]
    assert suggest(Study("snew", warm, known), 0) != suggest(Study("snew", warm), 0)


def test_the_best_parameters_become_a_request_with_the_model_that_the_trials_left_out() -> None:
    run = {
        "name": "run",
        "task": "task:Task",
        "code": {"uri": "s3://code/a.tgz", "sha256": "0" * 64},
        "training": {"epochs": 8},
        "model": "digits",
    }
    study = study_of(run=run, space={"lr": [0.1], "training.global_batch": [128]}, epochs=None, epochs_param=None)
    decide_all(study)
    of_trial = trial_request(study, study.trials[0]).request
    assert (of_trial.model, of_trial.study, of_trial.trial) == (None, "sabc", 0)
    assert of_trial.tags == {"trainbus.study": "sabc", "trainbus.trial": "0"}
    best = best_request(study, study.trials[0])
    assert best.training is not None
    assert (best.model, best.params, best.training.global_batch) == ("digits", {"lr": 0.1}, 128)


def test_a_command_gets_the_values_where_it_names_them() -> None:
    command = ["sh", "-c", "python fit.py --lr {lr} --epochs {epochs} {other}"]
    study = study_of(run={"name": "run", "command": command}, space={"lr": [0.1]})
    decide_all(study)
    of_trial = trial_request(study, study.trials[0]).request
    assert of_trial.command == ["sh", "-c", "python fit.py --lr 0.1 --epochs 8 {other}"]
    assert best_request(study, study.trials[0]).command == of_trial.command


def test_a_run_without_metrics_is_told_how_to_report() -> None:
    study = study_of()
    decide_all(study)
    ended = end_run(study, study.trials[0], RunCompleted(run_id="r1", generation=1, metrics={}), None)
    assert isinstance(ended, TrialEnded)
    assert "trainbus.report()" in ended.reason


@pytest.mark.parametrize(
    ("changes", "field", "text"),
    [
        ({"trails": 5}, "trails", "there is no such field"),
        ({"run": None}, "run", "give what each trial is a run of"),
        ({"space": {"a": {"type": "float", "low": 0, "high": 1, "when": {"b": [1]}}}}, "space.a.when", "no parameter"),
        ({"sampler": {"name": "grid"}}, "space.lr", "a grid needs steps"),
        ({"pruning": {"name": "asha"}}, "pruning.name", "pruning counts epochs"),
        ({"pruning": {"name": "extrapolation"}, "epochs": 8}, "epochs_param", "name its parameter"),
        ({"warm_start": ["snone"]}, "warm_start", "there is no study snone"),
        ({"first": [{"lr": 5}]}, "first.0.lr", "outside"),
        ({"space": {"training.epochs": "1..5"}}, "space.training.epochs", "the run has no training"),
        ({"run": {"name": "run"}}, "run", "give exactly one of 'task'"),
        (
            {
                "run": {"name": "run", "command": ["python", "fit.py", "--momentum={momentum}"]},
                "space": {
                    "sgd": [True, False],
                    "momentum": {"type": "choice", "choices": [0.9], "when": {"sgd": [True]}},
                },
            },
            "run.command",
            "not every trial has",
        ),
    ],
)
def test_an_impossible_study_is_rejected_with_what_to_change(changes: dict[str, Any], field: str, text: str) -> None:
    problems = find_problems(TuneRequested.model_validate({**BODY, **changes}), {})
    assert field in [problem.field for problem in problems]
    assert text in "; ".join(problem.message for problem in problems)


def test_a_sound_study_has_no_problems() -> None:
    assert find_problems(TuneRequested.model_validate(BODY), {}) == []


def test_a_curve_is_extrapolated_by_its_nearest_finished_ones() -> None:
    rising = {epoch: 1 - 0.5**epoch for epoch in range(1, 9)}
    flat = {epoch: 0.1 + 0.001 * epoch for epoch in range(1, 9)}
    finished = [rising, {k: v - 0.02 for k, v in rising.items()}, flat, {k: v + 0.01 for k, v in flat.items()}]
    seen = {epoch: value for epoch, value in rising.items() if epoch <= 4}
    assert predict(seen, finished, 8).mean == pytest.approx(rising[8], abs=0.03)
    assert formula({"lr": 0.01, "width": 32}, 1) == 1.0
