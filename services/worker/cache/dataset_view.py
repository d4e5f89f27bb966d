"""A run's view of a dataset: a folder with the manifest, in which a shard appears once it is verified for the run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from pydantic import BaseModel, ConfigDict

from contracts.datasets import SplitFiles
from contracts.events.dataset import ShardFile
from contracts.ranks import ShardPlanLine, ShardRequestLine
from services.worker import metrics
from services.worker.cache.shard_files import ShardFiles
from services.worker.core.prefetch_schedule import SPECULATIVE_S, PrefetchSchedule, ReadSequence
from services.worker.local_files import relative_path

#: Shards fetched behind one that a rank requests without a plan.
READ_AHEAD = 4
#: Seconds within which new positions of ranks are acted on.
POSITION_DELAY_S = 0.5
#: Stands for no rank.
NO_RANK = -1
CLOSED = "the run is over on this node"


class ShardError(ValueError):
    """A shard cannot be had; the text names it and says what to do."""


class ManifestSplits(BaseModel):
    """The part of a manifest that a cache needs."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    splits: dict[str, SplitFiles]


class SharedCache(Protocol):
    """What a view needs of the node's cache."""

    schedule: PrefetchSchedule
    files: ShardFiles

    def wake(self, within_s: float = ...) -> None:
        """Look again at what to fetch, within so many seconds."""

    def remove_view(self, view: DatasetView) -> None:
        """Fetch no more for a view that is closed."""


class DatasetView:
    """One placement's use of a dataset: what its ranks read, request and have."""

    def __init__(self, cache: SharedCache, folder: Path, bucket: str, manifest: ManifestSplits) -> None:
        """List the shards.

        Raises:
            ValueError: a path of the manifest leads out of the folder.
        """
        self._cache, self.folder, self.bucket = cache, folder, bucket
        self.splits = {name: files.shards for name, files in manifest.splits.items()}
        #: By path: the shard, its split and its number there.
        self._by_path = {
            shard.path: (shard, name, number)
            for name, files in self.splits.items()
            for number, shard in enumerate(files)
        }
        self.by_sha256: dict[str, list[ShardFile]] = {}
        for shard, _, _ in self._by_path.values():
            relative_path(shard.path), relative_path(shard.index_path)
            self.by_sha256.setdefault(shard.sha256, []).append(shard)
        #: Verified for this run, and in its folder.
        self.ready: set[str] = set()
        #: Why a shard could not be had when it was fetched ahead of need.
        self._problems: dict[str, str] = {}
        #: What stays until the view is closed.
        self.pinned: frozenset[str] = frozenset()
        #: By reason (``plan``, ``ahead``, ``guess``, ``whole``), split and rank.
        self._sequences: dict[tuple[str, str, int], ReadSequence] = {}
        #: Requests of ranks that wait, by shard.
        self.requests: dict[str, list[asyncio.Future[str]]] = {}
        self._is_closed = False

    # -- what ranks read ----------------------------------------------------

    def apply_plan(self, line: ShardPlanLine) -> None:
        """Note what a rank will read when, or how far it is."""
        key = "plan", line.split, line.rank
        known, files = self._sequences.get(key), self.splits.get(line.split, ())
        if line.needs is not None or known is None:
            needs = ((files[n].sha256, first, last) for n, first, last in line.needs or () if 0 <= n < len(files))
            self._add_sequence(key, ReadSequence(needs, at=line.at, per_s=line.per_s))
        elif line.at >= known.at:
            self._cache.schedule.advance(known, line.at, line.per_s)
        self._remove_sequences(("ahead", line.split, line.rank), ("guess", line.split, NO_RANK))
        # Each rank sends its position once a second: many of them are acted on together.
        self._cache.wake(within_s=0.0 if line.needs is not None else POSITION_DELAY_S)

    def prefetch_split(self, split: str) -> None:
        """Fetch a split when nothing else is to be fetched, until a rank sends a plan for it."""
        shards = (shard.sha256 for shard in self.splits.get(split, ()))
        self._add_sequence(("guess", split, NO_RANK), ReadSequence.of_list(shards, after_s=SPECULATIVE_S))

    async def request(self, line: ShardRequestLine) -> str:
        """Wait until the shard that a rank requests is in the folder; return why it cannot be had, else ''."""
        if line.shard not in self._by_path:
            return f"the dataset has no shard {line.shard}"
        if self._is_closed:
            return CLOSED
        shard, split, number = self._by_path[line.shard]
        reply: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.requests.setdefault(shard.sha256, []).append(reply)
        if self._problems.pop(shard.sha256, None) is not None:
            self._cache.schedule.update(shard.sha256)
        if ("plan", split, line.rank) not in self._sequences:
            self._read_ahead(split, number, line.rank)
        started = time.monotonic()
        self._cache.wake()
        try:
            return await reply
        finally:
            metrics.SHARD_WAIT_SECONDS.observe(time.monotonic() - started)
            self._remove_request(shard.sha256, reply)
            self._cache.wake()

    async def fetch_splits(self, splits: Iterable[str]) -> None:
        """Fetch every shard of these splits, and keep them until the view is closed.

        Raises:
            ShardError: one cannot be had.
            TransientError, OSError: the store does not answer, or there is no room.
        """
        files = [shard for split in splits for shard in self.splits.get(split, ())]
        if files:
            self.pinned |= {shard.sha256 for shard in files}
            sequence = ReadSequence.of_list((shard.sha256 for shard in files), every_s=1e-6)
            self._add_sequence(("whole", "", NO_RANK), sequence)
            for shard in files:
                self._cache.schedule.update_place(shard.sha256)
        for shard in files:
            while shard.sha256 not in self.ready:
                problem = await self.request(ShardRequestLine(rank=NO_RANK, generation=0, shard=shard.path))
                if problem:
                    raise ShardError(problem)

    def close(self) -> None:
        """Need nothing any more."""
        self._is_closed = True
        for sha256 in self.requests:
            self._reply(sha256, CLOSED)
        self._remove_sequences(*self._sequences)
        self._cache.remove_view(self)

    def _read_ahead(self, split: str, number: int, rank: int) -> None:
        """Fetch the next shards of a split that a rank reads without a plan: most likely it reads all in order."""
        following = (each.sha256 for each in self.splits[split][number + 1 : number + 1 + READ_AHEAD])
        self._add_sequence(("ahead", split, rank), ReadSequence.of_list(following, after_s=1.0))

    def _add_sequence(self, key: tuple[str, str, int], sequence: ReadSequence) -> None:
        """Follow a sequence in place of the one before it."""
        self._remove_sequences(key)
        self._sequences[key] = sequence
        self._cache.schedule.add(sequence, self)

    def _remove_sequences(self, *keys: tuple[str, str, int]) -> None:
        self._cache.schedule.remove(*(self._sequences.pop(key) for key in keys if key in self._sequences))

    def _remove_request(self, sha256: str, reply: asyncio.Future[str]) -> None:
        others = [each for each in self.requests.pop(sha256, ()) if each is not reply]
        if others:
            self.requests[sha256] = others

    # -- what the cache brings ----------------------------------------------

    def lacks(self, sha256: str) -> bool:
        """Whether a shard of this dataset has to be brought for this view."""
        if sha256 in self.ready:
            # Requested although it was linked: the link is missing, or the shard was evicted before the rank opened it.
            return sha256 in self.requests
        return sha256 not in self._problems

    def add_shard(self, sha256: str) -> None:
        """Link a verified shard into the folder, and reply to the ranks that wait for it."""
        files = self._cache.files
        for shard in self.by_sha256.get(sha256, ()):
            _link(files.index(sha256), self.folder / relative_path(shard.index_path))
            _link(files.path(sha256), self.folder / relative_path(shard.path))
            self.ready.add(sha256)
            self._problems.pop(sha256, None)
            self._reply(sha256, "")

    def fail_shard(self, sha256: str, problem: str) -> None:
        """Reply why a shard cannot be had; it is fetched again when a rank requests it again."""
        if sha256 in self.by_sha256:
            self._problems[sha256] = problem
            self._reply(sha256, problem)

    def delay_shard(self, sha256: str, error: Exception) -> None:
        """Note that the store does not answer. Ranks wait; a run that is not launched yet fails and is placed again."""
        if sha256 in self.pinned:
            for reply in self.requests.get(sha256, ()):
                if not reply.done():
                    reply.set_exception(error)

    def _reply(self, sha256: str, problem: str) -> None:
        for reply in self.requests.get(sha256, ()):
            if not reply.done():
                reply.set_result(problem)


def _link(source: Path, link: Path) -> None:
    """Make ``link`` lead to ``source``, also after ``source`` was evicted and fetched again."""
    if not link.is_symlink():
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(source.resolve())
