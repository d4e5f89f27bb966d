"""The processes of one generation's ranks on this node: started, watched, made to end."""

from __future__ import annotations

import json
import signal
import time
from asyncio import Task
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Self

import structlog

from contracts.events.run import RunPlaced
from contracts.ranks import STOP_SEEN_NAME, StopLine
from services.kit.concurrency import run_in_thread
from services.worker.checkpoints.survivor_state import SurvivorMemory
from services.worker.core.journal import RankState
from services.worker.core.rank_environment import ProcessSpec
from services.worker.core.rank_exits import Exit, first_failure
from services.worker.generation.requests import POLL_S, GenerationRequests, StopRequest
from services.worker.launch.executor import UNKNOWN_EXIT, Executor, read_exit
from services.worker.launch.processes import RankProcess, processes_path, read_processes
from services.worker.local_files import write_atomically
from services.worker.ranks.control_socket import ControlSocket
from services.worker.ranks.open_files import ScriptEndedError, find_written_files, wait_until_stopped

log = structlog.get_logger(__name__)

#: Seconds for the other local ranks to write down why they ended, once one has failed.
FAILURE_PATIENCE_S = 0.3
#: Seconds for the parent of a dead process to write its exit code.
EXIT_FILE_PATIENCE_S = 0.3
#: Steps in which ranks notice that they lost a peer.
NOTICE_STEPS = 2


class SurvivorGrace:
    """The survivors of one generation: whether they can save state, and how long they may take."""

    def __init__(self, placed: RunPlaced, memory: SurvivorMemory, max_save_s: float, now: Callable[[], float]) -> None:
        """``max_save_s``: the longest that survivors may take."""
        self._placed, self._memory, self._max_save_s, self._now = placed, memory, max_save_s, now
        self._ranks: Mapping[int, RankState] = {}

    def follow(self, ranks: Mapping[int, RankState]) -> None:
        """Read the ranks' progress from ``ranks``, which changes as they go on."""
        self._ranks = ranks

    @property
    def is_resumable(self) -> bool:
        """Whether a next generation can resume what the ranks write: no command or evaluation can."""
        spec = self._placed.spec
        return spec.command is None and spec.training is not None and spec.kind == "train"

    @property
    def can_use_memory(self) -> bool:
        """Whether the ranks can leave state in memory."""
        return self._memory.is_available and self.is_resumable

    @property
    def extra_s(self) -> float:
        """Seconds beyond a stop's grace for ranks whose peers have failed."""
        return self._max_save_s if self.can_use_memory else 0.0

    def may_wait(self, waited_s: float, running: Collection[int]) -> bool:
        """Whether the ranks that still run get more time, ``waited_s`` after the first failure."""
        # They notice the failure at the end of the step that they are in.
        notice_s = NOTICE_STEPS * self._mean_step_s if self.can_use_memory else 0.0
        if waited_s < FAILURE_PATIENCE_S + notice_s:
            return waited_s < max(self._max_save_s, FAILURE_PATIENCE_S)
        if not self.can_use_memory or waited_s > self._max_save_s:
            return False
        return self._memory.is_being_written(self._placed.run_id, self._placed.generation, running)

    def has_newer_state(self) -> bool:
        """Whether memory holds newer state than any checkpoint, so that the next generation needs no upload."""
        newest = self._memory.newest_step(self._placed.run_id, self._placed.generation)
        staged = (checkpoint.step for state in self._ranks.values() for checkpoint in state.checkpoints)
        return newest is not None and newest >= max(staged, default=0)

    @property
    def _mean_step_s(self) -> float:
        """Mean seconds a step of this generation, of its fastest rank; 0 while unknown."""
        per_rank = [
            (self._now() - state.started.time) / max(state.step - state.started.step, 1)
            for state in self._ranks.values()
            if state.started is not None and state.step is not None
        ]
        return min(per_rank, default=0.0)


class RankGroup:
    """The local ranks as processes. Use it as a context manager while they are watched."""

    def __init__(
        self,
        executor: Executor,
        folder: Path,
        requests: GenerationRequests,
        survivors: SurvivorGrace,
        now: Callable[[], float],
        *,
        kill_after_s: float,
    ) -> None:
        self._executor, self._folder, self._requests, self._now = executor, folder, requests, now
        self._survivors, self._kill_after_s = survivors, kill_after_s
        self._processes: list[RankProcess] = []
        self._watches = ExitStack()
        #: When a process was found dead whose exit code is not written yet.
        self._dead_since: dict[int, float] = {}
        self._sent_stop: StopRequest | None = None
        self._exits: dict[int, Exit] = {}
        #: Whether the agent ended ranks by a signal: then their exit codes do not show why they ended.
        self.terminated = False
        #: When they were first signalled to end, and which files they were writing then; None: unknown.
        self.terminated_at: float | None = None
        self.written_files: set[str] | None = None
        #: Whether one had to be killed.
        self.killed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._watches.close()

    @property
    def running(self) -> list[RankProcess]:
        """Processes that have not ended."""
        return [each for each in self._processes if each.rank not in self._exits]

    @property
    def exits(self) -> list[Exit]:
        """How the others ended."""
        return list(self._exits.values())

    @property
    def has_seen_stop(self) -> bool:
        """Whether a script has seen that it is to stop; it may see that before the agent signals it."""
        return (self._folder / STOP_SEEN_NAME).exists()

    def load(self) -> bool:
        """Read the processes that an earlier life of the agent wrote down; return whether there are any."""
        if not self._processes:
            self._processes = read_processes(self._folder)
        return bool(self._processes)

    async def start(self, specs: Sequence[ProcessSpec], cwd: Path, start_before: float | None = None) -> None:
        """Start all processes and write them down; none that would begin after ``start_before``, of the boot clock.

        Raises:
            RankStartError, OSError: one could not be started; the others have been killed.
        """
        started: list[RankProcess] = []
        try:
            for spec in specs:
                started.append(await self._executor.start(spec, self._folder, cwd, start_before))
            write_atomically(processes_path(self._folder), json.dumps([asdict(each) for each in started]))
        except BaseException:
            self._processes = started
            await self.sweep()
            raise
        self._processes = started
        log.info("ranks started", pids=[each.pid for each in started])

    async def wait_until_ended(self, control: ControlSocket, tasks: Sequence[Task[None]], *, listens: bool) -> None:
        """Wait until every process has ended, and make them end when they must.

        Args:
            tasks: what must go on meanwhile; an error of one ends the wait.
            listens: the ranks read the control socket; others are stopped by a signal.
        """
        for process in self._processes:
            self._watches.callback(self._executor.watch(process, self._requests.notify))
        failed_at: float | None = None
        while True:
            self._requests.raise_if_dropped()
            for task in tasks:
                if task.done():
                    task.result()  # ranks that are not followed must not train on
            self._collect_exits()
            if len(self._exits) == len(self._processes):
                break
            if failed_at is None and first_failure(self.exits):
                failed_at = time.monotonic()
                control.send_peer_lost()
            if failed_at is not None and not self._may_wait_since(time.monotonic() - failed_at):
                self._signal_all(signal.SIGKILL)
            if self._requests.stop is not None:
                await self._enforce_stop(self._requests.stop, control, listens)
            await self._requests.wait_for_change(POLL_S)
        # Data loaders and a script's children may outlive their parents.
        await self.sweep()

    async def sweep(self) -> None:
        """Kill every process that still belongs to the generation."""
        self.load()
        await self._executor.sweep(self._folder, self._processes)

    def _may_wait_since(self, waited_s: float) -> bool:
        return self._survivors.may_wait(waited_s, [each.rank for each in self.running])

    async def _enforce_stop(self, stop: StopRequest, control: ControlSocket, listens: bool) -> None:
        """Send the stop line, SIGTERM after the grace, then SIGKILL; SIGTERM at once to ranks that do not listen."""
        now = self._requests.now()
        if now < stop.kill_at and stop.survivor_s > 0 and self._may_wait_since(now - stop.deadline):
            control.send_peer_lost()  # one on another node
            return
        if self._sent_stop != stop:
            self._sent_stop = stop
            control.send_stop(StopLine(grace_s=stop.grace_s, reason=stop.reason, checkpoint=stop.grace_s > 0))
            if not listens and not control.connected:
                await self._terminate_scripts()
        if now >= stop.deadline and not self.terminated:
            if listens:
                self.terminated = True
                self._requests.note_signalled(self._now())
                self._signal_all(signal.SIGTERM)
            else:
                await self._terminate_scripts()
        if now >= stop.deadline + self._kill_after_s:
            self._signal_all(signal.SIGKILL)

    async def _terminate_scripts(self) -> None:
        """Send SIGTERM to scripts. The first time they are held until it is known which files they are writing.

        Otherwise one could begin to write another file before the signal ends it.
        """
        self.terminated = True
        try:
            if self.terminated_at is None:
                self._signal_all(signal.SIGSTOP)
                self.written_files = await run_in_thread(_list_written, [each.pid for each in self.running])
        finally:
            self.terminated_at = self.terminated_at or self._now()
            self._requests.note_signalled(self.terminated_at)
            self._signal_all(signal.SIGTERM)
            self._signal_all(signal.SIGCONT)

    def _signal_all(self, number: int) -> None:
        if number == signal.SIGKILL and self.running and not self.killed:
            self.killed = True
            self._requests.note_signalled(self._now(), killed=True)
        for process in self.running:
            self._executor.signal(process, number)

    def _collect_exits(self) -> None:
        for process in self.running:
            # In this order: an exit code that is written before the process is found dead is read.
            alive = self._executor.is_alive(process)
            found = read_exit(self._folder, process.rank)
            if found is None and not alive:
                found = self._find_unwritten_exit(process)
            if found is not None:
                self._exits[process.rank] = Exit(process.rank, *found)
                log.info("rank ended", rank=process.rank, code=found[0])
                self._read_signals()

    def _read_signals(self) -> None:
        """Read whether the guard, or an earlier life of the agent, has signalled the ranks to end."""
        self._requests.reload()
        stop = self._requests.stop
        if stop is not None and stop.signalled_at is not None:
            self.terminated, self.terminated_at = True, self.terminated_at or stop.signalled_at
            self.killed = self.killed or stop.killed

    def _find_unwritten_exit(self, process: RankProcess) -> tuple[int, float] | None:
        """Return the exit of a dead process without an exit code, after its parent has had time to write one."""
        dead_since = self._dead_since.setdefault(process.rank, time.monotonic())
        if time.monotonic() - dead_since < EXIT_FILE_PATIENCE_S:
            return None
        return read_exit(self._folder, process.rank) or (UNKNOWN_EXIT, self._now())


def _list_written(pids: Sequence[int]) -> set[str] | None:
    """Return the files that held scripts are writing; None if that is unknown."""
    if not wait_until_stopped(pids):
        return None
    try:
        return find_written_files(pids)
    except ScriptEndedError:
        return None
