"""The files that a node has downloaded: verified, shared by all generations, evicted by last use.

A file is named by the hash of its content, and renamed into place when it is whole. Since it is not flushed to the
disk, each file is hashed before its first use after the machine has started. A generation pins what it uses.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import structlog

from contracts.events.checkpoint import CheckpointFile
from services.kit.chunks import FileRange
from services.kit.store.files import hash_file
from services.kit.store.objects import ObjectStore
from services.worker import metrics
from services.worker.cache.cached_trees import CachedTrees
from services.worker.local_files import write_atomically

log = structlog.get_logger(__name__)


class ChunkIndex:
    """Chunk -> (file, offset, bytes), of files with several chunks. Uploads read it from threads.

    ``<ab>/<sha256 of the file>.json`` lists the file's chunks.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._places: dict[str, tuple[str, int, int]] | None = None
        self._lock = threading.Lock()

    def find(self, sha256: str) -> tuple[str, int, int] | None:
        """Return the file that has a chunk, with the chunk's offset and bytes."""
        with self._lock:
            return self._load_index().get(sha256)

    def add(self, file: CheckpointFile) -> None:
        """Note the chunks of a file that is in the cache."""
        if len(file.chunks) == 1:
            return
        chunks = [(chunk.sha256, chunk.size_bytes) for chunk in file.chunks]
        write_atomically(self._path(file.sha256), json.dumps(chunks))
        with self._lock:
            _add_chunks(self._load_index(), file.sha256, chunks)

    def remove(self, sha256: str) -> None:
        """Forget the chunks of a file that was evicted."""
        path = self._path(sha256)
        if path.exists():
            path.unlink(missing_ok=True)
            with self._lock:
                # Read the folder again: of several files with the same chunk only one was known.
                self._places = None

    def _load_index(self) -> dict[str, tuple[str, int, int]]:
        """Return the index; what an earlier life of the agent wrote is read on first use."""
        if self._places is None:
            self._places = {}
            for path in sorted(self.folder.glob("*/*.json")):
                try:
                    _add_chunks(self._places, path.stem, json.loads(path.read_bytes()))
                except (ValueError, TypeError, OSError) as error:
                    log.warning("the chunks of a cached file cannot be read", path=str(path), error=str(error))
        return self._places

    def _path(self, sha256: str) -> Path:
        return self.folder / sha256[:2] / f"{sha256}.json"


def _add_chunks(places: dict[str, tuple[str, int, int]], file: str, chunks: Iterable[tuple[str, int]]) -> None:
    offset = 0
    for sha256, size_bytes in chunks:
        places[sha256] = (file, offset, size_bytes)
        offset += size_bytes


PARALLEL_DOWNLOADS = 4


class FileCache:
    """Blobs, manifests and trees under one folder. ``excluded``: folders in it that are not the cache's own."""

    def __init__(self, folder: Path, objects: ObjectStore, excluded: Iterable[Path] = ()) -> None:
        self.folder, self._objects = folder, objects
        self.chunks, self.trees = ChunkIndex(folder / "chunks"), CachedTrees(folder / "trees")
        self._excluded = {self.chunks.folder, self.trees.folder, *excluded}
        #: Bytes of all files, as of the last listing.
        self.size_bytes = 0
        self._locks: dict[Path, asyncio.Lock] = {}
        self._pinned: Counter[Path] = Counter()
        self._downloads = asyncio.Semaphore(PARALLEL_DOWNLOADS)

    def blob(self, sha256: str) -> Path:
        """Return the path of a blob."""
        return self.folder / "blobs" / sha256[:2] / sha256

    def lock(self, path: Path) -> asyncio.Lock:
        """Return the lock of a file: one task at a time fetches it."""
        return self._locks.setdefault(path, asyncio.Lock())

    @asynccontextmanager
    async def pin(self) -> AsyncIterator[list[Path]]:
        """Yield pins: the files that are added to them are not evicted before the block ends."""
        pins: list[Path] = []
        try:
            yield pins
        finally:
            self._pinned.subtract(pins)
            self._pinned += Counter()

    def add_pins(self, paths: Sequence[Path], pins: list[Path]) -> None:
        """Pin files, before they are looked for: none is evicted before its use."""
        pins += paths
        self._pinned.update(paths)

    def has(self, sha256: str) -> bool:
        """Whether a blob, which the caller has pinned, is here and whole."""
        return _is_intact(self.blob(sha256), sha256)

    async def ensure(self, sha256: str, fetch: Callable[[Path], Awaitable[object]]) -> bool:
        """Have a blob, which the caller has pinned; return whether ``fetch`` had to write it."""
        path = self.blob(sha256)
        async with self.lock(path):
            if await asyncio.to_thread(_is_intact, path, sha256):
                os.utime(path)
                metrics.CACHE_LOOKUPS.labels("hit").inc()
                return False
            metrics.CACHE_LOOKUPS.labels("miss").inc()
            await fetch(path)
            return True

    async def download(self, uri: str, path: Path, sha256: str) -> None:
        """Download and verify one file."""
        async with self._downloads:
            await self._objects.download(uri, path, sha256=sha256)

    def find(self, sha256: str) -> FileRange | None:
        """Return where on this node a chunk is: a blob of its own, or a part of a checkpoint's file."""
        found = self.chunks.find(sha256)
        path = self.blob(found[0] if found is not None else sha256)
        if not _is_trusted(path):
            return None
        return FileRange(path, 0, path.stat().st_size) if found is None else FileRange(path, found[1], found[2])

    def evict(self, over_bytes: int) -> int:
        """Delete up to ``over_bytes`` of unpinned files, oldest use first; return the bytes freed."""
        return self._evict(self._list(), over_bytes)

    def evict_to(self, max_bytes: int) -> int:
        """Delete unpinned files, oldest use first, until ``max_bytes`` remain; return the bytes freed."""
        files = self._list()
        return self._evict(files, self.size_bytes - max_bytes)

    def _evict(self, files: list[tuple[Path, float, int]], over_bytes: int) -> int:
        freed = 0
        for path, _, size_bytes in files:
            if freed >= over_bytes:
                break
            if not self._pinned.get(path):
                self._remove(path)
                freed += size_bytes
        self.size_bytes -= freed
        return freed

    def _remove(self, path: Path) -> None:
        if path.parent == self.trees.folder:
            self.trees.remove(path.name)
        else:
            path.unlink(missing_ok=True)
            self.chunks.remove(path.name)

    def _list(self) -> list[tuple[Path, float, int]]:
        """Return path, time of last use and bytes of each file and each tree, the oldest use first."""
        files = [
            (path, (stat := path.stat()).st_mtime, stat.st_size)
            for each in self.folder.glob("*")
            if each not in self._excluded
            for path in each.rglob("*")
            if path.name[0] != "." and path.is_file()
        ]
        files += self.trees.list_trees()
        self.size_bytes = sum(size_bytes for _, _, size_bytes in files)
        return sorted(files, key=lambda each: each[1])


def _is_trusted(path: Path) -> bool:
    """Whether a file is here that was written or hashed since the machine started."""
    try:
        return path.stat().st_mtime > float(psutil.boot_time())
    except OSError:
        return False


def _is_intact(path: Path, sha256: str) -> bool:
    """Whether a file is here and has its hash. One that a power cut damaged is removed."""
    if _is_trusted(path):
        return True
    try:
        if hash_file(path) == sha256:
            return True
    except FileNotFoundError:
        return False
    except OSError as error:
        log.error("a cached file cannot be read", path=str(path), error=repr(error))
    log.error("a cached file is damaged, fetching it again", path=str(path))
    path.unlink(missing_ok=True)
    return False
