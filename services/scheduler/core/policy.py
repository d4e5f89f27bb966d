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
    #: A run is not grown before it has had its slots for so long, nor before the cluster's slots have
    #: been at rest for so long: growing costs a restart, and one that ends is often followed by another
    #: (its evaluation) that takes some of the slots for a moment.
    resize_interval_s: float = 3.0
    #: A node that has had free slots for so long is grown into however busy the others are.
    grow_anyway_s: float = 60.0
    #: How long a placement may take until its ranks run: downloads of data and code are part of it.
    start_deadline_s: float = 1800.0
    #: How long after its grace a node may take to let go; one that takes longer is taken for lost.
    release_deadline_s: float = 300.0
    #: A node on which a run failed so often in a row, by no fault of its own, is avoided by that run.
    avoid_node_after: int = 2
    #: So long before a machine is taken away its ranks must have let go, for what is still to be uploaded.
    notice_margin_s: float = 2.0
    #: Generations in a row that may break, by no fault of the run, without a new checkpoint.
    max_blameless: int = 50
    #: How long a run whose ranks all ended well waits for its final checkpoint to be committed.
    final_checkpoint_wait_s: float = 60.0
    #: Delay before a run is placed again, by how many generations in a row broke without a new
    #: checkpoint. The first two tries are immediate; a run that breaks at once must not spin.
    retry_delays_s: tuple[float, ...] = (0.0, 0.0, 1.0, 2.0, 5.0, 10.0, 30.0)

    def retry_delay_s(self, setbacks: int) -> float:
        """Seconds to wait after the ``setbacks``-th failure in a row."""
        return self.retry_delays_s[min(setbacks, len(self.retry_delays_s) - 1)]
