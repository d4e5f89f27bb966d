"""Slurm: the signal of ``sbatch --signal=USR1@<seconds>``, and the end of the job's time.

A job that Slurm preempts gets SIGTERM, which every agent handles. https://slurm.schedmd.com/sbatch.html
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Mapping

from services.worker.notices.base import Notice

#: Seconds before the end of the job's time at which its runs are stopped.
LEAVE_BEFORE_S = 120.0


class SlurmSource:
    name = "slurm"

    def __init__(self, environment: Mapping[str, str], leave_before_s: float = LEAVE_BEFORE_S) -> None:
        self._job = environment.get("SLURM_JOB_ID", "")
        end = environment.get("SLURM_JOB_END_TIME", "")
        self._ends_at = float(end) if end.isdigit() else None
        self._leave_before_s = leave_before_s

    async def applies(self) -> bool:
        return bool(self._job)

    async def watch(self) -> AsyncIterator[Notice]:
        loop, signalled = asyncio.get_running_loop(), asyncio.Event()
        loop.add_signal_handler(signal.SIGUSR1, signalled.set)
        try:
            timeout_s = None if self._ends_at is None else self._ends_at - self._leave_before_s - time.time()
            try:
                await asyncio.wait_for(signalled.wait(), timeout_s)
                kind, detail = "signal", f"SIGUSR1 to job {self._job}"
            except TimeoutError:
                kind, detail = "time-limit", f"the time of job {self._job} is nearly over"
            grace_s = None if self._ends_at is None else max(self._ends_at - time.time(), 0.0)
            yield Notice(self.name, kind, grace_s, detail)
            await asyncio.Event().wait()
        finally:
            loop.remove_signal_handler(signal.SIGUSR1)

    async def acknowledge(self, notice: Notice) -> None:
        """Slurm expects no acknowledgement."""
