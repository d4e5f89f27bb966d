"""The data of scripts that wait for it: copied to this node in the background, before their runs have slots here."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import structlog

from contracts.events.node import NodeStaged
from contracts.events.run import (
    RunCancelled,
    RunCompleted,
    RunExited,
    RunFailed,
    RunPlaced,
    RunReleased,
    RunStaging,
)
from services.kit.bus import Message
from services.kit.concurrency import cancel_and_wait
from services.worker import metrics
from services.worker.cache.node_cache import CachePins
from services.worker.node_context import NodeContext
from services.worker.retry import retry_transient

log = structlog.get_logger(__name__)

#: Runs whose data is copied at a time: a node's disk and network are those of the runs that train there, too.
STAGED_AT_A_TIME = 2
#: Seconds for which files are kept for a run at most, whatever the fact says.
MAX_PINNED_S = 86_400.0
ERROR_MAX_CHARS = 2000


class _Staging:
    """The staging of one run."""

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        #: The run is placed here: its generation has pins of its own soon, and these end with it.
        self.placed = asyncio.Event()
        self._ended = asyncio.Event()

    def end(self) -> None:
        """Stop the copy, and keep the files no longer."""
        # A cancellation may be lost in the client of the bus: then it ends here.
        self.placed.set()
        self._ended.set()
        if self.task is not None:
            self.task.cancel()

    async def wait_for_end(self, limit_s: float) -> None:
        """Wait until the files are not kept any more; ``limit_s``: seconds in which the run may yet be placed here."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(limit_s, 0.0)):
                await self.placed.wait()
        if self.placed.is_set():
            await self._ended.wait()


class DataStaging:
    """Stages what ``run.staging`` asks of this node, and answers each with ``node.staged``.

    The files stay until the run is placed elsewhere, has ended or has left its slots here, or until the limit of its
    staging if it is not placed by then.
    """

    def __init__(self, context: NodeContext, incarnation: Callable[[], str]) -> None:
        self._context, self._incarnation = context, incarnation
        self._stagings: dict[str, _Staging] = {}
        self._gate = asyncio.Semaphore(STAGED_AT_A_TIME)

    def handle_fact(self, message: Message[Any]) -> None:
        """Begin, keep or end the staging of a run."""
        match message.event:
            case RunStaging():
                if self._context.settings.node_id in message.event.node_ids:
                    self._begin_staging(message)
            case RunPlaced(run_id=run_id, members=members):
                if any(member.node_id == self._context.settings.node_id for member in members):
                    self._keep_files(run_id)
                else:
                    self._end_staging(run_id)
            case RunReleased(run_id=run_id) | RunExited(run_id=run_id):
                self._end_staging(run_id)
            case RunCompleted(run_id=run_id) | RunFailed(run_id=run_id) | RunCancelled(run_id=run_id):
                self._end_staging(run_id)
            case _:
                pass

    async def close(self) -> None:
        """Stop the copies that are under way."""
        await cancel_and_wait(*(each.task for each in self._stagings.values() if each.task is not None))

    def _begin_staging(self, message: Message[RunStaging]) -> None:
        run_id = message.event.run_id
        if run_id not in self._stagings:
            staging = self._stagings[run_id] = _Staging()
            staging.task = asyncio.create_task(self._stage(message, staging), name=f"stage {run_id}")
            staging.task.add_done_callback(lambda _: self._stagings.pop(run_id, None))

    def _keep_files(self, run_id: str) -> None:
        if (staging := self._stagings.get(run_id)) is not None:
            staging.placed.set()

    def _end_staging(self, run_id: str) -> None:
        if (staging := self._stagings.get(run_id)) is not None:
            staging.end()

    async def _stage(self, message: Message[RunStaging], staging: _Staging) -> None:
        fact, started = message.event, time.monotonic()
        async with self._context.cache.pin_files() as pins:
            staged = await self._copy_files(fact, pins)
            metrics.STAGING_SECONDS.observe(staged.seconds)
            await retry_transient(
                partial(self._context.bus.publish, staged, message.envelope), "staged data could not be reported"
            )
            if not staged.error:
                limit_s = fact.limit_s if math.isfinite(fact.limit_s) else MAX_PINNED_S
                await staging.wait_for_end(min(limit_s, MAX_PINNED_S) - (time.monotonic() - started))

    async def _copy_files(self, staging: RunStaging, pins: CachePins) -> NodeStaged:
        """Return what becomes of it; whatever fails here is the run's to meet when it starts."""
        started, error, size_bytes = time.monotonic(), "", 0
        datasets = staging.dataset.by_name.values()
        try:
            async with self._gate:
                for dataset in datasets:
                    size_bytes += (await self._context.data_folders.fetch(dataset, pins)).size_bytes
        except Exception as problem:
            error = str(problem)[:ERROR_MAX_CHARS] or repr(problem)
            log.warning("the data of a run could not be staged", run_id=staging.run_id, error=error)
        return NodeStaged(
            node_id=self._context.settings.node_id,
            incarnation=self._incarnation(),
            run_id=staging.run_id,
            dataset_ids=() if error else tuple(each.dataset_id for each in datasets),
            size_bytes=0 if error else size_bytes,
            seconds=time.monotonic() - started,
            error=error,
        )
