"""Notices of the cluster managers below trainbus: Slurm and Kubernetes."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from services.worker.notices.notice import Notice, NoticeSource

#: Seconds before the end of a Slurm job's time at which its runs are stopped.
LEAVE_BEFORE_S = 120.0
#: Kubernetes' own ``terminationGracePeriodSeconds`` where the pod gives none.
DEFAULT_GRACE_S = 30.0
#: A file that stays empty for this long was only touched: the hook gives no number.
WRITE_TIME_S = 1.0


class SlurmSource(NoticeSource):
    """The signal of ``sbatch --signal=USR1@<seconds>``, and the end of the job's time.

    A job that Slurm preempts gets SIGTERM, which every agent handles. https://slurm.schedmd.com/sbatch.html
    """

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


class KubernetesSource(NoticeSource):
    """A file that the container's preStop hook writes, before it sends SIGTERM; the agent's end acknowledges it.

    https://kubernetes.io/docs/concepts/containers/container-lifecycle-hooks/
    """

    name = "kubernetes"

    def __init__(self, environment: Mapping[str, str], prestop_file: Path, interval_s: float) -> None:
        self._is_in_pod = bool(environment.get("KUBERNETES_SERVICE_HOST"))
        self._file, self._interval_s = prestop_file, min(interval_s, 0.5)
        self._since = time.time()

    async def applies(self) -> bool:
        return self._is_in_pod

    async def watch(self) -> AsyncIterator[Notice]:
        while (written_at := self._written_at()) is None:  # noqa: ASYNC110, another process writes it
            await asyncio.sleep(self._interval_s)
        grace_s = max(self._grace_s() - (time.time() - written_at), 0.0)
        yield Notice(self.name, "termination", grace_s, "the pod is being deleted")
        await asyncio.Event().wait()

    def _written_at(self) -> float | None:
        """Return when the hook wrote the file; one from before the agent's start is of another container."""
        try:
            found = self._file.stat()
        except OSError:
            return None
        if found.st_size == 0 and time.time() < found.st_mtime + WRITE_TIME_S:
            return None  # a shell empties the file before it writes
        return found.st_mtime if found.st_mtime >= self._since - 1 else None

    def _grace_s(self) -> float:
        """Return the seconds of the pod from the hook on: the file's content, if it is a number."""
        try:
            return float(self._file.read_text().strip())
        except (OSError, ValueError):
            return DEFAULT_GRACE_S
