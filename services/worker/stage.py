"""Checkpoints on their way out: complete on disk, hashed, uploaded, staged."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import structlog

from contracts.events.checkpoint import CheckpointStaged
from contracts.events.run import Artifact, Member, RunPlaced
from services.kit.bus import Transient
from services.worker import metrics
from services.worker.context import Context
from services.worker.core.stage import ready_steps
from services.worker.files import inside
from services.worker.journal import Follower, Publish
from services.worker.upload import UploadError, upload_artifacts, upload_checkpoint

log = structlog.get_logger(__name__)

#: Staged checkpoints whose folders stay on this node; the cache has the files of all of them.
KEEP_FOLDERS = 2


class Stager:
    """Stages the checkpoints of one generation's local ranks, in the order of their steps."""

    def __init__(
        self, context: Context, placed: RunPlaced, member: Member, folder: Path, follower: Follower, publish: Publish
    ) -> None:
        self._context, self._placed, self._member = context, placed, member
        self._folder, self._follower, self._publish = folder, follower, publish

    async def run(self) -> None:
        """Stage whatever all local ranks have completed, until cancelled."""
        while True:
            self._follower.news.clear()
            await self._stage_ready(at_end=False)
            await self._follower.news.wait()

    async def finish(self) -> None:
        """Stage all that is left, also what only some of the ranks completed."""
        await self._stage_ready(at_end=True)

    async def artifacts(self, names: Sequence[str]) -> tuple[Artifact, ...]:
        """Upload the result's files, however long the store is away."""
        spec = self._placed.spec
        bucket = self._context.settings.bucket_models
        base = f"s3://{bucket}/{spec.experiment}/{self._placed.run_id}/artifacts"
        while True:
            try:
                return await upload_artifacts(names, self._folder, self._context.objects, base)
            except Transient as error:
                log.warning("the store does not take artifacts", error=str(error))

    async def _stage_ready(self, *, at_end: bool) -> None:
        ranks = self._follower.state.ranks
        for step in ready_steps({rank: state.checkpoints for rank, state in ranks.items()}, at_end=at_end):
            while True:
                try:
                    await self._stage(step)
                    break
                except Transient as error:
                    log.warning("the checkpoint is not staged yet", step=step, error=str(error))

    async def _stage(self, step: int) -> None:
        state = self._follower.state
        lines = {
            rank: line for rank, each in sorted(state.ranks.items()) for line in each.checkpoints if line.step == step
        }
        started = time.monotonic()
        first = next(iter(lines.values()))
        settings = self._context.settings
        try:
            files = await upload_checkpoint(
                list(lines.values()), self._folder, self._context.objects, settings.bucket_models, self._context.cache
            )
        except (UploadError, FileNotFoundError) as error:
            log.error("a checkpoint cannot be staged and is left out", step=step, error=str(error))
            self._forget(step)
            return
        await self._publish(
            CheckpointStaged(
                run_id=self._placed.run_id,
                generation=self._placed.generation,
                node_id=self._member.node_id,
                # A command under torchrun reports for all of its node's ranks.
                ranks=self._member.ranks if self._placed.spec.command is not None else tuple(lines),
                world_size=self._placed.world_size,
                step=step,
                epoch=first.epoch,
                samples_consumed=first.samples_consumed,
                files=files,
                metrics=first.metrics,
                final=any(line.final for line in lines.values()),
            )
        )
        metrics.UPLOAD_SECONDS.observe(time.monotonic() - started)
        metrics.UPLOAD_BYTES.inc(sum(file.size_bytes for file in files))
        log.info("checkpoint staged", step=step, files=len(files), seconds=round(time.monotonic() - started, 3))
        state.staged_step = max(step, state.staged_step or 0)
        state.staged_folders[step] = [line.folder for line in lines.values()]
        self._forget(step)
        await asyncio.to_thread(self._remove_old)

    def _forget(self, step: int) -> None:
        for each in self._follower.state.ranks.values():
            each.checkpoints = [line for line in each.checkpoints if line.step != step]
        self._follower.save()

    def _remove_old(self) -> None:
        folders = self._follower.state.staged_folders
        for step in sorted(folders)[:-KEEP_FOLDERS]:
            for name in folders.pop(step):
                path = self._folder / name
                if path != self._folder and inside(path, self._folder):
                    shutil.rmtree(path, ignore_errors=True)
