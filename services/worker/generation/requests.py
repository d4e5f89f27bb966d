"""What is wanted of a placement: its record, and the orders that reach it while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from contracts.events.run import RunPlaced
from services.worker.local_files import read_json, write_atomically


class PlacementRecord(BaseModel):
    """``placement.json``: the fact, and where it stood in the stream."""

    model_config = ConfigDict(frozen=True)

    placed: RunPlaced
    sequence: int
    correlation_id: str = ""
    causation_id: str = ""
    traceparent: str = ""


class StopRequest(BaseModel):
    """``stop.json``: since when the ranks must end, and until when they may take."""

    model_config = ConfigDict(frozen=True)

    grace_s: float
    deadline: float
    reason: str
    #: Seconds after the deadline in which the ranks may be left alone: they have lost their peers, end by
    #: themselves, and first leave state behind for the next generation.
    untouched_s: float = 0.0

    @property
    def ends_at(self) -> float:
        """From when on ranks that are still there are made to end."""
        return self.deadline + self.untouched_s


class GenerationDropped(Exception):
    """The placement is void; nobody waits for a report."""


class GenerationRequests:
    """Stop, settled, drop: given at any time by the agent, read by whatever the placement is busy with."""

    def __init__(self, folder: Path, now: Callable[[], float]) -> None:
        self._path, self._now = folder / "stop.json", now
        stored = read_json(self._path)
        self.stop: StopRequest | None = StopRequest.model_validate(stored) if stored else None
        self._settled: set[tuple[int, bool]] = set()
        self._drop_reason: str | None = None
        self._wake = asyncio.Event()

    def order_stop(self, grace_s: float, reason: str, untouched_s: float = 0.0) -> None:
        """Make the ranks end within their grace. A second, shorter grace shortens it."""
        order = StopRequest(grace_s=grace_s, deadline=self._now() + grace_s, reason=reason, untouched_s=untouched_s)
        if self.stop is None or order.ends_at < self.stop.ends_at:
            self.stop = order
            write_atomically(self._path, order.model_dump_json())
        self.wake()

    def settle(self, step: int, committed: bool) -> None:
        self._settled.add((step, committed))
        self.wake()

    def drop(self, why: str) -> None:
        self._drop_reason = why
        self.wake()

    def wake(self) -> None:
        """Something has happened: whoever waits looks now."""
        self._wake.set()

    def raise_if_dropped(self) -> None:
        if self._drop_reason is not None:
            raise GenerationDropped(self._drop_reason)

    def fate(self, step: int) -> bool | None:
        """Whether the checkpoint of the step was committed; None while nobody knows."""
        if (step, True) in self._settled:
            return True
        return False if (step, False) in self._settled else None

    def may_count(self, step: int) -> bool:
        """Whether a checkpoint of the step would be newer than what is committed, and has not been refused."""
        return self.fate(step) is None and all(step > other for other, committed in self._settled if committed)

    def stop_time_left_s(self) -> float | None:
        """Seconds of grace that are left; None: nobody wants the slots back."""
        return None if self.stop is None else max(self.stop.deadline - self._now(), 0)

    async def next(self, timeout_s: float) -> None:
        """Wait until something has happened since the last call, at most ``timeout_s``."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), timeout_s)
        self._wake.clear()

    async def beside(self, work: asyncio.Task[object], timeout_s: float | None = None) -> None:
        """Wait until ``work`` is done or something has happened."""
        waking = asyncio.create_task(self._wake.wait())
        try:
            await asyncio.wait({work, waking}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waking.cancel()
        self._wake.clear()
