"""What the agent requests of a running generation: to stop, to be dropped; and what became of its checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from services.kit.clock import boot_s
from services.worker.launch.lease_term import read_boot_id
from services.worker.launch.rank_guard import SIGNALS_NAME, STOP_NAME
from services.worker.local_files import read_json, write_if_space

#: Seconds between two polls of ranks and checkpoints. Changes wake the loop at once; polls find those without an event.
POLL_S = 0.05


class StopRequest(BaseModel):
    """``stop.json``: the ranks must end within their grace.

    Its times are those of the boot clock, which nobody sets: a wall clock that is set back would let the ranks run on
    while the scheduler takes the node for lost.
    """

    model_config = ConfigDict(frozen=True)

    grace_s: float
    deadline: float
    #: The boot of the machine that ``deadline`` belongs to.
    boot_id: str = ""
    reason: str
    #: Seconds after the deadline in which the ranks are not signalled: they have lost their peers, end by
    #: themselves, and first save state for the next generation.
    survivor_s: float = 0.0
    #: Whether the deadline also bounds the upload of what the ranks leave. When the node's lease is over, only they
    #: must be dead by then.
    bounds_upload: bool = True
    #: When, by the wall clock, the ranks were first signalled to end, and whether they had to be killed: then their
    #: exit codes do not show why they ended.
    signalled_at: float | None = None
    killed: bool = False

    @property
    def kill_at(self) -> float:
        """Time from which ranks that still run are made to end."""
        return self.deadline + self.survivor_s


class GenerationDropped(Exception):
    """The placement is void; nothing waits for a report."""


class GenerationRequests:
    """Requests to one generation. The agent makes them at any time; the runner reads them in every state."""

    def __init__(self, folder: Path, now: Callable[[], float] = boot_s) -> None:
        self._path, self.now = folder / STOP_NAME, now
        self.stop: StopRequest | None = None
        self.reload()
        self._settled: set[tuple[int, bool]] = set()
        self._drop_reason: str | None = None
        self._changed = asyncio.Event()

    def request_stop(self, grace_s: float, reason: str, survivor_s: float = 0.0, *, bounds_upload: bool = True) -> None:
        """Make the ranks end within their grace. A second, shorter grace shortens it."""
        self.reload()
        request = StopRequest(
            grace_s=grace_s,
            deadline=self.now() + grace_s,
            boot_id=read_boot_id(),
            reason=reason,
            survivor_s=survivor_s,
            bounds_upload=bounds_upload,
        )
        earlier = self.stop
        if earlier is None:
            self._store(request)
        elif request.kill_at < earlier.kill_at or bounds_upload > earlier.bounds_upload:
            signals = {"signalled_at": earlier.signalled_at, "killed": earlier.killed}
            bounds = {"bounds_upload": bounds_upload or earlier.bounds_upload}
            self._store(request.model_copy(update=signals | bounds))
        self.notify()

    def note_signalled(self, at: float, *, killed: bool = False) -> None:
        """Note that the ranks were signalled to end."""
        if self.stop is not None and (self.stop.signalled_at is None or killed > self.stop.killed):
            self._store(self.stop.model_copy(update={"signalled_at": self.stop.signalled_at or at, "killed": killed}))

    def reload(self) -> None:
        """Read what the guard of the ranks, or an earlier life of the agent, has requested."""
        stored = read_json(self._path)
        if not stored:
            return
        stop = StopRequest.model_validate(stored)
        if stop.boot_id != read_boot_id():  # the machine was restarted since, and the ranks are dead
            stop = stop.model_copy(update={"deadline": 0.0})
        if signals := read_json(self._path.with_name(SIGNALS_NAME)):
            times = (stop.signalled_at or signals["signalled_at"], stop.killed or signals["killed"])
            stop = stop.model_copy(update=dict(zip(("signalled_at", "killed"), times, strict=True)))
        self.stop = stop

    def _store(self, request: StopRequest) -> None:
        self.stop = request
        write_if_space(self._path, request.model_dump_json())

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

    @property
    def is_dropped(self) -> bool:
        """Whether the placement is void."""
        return self._drop_reason is not None

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
        """Return the seconds of grace that remain for an upload; None if nothing bounds it."""
        stop = self.stop
        return None if stop is None or not stop.bounds_upload else max(stop.deadline - self.now(), 0)

    async def wait_until_committed(self, step: int, patience_s: float) -> bool:
        """Wait until the checkpoint is committed; return False if it is refused or the time is over."""
        grace_s = self.remaining_grace_s()
        deadline = self.now() + (patience_s if grace_s is None else grace_s)
        while self.is_committed(step) is None and self.now() < deadline:
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
