"""What this node has downloaded: verified, shared by all placements, bounded.

A file's name is its content (a hash), so what is there is right. It comes by a rename, so what is there is whole; but
nothing is flushed for it, so that after a start of the machine each is hashed before its first use. A placement holds
what it uses; only what nobody holds is evicted, oldest use first. The shards of datasets have a part of their own
(``shards.py``): what ranks will read is known there.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import psutil
import structlog
from pydantic import TypeAdapter, ValidationError

from contracts.events.checkpoint import CheckpointFile
from contracts.events.run import CheckpointRef
from contracts.events.train import Code
from services.kit.chunks import Range, restore_file
from services.kit.store.errors import ObjectNotFound
from services.kit.store.files import hash_file
from services.kit.store.objects import ObjectStore
from services.worker import metrics
from services.worker.cache.shard_cache import DatasetView, ShardCache, ShardError
from services.worker.cache.shard_files import shard_path
from services.worker.local_files import link_or_copy, write_atomically
from services.worker.together import together

log = structlog.get_logger(__name__)

PARALLEL_DOWNLOADS = 4
#: Pieces of a checkpoint at a time: many are small, and what they cost is mostly waiting.
PARALLEL_PIECES = 8
#: Where the shards are, in the cache's folder.
SHARDS_FOLDER = "shards"
#: Files of a checkpoint with the optimizer's tensors (docs/checkpoints.md).
OPTIMIZER = re.compile(r"optimizer-\d+\.safetensors")
_FILES = TypeAdapter(tuple[CheckpointFile, ...])


class CacheError(ValueError):
    """What was asked for is not in the store or is not what it should be; the text says what to change."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    uri: str
    sha256: str
    path: Path


class NodeCache:
    """The node's downloads under one folder."""

    def __init__(self, folder: Path, objects: ObjectStore, max_bytes: int, shards: ShardCache | None = None) -> None:
        self.folder, self._objects, self._max_bytes = folder, objects, max_bytes
        self._shards = shards
        if shards is not None:
            shards.beside = self
        #: Bytes of everything but shards, as of the last look.
        self.other_bytes = 0
        self._locks: dict[Path, asyncio.Lock] = {}
        self._held: Counter[Path] = Counter()
        self._downloads = asyncio.Semaphore(PARALLEL_DOWNLOADS)
        self._pieces: dict[str, tuple[str, int, int]] | None = None
        self._pieces_lock = threading.Lock()  # uploads look from threads

    def blob(self, sha256: str) -> Path:
        return self.folder / "blobs" / sha256[:2] / sha256

    @asynccontextmanager
    async def holding(self) -> AsyncIterator[CachePins]:
        """What is taken from the cache inside the block is not evicted before it ends."""
        hold = CachePins(self)
        try:
            yield hold
        finally:
            for reading in hold.readings:
                reading.close()
            self._held.subtract(hold.paths)
            self._held += Counter()

    async def package(self, code: Code, hold: CachePins) -> Path:
        """The code package's file."""
        path = self.blob(code.sha256)
        try:
            await self._ensure([_Wanted(code.uri, code.sha256, path)], hold)
        except ObjectNotFound as error:
            raise CacheError(f"there is no code package at {code.uri}: upload it with `trainbus submit`") from error
        except ValueError as error:
            raise CacheError(f"code.sha256 does not fit the package: {error}. Upload it anew") from error
        return path

    async def dataset(
        self,
        manifest_uri: str,
        dataset_id: str,
        folder: Path,
        hold: CachePins,
        *,
        whole: Iterable[str] = (),
        guess: Iterable[str] = (),
    ) -> DatasetView:
        """Begin to read a dataset in ``folder``: its manifest is there at once, shards come as they are needed.

        Args:
            whole: splits whose shards are all there when this returns.
            guess: splits that the ranks here will read all of: they may be fetched before they say so.
        """
        assert self._shards is not None, "this cache was made without shards"
        manifest = self.folder / "datasets" / dataset_id / "manifest.json"
        self._hold([manifest], hold)
        try:
            content = await self._manifest(manifest_uri, dataset_id, manifest)
            reading = self._shards.open(content, dataset_id, manifest_uri, folder)
            hold.readings.append(reading)
            await reading.gather_limited(whole)
        except ObjectNotFound as error:
            raise CacheError(f"dataset {dataset_id} is not in the store ({error}): ingest it") from error
        except ShardError as error:
            raise CacheError(str(error)) from error
        except ValueError as error:
            raise CacheError(f"dataset {dataset_id} is damaged in the store: {error}. Ingest it anew") from error
        self._shards.guess(reading, guess)
        return reading

    async def _manifest(self, uri: str, dataset_id: str, path: Path) -> bytes:
        """The manifest's bytes: those that are here if they are still right."""
        async with self._locks.setdefault(path, asyncio.Lock()):
            if path.exists():
                content = await asyncio.to_thread(path.read_bytes)
                if hashlib.sha256(content).hexdigest() == dataset_id:
                    os.utime(path)
                    return content
                log.error("a cached manifest is damaged, fetching it anew", dataset_id=dataset_id)
                path.unlink(missing_ok=True)
            await self._objects.download(uri, path, sha256=dataset_id)
            return await asyncio.to_thread(path.read_bytes)

    def datasets(self) -> tuple[str, ...]:
        """The datasets of which every shard to train on lies here."""
        return tuple(sorted(path.parent.name for path in self.folder.glob("datasets/*/manifest.json") if _whole(path)))

    async def checkpoint(
        self,
        uri: str,
        folder: Path,
        hold: CachePins,
        manifest_sha256: str | None = None,
        *,
        weights_alone: bool = False,
    ) -> CheckpointRef:
        """Lay a committed checkpoint's files out in ``folder`` and say what it is.

        Args:
            manifest_sha256: what the manifest hashed to when it was committed, where that is known. It names every
                file by its hash, so that with it the whole checkpoint is the committed one.
            weights_alone: leave out the optimizer's tensors, which are most of the bytes.

        Raises:
            CacheError: it is not there, or not what was committed.
        """
        try:
            content = await self._objects.get(uri)
            found = hashlib.sha256(content).hexdigest()
            if manifest_sha256 is not None and manifest_sha256 != found:
                raise CacheError(
                    f"checkpoint {uri} is not the one that was committed: its manifest has SHA-256 {found}, not "
                    f"{manifest_sha256}. Run `trainbus checkpoints verify`, and start from another one"
                )
            manifest: dict[str, Any] = json.loads(content)
            files = _FILES.validate_python(manifest["files"])
            if weights_alone:
                files = tuple(file for file in files if not OPTIMIZER.fullmatch(file.path))
            ref = CheckpointRef(
                uri=uri,
                step=manifest["step"],
                epoch=manifest["epoch"],
                samples_consumed=manifest["samples_consumed"],
                manifest_sha256=found,
            )
            targets = [(folder / _relative(file.path), file) for file in files]
            await self._restore({file.sha256: file for file in files}.values(), hold)
        except CacheError:
            raise
        except ObjectNotFound as error:
            raise CacheError(f"checkpoint {uri} is not in the store, {error} is missing: choose another one") from error
        except (ValueError, KeyError, TypeError, ValidationError) as error:
            raise CacheError(f"checkpoint {uri} is damaged: {error}. Choose another one") from error
        for target, file in targets:
            await asyncio.to_thread(link_or_copy, self.blob(file.sha256), target)
        return ref

    async def files_of(self, uri: str) -> tuple[CheckpointFile, ...]:
        """What a manifest lists."""
        try:
            return _FILES.validate_python(json.loads(await self._objects.get(uri))["files"])
        except (ObjectNotFound, ValueError, KeyError, TypeError, ValidationError) as error:
            raise CacheError(f"the manifest {uri} cannot be used: {error!r}") from error

    async def _restore(self, files: Iterable[CheckpointFile], hold: CachePins) -> None:
        """Have the files whole: kept ones as they are, others of the pieces that are here and those that are not."""
        files = list(files)
        self._hold([self.blob(file.sha256) for file in files], hold)
        gate = asyncio.Semaphore(PARALLEL_PIECES)
        restored = await together(*(self._restore_one(file, gate) for file in files))
        if any(restored):
            await asyncio.to_thread(self.evict)

    async def _restore_one(self, file: CheckpointFile, gate: asyncio.Semaphore) -> bool:
        path = self.blob(file.sha256)
        async with self._locks.setdefault(path, asyncio.Lock()):
            if await asyncio.to_thread(_is_whole, path, file.sha256):
                os.utime(path)
                metrics.CACHE_LOOKUPS.labels("hit").inc()
                return False
            metrics.CACHE_LOOKUPS.labels("miss").inc()
            await restore_file(self._objects, file, path, local=self, gate=gate)
            await asyncio.to_thread(self._remember, file)
            return True

    def keep(self, path: Path, file: CheckpointFile) -> None:
        """Keep a file of ours that was hashed: whoever resumes here need not fetch it, nor what other files share."""
        link_or_copy(path, self.blob(file.sha256))
        self._remember(file)

    # -- pieces -------------------------------------------------------------

    def find(self, sha256: str) -> Range | None:
        """Where on this node a piece is: a file of its own, or a part of a checkpoint's file."""
        with self._pieces_lock:
            found = self._index().get(sha256)
        if found is None:
            path = self.blob(sha256)
            return Range(path, 0, path.stat().st_size) if _is_trusted(path) else None
        file, offset, size_bytes = found
        path = self.blob(file)
        return Range(path, offset, size_bytes) if _is_trusted(path) else None

    def _remember(self, file: CheckpointFile) -> None:
        if len(file.chunks) == 1:
            return
        pieces = [(chunk.sha256, chunk.size_bytes) for chunk in file.chunks]
        write_atomically(self._pieces_file(file.sha256), json.dumps(pieces))
        with self._pieces_lock:
            self._add_pieces(self._index(), file.sha256, pieces)

    def _forget(self, sha256: str) -> None:
        """A checkpoint's file is gone, and its pieces with it."""
        pieces_file = self._pieces_file(sha256)
        if pieces_file.exists():
            pieces_file.unlink(missing_ok=True)
            with self._pieces_lock:
                # Read anew: of several files with a piece only the last one was known.
                self._pieces = None

    def _index(self) -> dict[str, tuple[str, int, int]]:
        """Piece -> (file, offset, bytes); what an earlier life kept is read on first use."""
        if self._pieces is None:
            self._pieces = {}
            for path in sorted((self.folder / "pieces").glob("*/*.json")):
                try:
                    self._add_pieces(self._pieces, path.stem, json.loads(path.read_bytes()))
                except (ValueError, TypeError, OSError) as error:
                    log.warning("what a kept file consists of cannot be read", path=str(path), error=str(error))
        return self._pieces

    @staticmethod
    def _add_pieces(index: dict[str, tuple[str, int, int]], file: str, pieces: Iterable[tuple[str, int]]) -> None:
        offset = 0
        for sha256, size_bytes in pieces:
            index[sha256] = (file, offset, size_bytes)
            offset += size_bytes

    def _pieces_file(self, sha256: str) -> Path:
        return self.folder / "pieces" / sha256[:2] / f"{sha256}.json"

    # -- files --------------------------------------------------------------

    def _hold(self, paths: list[Path], hold: CachePins) -> None:
        # Held before they are looked for: nothing is evicted between the look and the use.
        hold.paths += paths
        self._held.update(paths)

    async def _ensure(self, wanted: list[_Wanted], hold: CachePins) -> None:
        self._hold([each.path for each in wanted], hold)
        fetched = await together(*(self._ensure_one(each) for each in wanted))
        if any(fetched):
            await asyncio.to_thread(self.evict)

    async def _ensure_one(self, wanted: _Wanted) -> bool:
        """Whether it had to be fetched."""
        async with self._locks.setdefault(wanted.path, asyncio.Lock()):
            if await asyncio.to_thread(_is_whole, wanted.path, wanted.sha256):
                os.utime(wanted.path)
                metrics.CACHE_LOOKUPS.labels("hit").inc()
                return False
            metrics.CACHE_LOOKUPS.labels("miss").inc()
            async with self._downloads:
                await self._objects.download(wanted.uri, wanted.path, sha256=wanted.sha256)
            return True

    def evict(self) -> int:
        """Delete what nobody holds, oldest use first, until the cache fits; return the bytes freed."""
        shards_bytes = self._shards.size_bytes if self._shards is not None else 0
        files = self._others()
        freed = self._evict(files, self.other_bytes + shards_bytes - self._max_bytes)
        metrics.CACHE_BYTES.set(self.other_bytes + shards_bytes)
        return freed

    def evict_others(self, over_bytes: int) -> int:
        """Make room for shards: delete up to ``over_bytes`` of the rest that nobody holds; return the bytes freed."""
        return self._evict(self._others(), over_bytes)

    def _others(self) -> list[tuple[Path, os.stat_result]]:
        """Everything but shards, oldest use first."""
        index, shards = self.folder / "pieces", self.folder / SHARDS_FOLDER
        files = [
            (path, path.stat())
            for each in self.folder.glob("*")
            if each not in (index, shards)
            for path in each.rglob("*")
            if path.name[0] != "." and path.is_file()
        ]
        self.other_bytes = sum(stat.st_size for _, stat in files)
        return sorted(files, key=lambda each: each[1].st_mtime)

    def _evict(self, files: list[tuple[Path, os.stat_result]], over_bytes: int) -> int:
        freed = 0
        for path, stat in files:
            if freed >= over_bytes:
                break
            if not self._held.get(path):
                path.unlink(missing_ok=True)
                self._forget(path.name)
                freed += stat.st_size
        self.other_bytes -= freed
        return freed


class CachePins:
    """The files that one placement uses."""

    def __init__(self, cache: NodeCache) -> None:
        self.cache = cache
        self.paths: list[Path] = []
        self.readings: list[DatasetView] = []


def _is_trusted(path: Path) -> bool:
    """Whether a file is here that was written or hashed since the machine started."""
    try:
        return path.stat().st_mtime > float(psutil.boot_time())
    except OSError:
        return False


def _is_whole(path: Path, sha256: str) -> bool:
    """Whether a file is here and right. One that a power cut damaged is removed."""
    if _is_trusted(path):
        return True
    try:
        if hash_file(path) == sha256:
            return True
    except FileNotFoundError:
        return False
    except OSError as error:
        log.error("a cached file cannot be read", path=str(path), error=repr(error))
    log.error("a cached file is damaged, fetching it anew", path=str(path))
    path.unlink(missing_ok=True)
    return False


def _whole(manifest: Path) -> bool:
    """Whether the shards of the training split are here."""
    folder = manifest.parents[2] / SHARDS_FOLDER
    try:
        shards = json.loads(manifest.read_bytes())["splits"]["train"]["shards"]
        return all(shard_path(folder, str(shard["sha256"])).exists() for shard in shards)
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("a kept dataset cannot be read", path=str(manifest), error=repr(error))
        return False


def _relative(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"{name!r} leads out of its folder")
    return path
