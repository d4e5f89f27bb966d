"""Kubernetes: a file that the container's preStop hook writes, before it sends SIGTERM.

https://kubernetes.io/docs/concepts/containers/container-lifecycle-hooks/
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from services.worker.notices.base import Notice

#: Kubernetes' own ``terminationGracePeriodSeconds`` where the pod gives none.
DEFAULT_GRACE_S = 30.0
#: A file that stays empty for this long was only touched: the hook gives no number.
WRITE_TIME_S = 1.0


class KubernetesSource:
    name = "kubernetes"

    def __init__(self, environment: Mapping[str, str], prestop_file: Path, interval_s: float) -> None:
        self._inside = bool(environment.get("KUBERNETES_SERVICE_HOST"))
        self._file, self._interval_s = prestop_file, min(interval_s, 0.5)
        self._since = time.time()

    async def applies(self) -> bool:
        return self._inside

    async def watch(self) -> AsyncIterator[Notice]:
        while (written_at := self._written_at()) is None:  # noqa: ASYNC110, another process writes it
            await asyncio.sleep(self._interval_s)
        grace_s = max(self._grace_s() - (time.time() - written_at), 0.0)
        yield Notice(self.name, "termination", grace_s, "the pod is being deleted")
        await asyncio.Event().wait()

    async def acknowledge(self, notice: Notice) -> None:
        """Do nothing: the end of the agent is the acknowledgement."""

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
