"""The shards that the runs of this node read: fetched ahead of need from what the ranks say they will read.

A placement has a ``Reading``: a folder of its own with the manifest, in which a shard appears, as a link into the
cache, once it is verified for this run. All readings share one cache and one download of each shard. What is needed
soonest is fetched first, what is needed last goes first; what a rank waits for is fetched whatever the room.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Protocol, Self

import structlog
from pydantic import BaseModel, ConfigDict, ValidationError

from contracts.datasets import SplitFiles
from contracts.events.dataset import ShardFile
from contracts.ranks import ShardPlanLine, ShardRequestLine
from services.kit.bus import TransientError
from services.kit.concurrency import cancel_and_wait
from services.kit.store.errors import ObjectCorrupted, ObjectNotFound, StoreRefused
from services.kit.store.uris import split_uri
from services.worker import metrics
from services.worker.cache.shard_files import ShardFiles
from services.worker.core.prefetch_schedule import SOMETIME_S, PrefetchSchedule, ReadSequence
from services.worker.local_files import write_atomically

log = structlog.get_logger(__name__)

#: Shards fetched at a time ahead of need, and those beside them that ranks wait for.
FETCHES = 4
URGENT_FETCHES = 4
#: Shards checked at a time: a core each.
CHECKS = 2
#: Shards fetched behind one that a rank waits for without having said what it reads next.
READ_AHEAD = 4
#: Seconds that a shard which a rank waited for is left to it, to be opened.
OPENING_S = 5.0
AHEAD_S = 60.0
RETRY_S = 1.0
#: Seconds in which nobody looks again for room beside the shards, once there was none: each look is at every file.
BESIDE_S = 5.0
#: Seconds in which the moves of ranks are seen.
MOVES_S = 0.5
#: Stands for no rank where what is needed is none's own.
NOBODY = -1
#: What the system says when the disk is full.
FULL = (errno.ENOSPC, errno.EDQUOT)


class ShardError(ValueError):
    """A shard cannot be had; the text names it and says what to do."""


class NeighborCache(Protocol):
    """What else lies in the cache."""

    @property
    def other_bytes(self) -> int: ...
    def evict_others(self, over_bytes: int) -> int: ...


class ManifestSplits(BaseModel):
    """What a cache needs to know of a manifest."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    splits: dict[str, SplitFiles]


class DatasetView:
    """One placement's use of a dataset."""

    def __init__(self, shards: ShardCache, folder: Path, bucket: str, manifest: ManifestSplits) -> None:
        self._shards, self.folder, self.bucket = shards, folder, bucket
        self.splits = {name: files.shards for name, files in manifest.splits.items()}
        self.by_path = {shard.path: shard for files in self.splits.values() for shard in files}
        #: By path: the split that the shard is in, and its number there.
        self._places = {
            shard.path: (name, number) for name, files in self.splits.items() for number, shard in enumerate(files)
        }
        self.by_sha256: dict[str, list[ShardFile]] = {}
        for shard in self.by_path.values():
            _relative(shard.path), _relative(shard.index_path)
            self.by_sha256.setdefault(shard.sha256, []).append(shard)
        #: Verified for this run, and in its folder.
        self.ready: set[str] = set()
        #: Why a shard could not be had when it was fetched ahead of need.
        self.failed: dict[str, str] = {}
        #: What stays until the end.
        self.whole: frozenset[str] = frozenset()
        #: What is needed: by why (``plan``, ``ahead``, ``guess``, ``whole``), split and rank.
        self._courses: dict[tuple[str, str, int], ReadSequence] = {}
        self.wanted: dict[str, list[asyncio.Future[str]]] = {}
        self.closed = False

    def plan(self, line: ShardPlanLine) -> None:
        """A rank has said what it reads when, or where it is."""
        key = "plan", line.split, line.rank
        known, files = self._courses.get(key), self.splits.get(line.split, ())
        if line.needs is not None or known is None:
            needs = ((files[n].sha256, first, last) for n, first, last in line.needs or () if 0 <= n < len(files))
            self._follow(key, ReadSequence(needs, at=line.at, per_s=line.per_s))
        elif line.at >= known.at:
            self._shards.agenda.move(known, line.at, line.per_s)
        self._drop(("ahead", line.split, line.rank), ("guess", line.split, NOBODY))
        # Each rank says once a second where it is: there is time to hear them all.
        self._shards.look(within_s=0.0 if line.needs is not None else MOVES_S)

    def guess(self, split: str) -> None:
        """Have a split fetched when there is nothing else to do, until a rank says what it reads of it."""
        shards = (shard.sha256 for shard in self.splits.get(split, ()))
        self._follow(("guess", split, NOBODY), ReadSequence.of(shards, after_s=SOMETIME_S))

    def _follow(self, key: tuple[str, str, int], course: ReadSequence) -> None:
        """Have a course followed in place of the one before it."""
        self._drop(key)
        self._courses[key] = course
        self._shards.agenda.open(course, self)

    def _drop(self, *keys: tuple[str, str, int]) -> None:
        self._shards.agenda.close(*(self._courses.pop(key) for key in keys if key in self._courses))

    async def want(self, line: ShardRequestLine) -> str:
        """Wait until the shard that a rank waits for is in its folder; return why it cannot be had, else ''."""
        shard = self.by_path.get(line.shard)
        if shard is None:
            return f"the dataset has no shard {line.shard}"
        if self.closed:
            return "the run is over on this node"
        waiting: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.wanted.setdefault(shard.sha256, []).append(waiting)
        if self.failed.pop(shard.sha256, None) is not None:
            self._shards.agenda.changed(shard.sha256)
        self._read_ahead(line, shard)
        started = time.monotonic()
        self._shards.look()
        try:
            return await waiting
        finally:
            metrics.SHARD_WAIT_SECONDS.observe(time.monotonic() - started)
            left = [each for each in self.wanted.get(shard.sha256, ()) if each is not waiting]
            if left:
                self.wanted[shard.sha256] = left
            else:
                self.wanted.pop(shard.sha256, None)
            self._shards.look()

    def _read_ahead(self, line: ShardRequestLine, shard: ShardFile) -> None:
        """Who reads a split without a plan most likely reads it from one end to the other."""
        split, at = self._places[shard.path]
        if ("plan", split, line.rank) not in self._courses:
            following = (each.sha256 for each in self.splits[split][at + 1 : at + 1 + READ_AHEAD])
            self._follow(("ahead", split, line.rank), ReadSequence.of(following, after_s=1.0))

    def lacks(self, sha256: str) -> bool:
        """Whether a shard of this dataset has to be brought for this reading."""
        if sha256 in self.ready:
            # Asked for although it is there: a link is missing, or it went between the answer and the look.
            return sha256 in self.wanted
        return sha256 not in self.failed

    def arrived(self, sha256: str) -> None:
        """Put a verified shard into the folder, and tell who waits for it."""
        for shard in self.by_sha256.get(sha256, ()):
            files = self._shards.files
            _link(files.index(sha256), self.folder / _relative(shard.index_path))
            _link(files.path(sha256), self.folder / _relative(shard.path))
            self.ready.add(sha256)
            self.failed.pop(sha256, None)
            self._answer(sha256, "")

    def cannot_have(self, sha256: str, problem: str) -> None:
        """Tell who waits for it; whoever does not yet will ask for it to be tried once more."""
        if sha256 in self.by_sha256:
            self.failed[sha256] = problem
            self._answer(sha256, problem)

    def not_now(self, sha256: str, error: Exception) -> None:
        """The store does not answer. Ranks wait; what has not begun yet had better begin elsewhere."""
        if sha256 in self.whole:
            for waiting in self.wanted.get(sha256, ()):
                if not waiting.done():
                    waiting.set_exception(error)

    def _answer(self, sha256: str, problem: str) -> None:
        for waiting in self.wanted.get(sha256, ()):
            if not waiting.done():
                waiting.set_result(problem)

    async def gather_limited(self, splits: Iterable[str]) -> None:
        """Have every shard of these splits, and keep them.

        Raises:
            ShardError: one cannot be had.
            TransientError, OSError: the store does not answer, or there is no room.
        """
        files = [shard for split in splits for shard in self.splits.get(split, ())]
        if files:
            self.whole |= {shard.sha256 for shard in files}
            self._follow(("whole", "", NOBODY), ReadSequence.of((shard.sha256 for shard in files), every_s=1e-6))
            for shard in files:
                self._shards.agenda.pin(shard.sha256)
        for shard in files:
            while shard.sha256 not in self.ready:
                problem = await self.want(ShardRequestLine(rank=NOBODY, generation=0, shard=shard.path))
                if problem:
                    raise ShardError(problem)

    def close(self) -> None:
        """Need nothing any more."""
        self.closed = True
        for sha256 in self.wanted:
            self._answer(sha256, "the run is over on this node")
        self._shards.forget(self)
        self._drop(*self._courses)
        self._shards.let_go()


class ShardCache:
    """All readings of a node, and what is fetched for them. Use it as an async context manager."""

    def __init__(
        self,
        files: ShardFiles,
        max_bytes: int,
        *,
        ahead_s: float = AHEAD_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """``ahead_s``: from when on a shard that will be needed goes for one that is needed sooner."""
        self.files, self._max_bytes, self._ahead_s, self._now = files, max_bytes, ahead_s, now
        self.beside: NeighborCache | None = None
        self._readings: list[DatasetView] = []
        self.agenda = PrefetchSchedule(
            files.present, lambda sha256: any(sha256 in each.whole for each in self._readings)
        )
        self._fetching: dict[str, asyncio.Task[None]] = {}
        self._checking: dict[str, asyncio.Task[None]] = {}
        self._reserved: dict[str, int] = {}
        self._waited_for: dict[str, float] = {}
        self._again: asyncio.TimerHandle | None = None
        self._calm = asyncio.Event()
        self._looking = False
        self._full_said = False
        self._beside_at_s = -math.inf

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._readings.clear()
        if self._again is not None:
            self._again.cancel()
        await cancel_and_wait(*self._fetching.values(), *self._checking.values())

    @property
    def size_bytes(self) -> int:
        """Bytes of the shards that are here, and of those that are on their way."""
        coming = (size for sha256, size in self._reserved.items() if sha256 not in self.files.present)
        return self.files.size_bytes + sum(coming)

    def open(self, manifest: bytes, dataset_id: str, manifest_uri: str, folder: Path) -> DatasetView:
        """Begin to read a dataset: ``folder`` gets its manifest, and shards as they come.

        Raises:
            ShardError: the manifest is not that of the dataset, or not one that this version reads.
        """
        found = hashlib.sha256(manifest).hexdigest()
        if found != dataset_id:
            raise ShardError(f"the manifest of dataset {dataset_id} has hash {found}: ingest it anew")
        try:
            reading = DatasetView(
                self, folder, split_uri(manifest_uri)[0], ManifestSplits.model_validate_json(manifest)
            )
        except (ValidationError, ValueError) as error:
            raise ShardError(f"dataset {dataset_id} is not one that this version reads: {error}") from error
        write_atomically(folder / "manifest.json", manifest)
        self._readings.append(reading)
        return reading

    def guess(self, reading: DatasetView, splits: Iterable[str]) -> None:
        """Fetch splits though no rank has said that it reads them, where there is room for twice as much."""
        for split in splits:
            files = reading.splits.get(split, ())
            if 2 * sum(shard.size_bytes for shard in files) <= self._max_bytes:
                reading.guess(split)
        self.look()

    def forget(self, reading: DatasetView) -> None:
        """A reading is over: what it would have kept may go."""
        if reading in self._readings:
            self._readings.remove(reading)

    def let_go(self) -> None:
        """End what is on its way for nobody."""
        wanted = self._wanted
        for sha256, task in (*self._fetching.items(), *self._checking.items()):
            if sha256 not in wanted and self.agenda.due_s(sha256) == math.inf:
                task.cancel()
        self.look()

    # -- what next ----------------------------------------------------------

    def look(self, within_s: float = 0.0) -> None:
        """See what there is to do, soon: what happens at one time is seen at once."""
        if self._looking or (within_s and self._again is not None):
            return
        if within_s:
            self._again = asyncio.get_running_loop().call_later(within_s, self._look)
        else:
            self._looking = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        self._looking = False
        if self._again is not None:
            self._again.cancel()
            self._again = None
        if self._bring_wanted():
            self._bring_announced()
        metrics.SHARDS_AHEAD_SECONDS.set(self._lacking_in_s())
        metrics.SHARDS_BYTES.set(self.files.size_bytes)
        self._calm.set()
        self._calm = asyncio.Event()

    def _bring_wanted(self) -> bool:
        """Begin to bring what ranks wait for; False if some of it has to wait, and all that is needed later."""
        for reading in self._readings:
            for sha256 in reading.wanted:
                lacking = reading.lacks(sha256) and sha256 not in self._busy
                if lacking and not self._bring(reading, sha256, -1.0, URGENT_FETCHES):
                    return False
        return True

    def _bring_announced(self) -> None:
        while following := self.agenda.next(self._busy, check=len(self._checking) < CHECKS):
            assert isinstance(following.owner, DatasetView)
            if not self._bring(following.owner, following.shard, following.due_s):
                return

    def _bring(self, reading: DatasetView, sha256: str, due_s: float, more: int = 0) -> bool:
        """Begin to fetch a shard, or to check it; False if what is needed later has to wait, too."""
        if sha256 in self.files.present:
            if len(self._checking) < CHECKS + more:
                self._start(self._checking, reading, sha256)
            return True
        if len(self._fetching) >= FETCHES + more or not self._room_for(reading.by_sha256[sha256][0], due_s):
            return False
        self._start(self._fetching, reading, sha256)
        return True

    def _lacking_in_s(self) -> float:
        """Seconds until a shard is needed that is not ready."""
        if any(reading.lacks(sha256) for reading in self._readings for sha256 in reading.wanted):
            return 0.0
        following = self.agenda.next(self._busy)
        return min([following.due_s if following else math.inf, *map(self.agenda.due_s, self._busy)])

    @property
    def _busy(self) -> set[str]:
        return self._fetching.keys() | self._checking.keys()

    def _room_for(self, shard: ShardFile, due_s: float) -> bool:
        """Make room; whether there is some. There always is for what a rank waits for."""
        size_bytes = shard.size_bytes + shard.index_bytes
        over_bytes = self.size_bytes + size_bytes + self._other_bytes - self._max_bytes
        if over_bytes <= 0:
            return True
        going = self.agenda.victims(over_bytes, due_s, self._ahead_s, self._spared())
        freeable = sum(self.files.present[sha256].size_bytes for sha256 in going)
        if freeable < over_bytes:
            freeable += self._evict_beside(over_bytes - freeable)
        if freeable < over_bytes:
            if due_s >= 0:
                return False
            if not self._full_said:
                self._full_said = True
                log.warning(
                    "what ranks read at a time does not fit into the cache, which grows beyond its bound: "
                    "raise TRAINBUS_CACHE_MAX_BYTES, or lower training.loading.lanes or window",
                    max_bytes=self._max_bytes,
                )
        for sha256 in going:
            self.evict(sha256)
        return True

    def _evict_beside(self, over_bytes: int) -> int:
        """Have others in the cache make room; return the bytes that they freed."""
        if self.beside is None or self._now() - self._beside_at_s < BESIDE_S:
            return 0
        freed = self.beside.evict_others(over_bytes)
        if freed < over_bytes:
            self._beside_at_s = self._now()
        return freed

    def _spared(self) -> set[str]:
        """What must not go: it is being checked, waited for, or was just waited for."""
        now = self._now()
        self._waited_for = {sha256: at_s for sha256, at_s in self._waited_for.items() if now - at_s < OPENING_S}
        return {*self._checking, *self._waited_for, *self._wanted}

    def evict(self, sha256: str) -> int:
        """Delete a shard; ranks that have it open keep what is open, others ask for it again."""
        freed = self.files.remove(sha256)
        for reading in self._readings:
            reading.ready.discard(sha256)
        self.agenda.changed(sha256)
        metrics.SHARD_EVICTIONS.inc()
        return freed

    @property
    def _other_bytes(self) -> int:
        return self.beside.other_bytes if self.beside is not None else 0

    # -- doing it -----------------------------------------------------------

    def _start(self, tasks: dict[str, asyncio.Task[None]], reading: DatasetView, sha256: str) -> None:
        shard = reading.by_sha256[sha256][0]
        fetching = tasks is self._fetching
        if fetching:
            self._reserved[sha256] = shard.size_bytes + shard.index_bytes
        metrics.CACHE_LOOKUPS.labels("miss" if fetching else "hit").inc()
        tasks[sha256] = task = asyncio.create_task(self._patiently(shard, reading.bucket if fetching else None))

        def over(_: asyncio.Task[None]) -> None:
            tasks.pop(sha256, None)
            self._reserved.pop(sha256, None)
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("a shard could not be brought here", shard=shard.path, error=repr(error))
                self._fail(sha256, f"shard {shard.path} could not be brought to this node: {error!r}")
            self.agenda.changed(sha256)
            self.look()

        task.add_done_callback(over)

    async def _patiently(self, shard: ShardFile, bucket: str | None) -> None:
        """Fetch a shard out of ``bucket``, or check the one that is here; wait a little if that cannot be done now."""
        try:
            await (self._check(shard) if bucket is None else self._fetch(shard, bucket))
        except (TransientError, OSError) as error:
            # The ranks wait, and say that they do; giving up would help nobody.
            log.warning("a shard cannot be brought now, trying again", shard=shard.path, error=repr(error))
            if isinstance(error, OSError) and error.errno in FULL:
                self._shrink()
            for reading in self._readings:
                reading.not_now(shard.sha256, error)
            await asyncio.sleep(RETRY_S)

    def _shrink(self) -> None:
        """Hold to what the disk has room for, where that is less than the cache may take."""
        room_bytes = self.files.size_bytes + self._other_bytes
        if room_bytes < self._max_bytes:
            self._max_bytes = room_bytes
            log.warning(
                "the disk is full: from now on the cache makes room for each shard; lower TRAINBUS_CACHE_MAX_BYTES",
                folder=str(self.files.folder),
                max_bytes=room_bytes,
            )

    async def _check(self, shard: ShardFile) -> None:
        """Let readings have what is here, if it is still what it was."""
        if await self.files.check(shard):
            self._arrived(shard.sha256)
        else:
            for reading in self._readings:
                reading.ready.discard(shard.sha256)

    async def _fetch(self, shard: ShardFile, bucket: str) -> None:
        sha256 = shard.sha256
        try:
            try:
                await self.files.fetch(shard, bucket, lambda: self._turn(sha256))
            except ObjectCorrupted as error:
                log.warning("a shard came damaged, fetching it once more", shard=shard.path, error=str(error))
                metrics.SHARDS_DAMAGED.labels("cold").inc()
                await self.files.fetch(shard, bucket, lambda: self._turn(sha256))
        except ObjectCorrupted as error:
            metrics.SHARDS_DAMAGED.labels("cold").inc()
            self._fail(sha256, f"shard {shard.path} is damaged in the store: {error}. Shard the dataset anew")
        except ObjectNotFound as error:
            self._fail(sha256, f"shard {shard.path} is not in the store ({error}): shard the dataset anew")
        except StoreRefused as error:
            self._fail(sha256, f"shard {shard.path} cannot be read: {error}. Check the node's S3 credentials")
        else:
            self._arrived(sha256)

    def _arrived(self, sha256: str) -> None:
        for reading in self._readings:
            if sha256 in reading.wanted:
                self._waited_for[sha256] = self._now()
            reading.arrived(sha256)

    def _fail(self, sha256: str, problem: str) -> None:
        for reading in self._readings:
            reading.cannot_have(sha256, problem)

    async def _turn(self, sha256: str) -> None:
        """Let what ranks wait for go before what is fetched ahead."""
        while (wanted := self._wanted & self._fetching.keys()) and sha256 not in wanted:
            await self._calm.wait()

    @property
    def _wanted(self) -> set[str]:
        return {sha256 for reading in self._readings for sha256 in reading.wanted}


def _link(source: Path, link: Path) -> None:
    """Make ``link`` lead to ``source``, also after ``source`` was gone and came again."""
    if not link.is_symlink():
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(source.resolve())


def _relative(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"{name!r} leads out of its folder")
    return path
