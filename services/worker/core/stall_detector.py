"""The detector of stalled ranks, from their heartbeats and the time."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

#: Steps from which a median is taken at the least; before, ranks may be compiling or warming up.
FIRST_STEPS = 3
#: Until then, also in a restarted agent, this many times the shortest limit is allowed.
FIRST_STEPS_FACTOR = 10.0
MEDIAN_STEPS_MAX = 64


@dataclass(frozen=True, slots=True)
class Stall:
    """A rank without a heartbeat for too long."""

    rank: int
    step: int
    silent_s: float
    median_step_s: float


@dataclass(slots=True)
class _Rank:
    mark: int
    step: int
    at_s: float
    step_at_s: float
    steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=MEDIAN_STEPS_MAX))
    reported: bool = False


class StallDetector:
    """Learns how long steps take, and reports each silence that is too long once."""

    def __init__(self, factor: float, min_s: float) -> None:
        self._factor, self._min_s = factor, min_s
        self._ranks: dict[int, _Rank] = {}

    def add_beat(self, rank: int, mark: int, step: int, at_s: float) -> None:
        """Note a rank's last heartbeat; ``mark`` differs from one to the next."""
        known = self._ranks.get(rank)
        if known is None:
            self._ranks[rank] = _Rank(mark, step, at_s, at_s)
            return
        if mark == known.mark:
            return
        if step > known.step:
            known.steps_s.append((at_s - known.step_at_s) / (step - known.step))
            known.step_at_s = at_s
        known.mark, known.step, known.at_s, known.reported = mark, step, at_s, False

    def find_stall(self, now_s: float, stopped: frozenset[int] = frozenset()) -> Stall | None:
        """Return the rank that holds the others up, if ranks are silent for too long.

        That is a stopped one, else the one at the lowest step, of several the first that fell silent.

        ``stopped``: ranks that the system has suspended.
        """
        silent = {rank: known for rank, known in self._ranks.items() if now_s - known.at_s > self.allowed_s}
        if not silent or any(known.reported for known in silent.values()):
            return None
        rank = min(silent, key=lambda each: (each not in stopped, silent[each].step, silent[each].at_s))
        known = silent[rank]
        known.reported = True
        return Stall(rank, known.step, now_s - known.at_s, self._median_s or 0.0)

    @property
    def allowed_s(self) -> float:
        """The longest silence that is no stall."""
        if self._median_s is None:
            return FIRST_STEPS_FACTOR * self._min_s
        return max(self._min_s, self._factor * self._median_s)

    @property
    def _median_s(self) -> float | None:
        steps_s = [step_s for known in self._ranks.values() for step_s in known.steps_s]
        return statistics.median(steps_s) if len(steps_s) >= FIRST_STEPS else None
