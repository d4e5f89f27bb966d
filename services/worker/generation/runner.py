"""One generation of one run on this node: prepare, launch, follow, stop, report.

Everything that must survive the agent is a file in the generation's folder, written before it is
acted on: ``placement.json`` (what to run), ``launch.json``, ``processes.json`` (who runs),
``follow.json`` (how far it is read), ``stop.json`` (that it must end), ``report.json`` (what is said of
its end, before it is said) and ``done.json``.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import structlog

from contracts.envelope import Envelope
from contracts.events.run import Member, ProgressPoint, RunExited, RunPlaced, RunProgress, RunReleased
from contracts.ranks import Launch
from services.kit import telemetry
from services.kit.bus import TransientError
from services.kit.concurrency import cancel_and_wait, run_in_thread
from services.worker import metrics
from services.worker.cache.node_cache import CacheError, CachePins
from services.worker.cache.shard_cache import DatasetView
from services.worker.checkpoints import survivor_checkpoints
from services.worker.checkpoints.stager import CheckpointStager
from services.worker.core import journal, rank_environment, rank_exits
from services.worker.generation.preparation import GenerationInputs, open_dataset, prepare_inputs
from services.worker.generation.reports import RankProgress, Report, ReportBuilder, StartFailure
from services.worker.generation.requests import GenerationDropped, GenerationRequests, PlacementRecord
from services.worker.launch.code_package import PackageError
from services.worker.launch.executor import StartError
from services.worker.launch.rank_group import FAILURE_PATIENCE_S, POLL_S, RankGroup
from services.worker.local_files import read_json, write_atomically
from services.worker.node.gpu_check import UnfitDeviceError
from services.worker.node_context import NodeContext
from services.worker.ranks.control_socket import ControlSocket, socket_path
from services.worker.ranks.journal_follower import JournalFollower
from services.worker.ranks.stall_watcher import StallWatcher

log = structlog.get_logger(__name__)

#: Seconds that checkpoints which were complete before a crash have to be uploaded.
CRASH_UPLOAD_PATIENCE_S = 20.0

#: Steps that ranks which lost a peer are given to notice it.
PATIENCE_STEPS = 2

T = TypeVar("T")


class GenerationRunner:
    """Runs one generation to its end. ``run`` may be cancelled and begun anew by a restarted agent at any point."""

    def __init__(self, context: NodeContext, record: PlacementRecord, folder: Path) -> None:
        self._context, self.record, self.folder = context, record, folder
        self.placed = record.placed
        self.member: Member = next(m for m in self.placed.members if m.node_id == context.settings.node_id)
        self._orders = GenerationRequests(folder, self._now)
        self._group = RankGroup(
            context.executor, folder, self._orders, self._now, kill_after_s=context.settings.kill_after_s
        )
        self._group.patience = self._may_still_save
        self._reporter = ReportBuilder(self.placed, self.member.node_id)
        self._ranks: Mapping[int, journal.RankState] = {}
        self.over = asyncio.Event()

    # -- what the agent tells it --------------------------------------------

    def stop(self, grace_s: float, reason: str, *, peer_lost: bool = False) -> None:
        """Make the ranks end within their grace. A second, shorter grace shortens it.

        ``peer_lost``: ranks elsewhere have failed. Those here notice by themselves, and first leave what they have
        for the next generation.
        """
        untouched_s = self._context.settings.outlive_s if peer_lost and self._outlives else 0.0
        self._orders.order_stop(grace_s, reason, untouched_s)

    def settle(self, step: int, committed: bool) -> None:
        """The checkpoint of this step is committed, or never will be."""
        if committed:
            self._context.memory.committed(self.placed.run_id, self.placed.generation)
            survivor_checkpoints.drop(self.folder.parent, before=self.placed.generation)
        self._orders.settle(step, committed)

    def drop(self, why: str) -> None:
        """Kill whatever runs and say nothing."""
        self._orders.drop(why)

    @property
    def pids(self) -> list[int]:
        return self._group.pids

    @property
    def fresh(self) -> bool:
        """Whether nothing has been done for it yet."""
        return not (self.folder / "launch.json").exists() and not (self.folder / "report.json").exists()

    def tidy(self) -> None:
        """Remove what is uploaded or can be fetched again; journals, logs and reports stay."""
        for name in ("code", "resume", "init", "checkpoints", "dataset"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        for ring in self.folder.glob("*.ring"):
            ring.unlink(missing_ok=True)

    # -- its life -----------------------------------------------------------

    async def run(self) -> None:
        """Run to the end and report it, exactly once."""
        run_id, generation = self.placed.run_id, str(self.placed.generation)
        with (
            telemetry.bind_log_context({"run_id": run_id, "generation": generation}),
            telemetry.start_span(
                "placement", traceparent=self.record.traceparent, run_id=run_id, generation=generation
            ),
            self._group,
        ):
            try:
                self._orders.raise_if_dropped()
                report = self._written_report() or await self._to_the_end()
                await self._say(report)
            except GenerationDropped as error:
                log.warning("placement dropped", reason=str(error))
                await self._group.sweep()
                self._mark("dropped")
            finally:
                if (self.folder / "done.json").exists():
                    self.over.set()

    async def end_unheard(self, reason: str) -> None:
        """Make what is left of the ranks end, at once and without a bus; a later life of the agent reports it."""
        if self._written_report() is None and self._group.load():
            self.stop(0, reason)
            async with ControlSocket(self._socket(), self.placed.generation, lambda: None) as control:
                with self._group:
                    await self._watch(control)
        else:
            await self._group.sweep()

    async def give_up(self, error: Exception) -> None:
        """End what broke here through no fault of the run, and say so."""
        await self._group.sweep()
        reason = f"node {self.member.node_id} could not keep the run going: {error!r}"
        await self._say(self._written_report() or self._reporter.failed(StartFailure(reason, True)))
        self.over.set()

    async def _to_the_end(self) -> Report:
        launch_file = self.folder / "launch.json"
        if launch_file.exists():
            if not self._group.load():
                # Killed while it started them: who knows which ranks there are.
                await self._group.sweep()
                return self._reporter.failed(StartFailure("the agent was killed while it started the ranks", True))
            metrics.REATTACHED.inc()
            log.info("taking up ranks again", pids=self.pids)
        try:
            patterns = journal.compile_patterns(self.placed.spec.metric_patterns)
        except ValueError as error:
            return self._reporter.failed(StartFailure(str(error), infrastructure_failure=False, permanent=True))
        follower = JournalFollower(
            journal.JournalSource(self.placed.run_id, self.placed.generation, self.member.node_id),
            self.member.ranks,
            self.folder,
            self._publish,
            self._now,
            interval_s=self._context.settings.follow_interval_s,
            patterns=patterns,
            launch_is_start=rank_environment.is_command(self.placed.spec),
            homes={rank: member.node_id for member in self.placed.members for rank in member.ranks},
        )
        stager = CheckpointStager(self._context, self.placed, self.member, self.folder, follower, self._publish)
        watcher = StallWatcher(
            self.placed,
            self.member.node_id,
            self.folder,
            follower,
            lambda: self._group.running,
            self._publish,
            lambda: self._orders.stop is not None,
            stager.artifacts,
        )
        self._ranks = follower.state.ranks
        async with self._context.cache.holding() as hold:
            if not launch_file.exists():
                prepared = await self._unless_stopped(
                    prepare_inputs(self._context, self.placed, self.member, self.folder, hold)
                )
                if isinstance(prepared, StartFailure):
                    return self._reporter.failed(prepared)
                if prepared is None:
                    reached = RankProgress.of(self.placed, follower.state.ranks)
                    return self._reporter.released(reached, clean=True, detail="nothing had been started")
                reading = prepared.dataset
            else:
                prepared, reading = None, await self._reading_again(hold)
            control = ControlSocket(self._socket(), self.placed.generation, follower.ring, reading)
            async with control, _running(follower.run()) as following:
                if prepared is not None:
                    failure = await self._launch(prepared)
                    if failure is not None:
                        return self._reporter.failed(failure)
                async with _running(stager.run()) as staging, _running(self._measure(follower)) as measuring:
                    async with _running(watcher.run()) as watching:
                        await _traced("ranks", self._watch(control, following, staging, measuring, watching))
                    await cancel_and_wait(following)
                    await follower.drain()
                    await self._finish_uploads(follower, stager, staging)
                return await self._judge(follower, stager)

    async def _unless_stopped(
        self, work: Coroutine[Any, Any, GenerationInputs]
    ) -> GenerationInputs | StartFailure | None:
        """Prepare, unless somebody wants the slots back first (None)."""
        started = time.monotonic()
        task = asyncio.create_task(_traced("prepare", work))
        try:
            while not task.done():
                self._orders.raise_if_dropped()
                if self._orders.stop is not None:
                    return None
                await self._orders.beside(task)
            return task.result()
        except (PackageError, CacheError) as error:
            return StartFailure(str(error), False)
        except UnfitDeviceError as error:
            return StartFailure(f"node {self.member.node_id} has a device that failed its check: {error}", True)
        except (TransientError, OSError, TimeoutError) as error:
            return StartFailure(f"node {self.member.node_id} could not prepare the run: {error}", True)
        finally:
            await cancel_and_wait(task)
            work.close()  # stopped before its first step, it was never begun
            metrics.PREPARE_SECONDS.observe(time.monotonic() - started)

    async def _reading_again(self, hold: CachePins) -> DatasetView | None:
        """Go on bringing shards to ranks that an earlier life of the agent started."""
        try:
            return await open_dataset(self._context, self.placed, self.member, self.folder, hold)
        except (CacheError, TransientError, OSError) as error:
            # They may have all that they need; if not, they end when nobody answers them.
            log.warning("the dataset cannot be taken up again", error=str(error))
            return None

    async def _launch(self, prepared: GenerationInputs) -> StartFailure | None:
        """Start the ranks; from ``launch.json`` on, a restarted agent looks for them."""
        launch_path = self.folder / "launch.json"
        memory = self._context.memory.for_run(self.placed.run_id, self.placed.generation) if self._outlives else None
        launch = Launch(
            run_id=self.placed.run_id,
            generation=self.placed.generation,
            node_id=self.member.node_id,
            world_size=self.placed.world_size,
            spec=self.placed.spec,
            folder=str(self.folder),
            socket=str(self._socket()),
            code_folder=str(prepared.code_folder) if prepared.code_folder else None,
            dataset_folder=str(prepared.dataset.folder) if prepared.dataset else None,
            dataset_id=self.placed.dataset.dataset_id if self.placed.dataset else None,
            resume_folder=str(prepared.resume_folder) if prepared.resume_folder else None,
            resume=prepared.resume,
            init_folder=str(prepared.init_folder) if prepared.init_folder else None,
            failures_seen=self.placed.failures_seen,
            run_s=self.placed.run_s,
            orphan_timeout_s=self._context.settings.orphan_timeout_s,
            memory_folder=str(memory) if memory else None,
            survivor_dir=str(survivor_checkpoints.folder_of(self.folder.parent)) if self._trains else None,
            machine=self._context.inventory.machine,
        )
        write_atomically(launch_path, launch.model_dump_json())
        place = self._context.place(launch_path, prepared)
        starts = rank_environment.build_process_specs(self.placed, self.member, self._context.environment, place)
        try:
            await self._group.start(starts, prepared.code_folder or self.folder)
        except (StartError, OSError) as error:
            return StartFailure(f"node {self.member.node_id} could not start the ranks: {error}", True)
        return None

    async def _watch(self, control: ControlSocket, *beside: asyncio.Task[None]) -> None:
        """Wait until every process has ended, and make them end when they must."""
        await self._group.until_over(control, beside, listens=not rank_environment.is_command(self.placed.spec))

    @property
    def _trains(self) -> bool:
        """Whether the next generation can take up what the ranks write: not a command's, and an evaluation has none."""
        spec = self.placed.spec
        return spec.command is None and spec.training is not None and spec.kind == "train"

    @property
    def _outlives(self) -> bool:
        """Whether the ranks can leave state in memory."""
        return self._context.memory.there and self._trains

    def _may_still_save(self, waited_s: float) -> bool:
        """Whether ranks that lost a peer get more time to leave their state behind."""
        # They notice at the end of the step that they are in.
        if waited_s < FAILURE_PATIENCE_S + (PATIENCE_STEPS * self._mean_step_s if self._outlives else 0):
            return waited_s < max(self._context.settings.outlive_s, FAILURE_PATIENCE_S)
        if not self._outlives or waited_s > self._context.settings.outlive_s:
            return False
        return self._context.memory.being_written(self.placed.run_id, self.placed.generation, self._group.alive)

    @property
    def _mean_step_s(self) -> float:
        """Seconds a step has taken in this generation, as far as anybody here knows."""
        known = [state for state in self._ranks.values() if state.started is not None and state.step is not None]
        per_rank = [
            (self._now() - state.started.time) / max(state.step - state.started.step, 1)
            for state in known
            if state.started is not None and state.step is not None
        ]
        return min(per_rank, default=0.0)

    def _memory_is_newer(self, follower: JournalFollower) -> bool:
        """Whether the next generation finds newer state here than any checkpoint: it need not wait for an upload."""
        newest = self._context.memory.newest_step(self.placed.run_id, self.placed.generation)
        ranks = follower.state.ranks.values()
        return newest is not None and newest >= max((c.step for each in ranks for c in each.checkpoints), default=0)

    async def _finish_uploads(
        self, follower: JournalFollower, stager: CheckpointStager, staging: asyncio.Task[None]
    ) -> None:
        """Upload what the ranks completed, for as long as somebody waits for it."""
        patience_s = self._orders.stop_time_left_s()
        if patience_s is None and rank_exits.first_failure(self._group.ended):
            patience_s = 0.0 if self._memory_is_newer(follower) else CRASH_UPLOAD_PATIENCE_S
        await cancel_and_wait(staging)
        if patience_s == 0:
            return
        work = asyncio.create_task(stager.finish())
        try:
            await self._await_until(work, patience_s)
        finally:
            await cancel_and_wait(work)

    async def _await_until(self, work: asyncio.Task[None], patience_s: float | None) -> None:
        deadline = None if patience_s is None else time.monotonic() + patience_s
        while not work.done() and (deadline is None or time.monotonic() < deadline):
            self._orders.raise_if_dropped()
            if deadline is None and (left_s := self._orders.stop_time_left_s()) is not None:
                deadline = time.monotonic() + left_s
            await self._orders.beside(work, POLL_S)

    async def _await_settled(self, step: int) -> bool:
        """Wait until the checkpoint is committed; False if it was refused or nobody can wait any longer."""
        stop, patience_s = self._orders.stop, self._context.settings.commit_patience_s
        deadline = stop.deadline if stop is not None else self._now() + patience_s
        while self._orders.fate(step) is None and self._now() < deadline:
            self._orders.raise_if_dropped()
            await self._orders.next(POLL_S)
        return self._orders.fate(step) is True

    async def _measure(self, follower: JournalFollower) -> None:
        """Publish what node and ranks use, every few seconds."""
        while True:
            await asyncio.sleep(self._context.settings.system_interval_s)
            state = follower.state
            values = await asyncio.to_thread(self._context.meter.measure, self.pids, self.member.slots)
            state.system_count += 1
            step = max((rank.step or 0 for rank in state.ranks.values()), default=0)
            await follower.save()
            point = RunProgress(
                run_id=self.placed.run_id,
                generation=self.placed.generation,
                node_id=self.member.node_id,
                rank=self.member.ranks[0],
                offset=state.system_count,
                points=(ProgressPoint(step=step, time=self._now(), values=values),),
                kind="system",
                step=step,
            )
            try:
                await self._publish(point)
            except TransientError as error:
                log.warning("a measurement of the node was not taken", error=str(error))

    # -- its end ------------------------------------------------------------

    async def _judge(self, follower: JournalFollower, stager: CheckpointStager) -> Report:
        exits, ranks = self._group.ended, follower.state.ranks
        failure = rank_exits.first_failure(exits)
        step = follower.state.staged_step
        if failure is not None and self._orders.stop is None:
            return self._reporter.crashed(failure, ranks, follower.tail(failure.rank, rank_exits.SEARCHED_LINES))
        committed = False
        if step is not None and failure is None:
            committed = await self._await_settled(step)
        if rank_exits.ended_well(exits) and not self._group.terminated:
            results = [state.result for _, state in sorted(ranks.items()) if state.result is not None]
            artifacts = await stager.artifacts([name for result in results for name in result.artifacts])
            return self._reporter.succeeded(ranks, artifacts)
        reached = RankProgress.of(self.placed, ranks)
        if failure is not None:
            detail = f"rank {failure.rank} {rank_exits.exit_text(failure.code)} while it was to stop"
            return self._reporter.released(reached, clean=False, detail=detail)
        clean = (committed and step is not None and step >= reached.step) or reached.step <= reached.begun_at
        if rank_environment.is_command(self.placed.spec):
            clean = committed
        detail = "" if clean else "the last steps are not in a committed checkpoint"
        return self._reporter.released(reached, clean=clean, detail=detail)

    async def _say(self, report: Report) -> None:
        """Write the report down, say it, mark it said. Said again after a crash, it is the same fact."""
        path = self.folder / "report.json"
        kind = "exited" if isinstance(report, RunExited) else "released"
        if path.exists() and await self._context.said(report):
            self._mark(kind)
            return
        write_atomically(path, _dump({"kind": kind, "fact": report.model_dump(mode="json")}))
        done = report.clean if isinstance(report, RunReleased) else report.outcome == "succeeded"
        if self._trains and not done:
            # Before anybody can be placed on what the report frees.
            await run_in_thread(survivor_checkpoints.keep, self.folder, self._orders.may_count)
        while True:
            try:
                await self._publish(report)
                break
            except TransientError as error:
                log.warning("the bus does not take the report", error=str(error))
        self._mark(report.outcome if isinstance(report, RunExited) else "released")
        log.info(
            "placement over", fact=kind, outcome=getattr(report, "outcome", ""), reason=getattr(report, "reason", "")
        )

    def _written_report(self) -> Report | None:
        written = read_json(self.folder / "report.json")
        if written is None:
            return None
        model = RunExited if written["kind"] == "exited" else RunReleased
        return model.model_validate(written["fact"])

    def _mark(self, outcome: str) -> None:
        write_atomically(self.folder / "done.json", _dump({"outcome": outcome}))
        metrics.PLACEMENTS.labels(outcome).inc()

    # -- small things -------------------------------------------------------

    async def _publish(self, fact: Any) -> None:
        cause = Envelope(
            id=self.record.causation_id,
            source=self._context.bus.source,
            type=RunPlaced.type,
            time=self._context.bus.clock.now(),
            correlation_id=self.record.correlation_id,
            traceparent=self.record.traceparent,
        )
        await self._context.bus.publish(fact, cause if cause.id else None)

    def _socket(self) -> Path:
        return socket_path(self.folder.parent, "agent.sock")

    def _now(self) -> float:
        return self._context.bus.clock.now().timestamp()


@asynccontextmanager
async def _running(work: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Task[None]]:
    """Run beside the block; what goes wrong beside it goes wrong in it when it ends."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        await cancel_and_wait(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error


async def _traced(name: str, work: Coroutine[Any, Any, T]) -> T:
    with telemetry.start_span(name):
        return await work


def _dump(value: Any) -> str:
    return json.dumps(value)
