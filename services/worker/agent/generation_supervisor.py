"""The generations on this node: restored from disk, started and stopped as facts demand, removed once they are done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import structlog

from contracts import subjects
from contracts.base import Event
from contracts.events.checkpoint import CheckpointCommitted
from contracts.events.run import RunAccepted, RunCancelled, RunCompleted, RunFailed, RunPlaced, RunQueued, RunReleased
from contracts.state.run import placement_problem
from services.kit.bus import Message
from services.kit.concurrency import cancel_and_wait
from services.worker import metrics
from services.worker.checkpoints.survivor_state import remove_survivor_checkpoints
from services.worker.core import node_decisions
from services.worker.core.node_decisions import Decision, LocalGeneration, NodeState
from services.worker.data_dir import PlacementRecord, RunFolders
from services.worker.generation.runner import GenerationRunner, ReportUnfit
from services.worker.node_context import NodeContext

log = structlog.get_logger(__name__)

RUN_ENDS = (RunCompleted, RunFailed, RunCancelled)
LEAVING = "the node's agent is stopping"

Key = tuple[str, int]


class GenerationSupervisor:
    """Has a runner, and once it is started a task, for each generation of this node."""

    def __init__(self, context: NodeContext, folders: RunFolders, report_unfit: ReportUnfit) -> None:
        self._context, self._folders, self._report_unfit = context, folders, report_unfit
        self.state = NodeState(context.settings.node_id)
        self._runners: dict[Key, GenerationRunner] = {}
        self._tasks: dict[Key, asyncio.Task[None]] = {}
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

    def stop_all(self, reason: str, grace_s: Callable[[float], float] = lambda requested_s: requested_s) -> None:
        """Stop every generation that has started. ``grace_s`` maps requested seconds to the grace."""
        for key in self._tasks:
            runner = self._runners[key]
            runner.stop(grace_s(runner.placed.spec.grace_s), reason)

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
            if not any(member.node_id == self._context.settings.node_id for member in event.members):
                return False
            problem = await self._placement_problem(event, message)
        else:
            problem = self._end_problem(event)
        if problem:
            metrics.UNSUPPORTED.labels(event.fact).inc()
            log.warning("a fact that nothing supports, ignored", run_id=event.run_id, fact=event.fact, problem=problem)
        return bool(problem)

    async def _placement_problem(self, placed: RunPlaced, message: Message[Any]) -> str:
        names = [subjects.fact("run", placed.run_id, fact.fact) for fact in (RunAccepted, RunQueued)]
        last = self._context.bus.get_last_message
        problem = _find_problem(placed, message.sequence, *await asyncio.gather(*map(last, names)))
        if not problem:
            return ""
        # A replica of the stream may lag behind; a consumer does not.
        accepted, queued = [await self._last_in_history(name) for name in names]
        problem = _find_problem(placed, message.sequence, accepted, queued)
        known = self.state.generations.get(placed.run_id)
        if problem and accepted is not None and (known is None or known.generation < placed.generation):
            await self._release_unsupported(placed, message, queued)
        return problem

    async def _last_in_history(self, subject: str) -> Message[Any] | None:
        found = await self._context.bus.read_history(subject)
        return found[-1] if found else None

    async def _release_unsupported(self, placed: RunPlaced, message: Message[Any], queued: Message[Any] | None) -> None:
        """Answer a placement that is not executed, where the scheduler takes it for its own and holds slots for it."""
        name = subjects.fact("run", placed.run_id, RunPlaced.fact)
        is_awaited = queued is not None and queued.event.next_generation == placed.generation
        if not is_awaited:
            earlier = [each for each in await self._context.bus.read_history(name) if each.sequence < message.sequence]
            is_awaited = placed.generation == 1 and not earlier
        if is_awaited:
            detail = "the log does not support the placement: nothing was started"
            node_id = self._context.settings.node_id
            released = RunReleased(
                run_id=placed.run_id, generation=placed.generation, node_id=node_id, clean=False, detail=detail
            )
            await self._context.bus.publish(released, message.envelope)

    def _end_problem(self, event: Event) -> str:
        """Why a run cannot have ended: its ranks run here, and this node has not reported their end."""
        if not isinstance(event, RunCompleted | RunFailed | RunCancelled):
            return ""
        here = self.state.generations.get(event.run_id)
        if here is None or here.has_ended:
            return ""
        runner = self._runners.get((here.run_id, here.generation))
        if runner is None or runner.has_report:
            return ""
        if not isinstance(event, RunCompleted):
            # Whoever said so, the scheduler gets an answer: it may have put the run aside and cancelled it.
            runner.stop(0, f"the run is {event.fact}")
        return "its ranks have not ended on this node"

    def apply(self, message: Message[Any]) -> bool:
        """Act on a fact; return whether the node must join again."""
        self.state, decisions = node_decisions.decide(self.state, message.event, message.sequence)
        rejoins = [self._carry_out(decision, message) for decision in decisions]
        return any(rejoins)

    def _carry_out(self, decision: Decision, message: Message[Any]) -> bool:
        match decision:
            case node_decisions.StartGeneration():
                self._accept_placement(decision, message)
            case node_decisions.GenerationDecision(run_id, generation):
                if (runner := self._runners.get((run_id, generation))) is not None:
                    _apply_to_runner(decision, runner)
            case node_decisions.CleanUpRun():
                self._folders.mark_ended(decision.run_id)
                self._folders.remove_in_background(self._context.memory.remove_run, decision.run_id)
                self._remove_checkpoints(decision.run_id)
                self._has_ended_runs = True
            case node_decisions.ForgetRun():
                # At once: the run may be placed here again, and its ranks then leave new state.
                self._context.memory.remove_run(decision.run_id)
                self._remove_checkpoints(decision.run_id)
            case node_decisions.RejoinCluster():
                log.warning("this node was declared lost, joining again", reason=decision.reason)
                return True
        return False

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
                runner.drop(reason)
            await runner.run()
        except Exception as error:
            log.exception("a generation's runner failed", run_id=run_id, generation=generation)
            await runner.abort(error)
        finally:
            if runner.files.is_done:
                self._context.slot_shares.release(run_id, generation)
            self.state = self.state.end_generation(run_id, generation)

    async def _void_reason(self, run_id: str, generation: int) -> str:
        """Return why the stream says that the generation must not run; '' if it may."""
        last = self._context.bus.get_last_message
        ends = await asyncio.gather(*(last(subjects.fact("run", run_id, fact.fact)) for fact in RUN_ENDS))
        placed = await last(subjects.fact("run", run_id, RunPlaced.fact))
        if any(ends):
            return "the run has ended"
        if placed is not None and placed.event.generation > generation:
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


def _find_problem(placed: RunPlaced, sequence: int, accepted: Message[Any] | None, queued: Message[Any] | None) -> str:
    """Return why the last ``accepted`` and ``queued`` of its run do not support a placement; '' if they do."""
    if queued is not None and queued.event.next_generation > placed.generation:
        return ""  # it is over, as is found out before anything is started
    awaited = queued.event.next_generation if queued is not None and queued.sequence < sequence else None
    spec = accepted.event.spec if accepted is not None and accepted.sequence < sequence else None
    return placement_problem(placed, spec, awaited)


def _apply_to_runner(decision: node_decisions.GenerationDecision, runner: GenerationRunner) -> None:
    match decision:
        case node_decisions.DropGeneration():
            log.warning("dropping a placement", run_id=decision.run_id, reason=decision.reason)
            runner.drop(decision.reason)
        case node_decisions.StopGeneration():
            runner.stop(decision.grace_s, decision.reason, peer_lost=decision.peer_lost)
        case node_decisions.SettleCheckpoint():
            runner.settle_checkpoint(decision.step, decision.committed)
