"""Where a step may have to wait for its samples: all ranks begin it, or none does.

A rank that has begun a step waits in its collectives for the others, and nothing ends that wait. Were one rank to wait
for its samples meanwhile (the store is away), a stop could not be heeded before they come, and all that was trained
since the last checkpoint would be lost when the grace is over. So ranks say, with what they say after each step anyway,
whether they have the samples of the next two; only where one has not do they meet before the next step, until all of
them have theirs or are to stop.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from trainbus.agent_link import Control
from trainbus.data.loader import Prefetcher
from trainbus.trainer.step_agreement import StepAgreement, StepSummary

#: Steps whose samples a rank must have so that nobody need ask: it is heard of a step later.
STOCK = 2
#: Seconds after which ranks that wait for samples ask each other again; well below what a collective may take.
ROUND_S = 1.0
#: Seconds after which a rank that waits looks whether it is to stop.
POLL_S = 0.1


class StepBarrier:
    """One rank's side of it. Every rank makes the same calls."""

    def __init__(self, consensus: StepAgreement, control: Control, clock: Callable[[], float] = time.monotonic) -> None:
        self._agreement, self._control, self._clock = consensus, control, clock
        #: The step up to which all ranks are known to have their samples.
        self._stocked_until = -1

    def heed(self, said: StepSummary) -> None:
        """Note what all ranks said after a step."""
        if not said.short:
            self._stocked_until = said.step + STOCK

    def opens(self, step: int, steps: Prefetcher[Any], ready: Callable[[], None] = lambda: None) -> bool:
        """Wait until all ranks can take ``step``; False if they are to stop before it.

        Args:
            ready: called when this rank has its samples, however long others still wait for theirs.
        """
        if step <= self._stocked_until:
            return True
        while True:
            lacking = not self._wait(steps)
            if not lacking:
                ready()
            anyone_lacks, stop = self._agreement.agree(lacking, self._control.stop_requested)
            if not anyone_lacks:
                return True
            if stop:
                return False

    def _wait(self, steps: Prefetcher[Any]) -> bool:
        """Whether the samples are here, within a round or until a stop is asked for."""
        until = self._clock() + ROUND_S
        while not (here := steps.has(1, POLL_S)) and not self._control.stop_requested and self._clock() < until:
            pass
        return here
