"""Holds all ranks before a step until each of them has its samples, so that all begin it or none does.

A rank that has begun a step waits for the others in its collectives, and nothing ends that wait. If one rank waited for
samples there (the store is away), the ranks could not stop before the samples come, and the grace period would end
without a checkpoint. So ranks report after each step, with what they exchange anyway, whether they have the samples of
the next two; only where one does not, they meet before the next step until all of them have theirs or must stop.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from trainbus.agent_link import Control
from trainbus.data.loader import Prefetcher
from trainbus.trainer.step_agreement import StepAgreement, StepSummary

#: Steps whose samples a rank must have so that ranks need not meet: reports arrive a step later.
MIN_PREFETCHED_STEPS = 2
#: Seconds between two meetings of ranks that wait for samples; well below the timeout of a collective.
MEETING_INTERVAL_S = 1.0
#: Seconds between two checks of a waiting rank whether it must stop.
STOP_CHECK_INTERVAL_S = 0.1


class StepBarrier:
    """One rank's side of the barrier. Every rank makes the same calls."""

    def __init__(self, consensus: StepAgreement, control: Control, clock: Callable[[], float] = time.monotonic) -> None:
        self._agreement, self._control, self._clock = consensus, control, clock
        #: The step up to which all ranks are known to have their samples.
        self._prefetched_until = -1

    def record_summary(self, summary: StepSummary) -> None:
        """Note whether all ranks had samples in stock after a step."""
        if not summary.lacks_data:
            self._prefetched_until = summary.step + MIN_PREFETCHED_STEPS

    def wait(self, step: int, steps: Prefetcher[Any], on_ready: Callable[[], None] = lambda: None) -> bool:
        """Wait until all ranks can take ``step``; False if they must stop before it.

        Args:
            on_ready: called when this rank has its samples, however long others still wait for theirs.
        """
        if step <= self._prefetched_until:
            return True
        while True:
            lacking = not self._wait_for_samples(steps)
            if not lacking:
                on_ready()
            anyone_lacks, stop = self._agreement.agree(lacking, self._control.stop_requested)
            if not anyone_lacks:
                return True
            if stop:
                return False

    def _wait_for_samples(self, steps: Prefetcher[Any]) -> bool:
        """Wait until the samples are here, the next meeting is due or a stop is requested; return whether they are."""
        until = self._clock() + MEETING_INTERVAL_S
        while (
            not (here := steps.has(1, STOP_CHECK_INTERVAL_S))
            and not self._control.stop_requested
            and self._clock() < until
        ):
            pass
        return here
