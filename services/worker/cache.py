"""What this node has downloaded: verified, shared by all placements, bounded.

A file's name is its content (a hash), so what is there is right. It comes by a rename, so what is
there is whole. A placement holds what it uses; only what nobody holds is evicted, oldest use first.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import structlog
from pydantic import TypeAdapter, ValidationError

from contracts.events.checkpoint import CheckpointFile
from contracts.events.dataset import ShardFile
from contracts.events.run import CheckpointRef
from contracts.events.train import Code
from services.kit.objects import Missing, Objects, hash_file
from services.worker import metrics
from services.worker.files import join, link_or_copy
from services.worker.together import together

log = structlog.get_logger(__name__)

PARALLEL_DOWNLOADS = 4
_SHARDS = TypeAdapter(tuple[ShardFile, ...])
_FILES = TypeAdapter(tuple[CheckpointFile, ...])


class CacheError(ValueError):
    """What was asked for is not in the store or is not what it should be; the text says what to change."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    uri: str
    sha256: str
    path: Path


class Cache:
    """The node's downloads under one folder."""

    def __init__(self, folder: Path, objects: Objects, max_bytes: int) -> None:
        self.folder, self._objects, self._max_bytes = folder, objects, max_bytes
        self._locks: dict[Path, asyncio.Lock] = {}
        self._held: Counter[Path] = Counter()
        self._downloads = asyncio.Semaphore(PARALLEL_DOWNLOADS)

    def blob(self, sha256: str) -> Path:
        return self.folder / "blobs" / sha256[:2] / sha256

    @asynccontextmanager
    async def holding(self) -> AsyncIterator[Hold]:
        """What is taken from the cache inside the block is not evicted before it ends."""
        hold = Hold(self)
        try:
            yield hold
        finally:
            self._held.subtract(hold.paths)
            self._held += Counter()

    async def package(self, code: Code, hold: Hold) -> Path:
        """The code package's file."""
        path = self.blob(code.sha256)
        try:
            await self._ensure([_Wanted(code.uri, code.sha256, path)], hold)
        except Missing as error:
            raise CacheError(f"there is no code package at {code.uri}: upload it with `trainbus submit`") from error
        except ValueError as error:
            raise CacheError(f"code.sha256 does not fit the package: {error}. Upload it anew") from error
        return path

    async def dataset(self, manifest_uri: str, dataset_id: str, splits: Iterable[str], hold: Hold) -> Path:
        """A folder with the dataset's manifest, and the shards of ``splits`` beside it."""
        folder = self.folder / "datasets" / dataset_id
        base = manifest_uri.rsplit("/", 1)[0]
        manifest = folder / "manifest.json"
        try:
            await self._ensure([_Wanted(manifest_uri, dataset_id, manifest)], hold)
            described = json.loads(manifest.read_bytes())["splits"]
            wanted: list[_Wanted] = []
            for split in splits:
                for shard in _SHARDS.validate_python(described.get(split, {}).get("shards", ())):
                    wanted.append(_Wanted(f"{base}/{shard.path}", shard.sha256, folder / _relative(shard.path)))
                    index = folder / _relative(shard.index_path)
                    wanted.append(_Wanted(f"{base}/{shard.index_path}", shard.index_sha256, index))
            await self._ensure(wanted, hold)
        except Missing as error:
            raise CacheError(f"dataset {dataset_id} is not whole in the store ({error}): ingest it") from error
        except (ValueError, KeyError, ValidationError) as error:
            raise CacheError(f"dataset {dataset_id} is damaged in the store: {error}. Ingest it anew") from error
        return folder

    async def checkpoint(self, uri: str, folder: Path, hold: Hold) -> CheckpointRef:
        """Lay a committed checkpoint's files out in ``folder`` and say what it is."""
        try:
            manifest: dict[str, Any] = json.loads(await self._objects.get(uri))
            files = _FILES.validate_python(manifest["files"])
            ref = CheckpointRef(
                uri=uri,
                step=manifest["step"],
                epoch=manifest["epoch"],
                samples_consumed=manifest["samples_consumed"],
            )
            targets = [(folder / _relative(file.path), file) for file in files]
            chunks = {chunk.sha256: chunk for file in files for chunk in file.chunks}
            await self._ensure([_Wanted(each.uri, sha256, self.blob(sha256)) for sha256, each in chunks.items()], hold)
        except Missing as error:
            raise CacheError(f"checkpoint {uri} is not in the store, {error} is missing: choose another one") from error
        except (ValueError, KeyError, TypeError, ValidationError) as error:
            raise CacheError(f"checkpoint {uri} is damaged: {error}. Choose another one") from error
        for target, file in targets:
            await asyncio.to_thread(join, [self.blob(chunk.sha256) for chunk in file.chunks], target)
        return ref

    def add(self, path: Path, sha256: str) -> None:
        """Keep a file of ours whose hash is known: a run resumed here need not fetch it again."""
        link_or_copy(path, self.blob(sha256))

    async def _ensure(self, wanted: list[_Wanted], hold: Hold) -> None:
        # Held before they are looked for: nothing is evicted between the look and the use.
        paths = [each.path for each in wanted]
        hold.paths += paths
        self._held.update(paths)
        fetched = await together(*(self._ensure_one(each) for each in wanted))
        if any(fetched):
            await asyncio.to_thread(self.evict)

    async def _ensure_one(self, wanted: _Wanted) -> bool:
        """Whether it had to be fetched."""
        async with self._locks.setdefault(wanted.path, asyncio.Lock()):
            if wanted.path.exists():
                os.utime(wanted.path)
                metrics.CACHE_LOOKUPS.labels("hit").inc()
                return False
            metrics.CACHE_LOOKUPS.labels("miss").inc()
            async with self._downloads:
                await self._objects.download(wanted.uri, wanted.path, sha256=wanted.sha256)
            return True

    def evict(self) -> int:
        """Delete what nobody holds, oldest use first, until the cache fits; return the bytes freed."""
        files = [(path, path.stat()) for path in self.folder.rglob("*") if path.is_file() and path.name[0] != "."]
        size_bytes = sum(stat.st_size for _, stat in files)
        freed = 0
        for path, stat in sorted(files, key=lambda each: each[1].st_mtime):
            if size_bytes - freed <= self._max_bytes:
                break
            if not self._held.get(path):
                path.unlink(missing_ok=True)
                freed += stat.st_size
        metrics.CACHE_BYTES.set(size_bytes - freed)
        return freed

    async def verify(self) -> list[Path]:
        """Remove blobs whose bytes are no longer what their names say; return them."""
        wrong = []
        for path in (self.folder / "blobs").glob("*/*"):
            if path.name[0] != "." and await asyncio.to_thread(hash_file, path) != path.name:
                path.unlink(missing_ok=True)
                wrong.append(path)
        return wrong


class Hold:
    """The files that one placement uses."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.paths: list[Path] = []


def _relative(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"{name!r} leads out of its folder")
    return path
