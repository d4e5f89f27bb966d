"""Following what ranks write, and publishing it: each byte once, whatever is killed when.

The cut is on disk before it is published (``follow.json``); after a crash the same cut is read and
published again under the same event ids, which the bus stores once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import structlog
from pydantic import BaseModel, ConfigDict, Field

from contracts.base import Fact
from contracts.events.run import RunLog, RunStarted
from contracts.progress import ring_name
from contracts.ranks import JournalLine, StartedLine, StarvationLine, StragglerLine
from services.kit.bus import TransientError
from services.kit.concurrency import run_in_thread
from services.worker import metrics
from services.worker.core import journal
from services.worker.core.metric_patterns import Pattern, match_patterns
from services.worker.local_files import write_atomically
from services.worker.ranks.ring_reader import RingReader

log = structlog.get_logger(__name__)

CHUNK_BYTES = 128 * 1024
#: More output than this behind is not sent line by line any more: the newest counts.
LOG_BACKLOG_BYTES = 8 * 2**20
LOG_RESUME_BYTES = 2**18
TAIL_BYTES = 64 * 1024

Publish = Callable[[Fact], Awaitable[object]]


class GenerationState(BaseModel):
    """What is known of a generation's ranks on this node; all that a restarted agent needs."""

    model_config = ConfigDict(extra="ignore")

    ranks: dict[int, journal.RankState] = Field(default_factory=dict)
    #: Step of the last checkpoint staged, and whether it is settled (committed, or refused).
    staged_step: int | None = None
    staged_folders: dict[int, list[str]] = Field(default_factory=dict)
    system_count: int = 0


class JournalFollower:
    """Follows the journals and logs of one generation's local ranks."""

    def __init__(
        self,
        placed: journal.JournalSource,
        ranks: Iterable[int],
        folder: Path,
        publish: Publish,
        now: Callable[[], float],
        *,
        interval_s: float,
        patterns: Mapping[str, Pattern] | None = None,
        launch_is_start: bool = False,
        homes: Mapping[int, str] | None = None,
    ) -> None:
        """``homes``: the node of every rank of the generation."""
        self._placed, self._folder, self._publish, self._now = placed, folder, publish, now
        self._interval_s, self._patterns = interval_s, patterns or {}
        #: A script need not say anything: it has started as soon as it runs.
        self._launch_is_start = launch_is_start
        self._homes = homes or {}
        self._rings: dict[int, RingReader] = {}
        self._path = folder / "follow.json"
        self.state = GenerationState()
        if self._path.exists():
            self.state = GenerationState.model_validate_json(self._path.read_bytes())
        for rank in ranks:
            self.state.ranks.setdefault(rank, journal.RankState())
        self._saving = asyncio.Lock()
        self._doorbell = asyncio.Event()
        #: Set whenever the ranks have said something that is more than metrics.
        self.news = asyncio.Event()
        self._started_published = False

    def ring_doorbell(self) -> None:
        """Look now."""
        self._doorbell.set()

    async def save(self) -> None:
        """Write down what is known. To replace a file can take as long as the disk is busy with checkpoints."""
        async with self._saving:
            content = self.state.model_dump_json()
            said = {rank: state.ring_start for rank, state in self.state.ranks.items()}
            await run_in_thread(write_atomically, self._path, content)
            for rank, ring in self._rings.items():
                # Only now: after a crash, what is being published is read once more.
                ring.done(said[rank])

    def ring_of(self, rank: int) -> RingReader | None:
        """The rank's ring, None while it has none."""
        ring = self._rings.get(rank) or RingReader.open(self._folder / ring_name(rank))
        if ring is not None:
            self._rings[rank] = ring
        return ring

    def close(self) -> None:
        """Let go of the rings."""
        while self._rings:
            self._rings.popitem()[1].close()

    async def run(self) -> None:
        """Follow until cancelled."""
        await self._patiently(self._publish_cuts)
        while True:
            more = await self._patiently(self.poll)
            if not more:
                self._doorbell.clear()
                try:
                    await asyncio.wait_for(self._doorbell.wait(), self._interval_s)
                except TimeoutError:
                    continue

    async def drain(self) -> None:
        """Publish all that is there; for when nobody writes any more and ``run`` has ended."""
        await self._patiently(self._publish_cuts)
        while await self._patiently(lambda: self.poll(at_end=True)):
            pass
        await self.save()

    async def poll(self, *, at_end: bool = False) -> bool:
        """Read what is new, write down what it comes to, publish it. False if there was nothing."""
        # A cut that is not published yet stays as it is: what has its id may be stored already, and must
        # be the same the second time, also when the server no longer remembers the first.
        await self._publish_cuts()
        read = [
            self._read_journal(rank, at_end) | self._read_ring(rank) | self._read_log(rank, at_end)
            for rank in self.state.ranks
        ]
        if any(read):
            await self.save()
            await self._publish_cuts()
        return any(read)

    def tail(self, rank: int, lines: int) -> tuple[str, ...]:
        """The last lines of a rank's output."""
        path = self._folder / f"rank_{rank}.log"
        if not path.exists():
            return ()
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            return tuple(journal.log_lines(file.read())[-lines:])

    # -- reading ------------------------------------------------------------

    def _read_journal(self, rank: int, at_end: bool) -> bool:
        state = self.state.ranks[rank]
        content = self._read(f"rank_{rank}.jsonl", state.journal_end, at_end)
        if not content:
            return False
        lines, problems = journal.parse(content, state.journal_end)
        for problem in problems:
            metrics.BAD_LINES.inc()
            log.warning("skipped a journal line", run_id=self._placed.run_id, rank=rank, problem=problem)
        journal.fold(state, (line for _, line in lines))
        state.journal_end += len(content)
        self.news.set()
        return True

    def _read_ring(self, rank: int) -> bool:
        """Take all there is: a line read before says nothing of a step whose record is not taken with it."""
        state, ring = self.state.ranks[rank], self.ring_of(rank)
        if ring is None or (head := ring.head) <= state.ring_end:
            return False
        state.ring_end += len(ring.read(state.ring_end, min(head, state.ring_start + ring.capacity)))
        if state.ring_end == state.ring_start:
            return False
        journal.fold_records(state, ring.read(state.ring_end - 1, state.ring_end)[0][1])
        return True

    def _read_log(self, rank: int, at_end: bool) -> bool:
        state = self.state.ranks[rank]
        content = self._read(f"rank_{rank}.log", state.log_end, at_end)
        if not content:
            return False
        state.log_end += len(content)
        state.log_time = self._now()
        if self._patterns:
            for _ in match_patterns(self._patterns, journal.log_lines(content), state.matches_end):
                pass
        self.news.set()
        return True

    def _read(self, name: str, offset: int, at_end: bool) -> bytes:
        try:
            with (self._folder / name).open("rb") as file:
                file.seek(offset)
                content = file.read(CHUNK_BYTES)
        except FileNotFoundError:
            return b""
        # A line longer than a chunk is cut, or it would hold up everything behind it.
        overlong = len(content) == CHUNK_BYTES and b"\n" not in content
        return journal.whole_lines(content, at_end=overlong or (at_end and len(content) < CHUNK_BYTES))

    # -- publishing ---------------------------------------------------------

    async def _publish_cuts(self) -> None:
        for rank, state in self.state.ranks.items():
            await self._publish_records(rank, state)
            if state.journal_start < state.journal_end:
                content = self._cut(f"rank_{rank}.jsonl", state.journal_start, state.journal_end)
                lines: list[tuple[int, JournalLine]] = journal.parse(content, state.journal_start)[0]
                for event in journal.progress(self._placed, rank, lines):
                    await self._publish(event)
                for _, line in lines:
                    if isinstance(line, StragglerLine):
                        await self._publish(journal.straggler(self._placed, self._homes, line))
                    elif isinstance(line, StarvationLine):
                        await self._publish(journal.starved(self._placed, self._homes, line))
                        metrics.STARVED.labels(line.bound_by).inc()
                state.journal_start = state.journal_end
            if state.log_start < state.log_end:
                await self._publish_log(rank, state)
        await self._publish_started()
        metrics.JOURNAL_LAG_BYTES.set(self._lag_bytes())

    async def _publish_records(self, rank: int, state: journal.RankState) -> None:
        ring = self.ring_of(rank) if state.ring_start < state.ring_end else None
        if ring is None:
            return
        records = ring.read(state.ring_start, state.ring_end)
        if len(records) < state.ring_end - state.ring_start:
            log.error("records of a rank are lost", run_id=self._placed.run_id, rank=rank, read=len(records))
        lines = [(journal.RING_OFFSET + number, line) for number, line in records]
        for event in journal.progress(self._placed, rank, lines):
            await self._publish(event)
        state.ring_start = state.ring_end

    async def _publish_log(self, rank: int, state: journal.RankState) -> None:
        content = self._cut(f"rank_{rank}.log", state.log_start, state.log_end)
        for event in journal.logs(self._placed, rank, content, state.log_start):
            await self._publish(event)
        if self._patterns:
            matches = match_patterns(self._patterns, journal.log_lines(content), state.matches_start)
            points = journal.pattern_progress(self._placed, rank, state.log_start, state.log_time, matches)
            if points is not None:
                state.step = points.step
                await self._publish(points)
        state.matches_start = dict(state.matches_end)
        state.log_start = state.log_end
        await self._skip_backlog(rank, state)

    async def _skip_backlog(self, rank: int, state: journal.RankState) -> None:
        """Leave out the middle of a flood of output; the node's file has it."""
        path = self._folder / f"rank_{rank}.log"
        behind = path.stat().st_size - state.log_end
        if behind <= LOG_BACKLOG_BYTES:
            return
        left_out = behind - LOG_RESUME_BYTES
        notice = f"[{left_out:,} bytes of output are left out here: print less]"
        await self._publish(
            RunLog(
                run_id=self._placed.run_id,
                generation=self._placed.generation,
                rank=rank,
                offset=state.log_end,
                lines=(notice,),
            )
        )
        state.log_start = state.log_end = state.log_end + left_out

    async def _publish_started(self) -> None:
        """Say once that this node's ranks train: from which sample, if they said so."""
        if self._started_published:
            return
        said = next((state.started for state in self.state.ranks.values() if state.started is not None), None)
        if said is None and not (self._launch_is_start and (self._folder / "processes.json").exists()):
            return
        await self._publish(
            RunStarted(
                run_id=self._placed.run_id,
                generation=self._placed.generation,
                node_id=self._placed.node_id,
                step=said.step if said else 0,
                samples_consumed=said.samples_consumed if said else 0,
                **_circumstances(said),
            )
        )
        self._started_published = True

    def _cut(self, name: str, start: int, end: int) -> bytes:
        with (self._folder / name).open("rb") as file:
            file.seek(start)
            return file.read(end - start)

    def _lag_bytes(self) -> int:
        lag = 0
        for rank, state in self.state.ranks.items():
            path = self._folder / f"rank_{rank}.jsonl"
            lag += path.stat().st_size - state.journal_start if path.exists() else 0
        return lag

    async def _patiently(self, work: Callable[[], Awaitable[object]]) -> bool:
        """Do it however long the bus is away: the files keep what the ranks write."""
        while True:
            try:
                return bool(await work())
            except TransientError as error:
                log.warning("the bus does not take what ranks report", error=str(error))


def _circumstances(said: StartedLine | None) -> dict[str, Any]:
    """Where the state came from and what decides the last bits, as the ranks said."""
    if said is None:
        return {}
    return said.model_dump(include={"resumed_from", "environment", "environment_digest", "exactness"})
