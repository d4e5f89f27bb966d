"""How long runs would wait in strict order of submission: what no run should wait longer than.

Beside the real allocations the fold keeps a virtual queue for each priority of each pool. Runs take the slots of the
pool in the order in which they became ready, and none overtakes another. A run gives its virtual slots back when it
really ends, since how long it takes is not known before. Lower priorities never delay higher ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Self

#: The longest wait is that of this period and the one before.
PERIOD_S = 7 * 86_400.0


@dataclass(slots=True)
class FifoQueue:
    """The runs of one priority that may use the same kinds of accelerator."""

    #: Run -> thousandths of slots; and of those that have not started, since when (seconds since the epoch).
    milli: dict[str, int] = field(default_factory=dict)
    waiting: dict[str, float] = field(default_factory=dict)
    started_milli: int = 0
    #: The longest wait in the current period, and in the one before it.
    period: int = 0
    longest_s: float = 0.0
    before_s: float = 0.0

    def add(self, run_id: str, milli: int, now_s: float) -> None:
        self.milli[run_id], self.waiting[run_id] = milli, now_s

    def remove(self, run_id: str) -> None:
        milli = self.milli.pop(run_id, 0)
        if self.waiting.pop(run_id, None) is None:
            self.started_milli -= milli

    def start_runs(self, free_milli: int, capacity_milli: int, now_s: float) -> None:
        """Start runs in order until one does not fit; note how long they waited. A run that never fits is left out."""
        self._change_period(now_s)
        started = []
        for run_id, since_s in self.waiting.items():
            milli = self.milli[run_id]
            if milli > capacity_milli:
                continue
            self.longest_s = max(self.longest_s, now_s - since_s)
            if milli > free_milli:
                break
            started.append(run_id)
            free_milli -= milli
            self.started_milli += milli
        for run_id in started:
            del self.waiting[run_id]

    def _change_period(self, now_s: float) -> None:
        period = math.floor(now_s / PERIOD_S)
        if period > self.period:
            self.before_s = self.longest_s if period == self.period + 1 else 0.0
            self.period, self.longest_s = period, 0.0


@dataclass(slots=True)
class FifoWaits:
    """The virtual queues of all pools (the kinds of accelerator that will do; none: any) and priorities."""

    pools: dict[frozenset[str], dict[int, FifoQueue]] = field(default_factory=dict)

    def add(self, pool: frozenset[str], priority: int, run_id: str, milli: int, now_s: float) -> None:
        """Queue a run that is ready."""
        self.pools.setdefault(pool, {}).setdefault(priority, FifoQueue()).add(run_id, milli, now_s)

    def remove(self, pool: frozenset[str], priority: int, run_id: str) -> None:
        """Remove a run that is over."""
        if (queue := self.pools.get(pool, {}).get(priority)) is not None:
            queue.remove(run_id)

    def start_runs(self, pool: frozenset[str], capacity_milli: int, now_s: float) -> None:
        """Start the runs of the pool whose turn has come."""
        used = 0
        for _, queue in sorted(self.pools.get(pool, {}).items(), reverse=True):
            if queue.waiting and capacity_milli:
                queue.start_runs(capacity_milli - used - queue.started_milli, capacity_milli, now_s)
            used += queue.started_milli

    def longest_s(self, pool: frozenset[str], priority: int) -> float:
        """Return the longest wait of late."""
        queue = self.pools.get(pool, {}).get(priority)
        return max(queue.longest_s, queue.before_s) if queue is not None else 0.0

    def longest_waits(self) -> Iterable[tuple[frozenset[str], int, float]]:
        """Iterate over the longest wait of each pool and priority."""
        for pool, queues in self.pools.items():
            for priority in queues:
                yield pool, priority, self.longest_s(pool, priority)

    def to_state(self) -> list[Any]:
        """Return everything as JSON."""
        return [
            [sorted(pool), priority, asdict(queue)]
            for pool, queues in self.pools.items()
            for priority, queue in queues.items()
        ]

    @classmethod
    def from_state(cls, state: list[Any]) -> Self:
        """Return what ``to_state`` was called on."""
        made = cls()
        for pool, priority, queue in state:
            made.pools.setdefault(frozenset(pool), {})[priority] = FifoQueue(**queue)
        return made
