"""Shards on this node's disk: each under its hash, verified when it comes and when it is used again.

``<ab>/<sha256>`` is a shard, ``<sha256>.idx`` its index and ``<sha256>.json`` its fast hash (xxh3), by which it is
checked before another run, or another life of the agent, relies on it. The shard is put in its place last.
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
from services.kit.store.ranged import RangedDownloader
from services.worker import metrics
from services.worker.core.prefetch_schedule import CachedShard
from services.worker.local_files import write_atomically

log = structlog.get_logger(__name__)


class ShardFiles:
    """The shards in one folder. ``warm``: a folder shared by nodes that is looked into before the store."""

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
        #: Bytes of all that is present.
        self.size_bytes = sum(each.size_bytes for each in self.present.values())

    def path(self, sha256: str) -> Path:
        return shard_path(self.folder, sha256)

    def index(self, sha256: str) -> Path:
        return _beside(self.path(sha256), ".idx")

    async def fetch(self, shard: ShardFile, bucket: str, turn: Callable[[], Awaitable[None]]) -> None:
        """Bring a shard and its index here.

        Raises:
            ObjectNotFound, ObjectCorrupted, StoreRefused: it cannot be had.
            TransientError: the store does not answer.
            OSError: there is no room.
        """
        path = self.path(shard.sha256)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Of its own: a thread that copies goes on for a moment when whoever waited for it is cancelled.
        part = path.with_name(f".{path.name}.{next(self._numbers)}.part")
        tier = "warm"
        fast = await asyncio.to_thread(self._from_warm, shard, part)
        try:
            if fast is None:
                tier = "cold"
                fast = await self._from_store(shard, bucket, part, turn)
            try:
                await run_in_thread(self._place, shard, part, fast)
            finally:  # also when nobody needs it any more: it takes room
                if self.path(shard.sha256).exists():
                    self._note(shard)
        finally:
            part.unlink(missing_ok=True)
            _beside(part, ".idx").unlink(missing_ok=True)
        metrics.SHARD_BYTES.labels(tier).inc(shard.size_bytes + shard.index_bytes)
        if tier == "cold" and self._warm is not None:
            await asyncio.to_thread(self._fill_warm, shard)

    async def check(self, shard: ShardFile) -> bool:
        """Whether the shard and index here are still what they were; if not, they are removed."""
        sound = await asyncio.to_thread(self._is_sound, shard)
        if sound:
            self.touch(shard.sha256)
            metrics.SHARD_BYTES.labels("hot").inc(shard.size_bytes + shard.index_bytes)
        else:
            log.error("a cached shard is damaged, fetching it anew", shard=shard.path, sha256=shard.sha256)
            metrics.SHARDS_CORRUPTED.labels("hot").inc()
            self.remove(shard.sha256)
        return sound

    def touch(self, sha256: str) -> None:
        """Note that it is used."""
        if (there := self.present.get(sha256)) is not None:
            self.present[sha256] = CachedShard(there.size_bytes, time.time())
            with suppress(OSError):
                os.utime(self.path(sha256))

    def remove(self, sha256: str) -> int:
        """Delete a shard; whoever has it open keeps what is open. Return the bytes."""
        there = self.present.pop(sha256, None)
        path = self.path(sha256)
        if there is not None:
            self.size_bytes -= there.size_bytes
        for each in (path, _beside(path, ".idx"), _beside(path, ".json")):
            each.unlink(missing_ok=True)
        return there.size_bytes if there is not None else 0

    # -- coming -------------------------------------------------------------

    async def _from_store(self, shard: ShardFile, bucket: str, part: Path, turn: Callable[[], Awaitable[None]]) -> str:
        index, uri = _beside(part, ".idx"), shard_uri(bucket, shard.index_sha256)
        if shard.index_bytes:
            await self._downloader.download(
                uri, index, size_bytes=shard.index_bytes, sha256=shard.index_sha256, before_range=turn
            )
        else:  # a manifest that does not say how large it is
            await self._objects.download(uri, index, sha256=shard.index_sha256)
        return await self._downloader.download(
            shard_uri(bucket, shard.sha256), part, size_bytes=shard.size_bytes, sha256=shard.sha256, before_range=turn
        )

    def _place(self, shard: ShardFile, part: Path, fast: str) -> None:
        path = self.path(shard.sha256)
        _beside(part, ".idx").replace(self.index(shard.sha256))
        write_atomically(_beside(path, ".json"), json.dumps({"xxh3": fast}))
        part.chmod(0o444)  # shared by runs, none of which may change it
        part.replace(path)

    def _note(self, shard: ShardFile) -> None:
        """It is here."""
        before = self.present.get(shard.sha256)
        self.present[shard.sha256] = CachedShard(shard.size_bytes + shard.index_bytes, time.time())
        self.size_bytes += shard.size_bytes + shard.index_bytes - (before.size_bytes if before is not None else 0)

    def _from_warm(self, shard: ShardFile, part: Path) -> str | None:
        """Copy it from the shared folder; None if it is not there or not what it should be."""
        if self._warm is None:
            return None
        source = shard_path(self._warm, shard.sha256)
        try:
            _copy_verified(_beside(source, ".idx"), _beside(part, ".idx"), shard.index_sha256)
            return _copy_verified(source, part, shard.sha256)
        except FileNotFoundError:
            return None
        except (OSError, ObjectCorrupted) as error:
            log.warning("the shared folder's copy cannot be used", shard=shard.path, error=str(error))
            if isinstance(error, ObjectCorrupted):
                metrics.SHARDS_CORRUPTED.labels("warm").inc()
                with suppress(OSError):
                    source.unlink()
                    _beside(source, ".idx").unlink()
            return None

    def _fill_warm(self, shard: ShardFile) -> None:
        """Leave a copy for the other nodes, where that is allowed and there is room."""
        assert self._warm is not None
        target = shard_path(self._warm, shard.sha256)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            _copy_atomically(self.index(shard.sha256), _beside(target, ".idx"))
            _copy_atomically(self.path(shard.sha256), target)
        except OSError as error:
            log.info("the shared folder takes no copy", folder=str(self._warm), error=str(error))

    # -- being here ---------------------------------------------------------

    def _is_sound(self, shard: ShardFile) -> bool:
        path = self.path(shard.sha256)
        try:
            if path.stat().st_size != shard.size_bytes or _hash(self.index(shard.sha256))[0] != shard.index_sha256:
                return False
            fast = _fast_hash(path)
            if fast == _noted_hash(_beside(path, ".json")):
                return True
            # The note may be what is wrong.
            if _hash(path)[0] != shard.sha256:
                return False
            write_atomically(_beside(path, ".json"), json.dumps({"xxh3": fast}))
        except OSError as error:
            log.warning("a cached shard cannot be read", shard=shard.path, error=str(error))
            return False
        return True

    def _scan(self) -> dict[str, CachedShard]:
        """What an earlier life left; half files are removed."""
        found: dict[str, CachedShard] = {}
        for path in self.folder.glob("*/*"):
            if path.name[0] == ".":
                path.unlink(missing_ok=True)
            elif not path.suffix:
                stat, index = path.stat(), _beside(path, ".idx")
                size_bytes = stat.st_size + (index.stat().st_size if index.exists() else 0)
                found[path.name] = CachedShard(size_bytes, stat.st_mtime)
        for path in self.folder.glob("*/*.*"):
            if path.name[0] != "." and path.stem not in found:
                path.unlink(missing_ok=True)
        return found


def shard_path(folder: Path, sha256: str) -> Path:
    return folder / sha256[:2] / sha256


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _noted_hash(path: Path) -> str:
    """The fast hash that was noted; '' where it cannot be read."""
    try:
        return str(json.loads(path.read_bytes())["xxh3"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _hash(path: Path, into: int | None = None) -> tuple[str, str]:
    """SHA-256 and xxh3 of a file, which is written to the handle ``into`` on the way."""
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
    """Copy a file whose hash is known; return its xxh3."""
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
