"""How fast a training goes, from the times of its steps."""

from __future__ import annotations

from collections import deque

#: Seconds of the past that count.
WINDOW_S = 60.0


class TrainingPace:
    """Steps per second over the last minute."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque()

    def add(self, time_s: float, step: int) -> None:
        """Add a step that ended at a time. A step before the last one begins anew: the training was restored."""
        if self._points and step < self._points[-1][1]:
            self._points.clear()
        self._points.append((time_s, step))
        while len(self._points) > 2 and self._points[1][0] < time_s - WINDOW_S:
            self._points.popleft()

    @property
    def steps_per_s(self) -> float | None:
        """Return the speed; None before the second step."""
        if not self._points:
            return None
        (first_s, first), (last_s, last) = self._points[0], self._points[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s and last > first else None
