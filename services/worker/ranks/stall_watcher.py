"""Watches whether the ranks of a generation go on, and tells where they are when they do not."""

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
from services.worker.launch.executor import RankProcess
from services.worker.ranks import flight_recorder
from services.worker.ranks.journal_follower import JournalFollower, Publish
from services.worker.ranks.stack_dump import is_stopped, stacks

log = structlog.get_logger(__name__)

#: Ranks whose stacks are told; a node has no more accelerators than that.
STACKS_MAX = 16
#: The stall is told without them if the store takes longer to have the flight recorders.
KEEP_PATIENCE_S = 15.0


class StallWatcher:
    """Looks at the beats of the local ranks. It ends nobody: what is done about a stall the scheduler decides."""

    def __init__(
        self,
        placed: RunPlaced,
        node_id: str,
        folder: Path,
        follower: JournalFollower,
        processes: Callable[[], Sequence[RankProcess]],
        publish: Publish,
        stopping: Callable[[], bool],
        keep: Callable[[Sequence[str]], Awaitable[Sequence[Artifact]]] | None = None,
    ) -> None:
        """Remember whom to look at. ``keep`` stores files of the generation's folder."""
        self._keep = keep
        self._placed, self._node_id, self._folder, self._follower = placed, node_id, folder, follower
        self._processes, self._publish, self._stopping = processes, publish, stopping
        wanted = placed.spec.watch
        self._watch = StallDetector(wanted.stall_factor, wanted.stall_min_s)
        self._interval_s = min(1.0, wanted.stall_min_s / 5)
        #: Ranks without a ring: the step they reported last, and when we heard of it.
        self._heard: dict[int, tuple[int, float]] = {}

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self.look(time.monotonic())

    async def look(self, now_s: float) -> None:
        """Take in the beats, and report a rank that has stalled."""
        alive = {process.rank: process for process in self._processes()}
        for rank in alive:
            self._see(rank, now_s)
        if self._stopping():
            return
        pids = {rank: self._pid(process) for rank, process in alive.items()}
        stall = self._watch.stalled(now_s, frozenset(rank for rank, pid in pids.items() if is_stopped(pid)))
        if stall is not None and stall.rank in alive:
            await self._report(stall, pids)

    def _see(self, rank: int, now_s: float) -> None:
        ring = self._follower.ring_of(rank)
        if ring is not None and (beat := ring.beat()) is not None:
            self._watch.saw(rank, beat.mark, beat.step, beat.at_s)
            return
        step = self._follower.state.ranks[rank].step if rank in self._follower.state.ranks else None
        if step is None:
            return
        if self._heard.get(rank, (None, 0.0))[0] != step:
            self._heard[rank] = (step, now_s)
        self._watch.saw(rank, step, *self._heard[rank])

    def _pid(self, process: RankProcess) -> int:
        """The rank itself, where what was started is a shell around it."""
        ring = self._follower.ring_of(process.rank)
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
            *(asyncio.to_thread(stacks, pids[rank], self._folder / f"rank_{rank}.stacks") for rank in chosen)
        )
        by_rank = {str(rank): text for rank, text in zip(chosen, texts, strict=True)}
        for rank, text in (await self._flights()).items():
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
            log.warning("a stall could not be told", error=str(error))

    async def _flights(self) -> dict[int, str]:
        """Where the flight recorders of ranks on NCCL are found; none where there is no GPU."""
        found = await asyncio.to_thread(flight_recorder.dumps, self._folder)
        uris: dict[str, str] = {}
        if found and self._keep is not None:
            try:
                kept = await asyncio.wait_for(self._keep([path.name for path in found.values()]), KEEP_PATIENCE_S)
                uris = {each.name: each.uri for each in kept}
            except (TransientError, OSError, TimeoutError) as error:
                log.warning("flight recorders stay on the node", error=repr(error))
        return {rank: flight_recorder.told(rank, path, uris.get(path.name)) for rank, path in found.items()}
