"""The shards of datasets on this node: fetched ahead of need, from the plans that ranks send.

All views share one cache and one download of each shard. The shard that is needed soonest is fetched first, the one
that is needed last is evicted first; a shard that a rank waits for is fetched even if the cache is full.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Self

import structlog
from pydantic import ValidationError

from contracts.disk_space import DISK_FULL
from contracts.events.dataset import ShardFile
from services.kit.bus import TransientError
from services.kit.concurrency import cancel_and_wait
from services.kit.store.errors import ObjectCorrupted, ObjectNotFound, StoreRefused
from services.kit.store.uris import split_uri
from services.worker import metrics
from services.worker.cache.dataset_view import DatasetView, ManifestSplits, ShardError
from services.worker.cache.file_cache import FileCache
from services.worker.cache.shard_files import ShardFiles
from services.worker.core.prefetch_schedule import PrefetchSchedule
from services.worker.local_files import write_atomically

log = structlog.get_logger(__name__)

#: Shards fetched at a time ahead of need, and in addition for ranks that wait.
FETCHES = 4
URGENT_FETCHES = 4
#: Shards verified at a time: a core each.
CHECKS = 2
#: Seconds in which a shard that a rank waited for is not evicted, so that the rank can open it.
OPEN_GRACE_S = 5.0
READ_AHEAD_S = 60.0
RETRY_S = 1.0
#: Seconds without another try to evict other files, after one freed too little: each try lists every file.
EVICTION_PAUSE_S = 5.0
#: Seconds until a shard is needed that a rank waits for.
OVERDUE_S = -1.0


class ShardCache:
    """Fetches and evicts shards for all views of a node. Use it as an async context manager."""

    def __init__(
        self,
        files: ShardFiles,
        max_bytes: int,
        *,
        ahead_s: float = READ_AHEAD_S,
        now: Callable[[], float] = time.monotonic,
        other_files: FileCache | None = None,
    ) -> None:
        """Begin with the shards that are here.

        Args:
            max_bytes: what shards and ``other_files`` of the node's cache together may take.
            ahead_s: how soon a shard must be needed to displace one that is needed later.
        """
        self.files, self._max_bytes, self._ahead_s, self._now = files, max_bytes, ahead_s, now
        self._other_files = other_files
        self._views: list[DatasetView] = []
        self.schedule = PrefetchSchedule(files.present, lambda sha256: any(sha256 in v.pinned for v in self._views))
        self._fetching: dict[str, asyncio.Task[None]] = {}
        self._checking: dict[str, asyncio.Task[None]] = {}
        self._reserved: dict[str, int] = {}
        #: When a shard that a rank waited for was linked.
        self._delivered: dict[str, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._turn = asyncio.Event()
        self._is_woken = False
        self._has_warned = False
        self._evicted_others_at_s = -math.inf

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._views.clear()
        if self._timer is not None:
            self._timer.cancel()
        await cancel_and_wait(*self._fetching.values(), *self._checking.values())

    @property
    def size_bytes(self) -> int:
        """Bytes of the shards that are here, and of those that are being fetched."""
        coming = (size for sha256, size in self._reserved.items() if sha256 not in self.files.present)
        return self.files.size_bytes + sum(coming)

    # -- views --------------------------------------------------------------

    def open(self, manifest: bytes, dataset_id: str, manifest_uri: str, folder: Path) -> DatasetView:
        """Open a dataset: ``folder`` gets its manifest, and shards as they come.

        Raises:
            ShardError: the manifest is not that of the dataset, or not one that this version reads.
        """
        found = hashlib.sha256(manifest).hexdigest()
        if found != dataset_id:
            raise ShardError(f"the manifest of dataset {dataset_id} has hash {found}: ingest it again")
        try:
            view = DatasetView(self, folder, split_uri(manifest_uri)[0], ManifestSplits.model_validate_json(manifest))
        except (ValidationError, ValueError) as error:
            raise ShardError(f"this version cannot read dataset {dataset_id}: {error}") from error
        write_atomically(folder / "manifest.json", manifest)
        self._views.append(view)
        return view

    def prefetch(self, view: DatasetView, splits: Iterable[str]) -> None:
        """Fetch splits before a rank sends a plan for them, where there is room for twice as much."""
        for split in splits:
            files = view.splits.get(split, ())
            if 2 * sum(shard.size_bytes for shard in files) <= self._max_bytes:
                view.prefetch_split(split)
        self.wake()

    def remove_view(self, view: DatasetView) -> None:
        """Forget a view, and cancel what no other view needs."""
        if view in self._views:
            self._views.remove(view)
        for sha256 in view.pinned:
            self.schedule.update_place(sha256)
        requested = self._requested
        for sha256, task in (*self._fetching.items(), *self._checking.items()):
            if sha256 not in requested and self.schedule.due_s(sha256) == math.inf:
                task.cancel()
        self.wake()

    # -- scheduling ---------------------------------------------------------

    def wake(self, within_s: float = 0.0) -> None:
        """Start what is needed next, soon: changes that come together are acted on together."""
        if self._is_woken or (within_s and self._timer is not None):
            return
        loop = asyncio.get_running_loop()
        if within_s:
            self._timer = loop.call_later(within_s, self._start_due)
        else:
            self._is_woken = True
            loop.call_soon(self._start_due)

    def _start_due(self) -> None:
        self._is_woken = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._start_requested():
            self._start_announced()
        metrics.SHARDS_AHEAD_SECONDS.set(self._seconds_ahead())
        metrics.SHARDS_BYTES.set(self.files.size_bytes)
        self._turn.set()
        self._turn = asyncio.Event()

    def _start_requested(self) -> bool:
        """Start to bring what ranks wait for; return False if some of it, and so all that is needed later, waits."""
        for view in self._views:
            for sha256 in view.requests:
                lacking = view.lacks(sha256) and sha256 not in self._busy
                if lacking and not self._start(view, sha256, OVERDUE_S, URGENT_FETCHES):
                    return False
        return True

    def _start_announced(self) -> None:
        while following := self.schedule.next_shard(self._busy, check=len(self._checking) < CHECKS):
            assert isinstance(following.consumer, DatasetView)
            if not self._start(following.consumer, following.shard, following.due_s):
                return

    def _start(self, view: DatasetView, sha256: str, due_s: float, extra: int = 0) -> bool:
        """Start to fetch a shard, or to verify it; return False if what is needed later has to wait, too."""
        if sha256 in self.files.present:
            if len(self._checking) < CHECKS + extra:
                self._create_task(self._checking, view, sha256)
            return True
        if len(self._fetching) >= FETCHES + extra or not self._make_room(view.by_sha256[sha256][0], due_s):
            return False
        self._create_task(self._fetching, view, sha256)
        return True

    def _seconds_ahead(self) -> float:
        """Return the seconds until a shard is needed that is not ready."""
        if any(view.lacks(sha256) for view in self._views for sha256 in view.requests):
            return 0.0
        following = self.schedule.next_shard(self._busy)
        return min([following.due_s if following else math.inf, *map(self.schedule.due_s, self._busy)])

    @property
    def _busy(self) -> set[str]:
        return self._fetching.keys() | self._checking.keys()

    @property
    def _requested(self) -> set[str]:
        return {sha256 for view in self._views for sha256 in view.requests}

    # -- room ---------------------------------------------------------------

    def _make_room(self, shard: ShardFile, due_s: float) -> bool:
        """Make room; return whether there is enough. A shard that a rank waits for may exceed the limit."""
        over_bytes = self.size_bytes + shard.size_bytes + shard.index_bytes + self._other_bytes - self._max_bytes
        if over_bytes <= 0:
            return True
        victims = self.schedule.select_victims(over_bytes, due_s, self._ahead_s, self._unevictable())
        freeable = sum(self.files.present[sha256].size_bytes for sha256 in victims)
        if freeable < over_bytes:
            freeable += self._evict_others(over_bytes - freeable)
        if freeable < over_bytes:
            if due_s >= 0:
                return False
            self._warn_full()
        for sha256 in victims:
            self.evict(sha256)
        return True

    def _warn_full(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "the shards that ranks read at a time do not fit into the cache, which grows beyond its limit: "
                "raise TRAINBUS_CACHE_MAX_BYTES, or lower training.loading.lanes or window",
                max_bytes=self._max_bytes,
            )

    def _evict_others(self, over_bytes: int) -> int:
        """Evict files that are no shards; return the bytes freed."""
        if self._other_files is None or self._now() - self._evicted_others_at_s < EVICTION_PAUSE_S:
            return 0
        freed = self._other_files.evict(over_bytes)
        if freed < over_bytes:
            self._evicted_others_at_s = self._now()
        return freed

    def _unevictable(self) -> set[str]:
        """Return the shards that are being verified, that ranks wait for, or that they are about to open."""
        now = self._now()
        self._delivered = {sha256: at_s for sha256, at_s in self._delivered.items() if now - at_s < OPEN_GRACE_S}
        return {*self._checking, *self._delivered, *self._requested}

    def evict(self, sha256: str) -> int:
        """Delete a shard and return its bytes. Ranks that have it open can go on; others request it again."""
        freed = self.files.remove(sha256)
        for view in self._views:
            view.ready.discard(sha256)
        self.schedule.update(sha256)
        metrics.SHARD_EVICTIONS.inc()
        return freed

    def _shrink(self) -> None:
        room_bytes = self.files.size_bytes + self._other_bytes
        if room_bytes < self._max_bytes:
            self._max_bytes = room_bytes
            log.warning(
                "the disk is full: from now on a shard is evicted for each that is fetched; "
                "lower TRAINBUS_CACHE_MAX_BYTES",
                folder=str(self.files.folder),
                max_bytes=room_bytes,
            )

    @property
    def _other_bytes(self) -> int:
        return self._other_files.size_bytes if self._other_files is not None else 0

    # -- fetching and verifying ---------------------------------------------

    def _create_task(self, tasks: dict[str, asyncio.Task[None]], view: DatasetView, sha256: str) -> None:
        shard = view.by_sha256[sha256][0]
        is_fetch = tasks is self._fetching
        if is_fetch:
            self._reserved[sha256] = shard.size_bytes + shard.index_bytes
        metrics.CACHE_LOOKUPS.labels("miss" if is_fetch else "hit").inc()
        tasks[sha256] = task = asyncio.create_task(self._fetch_or_verify(shard, view.bucket if is_fetch else None))

        def on_done(_: asyncio.Task[None]) -> None:
            tasks.pop(sha256, None)
            self._reserved.pop(sha256, None)
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("a shard could not be fetched", shard=shard.path, error=repr(error))
                self._fail(sha256, f"shard {shard.path} could not be fetched to this node: {error!r}")
            self.schedule.update(sha256)
            self.wake()

        task.add_done_callback(on_done)

    async def _fetch_or_verify(self, shard: ShardFile, bucket: str | None) -> None:
        """Fetch a shard from ``bucket``, or verify the one that is here; after an error wait a little."""
        try:
            await (self._check(shard) if bucket is None else self._fetch(shard, bucket))
        except (TransientError, OSError) as error:
            # The ranks wait: a retry is all that helps.
            log.warning("a shard cannot be fetched now, trying again", shard=shard.path, error=repr(error))
            if isinstance(error, OSError) and error.errno in DISK_FULL:
                self._shrink()
            for view in self._views:
                view.delay_shard(shard.sha256, error)
            await asyncio.sleep(RETRY_S)

    async def _check(self, shard: ShardFile) -> None:
        """Verify a shard that is here for the views that lack it."""
        if await self.files.check(shard):
            self._deliver(shard.sha256)
        else:
            for view in self._views:
                view.ready.discard(shard.sha256)

    async def _fetch(self, shard: ShardFile, bucket: str, *, is_repeated: bool = False) -> None:
        sha256 = shard.sha256
        try:
            await self.files.fetch(shard, bucket, lambda: self._yield_to_requested(sha256))
        except ObjectCorrupted as error:
            metrics.SHARDS_CORRUPTED.labels("cold").inc()
            if not is_repeated:
                log.warning("a shard was corrupted on its way, fetching it again", shard=shard.path, error=str(error))
                return await self._fetch(shard, bucket, is_repeated=True)
            self._fail(sha256, f"shard {shard.path} is damaged in the store: {error}. Shard the dataset again")
        except ObjectNotFound as error:
            self._fail(sha256, f"shard {shard.path} is not in the store ({error}): shard the dataset again")
        except StoreRefused as error:
            self._fail(sha256, f"shard {shard.path} cannot be read: {error}. Check the node's S3 credentials")
        else:
            self._deliver(sha256)

    def _deliver(self, sha256: str) -> None:
        for view in self._views:
            if sha256 in view.requests:
                self._delivered[sha256] = self._now()
            view.add_shard(sha256)

    def _fail(self, sha256: str, problem: str) -> None:
        for view in self._views:
            view.fail_shard(sha256, problem)

    async def _yield_to_requested(self, sha256: str) -> None:
        """Wait while shards are fetched that ranks wait for, unless this is one of them."""
        while (requested := self._requested & self._fetching.keys()) and sha256 not in requested:
            await self._turn.wait()
