"""The follower of ranks' journals, rings and logs: publishes each byte once, whichever process is killed when.

The offsets are on disk before the bytes are published (``follow.json``). After a crash the same bytes are read and
published again under the same event ids, which the bus stores once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import structlog
from pydantic import BaseModel, ConfigDict, Field

from contracts.base import Fact
from contracts.events.run import CheckpointRef, RunLog, RunStarted
from contracts.progress import ring_name
from contracts.ranks import CheckpointLine, JournalLine, RendezvousLine, StarvationLine, StragglerLine
from services.kit.concurrency import run_in_thread
from services.worker import metrics
from services.worker.core import journal
from services.worker.core.metric_patterns import Pattern, match_patterns
from services.worker.local_files import write_if_space
from services.worker.ranks.ring_reader import RingReader
from services.worker.retry import retry_transient

log = structlog.get_logger(__name__)

CHUNK_BYTES = 128 * 1024
#: If more unpublished output than this accumulates, its middle is skipped.
LOG_BACKLOG_BYTES = 8 * 2**20
LOG_RESUME_BYTES = 2**18
TAIL_BYTES = 64 * 1024
#: How often the state of a progress bar is read that has not come to its end.
BAR_INTERVAL_S = 5.0
#: Where the state of a started rank came from, and what decides the last bits of arithmetic.
ORIGIN_FIELDS = {"resumed_from", "environment", "environment_digest", "exactness"}

#: Logged while the bus is away: the files keep what the ranks write.
REFUSED = "the bus does not accept what ranks report"

Publish = Callable[[Fact], Awaitable[object]]


class GenerationState(BaseModel):
    """What is known of a generation's ranks on this node: all that a restarted agent needs."""

    model_config = ConfigDict(extra="ignore")

    ranks: dict[int, journal.RankState] = Field(default_factory=dict)
    #: Step of the last checkpoint staged.
    staged_step: int | None = None
    staged_folders: dict[int, list[str]] = Field(default_factory=dict)
    #: Copies of what a script left, by step, that are not yet staged.
    snapshots: dict[int, CheckpointLine] = Field(default_factory=dict)
    system_count: int = 0
    #: Metric pattern -> the rank in whose output it first matched: of ranks that print the same metric, one counts.
    pattern_ranks: dict[str, int] = Field(default_factory=dict)


class JournalFollower:
    """Reads and publishes what one generation's local ranks write."""

    def __init__(
        self,
        source: journal.JournalSource,
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
        """Continue where ``follow.json`` ends.

        Args:
            launch_is_start: the run has started as soon as its processes run; a command need not report it.
            homes: the node of every rank of the generation.
        """
        self._source, self._folder, self._publish, self._now = source, folder, publish, now
        self._interval_s, self._patterns = interval_s, patterns or {}
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
        #: The checkpoint that the ranks of a command were started with.
        self.resume: CheckpointRef | None = None
        #: Set when the ranks have written more than metrics.
        self.news = asyncio.Event()
        self._started_published = False

    def ring_doorbell(self) -> None:
        """Read now."""
        self._doorbell.set()

    async def save(self) -> None:
        """Save the state. Replacing a file can take as long as the disk is busy with checkpoints."""
        async with self._saving:
            content = self.state.model_dump_json()
            # Blanks, in whose place the state can grow when the disk is full.
            content = content.ljust(2 * len(content))
            published = {rank: state.ring_start for rank, state in self.state.ranks.items()}
            if not await run_in_thread(write_if_space, self._path, content):
                # What is read goes on being published. Should the agent end before the disk has space, it reads from
                # older offsets: lines may be published twice, and points be lost.
                return
            for rank, ring in self._rings.items():
                # Only now: after a crash, records that were being published are read again.
                ring.release(published[rank])

    def open_ring(self, rank: int) -> RingReader | None:
        """Return the rank's ring; None while it has none."""
        ring = self._rings.get(rank) or RingReader.open(self._folder / ring_name(rank))
        if ring is not None:
            self._rings[rank] = ring
        return ring

    def close(self) -> None:
        """Close the rings."""
        while self._rings:
            self._rings.popitem()[1].close()

    async def run(self) -> None:
        """Follow until cancelled."""
        await retry_transient(self._publish_read, REFUSED)
        while True:
            if not await retry_transient(self.poll, REFUSED):
                self._doorbell.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._doorbell.wait(), self._interval_s)

    async def drain(self) -> None:
        """Publish the rest, once the ranks and ``run`` have ended."""
        await retry_transient(self._publish_read, REFUSED)
        while await retry_transient(partial(self.poll, at_end=True), REFUSED):
            pass
        await self.save()

    async def poll(self, *, at_end: bool = False) -> bool:
        """Read new bytes, save the offsets, publish; return whether there were any."""
        # Offsets of unpublished bytes do not change: an event with their id may be stored already, and must be the same
        # the second time, also when the server no longer remembers the first.
        await self._publish_read()
        read = [
            self._read_journal(rank, at_end) | self._read_ring(rank) | self._read_log(rank, at_end)
            for rank in self.state.ranks
        ]
        if any(read):
            await self.save()
            await self._publish_read()
        return any(read)

    def continue_matches(self, rank: int, matches: Mapping[str, int]) -> None:
        """Count the matches of metric patterns on from those of earlier attempts, before the rank has started."""
        state = self.state.ranks[rank]
        state.matches_start, state.matches_end = dict(matches), dict(matches)

    async def read_ahead(self, rank: int) -> journal.RankState:
        """Return the rank's state with all that the rank has written by now, also what is not read or published yet.

        The rank's own state stays as it is, so this works while the bus is away.
        """
        return await run_in_thread(self._apply_unread, rank, self.state.ranks[rank].model_copy(deep=True))

    def tail(self, rank: int, lines: int) -> tuple[str, ...]:
        """Return the last lines of a rank's output."""
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
        state.journal_time = self._now()
        lines, problems = journal.parse_lines(content, state.journal_end, state.journal_time)
        for problem in problems:
            metrics.BAD_LINES.inc()
            log.warning("skipped a journal line", run_id=self._source.run_id, rank=rank, problem=problem)
        journal.apply_lines(state, (line for _, line in lines))
        state.journal_end += len(content)
        self.news.set()
        return True

    def _read_ring(self, rank: int) -> bool:
        """Read all records: no line that was read before may name a step whose record is left out."""
        state, ring = self.state.ranks[rank], self.open_ring(rank)
        if ring is None or (head := ring.head) <= state.ring_end:
            return False
        state.ring_end += len(ring.read(state.ring_end, min(head, state.ring_start + ring.capacity)))
        if state.ring_end == state.ring_start:
            return False
        journal.apply_last_record(state, ring.read(state.ring_end - 1, state.ring_end)[0][1])
        return True

    def _read_log(self, rank: int, at_end: bool) -> bool:
        state = self.state.ranks[rank]
        content = self._read(f"rank_{rank}.log", state.log_end, at_end) or self._read_bar(rank)
        if not content:
            return False
        state.log_end += len(content)
        state.log_time = self._now()
        for _, name, _ in match_patterns(
            self._patterns_of(rank, content), journal.log_lines(content), state.matches_end
        ):
            self.state.pattern_ranks.setdefault(name, rank)
        self.news.set()
        return True

    def _read_bar(self, rank: int) -> bytes:
        """Return the states of a progress bar so far, now and then: what draws one is seen to go on."""
        state = self.state.ranks[rank]
        if self._now() < state.log_time + BAR_INTERVAL_S:
            return b""
        content = self._read(f"rank_{rank}.log", state.log_end, at_end=True)
        # The last one may be half written, and a return may belong to a new line.
        return content[: content.rfind(b"\r", 0, -1) + 1]

    def _patterns_of(self, rank: int, content: bytes = b"") -> dict[str, Pattern]:
        """Return the metric patterns for output: those that no other rank's has matched before.

        How many states of a bar are read depends on the clock, so they count only where they name their step.
        """
        ranks, is_bar = self.state.pattern_ranks, content.endswith(b"\r")
        return {
            name: pattern
            for name, pattern in self._patterns.items()
            if ranks.get(name, rank) == rank and not (is_bar and "step" not in pattern.groupindex)
        }

    def _read(self, name: str, offset: int, at_end: bool) -> bytes:
        try:
            with (self._folder / name).open("rb") as file:
                file.seek(offset)
                content = file.read(CHUNK_BYTES)
        except FileNotFoundError:
            return b""
        # A line longer than a chunk is cut off, or it would delay everything behind it.
        overlong = len(content) == CHUNK_BYTES and b"\n" not in content
        return journal.whole_lines(content, at_end=overlong or (at_end and len(content) < CHUNK_BYTES))

    def _apply_unread(self, rank: int, state: journal.RankState) -> journal.RankState:
        while content := self._read(f"rank_{rank}.jsonl", state.journal_end, at_end=False):
            lines, _ = journal.parse_lines(content, state.journal_end, self._now())
            journal.apply_lines(state, (line for _, line in lines))
            state.journal_end += len(content)
        # Values in the output enter the state when they are published.
        state.matches_end, state.log_end = dict(state.matches_start), state.log_start
        patterns = self._patterns_of(rank)
        while patterns and (content := self._read(f"rank_{rank}.log", state.log_end, at_end=False)):
            matches = match_patterns(patterns, journal.log_lines(content), state.matches_end)
            journal.apply_matches(state, matches)
            state.log_end += len(content)
        return state

    # -- publishing ---------------------------------------------------------

    async def _publish_read(self) -> None:
        for rank, state in self.state.ranks.items():
            await self._publish_records(rank, state)
            if state.journal_start < state.journal_end:
                content = self._read_between(f"rank_{rank}.jsonl", state.journal_start, state.journal_end)
                lines: list[tuple[int, JournalLine]] = journal.parse_lines(
                    content, state.journal_start, state.journal_time
                )[0]
                for event in journal.progress_events(self._source, rank, lines):
                    await self._publish(event)
                for _, line in lines:
                    if isinstance(line, StragglerLine | StarvationLine):
                        await self._publish(journal.rank_event(self._source, self._homes, line))
                    if isinstance(line, RendezvousLine):
                        await self._publish(journal.held_up_event(self._source, self._homes, line))
                    if isinstance(line, StarvationLine):
                        metrics.STARVED.labels(line.bound_by).inc()
                state.journal_start = state.journal_end
            if state.log_start < state.log_end:
                await self._publish_log(rank, state)
        await self._publish_started()
        metrics.JOURNAL_LAG_BYTES.set(self._lag_bytes())

    async def _publish_records(self, rank: int, state: journal.RankState) -> None:
        ring = self.open_ring(rank) if state.ring_start < state.ring_end else None
        if ring is None:
            return
        records = ring.read(state.ring_start, state.ring_end)
        if len(records) < state.ring_end - state.ring_start:
            log.error("progress records of a rank are lost", run_id=self._source.run_id, rank=rank, read=len(records))
        lines = [(journal.RING_OFFSET + number, line) for number, line in records]
        for event in journal.progress_events(self._source, rank, lines):
            await self._publish(event)
        state.ring_start = state.ring_end

    async def _publish_log(self, rank: int, state: journal.RankState) -> None:
        content = self._read_between(f"rank_{rank}.log", state.log_start, state.log_end)
        for event in journal.log_events(self._source, rank, content, state.log_start):
            await self._publish(event)
        if patterns := self._patterns_of(rank, content):
            matches = list(match_patterns(patterns, journal.log_lines(content), state.matches_start))
            points = journal.pattern_event(
                self._source, rank, state.log_start, state.log_time, matches, state.step or 0
            )
            if points is not None:
                journal.apply_matches(state, matches)
                await self._publish(points)
        state.matches_start = dict(state.matches_end)
        state.log_start = state.log_end
        await self._skip_backlog(rank, state)

    async def _skip_backlog(self, rank: int, state: journal.RankState) -> None:
        """Skip the middle of a flood of output; the node's file has all of it."""
        path = self._folder / f"rank_{rank}.log"
        behind = path.stat().st_size - state.log_end
        if behind <= LOG_BACKLOG_BYTES:
            return
        skipped = behind - LOG_RESUME_BYTES
        notice = f"[{skipped:,} bytes of output are left out here: print less]"
        run_id, generation, _ = self._source
        await self._publish(
            RunLog(run_id=run_id, generation=generation, rank=rank, offset=state.log_end, lines=(notice,))
        )
        state.log_start = state.log_end = state.log_end + skipped

    async def _publish_started(self) -> None:
        """Publish once that this node's ranks train, and from which sample."""
        if self._started_published:
            return
        started = next((state.started for state in self.state.ranks.values() if state.started is not None), None)
        if started is None and not (self._launch_is_start and (self._folder / "processes.json").exists()):
            return
        resumed_step = self.resume.step if self.resume and not self.resume.step_is_count else 0
        await self._publish(
            RunStarted(
                **self._source._asdict(),
                step=started.step if started else resumed_step,
                samples_consumed=started.samples_consumed if started else 0,
                **(started.model_dump(include=ORIGIN_FIELDS) if started else {}),
            )
        )
        self._started_published = True

    def _read_between(self, name: str, start: int, end: int) -> bytes:
        with (self._folder / name).open("rb") as file:
            file.seek(start)
            return file.read(end - start)

    def _lag_bytes(self) -> int:
        paths = {self._folder / f"rank_{rank}.jsonl": state for rank, state in self.state.ranks.items()}
        return sum(path.stat().st_size - state.journal_start for path, state in paths.items() if path.exists())
