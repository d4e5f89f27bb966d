"""The shards on a node's disk, named by hash, verified when they are fetched and before another run uses them.

``<ab>/<sha256>`` is a shard, ``<sha256>.idx`` its index and ``<sha256>.json`` its fast hash (xxh3), by which it is
verified before another run, or another life of the agent, uses it. The shard is renamed into place last.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
import shutil
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import structlog
import xxhash

from contracts.datasets import shard_uri
from contracts.events.dataset import ShardFile
from services.kit.concurrency import run_in_thread
from services.kit.store.errors import ObjectCorrupted
from services.kit.store.files import READ_BYTES
from services.kit.store.objects import ObjectStore
from services.kit.store.ranged_download import RangedDownloader
from services.worker import metrics
from services.worker.core.prefetch_schedule import CachedShard
from services.worker.local_files import write_atomically, write_if_space

log = structlog.get_logger(__name__)


class ShardFiles:
    """The shards in one folder. ``warm``: a folder shared by nodes, which is read before the store."""

    def __init__(
        self,
        folder: Path,
        objects: ObjectStore,
        downloader: RangedDownloader,
        warm: Path | None = None,
    ) -> None:
        self.folder, self._objects, self._downloader, self._warm = folder, objects, downloader, warm
        self._numbers = itertools.count()
        self.present = self._scan()
        #: Bytes of all of them.
        self.size_bytes = sum(each.size_bytes for each in self.present.values())

    def path(self, sha256: str) -> Path:
        return shard_path(self.folder, sha256)

    def index(self, sha256: str) -> Path:
        return _with_suffix(self.path(sha256), ".idx")

    async def fetch(self, shard: ShardFile, bucket: str, turn: Callable[[], Awaitable[None]]) -> None:
        """Fetch a shard and its index.

        Raises:
            ObjectNotFound, ObjectCorrupted, StoreRefused: it cannot be had.
            TransientError: the store does not answer.
            OSError: there is no room.
        """
        path = self.path(shard.sha256)
        path.parent.mkdir(parents=True, exist_ok=True)
        # A name of its own: a thread that copies goes on for a moment after its caller is cancelled.
        part = path.with_name(f".{path.name}.{next(self._numbers)}.part")
        tier = "warm"
        fast = await asyncio.to_thread(self._from_warm, shard, part)
        try:
            if fast is None:
                tier = "cold"
                fast = await self._from_store(shard, bucket, part, turn)
            try:
                await run_in_thread(self._place, shard, part, fast)
            finally:  # also for a cancelled caller: the file takes room
                if self.path(shard.sha256).exists():
                    self._add_present(shard)
        finally:
            part.unlink(missing_ok=True)
            _with_suffix(part, ".idx").unlink(missing_ok=True)
        metrics.SHARD_BYTES.labels(tier).inc(shard.size_bytes + shard.index_bytes)
        if tier == "cold" and self._warm is not None:
            await asyncio.to_thread(self._fill_warm, shard)

    async def check(self, shard: ShardFile) -> bool:
        """Verify a shard and its index; remove them if they do not match their hashes."""
        is_intact = await asyncio.to_thread(self._is_intact, shard)
        if is_intact:
            self.touch(shard.sha256)
            metrics.SHARD_BYTES.labels("hot").inc(shard.size_bytes + shard.index_bytes)
        else:
            log.error("a cached shard is corrupted, fetching it again", shard=shard.path, sha256=shard.sha256)
            metrics.SHARDS_CORRUPTED.labels("hot").inc()
            self.remove(shard.sha256)
        return is_intact

    def touch(self, sha256: str) -> None:
        """Note that a shard is used."""
        if (there := self.present.get(sha256)) is not None:
            self.present[sha256] = CachedShard(there.size_bytes, time.time())
            with suppress(OSError):
                os.utime(self.path(sha256))

    def remove(self, sha256: str) -> int:
        """Delete a shard and return its bytes; readers that have it open are not affected."""
        removed = self.present.pop(sha256, None)
        path = self.path(sha256)
        if removed is not None:
            self.size_bytes -= removed.size_bytes
        for each in (path, _with_suffix(path, ".idx"), _with_suffix(path, ".json")):
            each.unlink(missing_ok=True)
        return removed.size_bytes if removed is not None else 0

    # -- fetching -----------------------------------------------------------

    async def _from_store(self, shard: ShardFile, bucket: str, part: Path, turn: Callable[[], Awaitable[None]]) -> str:
        index, uri = _with_suffix(part, ".idx"), shard_uri(bucket, shard.index_sha256)
        if shard.index_bytes:
            await self._downloader.download(
                uri, index, size_bytes=shard.index_bytes, sha256=shard.index_sha256, before_range=turn
            )
        else:  # a manifest without the index's size
            await self._objects.download(uri, index, sha256=shard.index_sha256)
        return await self._downloader.download(
            shard_uri(bucket, shard.sha256), part, size_bytes=shard.size_bytes, sha256=shard.sha256, before_range=turn
        )

    def _place(self, shard: ShardFile, part: Path, fast: str) -> None:
        path = self.path(shard.sha256)
        _with_suffix(part, ".idx").replace(self.index(shard.sha256))
        write_atomically(_with_suffix(path, ".json"), json.dumps({"xxh3": fast}))
        part.chmod(0o444)  # runs share it, and none may change it
        part.replace(path)

    def _add_present(self, shard: ShardFile) -> None:
        before = self.present.get(shard.sha256)
        self.present[shard.sha256] = CachedShard(shard.size_bytes + shard.index_bytes, time.time())
        self.size_bytes += shard.size_bytes + shard.index_bytes - (before.size_bytes if before is not None else 0)

    def _from_warm(self, shard: ShardFile, part: Path) -> str | None:
        """Copy a shard from the shared folder and return its xxh3; None if it is not there or corrupted."""
        if self._warm is None:
            return None
        source = shard_path(self._warm, shard.sha256)
        try:
            _copy_verified(_with_suffix(source, ".idx"), _with_suffix(part, ".idx"), shard.index_sha256)
            return _copy_verified(source, part, shard.sha256)
        except FileNotFoundError:
            return None
        except (OSError, ObjectCorrupted) as error:
            log.warning("the copy in the shared folder cannot be used", shard=shard.path, error=str(error))
            if isinstance(error, ObjectCorrupted):
                metrics.SHARDS_CORRUPTED.labels("warm").inc()
                with suppress(OSError):
                    source.unlink()
                    _with_suffix(source, ".idx").unlink()
            return None

    def _fill_warm(self, shard: ShardFile) -> None:
        """Write a copy for the other nodes, if the folder is writable and has room."""
        assert self._warm is not None
        target = shard_path(self._warm, shard.sha256)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            _copy_atomically(self.index(shard.sha256), _with_suffix(target, ".idx"))
            _copy_atomically(self.path(shard.sha256), target)
        except OSError as error:
            log.info("the shared folder accepts no copy", folder=str(self._warm), error=str(error))

    # -- verifying ----------------------------------------------------------

    def _is_intact(self, shard: ShardFile) -> bool:
        path = self.path(shard.sha256)
        try:
            if path.stat().st_size != shard.size_bytes or _hash(self.index(shard.sha256))[0] != shard.index_sha256:
                return False
            fast = _fast_hash(path)
            if fast == _noted_hash(_with_suffix(path, ".json")):
                return True
            # The noted hash may be the wrong one.
            if _hash(path)[0] != shard.sha256:
                return False
            write_if_space(_with_suffix(path, ".json"), json.dumps({"xxh3": fast}))
        except OSError as error:
            log.warning("a cached shard cannot be read", shard=shard.path, error=str(error))
            return False
        return True

    def _scan(self) -> dict[str, CachedShard]:
        """Return the shards that an earlier life fetched; remove partial files."""
        found: dict[str, CachedShard] = {}
        for path in self.folder.glob("*/*"):
            if path.name[0] == ".":
                path.unlink(missing_ok=True)
            elif not path.suffix:
                stat, index = path.stat(), _with_suffix(path, ".idx")
                size_bytes = stat.st_size + (index.stat().st_size if index.exists() else 0)
                found[path.name] = CachedShard(size_bytes, stat.st_mtime)
        for path in self.folder.glob("*/*.*"):
            if path.name[0] != "." and path.stem not in found:
                path.unlink(missing_ok=True)
        return found


def shard_path(folder: Path, sha256: str) -> Path:
    return folder / sha256[:2] / sha256


def _with_suffix(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _noted_hash(path: Path) -> str:
    """Return the noted xxh3; '' if it cannot be read."""
    try:
        return str(json.loads(path.read_bytes())["xxh3"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _hash(path: Path, into: int | None = None) -> tuple[str, str]:
    """Return SHA-256 and xxh3 of a file; write its bytes to the handle ``into``."""
    digest, fast = hashlib.sha256(), xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while content := file.read(READ_BYTES):
            digest.update(content)
            fast.update(content)
            if into is not None:
                view = memoryview(content)
                while view:
                    view = view[os.write(into, view) :]
    return digest.hexdigest(), fast.hexdigest()


def _fast_hash(path: Path) -> str:
    fast = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while content := file.read(READ_BYTES):
            fast.update(content)
    return fast.hexdigest()


def _copy_verified(source: Path, target: Path, sha256: str) -> str:
    """Copy a file and verify its SHA-256; return its xxh3."""
    handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        digest, fast = _hash(source, handle)
    finally:
        os.close(handle)
    if digest != sha256:
        raise ObjectCorrupted(f"{source} has hash {digest}, expected {sha256}")
    return fast


def _copy_atomically(source: Path, target: Path) -> None:
    if target.exists():
        return
    # Other nodes fill the same folder.
    partial = target.with_name(f".{target.name}.{os.getpid()}.{time.monotonic_ns()}")
    try:
        shutil.copyfile(source, partial)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
