"""When a checkpoint is due."""

from __future__ import annotations

import math
from dataclasses import dataclass

from contracts.events.train import Training

#: What is assumed of a machine before it has failed: one failure a day.
PRIOR_MTBF_S = 24 * 3600.0
#: The shortest time between checkpoints that ``auto`` chooses, in costs of one: they take a tenth of the time at most.
LEAST_COSTS = 10.0


def due(step: int, every: int | None, *, epoch_ended: bool) -> bool:
    """Return whether what comes every so many steps, or at the end of each epoch (None), comes after this one."""
    return epoch_ended if every is None else step % every == 0


@dataclass(frozen=True, slots=True)
class FailureHistory:
    """What a run has been through: so many involuntary ends, in so many seconds of running."""

    failures: int = 0
    run_s: float = 0.0


class CheckpointSchedule:
    """Steps are looked at on every rank alike; the clock on rank 0 alone, which tells the others."""

    def __init__(
        self, training: Training, now_s: float, *, machines: int = 1, history: FailureHistory | None = None
    ) -> None:
        """Start counting at ``now_s``. What the run's history says counts for more the longer it is."""
        history = history or FailureHistory()
        self._training = training
        self._at_steps = frozenset(training.checkpoint_at_steps)
        self._last_s = now_s
        self._mtbf_s = (PRIOR_MTBF_S / machines + history.run_s) / (1 + history.failures)
        self._cost_s: float | None = None

    def at(self, step: int, *, epoch_ended: bool) -> bool:
        """Return whether the request wants a checkpoint after this very step."""
        every = self._training.checkpoint_every_steps
        return step in self._at_steps or due(step, every, epoch_ended=epoch_ended)

    def by_now(self, now_s: float) -> bool:
        """Return whether so much time has passed that one is due at the next step."""
        return now_s - self._last_s >= self.interval_s

    @property
    def interval_s(self) -> float:
        """The longest time between checkpoints; ``auto`` by Young, 1974: sqrt(2 * cost * MTBF)."""
        every = self._training.checkpoint_every_s
        if every != "auto":
            return every
        # The first one is taken soon, so that what one costs is known.
        cost_s = 1.0 if self._cost_s is None else self._cost_s
        return max(math.sqrt(2 * cost_s * self._mtbf_s), LEAST_COSTS * cost_s)

    def taken(self, now_s: float) -> None:
        self._last_s = now_s

    def cost(self, seconds: float) -> None:
        """What the last checkpoint took from training, all in all; later ones count for more."""
        self._cost_s = seconds if self._cost_s is None else 0.5 * (self._cost_s + seconds)
