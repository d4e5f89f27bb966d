"""Which of a run's metrics a list shows. Pure: the command line and the page choose alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

#: The first of these that a training has says most about it.
PREFERRED_METRICS = ("validation/accuracy", "accuracy", "validation/loss", "train/loss", "loss")


class MainMetric(NamedTuple):
    """A metric with its value."""

    name: str
    value: float


def choose_main_metric(
    metrics: Mapping[str, float], evaluation: Mapping[str, float], evaluated_by: str | None
) -> MainMetric | None:
    """Return the metric that matters: of the evaluation if there is one, else the last of the training.

    ``evaluated_by`` is the metric that the request names for its evaluation.
    """
    if evaluation:
        name = evaluated_by if evaluated_by is not None and evaluated_by in evaluation else next(iter(evaluation))
        return MainMetric(name, evaluation[name])
    names = (*PREFERRED_METRICS, *metrics)
    return next((MainMetric(name, metrics[name]) for name in names if name in metrics), None)
