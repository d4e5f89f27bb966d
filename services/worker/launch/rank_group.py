"""The processes of one generation's ranks on this node: who runs, how each ended, how they are made to end."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import structlog

from contracts.ranks import StopLine
from services.worker.core import rank_environment, rank_exits
from services.worker.generation.requests import GenerationRequests, StopRequest
from services.worker.launch.executor import Executor, RankProcess, read_exit
from services.worker.local_files import read_json, write_atomically
from services.worker.ranks.control_socket import ControlSocket

log = structlog.get_logger(__name__)

#: How often processes are looked at. Their ends are noticed at once; this is for what nobody tells.
POLL_S = 0.05
#: Seconds given to the other local ranks to write down why they ended, once one has failed.
FAILURE_PATIENCE_S = 0.3
#: Seconds that whoever started a process may take to write its exit code, once it is dead.
EXIT_FILE_PATIENCE_S = 0.3


class RankGroup:
    """The local ranks as processes. Use it as a context manager while they are watched."""

    def __init__(
        self,
        executor: Executor,
        folder: Path,
        orders: GenerationRequests,
        now: Callable[[], float],
        *,
        kill_after_s: float,
    ) -> None:
        self._executor, self._folder, self._orders, self._now = executor, folder, orders, now
        self._kill_after_s = kill_after_s
        self._path = folder / "processes.json"
        self._processes: list[RankProcess] = []
        self._unwatch: list[Callable[[], None]] = []
        #: When a process was seen dead whose exit code is not written yet.
        self._dead_since: dict[int, float] = {}
        self._told: StopRequest | None = None
        self.exits: dict[int, rank_exits.Exit] = {}
        #: Ranks were told to end by a signal: whatever their exit code, that is why.
        self.terminated = False
        #: Whether the others are left alone for longer, so many seconds after the first of them failed.
        self.patience: Callable[[float], bool] = lambda waited_s: waited_s < FAILURE_PATIENCE_S

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for unwatch in self._unwatch:
            unwatch()
        self._unwatch.clear()

    @property
    def pids(self) -> list[int]:
        """Those that have not ended."""
        return [each.pid for each in self._processes if each.rank not in self.exits]

    @property
    def alive(self) -> list[int]:
        """Ranks that have not ended."""
        return [each.rank for each in self.running]

    @property
    def running(self) -> list[RankProcess]:
        return [each for each in self._processes if each.rank not in self.exits]

    @property
    def ended(self) -> list[rank_exits.Exit]:
        return list(self.exits.values())

    def load(self) -> bool:
        """Take up the processes that an earlier life of the agent has noted; False if there are none."""
        if not self._processes:
            stored = read_json(self._path)
            self._processes = [RankProcess(**each) for each in stored or ()]
        return bool(self._processes)

    async def start(self, starts: Sequence[rank_environment.ProcessSpec], cwd: Path) -> None:
        """Start all of them and note who they are.

        Raises:
            StartError, OSError: one could not be started; the others have been killed.
        """
        started: list[RankProcess] = []
        try:
            for start in starts:
                started.append(await self._executor.start(start, self._folder, cwd))
        except BaseException:
            self._processes = started
            await self.sweep()
            raise
        self._processes = started
        write_atomically(self._path, json.dumps([each.to_json() for each in started]))
        log.info("ranks started", pids=[each.pid for each in started])

    async def until_over(self, control: ControlSocket, beside: Sequence[asyncio.Task[None]], *, listens: bool) -> None:
        """Wait until every process has ended, and make them end when they must.

        Args:
            beside: what must go on beside them; its errors end the wait.
            listens: the ranks read the control socket; others are told by a signal.
        """
        self._unwatch += [self._executor.watch(process, self._orders.wake) for process in self._processes]
        failed_at: float | None = None
        while True:
            self._orders.raise_if_dropped()
            for task in beside:
                if task.done():
                    task.result()  # ranks that nobody follows must not train on unseen
            self._collect()
            if len(self.exits) == len(self._processes):
                break
            if failed_at is None and rank_exits.first_failure(self.ended):
                failed_at = time.monotonic()
            if failed_at is not None and not self.patience(time.monotonic() - failed_at):
                self._signal(signal.SIGKILL)
            if self._orders.stop is not None:
                self._enforce(self._orders.stop, control, listens)
            await self._orders.next(POLL_S)
        # Data loaders and torchrun's children may outlive whoever started them.
        await self.sweep()

    async def sweep(self) -> None:
        """Kill whatever is left of the generation."""
        self.load()
        await self._executor.sweep(self._folder, self._processes)

    def _enforce(self, stop: StopRequest, control: ControlSocket, listens: bool) -> None:
        """Ask; when the grace is over, tell; then kill. Scripts that do not listen are told at once."""
        now = self._now()
        if now < stop.ends_at and stop.untouched_s > 0 and self.patience(now - stop.deadline):
            return
        if self._told != stop:
            self._told = stop
            control.stop(StopLine(grace_s=stop.grace_s, reason=stop.reason, checkpoint=stop.grace_s > 0))
            if not listens and not control.connected:
                # Whatever its exit code is then, it ended because it was told to.
                self.terminated = True
                self._signal(signal.SIGTERM)
        if now >= stop.deadline and not self.terminated:
            self.terminated = True
            self._signal(signal.SIGTERM)
        if now >= stop.deadline + self._kill_after_s:
            self._signal(signal.SIGKILL)

    def _collect(self) -> None:
        for process in self._processes:
            if process.rank in self.exits:
                continue
            alive = self._executor.alive(process)
            found = read_exit(self._folder, process.rank)
            if found is None and not alive:
                found = self._unwritten_exit(process)
            if found is not None:
                self.exits[process.rank] = rank_exits.Exit(process.rank, *found)
                log.info("rank ended", rank=process.rank, code=found[0])

    def _unwritten_exit(self, process: RankProcess) -> tuple[int, float] | None:
        """The end of a process that nobody wrote down, once whoever starts processes has had time to."""
        dead_since = self._dead_since.setdefault(process.rank, time.monotonic())
        if time.monotonic() - dead_since < EXIT_FILE_PATIENCE_S:
            return None
        return read_exit(self._folder, process.rank) or (-int(signal.SIGKILL), self._now())

    def _signal(self, number: int) -> None:
        for process in self._processes:
            if process.rank not in self.exits:
                self._executor.signal(process, number)
