"""The shards that the runs of this node read: fetched ahead of need from what the ranks say they will read.

A placement has a ``Reading``: a folder of its own with the manifest, in which a shard appears, as a link into the
cache, once it is verified for this run. All readings share one cache and one download of each shard. What is needed
soonest is fetched first, what is needed last goes first; what a rank waits for is fetched whatever the room.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Protocol, Self

import structlog
from pydantic import BaseModel, ConfigDict, ValidationError

from contracts.datasets import SplitFiles
from contracts.events.dataset import ShardFile
from contracts.ranks import PlanLine, WantLine
from services.kit.bus import Transient
from services.kit.concurrency import end
from services.kit.objects import Missing, split_uri
from services.kit.ranged import Damaged
from services.kit.reader import Refused
from services.worker import metrics
from services.worker.core.shards import SOMETIME_S, Plan, earliest, victims
from services.worker.files import write_atomically
from services.worker.shard_files import ShardFiles

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
#: Seconds in which the moves of ranks are seen.
MOVES_S = 0.5


class ShardError(ValueError):
    """A shard cannot be had; the text names it and says what to do."""


class Beside(Protocol):
    """What else lies in the cache."""

    @property
    def other_bytes(self) -> int: ...
    def evict_others(self, over_bytes: int) -> int: ...


class Splits(BaseModel):
    """What a cache needs to know of a manifest."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    splits: dict[str, SplitFiles]


class Reading:
    """One placement's use of a dataset."""

    def __init__(self, shards: Shards, folder: Path, bucket: str, manifest: Splits) -> None:
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
        #: What is needed in any case, in this order, and stays until the end.
        self.whole: dict[str, None] = {}
        #: By split: worth having while no rank has said what it reads of it.
        self.guesses: dict[str, tuple[str, ...]] = {}
        self.plans: dict[tuple[str, int], Plan] = {}
        self._ahead: dict[tuple[str, int], tuple[str, ...]] = {}
        self.wanted: dict[str, list[asyncio.Future[str]]] = {}
        self.closed = False

    def plan(self, line: PlanLine) -> None:
        """A rank has said what it reads when, or where it is."""
        key = line.split, line.rank
        known = self.plans.get(key)
        needs = line.needs if line.needs is not None else known.needs if known is not None else ()
        count = len(self.splits.get(line.split, ()))
        self.plans[key] = Plan(line.at, line.per_s, tuple(need for need in needs if 0 <= need[0] < count))
        self.guesses.pop(line.split, None)
        # Each rank says once a second where it is: there is time to hear them all.
        self._shards.look(within_s=0.0 if line.needs is not None else MOVES_S)

    async def want(self, line: WantLine) -> str:
        """Wait until the shard that a rank waits for is in its folder; return why it cannot be had, else ''."""
        shard = self.by_path.get(line.shard)
        if shard is None:
            return f"the dataset has no shard {line.shard}"
        if self.closed:
            return "the run is over on this node"
        waiting: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.wanted.setdefault(shard.sha256, []).append(waiting)
        self.failed.pop(shard.sha256, None)
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

    def _read_ahead(self, line: WantLine, shard: ShardFile) -> None:
        """Who reads a split without a plan most likely reads it from one end to the other."""
        split, at = self._places[shard.path]
        if (split, line.rank) not in self.plans:
            following = self.splits[split][at + 1 : at + 1 + READ_AHEAD]
            self._ahead[split, line.rank] = tuple(each.sha256 for each in following)

    def dues(self) -> Iterator[tuple[str, float]]:
        """Each shard that is needed, and in how many seconds."""
        for sha256 in self.wanted:
            yield sha256, -1.0
        for place, sha256 in enumerate(self.whole):
            yield sha256, place * 1e-6
        for (split, _), plan in self.plans.items():
            files = self.splits.get(split, ())
            for number, due_s in plan.dues():
                yield files[number].sha256, due_s
        for ahead in self._ahead.values():
            for place, sha256 in enumerate(ahead):
                yield sha256, 1.0 + place
        for guess in self.guesses.values():
            for place, sha256 in enumerate(guess):
                yield sha256, SOMETIME_S + place

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

    async def all_of(self, splits: Iterable[str]) -> None:
        """Have every shard of these splits, and keep them.

        Raises:
            ShardError: one cannot be had.
            Transient, OSError: the store does not answer, or there is no room.
        """
        files = [shard for split in splits for shard in self.splits.get(split, ())]
        self.whole |= dict.fromkeys(shard.sha256 for shard in files)
        for shard in files:
            while shard.sha256 not in self.ready:
                problem = await self.want(WantLine(rank=-1, generation=0, shard=shard.path))
                if problem:
                    raise ShardError(problem)

    def close(self) -> None:
        """Need nothing any more."""
        self.closed = True
        for sha256 in self.by_sha256:
            self._answer(sha256, "the run is over on this node")
        self._shards.forget(self)


class Shards:
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
        self.beside: Beside | None = None
        self._readings: list[Reading] = []
        self._fetching: dict[str, asyncio.Task[None]] = {}
        self._checking: dict[str, asyncio.Task[None]] = {}
        self._reserved: dict[str, int] = {}
        self._waited_for: dict[str, float] = {}
        self._again: asyncio.TimerHandle | None = None
        self._calm = asyncio.Event()
        self._looking = False
        self._full_said = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._readings.clear()
        if self._again is not None:
            self._again.cancel()
        await end(*self._fetching.values(), *self._checking.values())

    @property
    def size_bytes(self) -> int:
        """Bytes of the shards that are here, and of those that are on their way."""
        coming = (size for sha256, size in self._reserved.items() if sha256 not in self.files.present)
        return self.files.size_bytes + sum(coming)

    def open(self, manifest: bytes, dataset_id: str, manifest_uri: str, folder: Path) -> Reading:
        """Begin to read a dataset: ``folder`` gets its manifest, and shards as they come.

        Raises:
            ShardError: the manifest is not that of the dataset, or not one that this version reads.
        """
        found = hashlib.sha256(manifest).hexdigest()
        if found != dataset_id:
            raise ShardError(f"the manifest of dataset {dataset_id} has hash {found}: ingest it anew")
        try:
            reading = Reading(self, folder, split_uri(manifest_uri)[0], Splits.model_validate_json(manifest))
        except (ValidationError, ValueError) as error:
            raise ShardError(f"dataset {dataset_id} is not one that this version reads: {error}") from error
        write_atomically(folder / "manifest.json", manifest)
        self._readings.append(reading)
        return reading

    def guess(self, reading: Reading, splits: Iterable[str]) -> None:
        """Fetch splits though no rank has said that it reads them, where there is room for twice as much."""
        for split in splits:
            files = reading.splits.get(split, ())
            if 2 * sum(shard.size_bytes for shard in files) <= self._max_bytes:
                reading.guesses[split] = tuple(shard.sha256 for shard in files)
        self.look()

    def forget(self, reading: Reading) -> None:
        """A reading is over: what was on its way for it alone is not needed."""
        if reading in self._readings:
            self._readings.remove(reading)
        needed = self._dues()
        for sha256, task in (*self._fetching.items(), *self._checking.items()):
            if sha256 not in needed:
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

    def _dues(self) -> dict[str, float]:
        return earliest(due for reading in self._readings for due in reading.dues())

    def _look(self) -> None:
        self._looking = False
        if self._again is not None:
            self._again.cancel()
            self._again = None
        dues = self._dues()
        ahead_s: float | None = None
        for sha256, due_s in sorted(dues.items(), key=lambda each: each[1]):
            readings = [each for each in self._readings if self._lacks(each, sha256)]
            if not readings:
                continue
            ahead_s = due_s if ahead_s is None else ahead_s
            if sha256 in self._fetching or sha256 in self._checking:
                continue
            reading = readings[0]
            if sha256 in self.files.present:
                if len(self._checking) < CHECKS + (URGENT_FETCHES if due_s < 0 else 0):
                    self._start(self._checking, reading, sha256)
            elif len(self._fetching) >= FETCHES + (URGENT_FETCHES if due_s < 0 else 0) or not self._room_for(
                reading.by_sha256[sha256][0], due_s, dues
            ):
                break  # what is needed later has to wait, too
            else:
                self._start(self._fetching, reading, sha256)
        metrics.SHARDS_AHEAD_SECONDS.set(float("inf") if ahead_s is None else max(ahead_s, 0.0))
        self._calm.set()
        self._calm = asyncio.Event()
        metrics.SHARDS_BYTES.set(self.files.size_bytes)

    @staticmethod
    def _lacks(reading: Reading, sha256: str) -> bool:
        if sha256 in reading.ready:
            # Asked for although it is there: a link is missing, or it went between the answer and the look.
            return sha256 in reading.wanted
        return sha256 in reading.by_sha256 and sha256 not in reading.failed

    def _room_for(self, shard: ShardFile, due_s: float, dues: dict[str, float]) -> bool:
        """Make room; whether there is some. There always is for what a rank waits for."""
        size_bytes = shard.size_bytes + shard.index_bytes
        over_bytes = self.size_bytes + size_bytes + self._other_bytes - self._max_bytes
        if over_bytes <= 0:
            return True
        going = victims(self.files.present, dues, self._spared(), over_bytes, due_s, self._ahead_s)
        freeable = sum(self.files.present[sha256].size_bytes for sha256 in going)
        if freeable < over_bytes and self.beside is not None:
            freeable += self.beside.evict_others(over_bytes - freeable)
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

    def _spared(self) -> set[str]:
        """What must not go: it is being checked, was just waited for, or a script has it all."""
        now = self._now()
        self._waited_for = {sha256: at_s for sha256, at_s in self._waited_for.items() if now - at_s < OPENING_S}
        whole = {sha256 for reading in self._readings for sha256 in reading.whole}
        return {*self._checking, *self._waited_for, *whole}

    def evict(self, sha256: str) -> int:
        """Delete a shard; ranks that have it open keep what is open, others ask for it again."""
        freed = self.files.remove(sha256)
        for reading in self._readings:
            reading.ready.discard(sha256)
        metrics.SHARD_EVICTIONS.inc()
        return freed

    def evict_unplanned(self, over_bytes: int) -> int:
        """Free up to ``over_bytes`` of what no run has announced; return the bytes."""
        dues = self._dues()
        return sum(
            self.evict(sha256)
            for sha256 in victims(self.files.present, dues, self._spared() | dues.keys(), over_bytes, SOMETIME_S)
        )

    @property
    def _other_bytes(self) -> int:
        return self.beside.other_bytes if self.beside is not None else 0

    # -- doing it -----------------------------------------------------------

    def _start(self, tasks: dict[str, asyncio.Task[None]], reading: Reading, sha256: str) -> None:
        shard = reading.by_sha256[sha256][0]
        fetching = tasks is self._fetching
        if fetching:
            self._reserved[sha256] = shard.size_bytes + shard.index_bytes
        metrics.CACHE_LOOKUPS.labels("miss" if fetching else "hit").inc()
        work = self._fetch(shard, reading.bucket) if fetching else self._check(shard)
        tasks[sha256] = task = asyncio.create_task(work)

        def over(_: asyncio.Task[None]) -> None:
            tasks.pop(sha256, None)
            self._reserved.pop(sha256, None)
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("a shard could not be brought here", shard=shard.path, error=repr(error))
                self._fail(sha256, f"shard {shard.path} could not be brought to this node: {error!r}")
            self.look()

        task.add_done_callback(over)

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
            except Damaged as error:
                log.warning("a shard came damaged, fetching it once more", shard=shard.path, error=str(error))
                metrics.SHARDS_DAMAGED.labels("cold").inc()
                await self.files.fetch(shard, bucket, lambda: self._turn(sha256))
        except Damaged as error:
            metrics.SHARDS_DAMAGED.labels("cold").inc()
            self._fail(sha256, f"shard {shard.path} is damaged in the store: {error}. Shard the dataset anew")
        except Missing as error:
            self._fail(sha256, f"shard {shard.path} is not in the store ({error}): shard the dataset anew")
        except Refused as error:
            self._fail(sha256, f"shard {shard.path} cannot be read: {error}. Check the node's S3 credentials")
        except (Transient, OSError) as error:
            # The ranks wait, and say that they do; giving up would help nobody.
            log.warning("a shard cannot be fetched now, trying again", shard=shard.path, error=repr(error))
            for reading in self._readings:
                reading.not_now(sha256, error)
            await asyncio.sleep(RETRY_S)
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
