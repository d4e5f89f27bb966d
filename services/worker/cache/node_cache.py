"""The cache of a node: code packages, datasets and checkpoints, as generations use them, within one limit."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import structlog
from pydantic import ValidationError

from contracts.events.checkpoint import CheckpointFile, Chunk
from contracts.events.run import CheckpointRef
from contracts.manifest import files_of
from contracts.spec.run import Code
from contracts.tensor_files import TENSOR_KINDS, parse_tensors_file
from services.kit.chunks import FileRange, place_piece, restore_file
from services.kit.concurrency import gather_limited
from services.kit.store.errors import ObjectNotFound
from services.kit.store.objects import ObjectStore
from services.worker import metrics
from services.worker.cache.dataset_view import DatasetView, ShardError
from services.worker.cache.file_cache import FileCache
from services.worker.cache.partial_checkpoint import PartialCheckpoint
from services.worker.cache.shard_cache import ShardCache
from services.worker.cache.shard_files import shard_path
from services.worker.local_files import link_or_copy, relative_path, suppress_full_disk

log = structlog.get_logger(__name__)

#: Chunks of a checkpoint fetched at a time: many are small, and cost mostly waiting.
PARALLEL_CHUNKS = 8
#: Folder of the shards in the cache's folder.
SHARDS_FOLDER = "shards"


class CacheError(ValueError):
    """What was requested is not in the store, or is not what it should be; the text says what to change."""


class CachePins:
    """What one generation uses of the cache."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files
        self.views: list[DatasetView | PartialCheckpoint] = []


class NodeCache:
    """The downloads of a node. ``shards``: None where no datasets are read."""

    def __init__(
        self, files: FileCache, objects: ObjectStore, max_bytes: int, shards: ShardCache | None = None
    ) -> None:
        self.files, self._objects, self._max_bytes, self._shards = files, objects, max_bytes, shards

    @asynccontextmanager
    async def pin_files(self) -> AsyncIterator[CachePins]:
        """Yield pins: what is requested with them stays until the block ends."""
        async with self.files.pin() as file_pins:
            pins = CachePins(file_pins)
            try:
                yield pins
            finally:
                for view in pins.views:
                    view.close()

    def find(self, sha256: str) -> FileRange | None:
        """Return where on this node a chunk of a checkpoint is."""
        return self.files.find(sha256)

    def evict(self) -> int:
        """Delete files that are not pinned, oldest use first, until the cache fits; return the bytes freed."""
        shards_bytes = self._shards.size_bytes if self._shards is not None else 0
        freed = self.files.evict_to(self._max_bytes - shards_bytes)
        metrics.CACHE_BYTES.set(self.files.size_bytes + shards_bytes)
        return freed

    # -- code ---------------------------------------------------------------

    async def package(self, code: Code, pins: CachePins) -> Path:
        """Return the code package's file.

        Raises:
            CacheError: it is not in the store, or not what was submitted.
        """
        path = self.files.blob(code.sha256)
        self.files.add_pins([path], pins.files)
        try:
            if await self.files.ensure(code.sha256, lambda path: self.files.download(code.uri, path, code.sha256)):
                await asyncio.to_thread(self.evict)
        except ObjectNotFound as error:
            raise CacheError(f"there is no code package at {code.uri}: upload it with `trainbus submit`") from error
        except ValueError as error:
            raise CacheError(f"code.sha256 does not fit the package: {error}. Upload it again") from error
        return path

    # -- datasets -----------------------------------------------------------

    async def dataset(
        self,
        manifest_uri: str,
        dataset_id: str,
        folder: Path,
        pins: CachePins,
        *,
        whole: Iterable[str] = (),
        guess: Iterable[str] = (),
    ) -> DatasetView:
        """Open a dataset in ``folder``: its manifest is there at once, shards come as they are needed.

        Args:
            whole: splits whose shards are all there when this returns.
            guess: splits of which the ranks here will read everything: they may be fetched before the ranks' plans.

        Raises:
            CacheError: it is not in the store, or damaged there.
        """
        assert self._shards is not None, "this cache was made without shards"
        manifest = self._manifest_path(dataset_id)
        self.files.add_pins([manifest], pins.files)
        try:
            content = await self._manifest(manifest_uri, dataset_id, manifest)
            view = self._shards.open(content, dataset_id, manifest_uri, folder)
            pins.views.append(view)
            await view.fetch_splits(whole)
        except ObjectNotFound as error:
            raise CacheError(f"dataset {dataset_id} is not in the store ({error}): ingest it") from error
        except ShardError as error:
            raise CacheError(str(error)) from error
        except ValueError as error:
            raise CacheError(f"dataset {dataset_id} is damaged in the store: {error}. Ingest it again") from error
        self._shards.prefetch(view, guess)
        return view

    def datasets(self) -> tuple[str, ...]:
        """Return the datasets whose training split is here as shards."""
        manifests = self.files.folder.glob("datasets/*/manifest.json")
        return tuple(sorted(path.parent.name for path in manifests if self._has_train_split(path)))

    def _manifest_path(self, dataset_id: str) -> Path:
        return self.files.folder / "datasets" / dataset_id / "manifest.json"

    async def _manifest(self, uri: str, dataset_id: str, path: Path) -> bytes:
        """Return the manifest's bytes, from here if they still have their hash."""
        async with self.files.lock(path):
            if path.exists():
                content = await asyncio.to_thread(path.read_bytes)
                if hashlib.sha256(content).hexdigest() == dataset_id:
                    os.utime(path)
                    return content
                log.error("a cached manifest is damaged, fetching it again", dataset_id=dataset_id)
                path.unlink(missing_ok=True)
            await self._objects.download(uri, path, sha256=dataset_id)
            return await asyncio.to_thread(path.read_bytes)

    def _has_train_split(self, manifest: Path) -> bool:
        try:
            shards = json.loads(manifest.read_bytes())["splits"]["train"]["shards"]
            folder = self.files.folder / SHARDS_FOLDER
            return all(shard_path(folder, str(shard["sha256"])).exists() for shard in shards)
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("a cached dataset cannot be read", path=str(manifest), error=repr(error))
            return False

    # -- checkpoints --------------------------------------------------------

    async def checkpoint(
        self,
        uri: str,
        folder: Path,
        pins: CachePins,
        manifest_sha256: str | None = None,
        *,
        weights_only: bool = False,
    ) -> CheckpointRef:
        """Lay a committed checkpoint's files out in ``folder`` and return what it is.

        Args:
            manifest_sha256: the manifest's hash when it was committed, where that is known. The manifest names every
                file by its hash, so that with it the whole checkpoint is the committed one.
            weights_only: leave out the optimizer's tensors, which are most of the bytes.

        Raises:
            CacheError: it is not there, or not what was committed.
        """
        with _explain_damage(uri):
            ref, files = await self._read_manifest(uri, manifest_sha256)
            if weights_only:
                files = tuple(file for file in files if _kind_of(file) != "optimizer")
            await self._lay_out(files, folder, pins)
        return ref

    async def partial_checkpoint(
        self,
        uri: str,
        folder: Path,
        pins: CachePins,
        manifest_sha256: str | None = None,
        *,
        kinds: Collection[str] = TENSOR_KINDS,
    ) -> tuple[CheckpointRef, PartialCheckpoint]:
        """Lay a committed checkpoint's files out, those with tensors without the bytes that this node does not have.

        Args:
            kinds: of tensors; other kinds' files are laid out whole.

        The other arguments and the errors are as in ``checkpoint``.
        """
        with _explain_damage(uri):
            ref, files = await self._read_manifest(uri, manifest_sha256)
            self.files.add_pins([self.files.blob(file.sha256) for file in files], pins.files)
            absent = {
                file.path: file
                for file in files
                if _kind_of(file) in kinds and not await asyncio.to_thread(self.files.has, file.sha256)
            }
            await self._lay_out([file for file in files if file.path not in absent], folder, pins)
            partial = self._open_parts(uri, folder, absent.values(), pins)
            await partial.fill_beginnings()
        return ref, partial

    async def reopen_checkpoint(self, ref: CheckpointRef, folder: Path, pins: CachePins) -> PartialCheckpoint:
        """Go on with what ``partial_checkpoint`` laid out in an earlier life of the agent; errors as there."""
        with _explain_damage(ref.uri):
            _, files = await self._read_manifest(ref.uri, ref.manifest_sha256)
            # Whatever was whole then: the pieces are verified before they are taken for present.
            tensors = [file for file in files if _kind_of(file) in TENSOR_KINDS]
            return self._open_parts(ref.uri, folder, tensors, pins)

    def _open_parts(
        self, uri: str, folder: Path, files: Iterable[CheckpointFile], pins: CachePins
    ) -> PartialCheckpoint:
        gate = asyncio.Semaphore(PARALLEL_CHUNKS)

        async def fetch(chunk: Chunk, path: Path, offset: int) -> None:
            async with gate:
                await place_piece(self._objects, chunk, path, offset, self.files)

        partial = PartialCheckpoint(uri, folder, files, fetch)
        pins.views.append(partial)
        return partial

    async def _read_manifest(
        self, uri: str, manifest_sha256: str | None
    ) -> tuple[CheckpointRef, tuple[CheckpointFile, ...]]:
        content = await self._objects.get(uri)
        found = hashlib.sha256(content).hexdigest()
        if manifest_sha256 is not None and manifest_sha256 != found:
            raise CacheError(
                f"checkpoint {uri} is not the one that was committed: its manifest has SHA-256 {found}, not "
                f"{manifest_sha256}. Run `trainbus checkpoints verify`, and start from another one"
            )
        manifest: dict[str, Any] = json.loads(content)
        ref = CheckpointRef(
            uri=uri,
            step=manifest["step"],
            epoch=manifest["epoch"],
            samples_consumed=manifest["samples_consumed"],
            manifest_sha256=found,
            step_is_count=manifest.get("step_is_count", False),
        )
        return ref, files_of(content)

    async def _lay_out(self, files: Sequence[CheckpointFile], folder: Path, pins: CachePins) -> None:
        targets = [(folder / relative_path(file.path), file) for file in files]
        await self._restore({file.sha256: file for file in files}.values(), pins)
        for target, file in targets:
            await asyncio.to_thread(link_or_copy, self.files.blob(file.sha256), target)

    async def manifest_files(self, uri: str) -> tuple[CheckpointFile, ...]:
        """Return the files that a checkpoint's manifest lists.

        Raises:
            CacheError: there is no such manifest.
        """
        try:
            return files_of(await self._objects.get(uri))
        except (ObjectNotFound, ValueError) as error:
            raise CacheError(f"the manifest {uri} cannot be used: {error!r}") from error

    def add_checkpoint_file(self, path: Path, file: CheckpointFile) -> None:
        """Add a file that this node wrote and hashed: a generation that resumes here need not fetch it.

        On a full disk it is not added.
        """
        with suppress_full_disk():
            link_or_copy(path, self.files.blob(file.sha256))
            self.files.chunks.add(file)

    async def _restore(self, files: Iterable[CheckpointFile], pins: CachePins) -> None:
        """Have the files whole, from the chunks that are here and those in the store."""
        files = list(files)
        self.files.add_pins([self.files.blob(file.sha256) for file in files], pins.files)
        gate = asyncio.Semaphore(PARALLEL_CHUNKS)

        async def restore(file: CheckpointFile) -> bool:
            async def fetch(path: Path) -> None:
                await restore_file(self._objects, file, path, local=self.files, gate=gate)
                await asyncio.to_thread(self.files.chunks.add, file)

            return await self.files.ensure(file.sha256, fetch)

        restored = await gather_limited((restore(file) for file in files), limit=max(len(files), 1))
        if any(restored):
            await asyncio.to_thread(self.evict)


def _kind_of(file: CheckpointFile) -> str:
    """Return the kind of a file's tensors; '' if it has none."""
    named = parse_tensors_file(file.path)
    return "" if named is None else named[0]


@contextmanager
def _explain_damage(uri: str) -> Iterator[None]:
    """Raise CacheError in the place of what a checkpoint that is not there, or not what was committed, causes."""
    try:
        yield
    except CacheError:
        raise
    except ObjectNotFound as error:
        raise CacheError(f"checkpoint {uri} is not in the store, {error} is missing: choose another one") from error
    except (ValueError, KeyError, TypeError, ValidationError) as error:
        raise CacheError(f"checkpoint {uri} is damaged: {error}. Choose another one") from error
