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
import signal
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import structlog
from pydantic import BaseModel, ConfigDict

from contracts.envelope import Envelope
from contracts.events.run import Member, ProgressPoint, RunExited, RunPlaced, RunProgress, RunReleased
from contracts.ranks import Launch, StopLine
from services.kit import telemetry
from services.kit.bus import Transient
from services.kit.concurrency import end
from services.worker import metrics
from services.worker.cache import CacheError
from services.worker.context import Context
from services.worker.control import Control, socket_path
from services.worker.core import journal as core_journal
from services.worker.core import ranks as core
from services.worker.executor import RankProcess, StartError, read_exit
from services.worker.files import read_json, write_atomically
from services.worker.journal import Follower
from services.worker.package import PackageError
from services.worker.prepare import Prepared, prepare
from services.worker.stage import Stager

log = structlog.get_logger(__name__)

POLL_S = 0.05
#: Seconds given to the other local ranks to write down why they ended, once one has failed.
FAILURE_PATIENCE_S = 0.3
#: Seconds that checkpoints which were complete before a crash have to be uploaded.
CRASH_UPLOAD_PATIENCE_S = 20.0


class Record(BaseModel):
    """``placement.json``: the fact, and where it stood in the stream."""

    model_config = ConfigDict(frozen=True)

    placed: RunPlaced
    sequence: int
    correlation_id: str = ""
    causation_id: str = ""
    traceparent: str = ""


class StopOrder(BaseModel):
    """``stop.json``: since when the ranks must end, and until when they may take."""

    model_config = ConfigDict(frozen=True)

    grace_s: float
    deadline: float
    reason: str


class Dropped(Exception):
    """The placement is void; nobody waits for a report."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the ranks could not be started."""

    reason: str
    blameless: bool


Report = RunExited | RunReleased
T = TypeVar("T")


class Placement:
    """Runs one generation to its end. ``run`` may be cancelled and begun anew by a restarted agent at any point."""

    def __init__(self, context: Context, record: Record, folder: Path) -> None:
        self._context, self.record, self.folder = context, record, folder
        self.placed = record.placed
        self.member: Member = next(m for m in self.placed.members if m.node_id == context.settings.node_id)
        self._processes: list[RankProcess] = []
        self._exits: dict[int, core.Exit] = {}
        self._wake = asyncio.Event()
        self._settled: set[tuple[int, bool]] = set()
        self._drop_reason: str | None = None
        stored = read_json(folder / "stop.json")
        self._stop: StopOrder | None = StopOrder.model_validate(stored) if stored else None
        self._stop_told = self._terminated = self._killed = False
        self.over = asyncio.Event()

    # -- what the agent tells it --------------------------------------------

    def stop(self, grace_s: float, reason: str) -> None:
        """Make the ranks end within their grace. A second, shorter grace shortens it."""
        order = StopOrder(grace_s=grace_s, deadline=self._now() + grace_s, reason=reason)
        if self._stop is None or order.deadline < self._stop.deadline:
            self._stop = order
            write_atomically(self.folder / "stop.json", order.model_dump_json())
            self._stop_told = False
        self._wake.set()

    def settle(self, step: int, committed: bool) -> None:
        """The checkpoint of this step is committed, or never will be."""
        self._settled.add((step, committed))
        self._wake.set()

    def drop(self, why: str) -> None:
        """Kill whatever runs and say nothing."""
        self._drop_reason = why
        self._wake.set()

    @property
    def pids(self) -> list[int]:
        return [each.pid for each in self._processes if each.rank not in self._exits]

    @property
    def fresh(self) -> bool:
        """Whether nothing has been done for it yet."""
        return not (self.folder / "launch.json").exists() and not (self.folder / "report.json").exists()

    def tidy(self) -> None:
        """Remove what is uploaded or can be fetched again; journals, logs and reports stay."""
        for name in ("code", "resume", "checkpoints"):
            shutil.rmtree(self.folder / name, ignore_errors=True)

    # -- its life -----------------------------------------------------------

    async def run(self) -> None:
        """Run to the end and report it, exactly once."""
        run_id, generation = self.placed.run_id, str(self.placed.generation)
        with (
            telemetry.bound({"run_id": run_id, "generation": generation}),
            telemetry.span("placement", traceparent=self.record.traceparent, run_id=run_id, generation=generation),
        ):
            try:
                if self._drop_reason is not None:
                    raise Dropped(self._drop_reason)
                report = self._written_report() or await self._to_the_end()
                await self._say(report)
            except Dropped as error:
                log.warning("placement dropped", reason=str(error))
                await self._sweep()
                self._mark("dropped")
            finally:
                if (self.folder / "done.json").exists():
                    self.over.set()

    async def end_unheard(self, reason: str) -> None:
        """Make what is left of the ranks end, at once and without a bus; a later life of the agent reports it."""
        if self._written_report() is None and self._load_processes():
            self.stop(0, reason)
            async with Control(self._socket(), self.placed.generation, lambda: None) as control:
                await self._watch(control, ())
        else:
            await self._sweep()

    async def give_up(self, error: Exception) -> None:
        """End what broke here through no fault of the run, and say so."""
        await self._sweep()
        reason = f"node {self.member.node_id} could not keep the run going: {error!r}"
        await self._say(self._written_report() or self._failed(Failure(reason, True)))
        self.over.set()

    async def _to_the_end(self) -> Report:
        launch_file = self.folder / "launch.json"
        if launch_file.exists():
            if not self._load_processes():
                # Killed while it started them: who knows which ranks there are.
                await self._sweep()
                return self._failed(Failure("the agent was killed while it started the ranks", True))
            metrics.REATTACHED.inc()
            log.info("taking up ranks again", pids=[each.pid for each in self._processes])
        try:
            patterns = core_journal.compile_patterns(self.placed.spec.metric_patterns)
        except ValueError as error:
            return self._failed(Failure(str(error), False))
        follower = Follower(
            core_journal.Placed(self.placed.run_id, self.placed.generation, self.member.node_id),
            self.member.ranks,
            self.folder,
            self._publish,
            self._now,
            interval_s=self._context.settings.follow_interval_s,
            patterns=patterns,
            launch_is_start=core.is_command(self.placed.spec),
        )
        async with self._context.cache.holding() as hold:
            if not launch_file.exists():
                prepared = await self._unless_stopped(
                    prepare(self._context, self.placed, self.member, self.folder, hold)
                )
                if isinstance(prepared, Failure):
                    return self._failed(prepared)
                if prepared is None:
                    return self._released(follower, clean=True, detail="nothing had been started")
            else:
                prepared = None
            control = Control(self._socket(), self.placed.generation, follower.ring)
            stager = Stager(self._context, self.placed, self.member, self.folder, follower, self._publish)
            async with control, _running(follower.run()) as following:
                if prepared is not None:
                    failure = await self._launch(prepared)
                    if failure is not None:
                        return self._failed(failure)
                async with _running(stager.run()) as staging, _running(self._measure(follower)) as measuring:
                    await _traced("ranks", self._watch(control, (following, staging, measuring)))
                    await end(following)
                    await follower.drain()
                    await self._finish_uploads(stager, staging)
                return await self._judge(follower, stager)

    async def _unless_stopped(self, work: Coroutine[Any, Any, Prepared]) -> Prepared | Failure | None:
        """Prepare, unless somebody wants the slots back first (None)."""
        started = time.monotonic()
        task = asyncio.create_task(_traced("prepare", work))
        try:
            while not task.done():
                if self._drop_reason is not None:
                    raise Dropped(self._drop_reason)
                if self._stop is not None:
                    return None
                self._wake.clear()
                waking = asyncio.create_task(self._wake.wait())
                await asyncio.wait({task, waking}, return_when=asyncio.FIRST_COMPLETED)
                waking.cancel()
            return task.result()
        except (PackageError, CacheError) as error:
            return Failure(str(error), False)
        except (Transient, OSError, TimeoutError) as error:
            return Failure(f"node {self.member.node_id} could not prepare the run: {error}", True)
        finally:
            await end(task)
            work.close()  # stopped before its first step, it was never begun
            metrics.PREPARE_SECONDS.observe(time.monotonic() - started)

    async def _launch(self, prepared: Prepared) -> Failure | None:
        """Start the ranks; from ``launch.json`` on, a restarted agent looks for them."""
        settings = self._context.settings
        launch_path = self.folder / "launch.json"
        launch = Launch(
            run_id=self.placed.run_id,
            generation=self.placed.generation,
            node_id=self.member.node_id,
            world_size=self.placed.world_size,
            spec=self.placed.spec,
            folder=str(self.folder),
            socket=str(self._socket()),
            code_folder=str(prepared.code_folder) if prepared.code_folder else None,
            dataset_folder=str(prepared.dataset_folder) if prepared.dataset_folder else None,
            dataset_id=self.placed.dataset.dataset_id if self.placed.dataset else None,
            resume_folder=str(prepared.resume_folder) if prepared.resume_folder else None,
            resume=prepared.resume,
            orphan_timeout_s=settings.orphan_timeout_s,
        )
        write_atomically(launch_path, launch.model_dump_json())
        place = self._context.place(launch_path, prepared)
        cwd = prepared.code_folder or self.folder
        started: list[RankProcess] = []
        try:
            for start in core.starts(self.placed, self.member, self._context.environment, place):
                started.append(await self._context.executor.start(start, self.folder, cwd))
        except (StartError, OSError) as error:
            self._processes = started
            await self._sweep()
            return Failure(f"node {self.member.node_id} could not start the ranks: {error}", True)
        self._processes = started
        write_atomically(self.folder / "processes.json", _dump([each.to_json() for each in started]))
        log.info("ranks started", pids=[each.pid for each in started])
        return None

    async def _watch(self, control: Control, beside: tuple[asyncio.Task[None], ...]) -> None:
        """Wait until every process has ended, and make them end when they must."""
        failed_at: float | None = None
        while True:
            if self._drop_reason is not None:
                raise Dropped(self._drop_reason)
            for task in beside:
                if task.done():
                    task.result()  # ranks that nobody follows must not train on unseen
            self._collect_exits()
            if len(self._exits) == len(self._processes):
                break
            if failed_at is None and core.first_failure(list(self._exits.values())):
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() - failed_at > FAILURE_PATIENCE_S:
                self._signal(signal.SIGKILL)
            if self._stop is not None:
                self._enforce(self._stop, control)
            self._wake.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), POLL_S)
        # Data loaders and torchrun's children may outlive whoever started them.
        await self._sweep()

    def _enforce(self, stop: StopOrder, control: Control) -> None:
        """Ask; when the grace is over, tell; then kill. Scripts that do not listen are told at once."""
        if not self._stop_told:
            self._stop_told = True
            control.stop(StopLine(grace_s=stop.grace_s, reason=stop.reason, checkpoint=stop.grace_s > 0))
            if core.is_command(self.placed.spec) and not control.connected:
                # Whatever its exit code is then, it ended because it was told to.
                self._terminated = True
                self._signal(signal.SIGTERM)
        now = self._now()
        if now >= stop.deadline and not self._terminated:
            self._terminated = True
            self._signal(signal.SIGTERM)
        if now >= stop.deadline + self._context.settings.kill_after_s:
            self._signal(signal.SIGKILL)

    def _collect_exits(self) -> None:
        for process in self._processes:
            if process.rank in self._exits:
                continue
            alive = self._context.executor.alive(process)
            found = read_exit(self.folder, process.rank)
            if found is None and not alive:
                found = read_exit(self.folder, process.rank) or (-int(signal.SIGKILL), self._now())
            if found is not None:
                self._exits[process.rank] = core.Exit(process.rank, *found)
                log.info("rank ended", rank=process.rank, code=found[0])

    async def _finish_uploads(self, stager: Stager, staging: asyncio.Task[None]) -> None:
        """Upload what the ranks completed, for as long as somebody waits for it."""
        patience_s: float | None = None
        if self._stop is not None:
            patience_s = max(self._stop.deadline - self._now(), 0)
        elif core.first_failure(list(self._exits.values())):
            patience_s = CRASH_UPLOAD_PATIENCE_S
        await end(staging)
        if patience_s == 0:
            return
        work = asyncio.create_task(stager.finish())
        try:
            await self._await_until(work, patience_s)
        finally:
            await end(work)

    async def _await_until(self, work: asyncio.Task[None], patience_s: float | None) -> None:
        deadline = None if patience_s is None else time.monotonic() + patience_s
        while not work.done() and (deadline is None or time.monotonic() < deadline):
            if self._drop_reason is not None:
                raise Dropped(self._drop_reason)
            if deadline is None and self._stop is not None:
                deadline = time.monotonic() + max(self._stop.deadline - self._now(), 0)
            await asyncio.wait({work}, timeout=POLL_S)

    async def _await_settled(self, step: int) -> bool:
        """Wait until the checkpoint is committed; False if it was refused or nobody can wait any longer."""
        patience_s = self._context.settings.commit_patience_s
        deadline = self._stop.deadline if self._stop is not None else self._now() + patience_s
        while not {(step, True), (step, False)} & self._settled and self._now() < deadline:
            if self._drop_reason is not None:
                raise Dropped(self._drop_reason)
            self._wake.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), POLL_S)
        return (step, True) in self._settled

    async def _measure(self, follower: Follower) -> None:
        """Publish what node and ranks use, every few seconds."""
        while True:
            await asyncio.sleep(self._context.settings.system_interval_s)
            state = follower.state
            values = await asyncio.to_thread(self._context.meter.measure, self.pids, self.member.slots)
            state.system_count += 1
            step = max((rank.step or 0 for rank in state.ranks.values()), default=0)
            follower.save()
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
            except Transient as error:
                log.warning("a measurement of the node was not taken", error=str(error))

    # -- its end ------------------------------------------------------------

    async def _judge(self, follower: Follower, stager: Stager) -> Report:
        exits = list(self._exits.values())
        failure = core.first_failure(exits)
        step = follower.state.staged_step
        if failure is not None and self._stop is None:
            return self._crashed(failure, follower)
        committed = False
        if step is not None and failure is None:
            committed = await self._await_settled(step)
        if core.ended_well(exits) and not self._terminated:
            return await self._succeeded(follower, stager)
        if failure is not None:
            detail = f"rank {failure.rank} {core.exit_text(failure.code)} while it was to stop"
            return self._released(follower, clean=False, detail=detail)
        trained_to, begun_at = self._reached(follower)
        clean = (committed and step is not None and step >= trained_to) or trained_to <= begun_at
        if core.is_command(self.placed.spec):
            clean = committed
        detail = "" if clean else "the last steps are not in a committed checkpoint"
        return self._released(follower, clean=clean, detail=detail)

    def _reached(self, follower: Follower) -> tuple[int, int]:
        """(last step trained, step begun at)."""
        begun_at = self.placed.resume.step if self.placed.resume else 0
        steps = [state.step for state in follower.state.ranks.values() if state.step is not None]
        return max(steps, default=begun_at), begun_at

    def _crashed(self, failure: core.Exit, follower: Follower) -> Report:
        ended = follower.state.ranks.get(failure.rank)
        error = ended.ended.error if ended is not None and ended.ended is not None else ""
        lines = follower.tail(failure.rank, core.SEARCHED_LINES)
        failure, tail = core.cause(failure, lines)
        started = any(state.started for state in follower.state.ranks.values())
        reason = f"rank {failure.rank} {core.exit_text(failure.code)}" + (f": {error}" if error else "")
        trained_to, _ = self._reached(follower)
        return RunExited(
            run_id=self.placed.run_id,
            generation=self.placed.generation,
            node_id=self.member.node_id,
            outcome="failed",
            blameless=core.is_blameless(failure.code, started, error + "\n".join(lines)),
            reason=reason[:2000],
            rank=failure.rank,
            exit_code=failure.code,
            log_tail=tail,
            step=trained_to,
            samples_consumed=self._samples(follower),
        )

    async def _succeeded(self, follower: Follower, stager: Stager) -> Report:
        results = [state.result for _, state in sorted(follower.state.ranks.items()) if state.result is not None]
        names = [name for result in results for name in result.artifacts]
        artifacts = await stager.artifacts(names)
        trained_to, _ = self._reached(follower)
        return RunExited(
            run_id=self.placed.run_id,
            generation=self.placed.generation,
            node_id=self.member.node_id,
            outcome="succeeded",
            step=trained_to,
            samples_consumed=self._samples(follower),
            metrics=results[0].metrics if results else {},
            artifacts=artifacts,
        )

    def _failed(self, failure: Failure) -> Report:
        return RunExited(
            run_id=self.placed.run_id,
            generation=self.placed.generation,
            node_id=self.member.node_id,
            outcome="failed",
            blameless=failure.blameless,
            reason=failure.reason[:2000],
        )

    def _released(self, follower: Follower, *, clean: bool, detail: str) -> Report:
        trained_to, _ = self._reached(follower)
        return RunReleased(
            run_id=self.placed.run_id,
            generation=self.placed.generation,
            node_id=self.member.node_id,
            clean=clean,
            step=trained_to,
            samples_consumed=self._samples(follower),
            detail=detail,
        )

    def _samples(self, follower: Follower) -> int:
        begun_at = self.placed.resume.samples_consumed if self.placed.resume else 0
        return max((state.samples_consumed for state in follower.state.ranks.values()), default=0) or begun_at

    async def _say(self, report: Report) -> None:
        """Write the report down, say it, mark it said. Said again after a crash, it is the same fact."""
        path = self.folder / "report.json"
        kind = "exited" if isinstance(report, RunExited) else "released"
        if path.exists() and await self._context.said(report):
            self._mark(kind)
            return
        write_atomically(path, _dump({"kind": kind, "fact": report.model_dump(mode="json")}))
        while True:
            try:
                await self._publish(report)
                break
            except Transient as error:
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

    def _signal(self, number: int) -> None:
        for process in self._processes:
            if process.rank not in self._exits:
                self._context.executor.signal(process, number)

    async def _sweep(self) -> None:
        self._load_processes()
        await self._context.executor.sweep(self.folder, self._processes)

    def _load_processes(self) -> bool:
        if not self._processes:
            stored = read_json(self.folder / "processes.json")
            self._processes = [RankProcess(**each) for each in stored or ()]
        return bool(self._processes)

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
        await end(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error


async def _traced(name: str, work: Coroutine[Any, Any, T]) -> T:
    with telemetry.span(name):
        return await work


def _dump(value: Any) -> str:
    return json.dumps(value)
