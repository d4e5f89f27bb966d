"""The watcher of stalls: reports a rank that makes no progress, with the stacks of all ranks."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import structlog

from contracts.base import Fact
from contracts.events.run import Artifact, RunPlaced, RunStalled
from services.kit.bus import TransientError
from services.worker import metrics
from services.worker.core.stall_detector import Stall, StallDetector
from services.worker.launch.processes import RankProcess
from services.worker.ranks.journal_follower import JournalFollower, Publish
from services.worker.ranks.stall_dumps import describe_dump, dump_flight_recorders, dump_stacks, is_stopped

log = structlog.get_logger(__name__)

#: Ranks whose stacks are reported; no node has more accelerators.
STACKS_MAX = 16
#: Seconds for the flight recorders to be uploaded; the stall is reported without them if the store takes longer.
UPLOAD_TIMEOUT_S = 15.0


class StallWatcher:
    """Reads the heartbeats of the local ranks. It ends no rank: the scheduler decides what follows a stall."""

    def __init__(
        self,
        placed: RunPlaced,
        node_id: str,
        folder: Path,
        follower: JournalFollower,
        processes: Callable[[], Sequence[RankProcess]],
        publish: Publish,
        is_stopping: Callable[[], bool],
        upload: Callable[[Sequence[str]], Awaitable[Sequence[Artifact]]] | None = None,
    ) -> None:
        """``upload`` stores files of the generation's folder."""
        self._upload = upload
        self._placed, self._node_id, self._folder, self._follower = placed, node_id, folder, follower
        self._processes, self._publish, self._is_stopping = processes, publish, is_stopping
        limits = placed.spec.watch
        self._detector = StallDetector(limits.stall_factor, limits.stall_min_s)
        self._interval_s = min(1.0, limits.stall_min_s / 5)
        #: Ranks without a ring: the step that they reported last, and when it was read.
        self._reported: dict[int, tuple[int, float]] = {}

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self.check(time.monotonic())

    async def check(self, now_s: float) -> None:
        """Read the heartbeats, and report a rank that has stalled."""
        alive = {process.rank: process for process in self._processes()}
        for rank in alive:
            self._read_beat(rank, now_s)
        if self._is_stopping():
            return
        pids = {rank: self._pid(process) for rank, process in alive.items()}
        stall = self._detector.find_stall(now_s, frozenset(rank for rank, pid in pids.items() if is_stopped(pid)))
        if stall is not None and stall.rank in alive:
            await self._report(stall, pids)

    def _read_beat(self, rank: int, now_s: float) -> None:
        ring = self._follower.open_ring(rank)
        if ring is not None and (beat := ring.beat()) is not None:
            self._detector.add_beat(rank, beat.mark, beat.step, beat.at_s)
            return
        step = self._follower.state.ranks[rank].step if rank in self._follower.state.ranks else None
        if step is None:
            return
        if self._reported.get(rank, (None, 0.0))[0] != step:
            self._reported[rank] = (step, now_s)
        self._detector.add_beat(rank, step, *self._reported[rank])

    def _pid(self, process: RankProcess) -> int:
        """Return the pid of the rank itself, where a shell around it was started."""
        ring = self._follower.open_ring(process.rank)
        if ring is None:
            return process.pid
        try:
            return ring.pid if os.getpgid(ring.pid) == os.getpgid(process.pid) else process.pid
        except OSError:
            return process.pid

    async def _report(self, stall: Stall, pids: dict[int, int]) -> None:
        metrics.STALLS.inc()
        log.warning("a rank makes no progress", rank=stall.rank, step=stall.step, silent_s=round(stall.silent_s, 1))
        chosen = sorted(pids, key=lambda rank: (rank != stall.rank, rank))[:STACKS_MAX]
        texts = await asyncio.gather(
            *(asyncio.to_thread(dump_stacks, pids[rank], self._folder / f"rank_{rank}.stacks") for rank in chosen)
        )
        by_rank = {str(rank): text for rank, text in zip(chosen, texts, strict=True)}
        for rank, text in (await self._dump_flight_recorders()).items():
            by_rank[str(rank)] = "\n".join(filter(None, (text, by_rank.get(str(rank)))))
        fact: Fact = RunStalled(
            run_id=self._placed.run_id,
            generation=self._placed.generation,
            node_id=self._node_id,
            rank=stall.rank,
            step=stall.step,
            silent_s=stall.silent_s,
            median_step_s=stall.median_step_s,
            on_stall=self._placed.spec.watch.on_stall,
            stacks=by_rank,
        )
        try:
            await self._publish(fact)
        except TransientError as error:
            log.warning("a stall could not be reported", error=str(error))

    async def _dump_flight_recorders(self) -> dict[int, str]:
        """Return where the flight recorders of ranks that use NCCL can be read."""
        found = await asyncio.to_thread(dump_flight_recorders, self._folder)
        uris: dict[str, str] = {}
        if found and self._upload is not None:
            try:
                uploaded = await asyncio.wait_for(
                    self._upload([path.name for path in found.values()]), UPLOAD_TIMEOUT_S
                )
                uris = {each.name: each.uri for each in uploaded}
            except (TransientError, OSError, TimeoutError) as error:
                log.warning("flight recorders stay on the node", error=repr(error))
        return {rank: describe_dump(rank, path, uris.get(path.name)) for rank, path in found.items()}
