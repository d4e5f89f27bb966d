"""The stager of checkpoints: uploads what ranks completed on disk, and publishes it as staged."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from contracts import subjects, topology
from contracts.events.checkpoint import CheckpointCommitted, CheckpointFile, CheckpointStaged, FileListing
from contracts.events.run import Artifact, Member, RunPlaced
from contracts.manifest import files_of
from contracts.node_outputs import NodeOutputs, NodeOutputsRef
from contracts.ranks import CheckpointLine
from services.kit.bus import PoisonMessage
from services.kit.store.files import is_inside
from services.worker import metrics
from services.worker.cache.node_cache import CacheError
from services.worker.checkpoints.dvc import pointer_key, write_pointer
from services.worker.checkpoints.packed_outputs import NodeSnapshot, node_snapshot_path, peer_files_path
from services.worker.checkpoints.uploader import (
    CheckpointUploader,
    UploadError,
    collect_files,
    find_bases,
    upload_files,
)
from services.worker.core.checkpoint_chunks import DeltaBases
from services.worker.core.rank_environment import is_command
from services.worker.local_files import write_if_space
from services.worker.node_context import NodeContext
from services.worker.ranks.journal_follower import JournalFollower, Publish
from services.worker.retry import retry_transient

log = structlog.get_logger(__name__)

#: Staged checkpoints whose folders stay on this node; the cache has all their files.
KEEP_FOLDERS = 2


class CheckpointStager:
    """Stages the checkpoints of one generation's local ranks, in the order of their steps.

    What a script writes on a node without rank 0 is listed in the bucket OUTPUTS instead: the node of rank 0 stages it.
    """

    def __init__(
        self,
        context: NodeContext,
        placed: RunPlaced,
        member: Member,
        folder: Path,
        follower: JournalFollower,
        publish: Publish,
    ) -> None:
        self._context, self._placed, self._member = context, placed, member
        self._folder, self._follower, self._publish = folder, follower, publish
        self._lists_outputs = is_command(placed.spec) and placed.spec.kind == "train" and 0 not in member.ranks
        #: What the bucket has of this node, or is to have.
        self._ref_path = folder / "node_outputs.json"

    async def run(self) -> None:
        """Stage each checkpoint that all local ranks have completed, until cancelled."""
        while True:
            self._follower.news.clear()
            await self._stage_ready(at_end=False)
            await self._follower.news.wait()

    async def stage_rest(self) -> None:
        """Stage the rest, also what only some of the ranks completed."""
        await self._stage_ready(at_end=True)
        if self._lists_outputs:
            await retry_transient(partial(self._put_ref, is_final=True), "the last list of files is not published yet")

    @property
    def has_listed_all(self) -> bool:
        """Whether rank 0's node knows of all that the script has left on this node, which has not rank 0."""
        return self._lists_outputs and self._read_ref().is_final

    @property
    def has_rest(self) -> bool:
        """Whether a checkpoint that a rank has completed is not staged yet."""
        return bool(self._unstaged(at_end=True))

    async def upload_artifacts(self, names: Sequence[str], folder: Path | None = None) -> tuple[Artifact, ...]:
        """Upload files of a folder, by default of the generation's own, however long the store is away."""
        spec = self._placed.spec
        bucket = self._context.settings.bucket_models
        base = f"s3://{bucket}/{spec.experiment}/{self._placed.run_id}/artifacts"
        upload = partial(upload_files, names, folder or self._folder, self._context.objects, base)
        return await retry_transient(upload, "the store does not accept artifacts")

    async def _stage_ready(self, *, at_end: bool) -> None:
        for step in self._unstaged(at_end=at_end):
            await retry_transient(partial(self._stage, step), "the checkpoint is not staged yet", step=step)

    def _unstaged(self, *, at_end: bool) -> list[int]:
        state = self._follower.state
        ready = ready_steps({rank: each.checkpoints for rank, each in state.ranks.items()}, at_end=at_end)
        return sorted({*ready, *state.snapshots})

    async def _stage(self, step: int) -> None:
        lines = self._lines_of(step)
        started = time.monotonic()
        try:
            paths = await asyncio.to_thread(collect_files, list(lines.values()), self._folder)
            stage = self._list_outputs if self._lists_outputs else self._upload
            size_bytes = await stage(step, lines, paths)
        except (UploadError, FileNotFoundError, PoisonMessage) as error:
            log.error("a checkpoint cannot be staged and is skipped", step=step, error=str(error))
            await self._remove_step(step)
            return
        metrics.UPLOAD_SECONDS.observe(time.monotonic() - started)
        metrics.UPLOAD_BYTES.inc(size_bytes)
        context, state = self._context, self._follower.state
        if self._placed.spec.checkpoints.dvc and not self._lists_outputs:
            # Before the step is removed from the state: a restarted agent writes the pointer again.
            placed, epoch = self._placed, next(iter(lines.values())).epoch
            key = pointer_key(
                placed.spec.experiment, placed.run_id, epoch, step, placed.generation, self._member.node_id
            )
            await write_pointer(context.objects, context.settings.bucket_models, key, paths)
        if not self._lists_outputs:
            state.staged_step = max(step, state.staged_step or 0)
        state.staged_folders[step] = [line.folder for line in lines.values()]
        await self._remove_step(step)
        await asyncio.to_thread(self._remove_old_folders)
        await asyncio.to_thread(context.cache.evict)

    def _lines_of(self, step: int) -> dict[int, CheckpointLine]:
        """Return what the ranks have reported of a step, or the one snapshot of what a script left."""
        state = self._follower.state
        if (snapshot := state.snapshots.get(step)) is not None:
            return {0: snapshot}
        return {
            rank: line for rank, each in sorted(state.ranks.items()) for line in each.checkpoints if line.step == step
        }

    async def _upload(self, step: int, lines: Mapping[int, CheckpointLine], paths: dict[str, Path]) -> int:
        """Upload the files and publish them as staged; return their bytes.

        Raises:
            UploadError: they cannot be uploaded.
            PoisonMessage: no reader would read the fact.
        """
        context, started = self._context, time.monotonic()
        bases = await self._load_bases() if self._placed.spec.checkpoints.delta else None
        uploader = CheckpointUploader(
            context.objects, context.settings.bucket_models, context.cache, context.known_blobs, bases
        )
        files = await uploader.upload(paths)
        if peer_files := await asyncio.to_thread(_read_peer_files, self._path_of(lines)):
            await uploader.renew(peer_files)
            files = tuple(sorted((*files, *peer_files), key=lambda file: file.path))
        staged = self._describe(step, lines, files, await uploader.upload_listing(files))
        await self._publish(staged)
        log.info(
            "checkpoint staged",
            step=step,
            files=len(files),
            bytes=staged.size_bytes,
            sent_bytes=uploader.sent_bytes,
            seconds=round(time.monotonic() - started, 3),
        )
        return staged.size_bytes

    def _path_of(self, lines: Mapping[int, CheckpointLine]) -> Path:
        return self._folder / next(iter(lines.values())).folder

    async def _list_outputs(self, step: int, lines: Mapping[int, CheckpointLine], paths: dict[str, Path]) -> int:
        """Upload what the script has written on this node, and list it for the node of rank 0; return its bytes.

        Raises:
            UploadError: it cannot be uploaded.
        """
        context = self._context
        uploader = CheckpointUploader(
            context.objects, context.settings.bucket_models, context.cache, context.known_blobs
        )
        content = await asyncio.to_thread(node_snapshot_path(self._path_of(lines)).read_bytes)
        snapshot = NodeSnapshot.model_validate_json(content)
        files = await uploader.upload(paths)
        listed = NodeOutputs(files=files, packed=snapshot.packed, deleted=snapshot.deleted)
        listing = await uploader.store_listing(listed.model_dump_json(exclude_defaults=True).encode(), files)
        await self._put_ref(listing=listing, requests=snapshot.requests)
        log.info("outputs listed", step=step, files=len(files), bytes=listing.files_bytes)
        return listing.files_bytes

    async def _put_ref(self, **changes: Any) -> None:
        ref = self._read_ref().model_copy(update=changes)
        # Before it is published: a restarted agent must not list less.
        await asyncio.to_thread(write_if_space, self._ref_path, ref.model_dump_json())
        await self._context.bus.put_in_bucket(topology.OUTPUTS, ref.key, ref.model_dump_json().encode())

    def _read_ref(self) -> NodeOutputsRef:
        if self._ref_path.is_file():
            return NodeOutputsRef.model_validate_json(self._ref_path.read_bytes())
        return NodeOutputsRef(
            run_id=self._placed.run_id,
            generation=self._placed.generation,
            node_id=self._member.node_id,
        )

    def _describe(
        self,
        step: int,
        lines: Mapping[int, CheckpointLine],
        files: tuple[CheckpointFile, ...],
        listing: FileListing | None,
    ) -> CheckpointStaged:
        first = next(iter(lines.values()))
        return CheckpointStaged(
            run_id=self._placed.run_id,
            generation=self._placed.generation,
            node_id=self._member.node_id,
            # A command reports for all of its node's ranks.
            ranks=self._member.ranks if self._placed.spec.command is not None else tuple(lines),
            world_size=self._placed.world_size,
            step=step,
            epoch=first.epoch,
            samples_consumed=first.samples_consumed,
            is_whole=step in self._follower.state.snapshots,
            step_is_count=first.step_is_count,
            files=() if listing is not None else files,
            listing=listing,
            metrics=first.metrics,
            final=any(line.final for line in lines.values()),
            exactness="exact" if all(line.exactness == "exact" for line in lines.values()) else "samples-exact",
        )

    async def _load_bases(self) -> DeltaBases:
        """Return the part of the run's last committed checkpoint that this node has; before one, of what it resumed."""
        last = await self._context.bus.get_last_message(
            subjects.fact("run", self._placed.run_id, CheckpointCommitted.fact)
        )
        ref = last.event.checkpoint if last is not None else self._placed.resume
        if ref is None:
            return DeltaBases()
        try:
            files = await self._context.cache.manifest_files(ref.uri)
        except CacheError as error:
            log.warning("the last checkpoint cannot be read, all chunks are stored whole", error=str(error))
            return DeltaBases()
        return await asyncio.to_thread(find_bases, ref.step, files, self._context.cache)

    async def _remove_step(self, step: int) -> None:
        self._follower.state.snapshots.pop(step, None)
        for each in self._follower.state.ranks.values():
            each.checkpoints = [line for line in each.checkpoints if line.step != step]
        await self._follower.save()

    def _remove_old_folders(self) -> None:
        folders = self._follower.state.staged_folders
        for step in sorted(folders)[:-KEEP_FOLDERS]:
            for name in folders.pop(step):
                path = self._folder / name
                if path != self._folder and is_inside(path, self._folder):
                    shutil.rmtree(path, ignore_errors=True)
                    for beside in (peer_files_path(path), node_snapshot_path(path)):
                        beside.unlink(missing_ok=True)


def _read_peer_files(packed: Path) -> tuple[CheckpointFile, ...]:
    path = peer_files_path(packed)
    return files_of(path.read_bytes()) if path.is_file() else ()


def ready_steps(checkpoints: Mapping[int, Sequence[CheckpointLine]], *, at_end: bool) -> list[int]:
    """Return the steps that every local rank has completed; at the end, those that any has."""
    steps = [{line.step for line in lines} for lines in checkpoints.values()]
    return sorted(set.union(*steps) if at_end else set.intersection(*steps)) if steps else []
