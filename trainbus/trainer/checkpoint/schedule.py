"""When a checkpoint is due."""

from __future__ import annotations

import math
from dataclasses import dataclass

from contracts.spec.training import Training

#: Expected time between failures of a machine that has not failed yet: a day.
PRIOR_MTBF_S = 24 * 3600.0
#: The shortest interval that ``auto`` chooses, in costs of one checkpoint: they take a tenth of the time at most.
MIN_INTERVAL_COSTS = 10.0


def is_due(step: int, every: int | None, *, epoch_ended: bool) -> bool:
    """Return whether what is due every ``every`` steps, or at the end of each epoch (None), is due after ``step``."""
    return epoch_ended if every is None else step % every == 0


@dataclass(frozen=True, slots=True)
class FailureHistory:
    """How often a run has failed, in how many seconds of running."""

    failures: int = 0
    run_s: float = 0.0


class CheckpointSchedule:
    """Decides by steps, alike on every rank, and by the clock, on rank 0 alone."""

    def __init__(
        self, training: Training, now_s: float, *, machines: int = 1, history: FailureHistory | None = None
    ) -> None:
        """Start counting at ``now_s``. A longer history has more weight in the expected time between failures."""
        history = history or FailureHistory()
        self._training = training
        self._at_steps = frozenset(training.checkpoint_at_steps)
        self._last_s = now_s
        self._mtbf_s = (PRIOR_MTBF_S / machines + history.run_s) / (1 + history.failures)
        self._cost_s: float | None = None

    def is_due_at_step(self, step: int, *, epoch_ended: bool) -> bool:
        """Return whether the request asks for a checkpoint after this step."""
        every = self._training.checkpoint_every_steps
        return step in self._at_steps or is_due(step, every, epoch_ended=epoch_ended)

    def is_due_at_time(self, now_s: float) -> bool:
        """Return whether enough time has passed for a checkpoint at the next step."""
        return now_s - self._last_s >= self.interval_s

    @property
    def interval_s(self) -> float:
        """The longest time between checkpoints; ``auto`` by Young, 1974: sqrt(2 * cost * MTBF)."""
        every = self._training.checkpoint_every_s
        if every != "auto":
            return every
        # The first checkpoint comes soon, to measure what one costs.
        cost_s = 1.0 if self._cost_s is None else self._cost_s
        return max(math.sqrt(2 * cost_s * self._mtbf_s), MIN_INTERVAL_COSTS * cost_s)

    def record_time(self, now_s: float) -> None:
        """Note when the last checkpoint was taken."""
        self._last_s = now_s

    def record_cost(self, seconds: float) -> None:
        """Note how long the last checkpoint held training; later ones have more weight."""
        self._cost_s = seconds if self._cost_s is None else 0.5 * (self._cost_s + seconds)
