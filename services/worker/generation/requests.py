"""What the agent requests of a running generation: to stop, to be dropped; and what became of its checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from services.worker.local_files import read_json, write_atomically

#: Seconds between two polls of ranks and checkpoints. Changes wake the loop at once; polls find those without an event.
POLL_S = 0.05


class StopRequest(BaseModel):
    """``stop.json``: the ranks must end within their grace."""

    model_config = ConfigDict(frozen=True)

    grace_s: float
    deadline: float
    reason: str
    #: Seconds after the deadline in which the ranks are not signalled: they have lost their peers, end by
    #: themselves, and first save state for the next generation.
    survivor_s: float = 0.0

    @property
    def kill_at(self) -> float:
        """Time from which ranks that still run are made to end."""
        return self.deadline + self.survivor_s


class GenerationDropped(Exception):
    """The placement is void; nothing waits for a report."""


class GenerationRequests:
    """Requests to one generation. The agent makes them at any time; the runner reads them in every state."""

    def __init__(self, folder: Path, now: Callable[[], float]) -> None:
        self._path, self._now = folder / "stop.json", now
        stored = read_json(self._path)
        self.stop: StopRequest | None = StopRequest.model_validate(stored) if stored else None
        self._settled: set[tuple[int, bool]] = set()
        self._drop_reason: str | None = None
        self._changed = asyncio.Event()

    def request_stop(self, grace_s: float, reason: str, survivor_s: float = 0.0) -> None:
        """Make the ranks end within their grace. A second, shorter grace shortens it."""
        request = StopRequest(grace_s=grace_s, deadline=self._now() + grace_s, reason=reason, survivor_s=survivor_s)
        if self.stop is None or request.kill_at < self.stop.kill_at:
            self.stop = request
            write_atomically(self._path, request.model_dump_json())
        self.notify()

    def settle_checkpoint(self, step: int, committed: bool) -> None:
        """Note that the checkpoint of a step is committed, or was refused."""
        self._settled.add((step, committed))
        self.notify()

    def drop(self, reason: str) -> None:
        """Void the placement."""
        self._drop_reason = reason
        self.notify()

    def notify(self) -> None:
        """Wake the task that waits for a change."""
        self._changed.set()

    def raise_if_dropped(self) -> None:
        """Raise ``GenerationDropped`` once the placement is void."""
        if self._drop_reason is not None:
            raise GenerationDropped(self._drop_reason)

    def is_committed(self, step: int) -> bool | None:
        """Whether the checkpoint of the step was committed; None before it is settled."""
        return next((committed for committed in (True, False) if (step, committed) in self._settled), None)

    def may_commit(self, step: int) -> bool:
        """Whether a checkpoint of the step would be newer than all committed ones and is not refused."""
        return self.is_committed(step) is None and all(step > other for other, committed in self._settled if committed)

    def remaining_grace_s(self) -> float | None:
        """Return the seconds of grace that remain; None without a stop request."""
        return None if self.stop is None else max(self.stop.deadline - self._now(), 0)

    async def wait_until_committed(self, step: int, patience_s: float) -> bool:
        """Wait until the checkpoint is committed; return False if it is refused or the time is over."""
        deadline = self.stop.deadline if self.stop is not None else self._now() + patience_s
        while self.is_committed(step) is None and self._now() < deadline:
            self.raise_if_dropped()
            await self.wait_for_change(POLL_S)
        return self.is_committed(step) is True

    async def wait_for_change(self, timeout_s: float) -> None:
        """Wait until something has changed since the last call, at most ``timeout_s``."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        self._changed.clear()

    async def wait_for_task(self, task: asyncio.Task[object], timeout_s: float | None = None) -> None:
        """Wait until ``task`` is done or something has changed."""
        change = asyncio.create_task(self._changed.wait())
        try:
            await asyncio.wait({task, change}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            change.cancel()
        self._changed.clear()
