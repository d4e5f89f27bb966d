"""Whether a validation was the best so far, and whether it is time to give up waiting for a better one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, Protocol

from contracts.events.train import EarlyStopping

MetricMode = Literal["min", "max"]


class BestMetricState(Protocol):
    """The part of the training state that this changes."""

    best: dict[str, float]
    validations_without_improvement: int


class BestMetricTracker:
    """Keeps the best values in ``kept``: one for checkpoints, one for early stopping with its own metric and margin."""

    def __init__(self, kept: BestMetricState, metric: str, mode: MetricMode, stopping: EarlyStopping | None) -> None:
        self._kept, self._metric, self._mode, self._stopping = kept, metric, mode, stopping

    def saw(self, metrics: Mapping[str, float]) -> bool:
        """Take in a validation; return whether it is the best one for checkpoints."""
        improved = self._improves(metrics, self._metric, self._mode, 0.0, "best")
        stopping = self._stopping
        if stopping is not None and stopping.metric in metrics:
            better = self._improves(metrics, stopping.metric, stopping.mode, stopping.min_delta, "early_stopping")
            self._kept.validations_without_improvement = 0 if better else self._kept.validations_without_improvement + 1
        return improved

    @property
    def patience_is_over(self) -> bool:
        stopping = self._stopping
        return stopping is not None and self._kept.validations_without_improvement >= stopping.patience

    def _improves(self, metrics: Mapping[str, float], metric: str, mode: str, min_delta: float, purpose: str) -> bool:
        value = metrics.get(metric)
        if value is None or not math.isfinite(value):
            return False
        best = self._kept.best.get(purpose)
        gain = math.inf if best is None else (best - value if mode == "min" else value - best)
        if gain <= min_delta:
            return False
        self._kept.best[purpose] = value
        return True
