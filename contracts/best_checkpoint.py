"""Which of a run's checkpoints is the best. Pure: retention, evaluation, the clients and the gateway choose alike."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from contracts.spec.base import Mode
from contracts.spec.run import RunFields


class MeasuredCheckpoint(Protocol):
    """A checkpoint with the metrics of its step."""

    @property
    def metrics(self) -> Mapping[str, float]: ...


C = TypeVar("C", bound=MeasuredCheckpoint)


@dataclass(frozen=True, slots=True)
class RankingMetric:
    """The metric by which checkpoints are compared."""

    name: str
    mode: Mode


def ranking_metrics(spec: RunFields | None) -> tuple[RankingMetric, ...]:
    """Return the metrics that a request names to compare its checkpoints by, the first choice first."""
    if spec is None:
        return ()
    found = [RankingMetric(spec.retention.metric, spec.retention.mode)]
    if spec.evaluation is not None:
        found.append(RankingMetric(spec.evaluation.metric, spec.evaluation.mode))
    return tuple(found)


def find_ranking_metric(spec: RunFields | None, checkpoints: Iterable[MeasuredCheckpoint]) -> RankingMetric | None:
    """Return the first of ``ranking_metrics`` that any checkpoint has; None if no checkpoint has any."""
    measured = {name for each in checkpoints for name, value in each.metrics.items() if math.isfinite(value)}
    return next((metric for metric in ranking_metrics(spec) if metric.name in measured), None)


def rank_checkpoints(checkpoints: Sequence[C], metric: RankingMetric) -> list[C]:
    """Return the checkpoints that have the metric, the best first; of equals the later one first."""
    sign = -1 if metric.mode == "max" else 1
    ranked = [
        (sign * value, -place, each)
        for place, each in enumerate(checkpoints)
        if math.isfinite(value := each.metrics.get(metric.name, math.nan))
    ]
    return [each for _, _, each in sorted(ranked, key=lambda item: item[:2])]


def find_best(spec: RunFields | None, checkpoints: Sequence[C]) -> C | None:
    """Return the best of the checkpoints; None if they have no metric that the request names."""
    metric = find_ranking_metric(spec, checkpoints)
    return None if metric is None else rank_checkpoints(checkpoints, metric)[0]


def find_judged(spec: RunFields | None, checkpoints: Sequence[C]) -> C | None:
    """Return the checkpoint that stands for a run's result: it is measured, compared and promoted.

    None where that is the final one, which need not be among ``checkpoints``.
    """
    choice = spec.evaluation.checkpoint if spec is not None and spec.evaluation is not None else None
    return None if choice == "final" else find_best(spec, checkpoints)
