"""Prefetch of shards by the node's agent: the rank sends its read plan, and waits for shards that are missing.

The node's agent puts a shard into the dataset's folder when it is verified, so what is there can be read. A rank that
waits sits in a read from the agent's socket: it takes no CPU, and the agent
answers as soon as the shard is there or cannot be fetched. When there is no agent for long, the rank ends itself
(``agent_link``).
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

from contracts.events.dataset import ShardFile
from contracts.ranks import ShardPlanLine, ShardReplyLine, ShardRequestLine, json_line
from trainbus.agent_link.requests import PATIENCE_S, POLL_S, request_until_answered
from trainbus.data.batch_timings import BatchTimings
from trainbus.data.read_plan import ShardNeed
from trainbus.data.reader import DatasetError

#: Seconds between two reports of the rank's position to the agent.
REPORT_S = 1.0
#: Needs in one report; the next ones follow long before training reaches them.
MAX_NEEDS = 4096
#: Positions to look ahead, at first and at most.
SPAN_MIN, SPAN_MAX = 2**14, 2**44
#: Reports over which the rate is measured.
RATE_REPORTS = 30

Needs = Callable[[int, int], Sequence[ShardNeed]]


class ShardPrefetcher:
    """One rank's end of the node's shard cache. ``wait`` is for any thread, the rest for the training loop."""

    def __init__(
        self,
        agent: Path,
        folder: Path,
        *,
        rank: int = 0,
        generation: int = 1,
        waits: BatchTimings | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Set up the prefetcher; it connects to the agent on the first call.

        Args:
            agent: the agent's socket.
            folder: where the dataset's manifest is, and its shards will be.
            patience_s: seconds without an agent after which a wait is given up.
        """
        self._agent, self._folder, self._rank, self._generation = agent, folder, rank, generation
        self._waits, self._patience_s = waits, patience_s
        self._split = ""
        self._needs: Needs | None = None
        self._at: int | None = None
        self._moved = threading.Event()
        self._closed = threading.Event()
        self._planned_until = -1
        self._waited_s = 0.0
        #: (seconds, not counting those spent waiting for shards; position) of the last reports.
        self._reports: deque[tuple[float, int]] = deque(maxlen=RATE_REPORTS)

    # -- what will be read ----------------------------------------------------

    def set_plan(self, split: str, needs: Needs) -> None:
        """Set what this rank will read; the agent fetches it ahead, from the first ``set_position`` on.

        Args:
            needs: the shards of ``split`` that the rank needs from one position to another, by first need; called
                from a thread of its own.
        """
        first = self._needs is None
        self._split, self._needs, self._planned_until = split, needs, -1
        if first:
            threading.Thread(target=self._report_positions, name="trainbus-shard-prefetch", daemon=True).start()

    def set_position(self, samples_consumed: int) -> None:
        """Set the position of training. It is cheap enough for every step."""
        first = self._at is None
        self._at = samples_consumed
        if first:
            self._moved.set()

    def close(self) -> None:
        """Stop reporting."""
        self._closed.set()
        self._moved.set()

    def _report_positions(self) -> None:
        """Report the needed shards and the rank's position to the agent, until ``close``."""
        self._moved.wait()
        connection: socket.socket | None = None
        reported = -1
        while not self._closed.is_set():
            at = self._at
            assert at is not None
            if connection is not None and not _is_open(connection):
                connection.close()
                connection = None
            try:
                if connection is None:
                    connection = self._connect()
                    self._planned_until = -1  # a new agent has no plan yet
                if at != reported or at >= self._planned_until:
                    connection.sendall(json_line(self._plan_line(at)))
                    reported = at
            except OSError:  # without an agent, report again when there is one
                if connection is not None:
                    connection.close()
                connection = None
            self._closed.wait(REPORT_S)
        if connection is not None:
            connection.close()

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(POLL_S)
        try:
            connection.connect(str(self._agent))
        except OSError:
            connection.close()
            raise
        return connection

    def _plan_line(self, at: int) -> ShardPlanLine:
        self._reports.append((time.monotonic() - self._waited_s, at))
        (first_s, first), (last_s, last) = self._reports[0], self._reports[-1]
        per_s = (last - first) / (last_s - first_s) if last_s > first_s and last > first else 0.0
        needs = self._needs_from(at) if at >= self._planned_until else None
        return ShardPlanLine(rank=self._rank, split=self._split, at=at, per_s=per_s, needs=needs)

    def _needs_from(self, at: int) -> tuple[tuple[int, int, int], ...]:
        """Return the next needs, until every shard occurred once or ``MAX_NEEDS`` is reached."""
        assert self._needs is not None
        span, shards, needs = SPAN_MIN, -1, self._needs(at, at + SPAN_MIN)
        while len(needs) <= MAX_NEEDS and span < SPAN_MAX:
            known = len({need.shard for need in needs})
            if known == shards and known:
                break
            shards, span = known, 2 * span
            needs = self._needs(at, at + span)
        known_until = needs[MAX_NEEDS].first if len(needs) > MAX_NEEDS else at + span
        # Report again when half of it is consumed.
        self._planned_until = at + max(1, (known_until - at) // 2)
        return tuple((need.shard, need.first, need.last) for need in needs[:MAX_NEEDS])

    # -- what is read now -----------------------------------------------------

    def wait(self, shard: ShardFile) -> None:
        """Return when the shard and its index are in the folder.

        Raises:
            DatasetError: the shard cannot be fetched, or there is no agent.
        """
        if self._is_here(shard):
            return
        started_s = time.monotonic()
        try:
            with nullcontext() if self._waits is None else self._waits.during("fetch"):
                self._wait_for(shard)
        finally:
            self._waited_s += time.monotonic() - started_s

    def _is_here(self, shard: ShardFile) -> bool:
        # These are links into the cache. A dangling one is a shard that was evicted and can return.
        return (self._folder / shard.path).exists() and (self._folder / shard.index_path).exists()

    def _wait_for(self, shard: ShardFile) -> None:
        line = ShardRequestLine(rank=self._rank, generation=self._generation, shard=shard.path)
        while not self._is_here(shard):  # an agent that says so may mean a shard that was evicted since
            problem = request_until_answered(
                self._agent,
                line,
                ShardReplyLine,
                shard.path,
                patience_s=self._patience_s,
                is_here=lambda: self._is_here(shard),
            )
            if problem:
                raise DatasetError(problem)


def _is_open(connection: socket.socket) -> bool:
    """Return whether the other end, which sends nothing on this connection, is still open."""
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        connection.settimeout(POLL_S)
