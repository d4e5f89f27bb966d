"""Freeze and thaw: which paused trial to go on with, by where its learning curve leads.

The curves of the study's own finished trials say how much a trial gains from an epoch on: those whose value and
slope at that epoch are near to the trial's weigh most. The budget counts epochs, since a paused trial costs nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from contracts.state.study import Study, Trial

#: Width of the neighbourhood in which finished curves count, in standard deviations of value and slope.
BANDWIDTH = 0.5
#: Weight that every finished curve has at least.
MIN_WEIGHT = 1e-3
#: Finished curves that a prediction needs.
MIN_CURVES = 4


@dataclass(frozen=True, slots=True)
class Prediction:
    """The value that a trial would end with."""

    mean: float
    deviation: float


def predict(curve: dict[int, float], finished: list[dict[int, float]], last: int) -> Prediction:
    """Return where a curve leads by epoch ``last``; larger is better. Pure."""
    epoch = max(curve)
    value = curve[epoch]
    if epoch >= last:
        return Prediction(value, 0.0)
    before = _value_at(curve, epoch // 2)
    known = [other for other in finished if other]
    if len(known) < MIN_CURVES:
        return Prediction(value, math.inf)
    values = np.array([_value_at(other, epoch) for other in known])
    slopes = values - np.array([_value_at(other, epoch // 2) for other in known])
    gains = np.array([other[max(other)] for other in known]) - values
    features = np.column_stack([values, slopes])
    scale = np.maximum(features.std(axis=0), 1e-12)
    distances = (((features - np.array([value, value - before])) / scale) ** 2).sum(axis=1)
    weights = np.exp(-0.5 * distances / BANDWIDTH**2) + MIN_WEIGHT
    mean = float((weights * gains).sum() / weights.sum())
    variance = float((weights * (gains - mean) ** 2).sum() / weights.sum())
    return Prediction(value + mean, math.sqrt(variance))


def _value_at(curve: dict[int, float], epoch: int) -> float:
    """Return the value at an epoch, or the nearest one before it (else the first)."""
    there = [step for step in curve if step <= epoch]
    return curve[max(there)] if there else curve[min(curve)]


def predict_finals(study: Study) -> dict[int, float]:
    """Return where the curve of each paused trial leads, by the trial's number, as a value of the objective."""
    if study.spec.pruning.name != "extrapolation":
        return {}
    sign = _sign(study)
    return {number: sign * found.mean for number, found in _predictions(study).items()}


def choose_thaw(study: Study) -> tuple[Trial, int] | None:
    """Return the paused trial to go on with, and up to which epoch; None if a new trial is worth more, or none is."""
    spec = study.spec
    if spec.pruning.name != "extrapolation":
        return None
    paused = {trial.number: trial for trial in study.search_trials if trial.state == "paused"}
    predictions = _predictions(study)
    if not paused:
        return None
    last = spec.rungs[-1]
    left = spec.pruning.budget * spec.trials * last - used_epochs(study)
    finished = _finished_curves(study)
    # The first ones are trained to the end: their curves are what the others are compared with.
    if len(finished) + sum(trial.until_epoch == last for trial in study.running) < spec.pruning.startup_trials:
        trial = paused[min(paused)]
        return (trial, last) if last - _reached(trial) <= left else None
    number = max(paused, key=lambda each: (predictions[each].mean + predictions[each].deviation, -each))
    trial, found = paused[number], predictions[number]
    upper = found.mean + found.deviation
    if finished and upper <= max(curve[max(curve)] for curve in finished):
        return None
    until_epoch = next(rung for rung in spec.rungs if rung > _reached(trial))
    return (trial, until_epoch) if until_epoch - _reached(trial) <= left else None


def used_epochs(study: Study) -> int:
    """Return the epochs that the study's trials have been given."""
    return sum(_reached(trial) for trial in study.search_trials)


def _reached(trial: Trial) -> int:
    return trial.until_epoch or trial.last_step


def _sign(study: Study) -> int:
    return 1 if study.spec.objectives[0].mode == "max" else -1


def _curve(study: Study, trial: Trial) -> dict[int, float]:
    sign = _sign(study)
    return {step: sign * values[0] for step, values in trial.reports.items()}


def _finished_curves(study: Study) -> list[dict[int, float]]:
    return [_curve(study, trial) for trial in study.search_trials if trial.state == "completed" and trial.reports]


def _predictions(study: Study) -> dict[int, Prediction]:
    finished, last = _finished_curves(study), study.spec.rungs[-1]
    return {
        trial.number: predict(_curve(study, trial), finished, last)
        for trial in study.search_trials
        if trial.state == "paused"
    }
