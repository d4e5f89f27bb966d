"""The generations on this node: restored from disk, started and stopped as facts demand, removed once they are done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import structlog

from contracts import subjects
from contracts.base import Event
from contracts.events.checkpoint import CheckpointCommitted
from contracts.events.run import RunCancelled, RunCompleted, RunExited, RunFailed, RunPlaced, RunReleased
from services.kit.bus import Message
from services.kit.concurrency import cancel_and_wait
from services.kit.placements import PlacementReader
from services.worker import metrics
from services.worker.agent.placement_support import PlacementSupport
from services.worker.checkpoints.survivor_state import remove_survivor_checkpoints
from services.worker.core import node_decisions
from services.worker.core.node_decisions import Decision, LocalGeneration, NodeState
from services.worker.data_dir import PlacementRecord, RunFolders
from services.worker.generation.runner import GenerationRunner, ReportUnfit
from services.worker.launch.processes import read_processes
from services.worker.local_files import suppress_full_disk
from services.worker.node_context import NodeContext

log = structlog.get_logger(__name__)

RUN_ENDS = (RunCompleted, RunFailed, RunCancelled)
#: What is said of ranks or runs that have ended.
ENDS = (*RUN_ENDS, RunExited, RunReleased)
LEAVING = "the node's agent is stopping"

Key = tuple[str, int]


class GenerationSupervisor:
    """Has a runner, and once it is started a task, for each generation of this node."""

    def __init__(self, context: NodeContext, folders: RunFolders, report_unfit: ReportUnfit) -> None:
        self._context, self._folders, self._report_unfit = context, folders, report_unfit
        self.state = NodeState(context.settings.node_id)
        self._runners: dict[Key, GenerationRunner] = {}
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._placements = PlacementReader(context.bus)
        self._support = PlacementSupport(context.bus, context.settings.node_id)
        self._is_restored = self._is_leaving = self._may_start = False
        #: Whether runs have ended since their folders were removed; at first, those of earlier lives.
        self._has_ended_runs = True

    # -- lives of the agent -------------------------------------------------

    def restore(self) -> None:
        """Find the generations of earlier lives on disk, once."""
        if self._is_restored:
            return
        self._is_restored = True
        found: list[LocalGeneration] = []
        for record, files in self._folders.placements():
            run_id, generation = record.placed.run_id, record.placed.generation
            if not self._folders.has_ended(run_id):
                found.append(LocalGeneration(run_id, generation, record.sequence, files.is_done))
            if not files.is_done:
                self._add_runner(record)
        self._context.memory.remove_others({each.run_id for each in found})
        self.state = node_decisions.restore_state(self._context.settings.node_id, found)
        for (run_id, generation), runner in self._runners.items():
            newest = self.state.generations.get(run_id)
            if newest is None or newest.generation != generation:
                runner.drop("a newer generation was placed, or the run has ended")

    async def drop_ended(self) -> None:
        """Drop the generations that ended unknown to this agent, and settle checkpoints committed in the meantime."""
        for (run_id, generation), runner in self._runners.items():
            if runner.files.is_done:
                continue
            reason = await self._void_reason(run_id, generation)
            if reason:
                runner.drop(reason)
                self.state = self.state.end_generation(run_id, generation)
                continue
            committed = subjects.fact("run", run_id, CheckpointCommitted.fact)
            for message in await self._context.bus.read_history(committed, start_sequence=runner.record.sequence):
                if message.event.generation == generation:
                    runner.settle_checkpoint(message.event.checkpoint.step, True)

    async def end_dropped(self) -> None:
        """End the processes of generations that must not run here, and of those whose placement cannot be read."""
        dropped = [runner for runner in self._runners.values() if runner.is_dropped and not runner.files.is_done]
        await asyncio.gather(*(runner.sweep() for runner in dropped))
        known = {runner.files.folder for runner in self._runners.values()}
        for folder in self._folders.launched():
            if folder not in known:
                await self._context.executor.sweep(folder, read_processes(folder))

    def start_all(self) -> None:
        """Start every generation, and from now on those that are placed."""
        self._may_start = True
        for key in list(self._runners):
            self._start(key)

    def pause_starts(self) -> None:
        """Start no generation until the node has joined again."""
        self._may_start = False

    def refuse_new(self) -> None:
        """Stop generations that are placed from now on at once: the agent leaves."""
        self._is_leaving = True

    def stop_all(
        self,
        reason: str,
        grace_s: Callable[[float], float] = lambda requested_s: requested_s,
        *,
        bounds_upload: bool = True,
    ) -> None:
        """Stop every generation that has started. ``grace_s`` maps requested seconds to the grace."""
        for key in self._tasks:
            runner = self._runners[key]
            runner.stop(grace_s(runner.placed.spec.grace_s), reason, bounds_upload=bounds_upload)

    async def wait_until_idle(self) -> None:
        """Wait until no generation runs any more."""
        while running := self._running_tasks:
            await asyncio.wait(running)

    async def finish(self, timeout_s: float) -> None:
        """Wait until all generations are reported; end the ones that are not by then."""
        if running := self._running_tasks:
            log.info("waiting for generations to end", generations=len(running))
            _, late = await asyncio.wait(running, timeout=timeout_s)
            # Their ranks are dead. What could not be published is on disk, and the next life publishes it.
            await cancel_and_wait(*late)

    @property
    def _running_tasks(self) -> list[asyncio.Task[None]]:
        return [task for task in self._tasks.values() if not task.done()]

    async def end_offline(self, reason: str) -> None:
        """End all ranks without a bus."""
        for runner in self._runners.values():
            await runner.end_offline(reason)

    @property
    def longest_grace_s(self) -> float:
        """The longest grace that a generation here requests."""
        return max((runner.placed.spec.grace_s for runner in self._runners.values()), default=0)

    # -- facts --------------------------------------------------------------

    async def is_unsupported(self, message: Message[Any]) -> bool:
        """Whether nothing in the log supports a fact on which this node would act. Anybody can publish one."""
        event = message.event
        if isinstance(event, RunPlaced):
            # Placed elsewhere, it would end the ranks here.
            concerns_us = event.run_id in self.state.generations or self._support.is_member(event)
            problem = await self._support.problem(message) if concerns_us else ""
        else:
            self._look_for_report(event)
            problem = node_decisions.completion_problem(self.state, event)
        if problem:
            metrics.UNSUPPORTED.labels(event.fact).inc()
            log.warning("a fact that nothing supports, ignored", run_id=event.run_id, fact=event.fact, problem=problem)
        return bool(problem)

    def _look_for_report(self, event: Event) -> None:
        """Note that the ranks of the event's run have ended here, if what they came to is on disk."""
        here = self.state.generations.get(event.run_id) if isinstance(event, ENDS) else None
        runner = self._runners.get((here.run_id, here.generation)) if here is not None else None
        if here is not None and runner is not None and runner.has_report:
            self.state = self.state.with_generation(replace(here, has_report=True))

    def apply(self, message: Message[Any]) -> str:
        """Act on a fact that is not unsupported; return why the node must join again, '' if it need not."""
        self.state, decisions = node_decisions.decide(self.state, message.event, message.sequence)
        for decision in decisions:
            if isinstance(decision, node_decisions.StartGeneration):
                self._accept_placement(decision, message)
            else:
                self._carry_out(decision)
        return next((each.reason for each in decisions if isinstance(each, node_decisions.RejoinCluster)), "")

    def _carry_out(self, decision: Decision) -> None:
        match decision:
            case node_decisions.GenerationDecision(run_id, generation):
                if (runner := self._runners.get((run_id, generation))) is not None:
                    _apply_to_runner(decision, runner)
            case node_decisions.CleanUpRun():
                self._clean_up(decision.run_id)
            case node_decisions.ForgetRun():
                # At once: the run may be placed here again, and its ranks then leave new state.
                self._context.memory.remove_run(decision.run_id)
                self._remove_checkpoints(decision.run_id)

    def _clean_up(self, run_id: str) -> None:
        self._folders.mark_ended(run_id)
        self._folders.remove_in_background(self._context.memory.remove_run, run_id)
        self._remove_checkpoints(run_id)
        self._has_ended_runs = True

    def _remove_checkpoints(self, run_id: str) -> None:
        self._folders.remove_in_background(remove_survivor_checkpoints, self._folders.run_folder(run_id))

    def _accept_placement(self, decision: node_decisions.StartGeneration, message: Message[Any]) -> None:
        """Make the placement durable; its ranks start once the node has joined."""
        placed, envelope = decision.placed, message.envelope
        files = self._folders.generation(placed.run_id, placed.generation)
        if files.is_done or self._folders.has_ended(placed.run_id):
            log.warning("a placement that has ended was published again", run_id=placed.run_id)
            self.state = self.state.end_generation(placed.run_id, placed.generation)
            return
        record = PlacementRecord(
            placed=placed,
            sequence=decision.sequence,
            correlation_id=envelope.correlation_id,
            causation_id=envelope.id,
            traceparent=envelope.traceparent,
        )
        with suppress_full_disk():  # the launch needs the file, and its failure is reported
            files.write_placement(record)
        runner = self._add_runner(record)
        if self._is_leaving:
            runner.stop(0, LEAVING)
        if self._may_start:
            self._start((placed.run_id, placed.generation))

    # -- runners ------------------------------------------------------------

    def _add_runner(self, record: PlacementRecord) -> GenerationRunner:
        placed = record.placed
        files = self._folders.generation(placed.run_id, placed.generation)
        runner = GenerationRunner(self._context, record, files, self._report_unfit)
        self._runners[placed.run_id, placed.generation] = runner
        self._context.slot_shares.allocate(
            placed.run_id, placed.generation, runner.member.slots, placed.spec.resources.share
        )
        return runner

    def _start(self, key: Key) -> None:
        if key in self._tasks or key not in self._runners:
            return
        run_id, generation = key
        older = [task for (other, number), task in self._tasks.items() if other == run_id and number != generation]
        self._tasks[key] = asyncio.create_task(self._run(self._runners[key], older), name=f"{run_id}/{generation}")
        self._update_gauges()

    async def _run(self, runner: GenerationRunner, older: list[asyncio.Task[None]]) -> None:
        # The ranks of an older generation are dead before a new one starts.
        await asyncio.gather(*older, return_exceptions=True)
        run_id, generation = runner.placed.run_id, runner.placed.generation
        try:
            if runner.files.is_untouched and (reason := await self._void_reason(run_id, generation)):
                # Not dropped: if the scheduler counts it, it waits for an answer.
                runner.stop(0, reason)
            await runner.run()
        except Exception as error:
            log.exception("a generation's runner failed", run_id=run_id, generation=generation)
            await runner.abort(error)
        finally:
            if runner.files.is_done:
                self._context.slot_shares.release(run_id, generation)
            self.state, decisions = node_decisions.end_generation(self.state, run_id, generation)
            for decision in decisions:
                self._carry_out(decision)

    async def _void_reason(self, run_id: str, generation: int) -> str:
        """Return why the stream says that the generation must not run; '' if it may."""
        last = self._context.bus.get_last_message
        ends = await asyncio.gather(*(last(subjects.fact("run", run_id, fact.fact)) for fact in RUN_ENDS))
        placement = await self._placements.find(run_id)
        if any(ends):
            return "the run has ended"
        if placement is not None and placement.placed.generation > generation:
            return "a newer generation was placed"
        return ""

    def reap(self) -> None:
        """Forget the generations that are done, and remove what they leave on disk."""
        for key, task in list(self._tasks.items()):
            if task.done():
                del self._tasks[key]
                runner = self._runners.pop(key)
                self._context.slot_shares.release(*key)
                task.result()  # an error of a failed abort must end the agent
                self._folders.remove_in_background(runner.files.remove_refetchable)
        self._update_gauges()
        if self._has_ended_runs:
            self._has_ended_runs = False
            self._folders.remove_in_background(self._folders.remove_ended, {run_id for run_id, _ in self._runners})

    def _update_gauges(self) -> None:
        running = [self._runners[key] for key in self._tasks]
        shares = [len(runner.member.slots) * runner.placed.spec.resources.share for runner in running]
        metrics.SLOTS_USED.set(sum(shares))
        metrics.RANKS_RUNNING.set(sum(len(runner.pids) for runner in running))


def _apply_to_runner(decision: node_decisions.GenerationDecision, runner: GenerationRunner) -> None:
    match decision:
        case node_decisions.DropGeneration():
            log.warning("dropping a placement", run_id=decision.run_id, reason=decision.reason)
            runner.drop(decision.reason)
        case node_decisions.StopGeneration():
            runner.stop(decision.grace_s, decision.reason, peer_lost=decision.peer_lost)
        case node_decisions.SettleCheckpoint():
            runner.settle_checkpoint(decision.step, decision.committed)
