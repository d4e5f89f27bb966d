"""The local cache of an ingestion's packs: each is fetched once, when needed; the bytes are bounded."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import structlog

from contracts.datasets import pack_name
from services.kit.concurrency import cancel_and_wait, gather_limited
from services.kit.store.errors import ObjectNotFound
from services.kit.store.objects import ObjectStore

log = structlog.get_logger(__name__)

PARALLEL_TRANSFERS = 4


class _NoHash:
    """Computes no hash: each record of a pack has its own."""

    def update(self, content: memoryview, /) -> None:
        return None

    def hexdigest(self) -> str:
        return ""


class PackCache:
    """Shares packs among the shards that are being written. It evicts packs that are not pinned, the oldest first."""

    def __init__(self, objects: ObjectStore, folder: Path, source_uri: str, max_bytes: int) -> None:
        self._objects, self._folder, self._source_uri, self._max_bytes = objects, folder, source_uri, max_bytes
        self._sizes: dict[int, int] = {}
        self._fetching: OrderedDict[int, asyncio.Task[Path]] = OrderedDict()
        self._pins: Counter[int] = Counter()
        #: How often a copy was corrupted. The next copy has another name, because others may be reading this one.
        self._corrupted: Counter[int] = Counter()
        self._transfers = asyncio.Semaphore(PARALLEL_TRANSFERS)
        self.held_bytes = 0
        folder.mkdir(parents=True, exist_ok=True)

    async def list_packs(self) -> None:
        """List the packs in the store."""
        async for info in self._objects.list(f"{self._source_uri}/pack-"):
            self._sizes[int(info.key.rpartition("-")[2])] = info.size_bytes

    def _path(self, number: int) -> Path:
        return self._folder / f"{pack_name(number)}.{self._corrupted[number]}"

    @asynccontextmanager
    async def pin(self, numbers: Iterable[int]) -> AsyncIterator[dict[int, Path]]:
        """Keep these packs on the disk during the block; yield their paths.

        Raises:
            ObjectNotFound: one of them is not in the store.
        """
        wanted = sorted(set(numbers))
        if gone := [number for number in wanted if number not in self._sizes]:
            raise ObjectNotFound(f"{self._source_uri}/{pack_name(gone[0])}")
        self._pins.update(wanted)
        try:
            paths = await gather_limited(map(self._ensure_local, wanted), limit=max(len(wanted), 1))
            yield dict(zip(wanted, paths, strict=True))
        finally:
            self._pins.subtract(wanted)
            self._evict()

    def discard_copy(self, number: int) -> None:
        """Discard a corrupted copy of a pack, so that it is fetched again."""
        if self._fetching.pop(number, None) is not None:
            self.held_bytes -= self._sizes[number]
        self._corrupted[number] += 1

    async def close(self) -> None:
        """Cancel the fetches under way."""
        await cancel_and_wait(*self._fetching.values())

    async def _ensure_local(self, number: int) -> Path:
        task = self._fetching.get(number)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            if task is not None:
                self._drop(number)
            self.held_bytes += self._sizes[number]
            self._evict()
            task = self._fetching[number] = asyncio.create_task(self._fetch(number))
        self._fetching.move_to_end(number)
        # Others may wait for the same fetch: cancelling one waiter must not cancel it.
        return await asyncio.shield(task)

    async def _fetch(self, number: int) -> Path:
        async with self._transfers:
            path, size = self._path(number), self._sizes[number]
            path.touch()
            await self._objects.read_into(f"{self._source_uri}/{pack_name(number)}", path, 0, size, _NoHash)
            return path

    def _evict(self) -> None:
        for number, task in list(self._fetching.items()):
            if self.held_bytes <= self._max_bytes:
                return
            if not self._pins[number] and task.done():
                self._drop(number)

    def _drop(self, number: int) -> None:
        del self._fetching[number]
        self.held_bytes -= self._sizes[number]
        self._path(number).unlink(missing_ok=True)
