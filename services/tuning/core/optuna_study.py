"""The study as Optuna sees it: suggestions and pruning are Optuna's, made from the folded history alone.

A sampler keeps no state between two suggestions: each is asked of a new one with a seed of its own, over a study that
is built from the facts. So a service that begins again goes on with the same suggestions.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner, SuccessiveHalvingPruner
from optuna.samplers import BaseSampler, CmaEsSampler, GPSampler, GridSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, create_trial
from optuna.trial import TrialState as OptunaState

from contracts.base import short_hash
from contracts.spec.study import Parameter, StudySpec
from contracts.state.study import Study, Trial
from services.tuning.core.curves import predict_finals

optuna.logging.set_verbosity(optuna.logging.ERROR)

STATES = {
    "running": OptunaState.RUNNING,
    "paused": OptunaState.RUNNING,
    "pruned": OptunaState.PRUNED,
    "completed": OptunaState.COMPLETE,
    "failed": OptunaState.FAIL,
    "cancelled": OptunaState.FAIL,
}


def distribution_of(parameter: Parameter) -> BaseDistribution:
    """Return a parameter of a space as Optuna's distribution."""
    if parameter.type == "choice":
        return CategoricalDistribution(parameter.choices or ())
    assert parameter.low is not None
    assert parameter.high is not None
    if parameter.type == "int":
        return IntDistribution(int(parameter.low), int(parameter.high), parameter.log, int(parameter.step or 1))
    return FloatDistribution(parameter.low, parameter.high, parameter.log, parameter.step)


def sampler_of(spec: StudySpec, trial: int) -> BaseSampler:
    """Return the sampler that suggests a trial, every argument explicit."""
    options = spec.sampler
    seed = seed_of(options.seed, trial)
    match options.name:
        case "tpe":
            is_conditional = any(parameter.when for parameter in spec.space.values())
            return TPESampler(
                n_startup_trials=options.startup_trials,
                n_ei_candidates=options.candidates,
                seed=seed,
                multivariate=options.multivariate or is_conditional,
                group=is_conditional,
                constant_liar=options.constant_liar,
            )
        case "gp":
            return GPSampler(
                seed=seed,
                independent_sampler=RandomSampler(seed=seed),
                n_startup_trials=options.startup_trials,
                deterministic_objective=options.deterministic,
                warn_independent_sampling=False,
            )
        case "cmaes":
            return CmaEsSampler(
                x0=None,
                sigma0=options.sigma0,
                n_startup_trials=options.startup_trials,
                independent_sampler=RandomSampler(seed=seed),
                warn_independent_sampling=False,
                seed=seed,
                consider_pruned_trials=False,
                popsize=options.population,
                use_separable_cma=False,
                with_margin=False,
                lr_adapt=False,
                source_trials=None,
            )
        case "grid":
            # The order of the grid is one for the whole study.
            return GridSampler({name: grid_of(parameter) for name, parameter in spec.space.items()}, seed=options.seed)
        case _:
            return RandomSampler(seed=seed)


def seed_of(seed: int, trial: int) -> int:
    """Return the seed of a trial's suggestion."""
    return int.from_bytes(short_hash(str(seed), str(trial)).encode()[:8], "big") % 2**32


def grid_of(parameter: Parameter) -> list[Any]:
    """Return the values of a parameter on a grid.

    Raises:
        ValueError: it has infinitely many.
    """
    if parameter.type == "choice":
        return list(parameter.choices or ())
    assert parameter.low is not None
    assert parameter.high is not None
    if parameter.type == "int":
        return list(range(int(parameter.low), int(parameter.high) + 1, int(parameter.step or 1)))
    if parameter.step is None:
        raise ValueError("a grid needs steps: give 'step', or list the values as choices")
    count = int((parameter.high - parameter.low) / parameter.step + 1e-9) + 1
    return [parameter.low + index * parameter.step for index in range(count)]


def pruner_of(spec: StudySpec) -> BasePruner:
    """Return the pruner, every argument explicit."""
    options = spec.pruning
    match options.name:
        case "median":
            return MedianPruner(
                n_startup_trials=options.startup_trials,
                n_warmup_steps=options.min_epochs,
                interval_steps=1,
                n_min_trials=1,
            )
        case "asha":
            return SuccessiveHalvingPruner(
                min_resource=options.min_epochs,
                reduction_factor=options.reduction_factor,
                min_early_stopping_rate=0,
                bootstrap_count=0,
            )
        case "hyperband":
            return HyperbandPruner(
                min_resource=options.min_epochs,
                max_resource=max(spec.trial_epochs or 1, options.min_epochs),
                reduction_factor=options.reduction_factor,
                bootstrap_count=0,
            )
        case _:
            return NopPruner()


def build_study(study: Study, *, trial: int = 0) -> optuna.Study:
    """Return Optuna's study with this history; ``trial`` is what its sampler is to suggest."""
    spec = study.spec
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        built = optuna.create_study(
            study_name=study.study_id,
            directions=["minimize" if each.mode == "min" else "maximize" for each in spec.objectives],
            sampler=sampler_of(spec, trial),
            pruner=pruner_of(spec),
        )
        built.add_trials(frozen_trials(study))
    return built


def frozen_trials(study: Study) -> list[FrozenTrial]:
    """Return the history as Optuna's trials: those of earlier studies, then the study's own in their order."""
    distributions = {name: distribution_of(parameter) for name, parameter in study.spec.space.items()}
    known = [
        create_trial(
            state=OptunaState.COMPLETE,
            values=list(each.values),
            params=each.params,
            distributions={name: distributions[name] for name in each.params},
            system_attrs=_constraints(study.spec, each.violations),
        )
        for each in study.known
    ]
    predicted = predict_finals(study)
    return known + [_frozen(study.spec, trial, distributions, predicted) for trial in study.search_trials]


def _frozen(
    spec: StudySpec,
    trial: Trial,
    distributions: Mapping[str, BaseDistribution],
    predicted: Mapping[int, float],
) -> FrozenTrial:
    state, values = STATES[trial.state], list(trial.values)
    if trial.number in predicted:
        # A paused trial counts as one that has the value that its curve leads to.
        state, values = OptunaState.COMPLETE, [predicted[trial.number]]
    elif state == OptunaState.COMPLETE and not values:
        state = OptunaState.FAIL
    is_single = len(spec.objectives) == 1
    return create_trial(
        state=state,
        values=values if state == OptunaState.COMPLETE else None,
        params=trial.params,
        distributions={name: distributions[name] for name in trial.params},
        intermediate_values={step: values[0] for step, values in sorted(trial.reports.items())} if is_single else None,
        system_attrs=trial.attributes | _constraints(spec, trial.violations),
    )


def _constraints(spec: StudySpec, violations: tuple[float, ...]) -> dict[str, Any]:
    return {
        f"constraints:{index}.{each.metric}": violation
        for index, (each, violation) in enumerate(zip(spec.constraints, violations, strict=False))
    }


def suggest(study: Study, trial: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the parameters of the next trial, and what the sampler keeps with it."""
    spec = study.spec
    built = build_study(study, trial=trial)
    searched = len(study.search_trials)
    if searched < len(spec.first):
        built.enqueue_trial(dict(spec.first[searched]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        asked = built.ask()
        for name, parameter in spec.space.items():
            if parameter.is_active(asked.params):
                asked._suggest(name, distribution_of(parameter))
    kept = built._storage.get_trial_system_attrs(asked._trial_id)
    attributes = {key: value for key, value in kept.items() if key != "fixed_params"}
    return dict(asked.params), attributes


def judge_report(study: Study, trial: Trial, step: int, value: float) -> tuple[bool, dict[str, Any]]:
    """Return whether the pruner ends a trial at this report, and what it keeps with the trial."""
    if study.spec.pruning.name not in ("median", "asha", "hyperband") or trial.purpose != "search":
        return False, {}
    built = build_study(study)
    index = len(study.known) + study.search_trials.index(trial)
    trial_id = built.trials[index]._trial_id
    built._storage.set_trial_intermediate_value(trial_id, step, value)
    frozen = built._storage.get_trial(trial_id)
    prune = built.pruner.prune(built, frozen)
    after = built._storage.get_trial_system_attrs(trial_id)
    return prune, {key: value for key, value in after.items() if key not in frozen.system_attrs}


def best_trials(study: Study) -> tuple[int, ...]:
    """Return the best finished trials that keep the constraints: one, or the Pareto front of several objectives."""
    searched = [trial for trial in study.search_trials if trial.state == "completed" and trial.is_feasible]
    signs = [1 if each.mode == "min" else -1 for each in study.spec.objectives]
    costs = {
        trial.number: tuple(sign * value for sign, value in zip(signs, trial.values, strict=True))
        for trial in searched
        if trial.values
    }
    if len(signs) == 1:
        return (min(costs, key=lambda number: (costs[number], number)),) if costs else ()
    return tuple(
        number
        for number, cost in costs.items()
        if not any(_dominates(other, cost) for rival, other in costs.items() if rival != number)
    )


def _dominates(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))
