"""How long each phase of a scheduling cycle takes."""

from __future__ import annotations

import time

from services.scheduler import metrics


class PhaseTimer:
    """Observes the phases of one cycle, of which each ends when the next one begins."""

    def __init__(self) -> None:
        self._phase, self._began_s = "", 0.0

    def begin_phase(self, phase: str) -> None:
        """End the present phase and begin another one."""
        now_s = time.perf_counter()
        if self._phase:
            metrics.PHASE_SECONDS.labels(self._phase).observe(now_s - self._began_s)
        self._phase, self._began_s = phase, now_s

    def end_phase(self) -> None:
        """End the present phase."""
        self.begin_phase("")
