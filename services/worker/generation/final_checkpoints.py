"""The checkpoints of ranks that have ended: uploaded and committed for as long as the generation can wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from services.kit.concurrency import cancel_and_wait
from services.worker.checkpoints.stager import CheckpointStager
from services.worker.generation.rank_group import POLL_S
from services.worker.generation.requests import GenerationRequests

#: Seconds for checkpoints that were complete before a crash to be uploaded.
CRASH_UPLOAD_S = 20.0


async def upload_rest(stager: CheckpointStager, requests: GenerationRequests, limit_s: float | None) -> None:
    """Upload what the ranks completed, within ``limit_s``; None: until it is done or the grace of a stop is over."""
    upload = asyncio.create_task(stager.stage_rest())
    deadline = None if limit_s is None else time.monotonic() + limit_s
    try:
        while not upload.done() and (deadline is None or time.monotonic() < deadline):
            requests.raise_if_dropped()
            if deadline is None and (grace_s := requests.remaining_grace_s()) is not None:
                deadline = time.monotonic() + grace_s
            await requests.wait_for_task(upload, POLL_S)
    finally:
        await cancel_and_wait(upload)


async def wait_until_committed(
    step: int, requests: GenerationRequests, patience_s: float, now: Callable[[], float]
) -> bool:
    """Wait until the checkpoint is committed; return False if it is refused or the time is over."""
    deadline = requests.stop.deadline if requests.stop is not None else now() + patience_s
    while requests.is_committed(step) is None and now() < deadline:
        requests.raise_if_dropped()
        await requests.wait_for_change(POLL_S)
    return requests.is_committed(step) is True
