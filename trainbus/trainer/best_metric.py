"""Tracks the best validation, and when early stopping ends the run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, Protocol

from contracts.spec.training import EarlyStopping

MetricMode = Literal["min", "max"]


class BestMetricState(Protocol):
    """The part of the training state that the tracker changes."""

    best: dict[str, float]
    validations_without_improvement: int


class BestMetricTracker:
    """Keeps the best values in ``state``: one for checkpoints, one for early stopping, which has its own metric."""

    def __init__(self, state: BestMetricState, metric: str, mode: MetricMode, stopping: EarlyStopping | None) -> None:
        self._state, self._metric, self._mode, self._stopping = state, metric, mode, stopping

    def update(self, metrics: Mapping[str, float]) -> bool:
        """Add a validation; return whether it is the best one for checkpoints."""
        improved = self._improves(metrics, self._metric, self._mode, 0.0, "best")
        stopping = self._stopping
        if stopping is not None and stopping.metric in metrics:
            better = self._improves(metrics, stopping.metric, stopping.mode, stopping.min_delta, "early_stopping")
            self._state.validations_without_improvement = (
                0 if better else self._state.validations_without_improvement + 1
            )
        return improved

    @property
    def is_patience_over(self) -> bool:
        stopping = self._stopping
        return stopping is not None and self._state.validations_without_improvement >= stopping.patience

    def _improves(self, metrics: Mapping[str, float], metric: str, mode: str, min_delta: float, purpose: str) -> bool:
        value = metrics.get(metric)
        if value is None or not math.isfinite(value):
            return False
        best = self._state.best.get(purpose)
        gain = math.inf if best is None else (best - value if mode == "min" else value - best)
        if gain <= min_delta:
            return False
        self._state.best[purpose] = value
        return True
