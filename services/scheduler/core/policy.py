"""What an operator can choose about scheduling: a few numbers and the order of the queue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.scheduler.core.cluster import Run

#: Smaller sorts first. A policy that knows users or predicted times only needs another key.
Order = Callable[[Run], tuple[int, ...]]


def by_priority(run: Run) -> tuple[int, ...]:
    """A higher priority goes first; within one, whoever was submitted first."""
    return (-run.spec.priority, run.submitted)


@dataclass(frozen=True, slots=True)
class Policy:
    """Everything ``decide`` may be told; two schedulers with the same policy decide the same."""

    order: Order = by_priority
    #: A run is not grown before it has had its slots for so long: growing costs a restart.
    resize_interval_s: float = 2.0
    #: How long a run whose ranks all ended well waits for its final checkpoint to be committed.
    final_checkpoint_wait_s: float = 60.0
    #: Delay before a run is placed again, by how many generations in a row broke without a new
    #: checkpoint. The first two tries are immediate; a run that breaks at once must not spin.
    retry_delays_s: tuple[float, ...] = (0.0, 0.0, 1.0, 2.0, 5.0, 10.0, 30.0)

    def retry_delay_s(self, setbacks: int) -> float:
        """Seconds to wait after the ``setbacks``-th failure in a row."""
        return self.retry_delays_s[min(setbacks, len(self.retry_delays_s) - 1)]
