"""One generation of one run on this node, from its placement to its report."""

from __future__ import annotations

import asyncio
import math
import shutil
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog

from contracts.base import Fact
from contracts.envelope import Envelope
from contracts.events.run import Artifact, Member, RunPlaced
from contracts.project_paths import find_import_folders
from contracts.ranks import Launch
from services.kit import telemetry
from services.kit.bus import TransientError
from services.kit.code_package import PackageError
from services.kit.concurrency import cancel_and_wait, run_in_thread
from services.kit.packages.package_environment import PackagesError
from services.worker import metrics
from services.worker.cache.dataset_view import DatasetView
from services.worker.cache.late_input import LateInput
from services.worker.cache.node_cache import CacheError, CachePins
from services.worker.cache.partial_checkpoint import PartialCheckpoint
from services.worker.checkpoints.output_folder import OutputKeeper, describe_unkept, write_to_log
from services.worker.checkpoints.peer_outputs import PeerOutputs
from services.worker.checkpoints.stager import CheckpointStager
from services.worker.checkpoints.survivor_state import (
    remove_survivor_checkpoints,
    save_survivor_checkpoints,
    survivor_dir,
)
from services.worker.core.journal import JournalSource, RankState, have_diverged
from services.worker.core.metric_patterns import compile_patterns
from services.worker.core.rank_environment import NodeEnvironment, build_process_specs, is_command
from services.worker.core.rank_exits import (
    SEARCHED_LINES,
    all_succeeded,
    describe_exit,
    first_failure,
    first_own_failure,
)
from services.worker.data_dir import GenerationFiles, PlacementRecord
from services.worker.generation.preparation import GenerationInputs, open_dataset, prepare_inputs
from services.worker.generation.rank_group import RankGroup, SurvivorGrace
from services.worker.generation.reports import (
    GenerationFailure,
    Report,
    ReportBuilder,
    ReportPublisher,
    RunPosition,
    is_complete,
)
from services.worker.generation.requests import POLL_S, GenerationDropped, GenerationRequests
from services.worker.launch.executor import PYTHON_ROOT, RankStartError, is_refused_by_exec
from services.worker.launch.mlflow_plugin import find_mlflow_uri
from services.worker.local_files import read_json, write_atomically
from services.worker.node.gpu_check import UnfitDeviceError
from services.worker.node.inventory import find_mps_pipe
from services.worker.node_context import NodeContext
from services.worker.ranks.control_socket import ControlSocket
from services.worker.ranks.journal_follower import JournalFollower
from services.worker.ranks.stall_watcher import StallWatcher
from services.worker.ranks.system_metrics import publish_system_metrics

log = structlog.get_logger(__name__)

T = TypeVar("T")
#: Seconds for checkpoints that were complete before a crash to be uploaded.
CRASH_UPLOAD_S = 20.0
#: Seconds, at least, for what finished ranks left, checkpoint and artifacts, to be stored, however short the grace is.
FINISHED_UPLOAD_S = 10.0
#: Part of a stop's grace in which rank 0's node waits for the last files of other nodes; the rest is for storing them.
PEER_WAIT_SHARE = 0.75
#: Publishes that slots of this node failed their check, and why.
ReportUnfit = Callable[[tuple[int, ...], str], Awaitable[None]]


class GenerationRunner:
    """Prepares, launches and monitors the ranks of one generation, and reports their end exactly once.

    A restarted agent continues in the state that the generation's files show: prepared again while nothing is
    launched, monitored while ranks are, reported once a report is written.
    """

    def __init__(
        self, context: NodeContext, record: PlacementRecord, files: GenerationFiles, report_unfit: ReportUnfit
    ) -> None:
        self._context, self.record, self.files, self._report_unfit = context, record, files, report_unfit
        self.placed: RunPlaced = record.placed
        self.member: Member = next(m for m in self.placed.members if m.node_id == context.settings.node_id)
        settings = context.settings
        self._requests = GenerationRequests(files.folder)
        self._survivors = SurvivorGrace(self.placed, context.memory, settings.survivor_save_s, self._now)
        self._group = RankGroup(
            context.executor,
            files.folder,
            self._requests,
            self._survivors,
            self._now,
            kill_after_s=settings.kill_after_s,
        )
        self._reports = ReportPublisher(files, self._publish, self._is_published)
        self._build_report = ReportBuilder(self.placed, self.member.node_id)
        #: What a script writes on the generation's other nodes; None if there are none, or another node keeps it.
        self._peers: PeerOutputs | None = None
        is_script = is_command(self.placed.spec) and self.placed.spec.kind == "train"
        if is_script and 0 in self.member.ranks and sum(1 for each in self.placed.members if each.ranks) > 1:
            self._peers = PeerOutputs(context, self.placed, self.member, files.folder)
        #: Until when what ranks left is stored in any case, by the monotonic clock: of finished ones, and of a script
        #: whose other nodes broke.
        self._stored_until: float | None = None

    # -- requests -----------------------------------------------------------

    def stop(self, grace_s: float, reason: str, *, peer_lost: bool = False, bounds_upload: bool = True) -> None:
        """Make the ranks end within their grace. A second, shorter grace shortens it.

        ``peer_lost``: ranks elsewhere have failed. Those here notice by themselves, and first save their state for
        the next generation. ``bounds_upload``: what they leave has the same time to be uploaded.
        """
        survivor_s = self._survivors.extra_s if peer_lost else 0.0
        self._requests.request_stop(grace_s, reason, survivor_s, bounds_upload=bounds_upload)

    def settle_checkpoint(self, step: int, committed: bool) -> None:
        """Note that the checkpoint of a step is committed, or was refused."""
        if committed:
            self._context.memory.remove_before(self.placed.run_id, self.placed.generation)
            remove_survivor_checkpoints(self.files.run_folder, before=self.placed.generation)
        self._requests.settle_checkpoint(step, committed)

    def drop(self, reason: str) -> None:
        """Kill the ranks that run, and report nothing."""
        self._requests.drop(reason)

    @property
    def has_report(self) -> bool:
        """Whether the end of the ranks is known, and will be published if it is not yet."""
        return self._reports.read() is not None

    @property
    def is_dropped(self) -> bool:
        """Whether the placement is void."""
        return self._requests.is_dropped

    async def sweep(self) -> None:
        """Kill the ranks that run now."""
        await self._group.sweep()

    @property
    def pids(self) -> list[int]:
        """Processes of ranks that have not ended."""
        return [process.pid for process in self._group.running]

    # -- states -------------------------------------------------------------

    async def run(self) -> None:
        """Run the generation to its end and report it."""
        run_id, generation = self.placed.run_id, str(self.placed.generation)
        with (
            telemetry.bind_log_context({"run_id": run_id, "generation": generation}),
            telemetry.start_span(
                "placement", traceparent=self.record.traceparent, run_id=run_id, generation=generation
            ),
            self._group,
        ):
            try:
                self._requests.raise_if_dropped()
                await self._report(self._reports.read() or await self._run_to_end())
            except GenerationDropped as error:
                log.warning("placement dropped", reason=str(error))
                await self._group.sweep()
                self._reports.mark_done("dropped")

    async def end_offline(self, reason: str) -> None:
        """End the ranks at once and without a bus; a later life of the agent reports it."""
        if self._reports.read() is None and self._group.load():
            self.stop(0, reason)
            async with ControlSocket(self.files.socket, self.placed.generation, lambda: None) as control:
                with self._group:
                    await self._monitor_ranks(control)
        else:
            await self._group.sweep()

    async def abort(self, error: Exception) -> None:
        """End and report a generation whose runner failed through no fault of the run."""
        await self._group.sweep()
        reason = f"node {self.member.node_id} could not keep the run going: {error!r}"
        failure = GenerationFailure(reason, infrastructure=True)
        await self._report(self._reports.read() or self._build_report.failed(failure))

    async def _run_to_end(self) -> Report:
        try:
            if self.files.is_launched:
                await self._reattach()
            with closing(self._follow_journals()) as follower:
                stager = CheckpointStager(
                    self._context, self.placed, self.member, self.files.folder, follower, self._publish
                )
                if self.files.is_launched:
                    launch = Launch.model_validate_json(self.files.launch.read_bytes())
                    self._keeper = self._keep_outputs(follower, launch.output_dir)
                    follower.resume = launch.resume
                async with self._context.cache.pin_files() as pins:
                    return await self._run_ranks(pins, follower, stager)
        except GenerationFailure as failure:
            return self._build_report.failed(failure)

    async def _run_ranks(self, pins: CachePins, follower: JournalFollower, stager: CheckpointStager) -> Report:
        inputs: GenerationInputs | None = None
        dataset, checkpoint = LateInput[DatasetView](), LateInput[PartialCheckpoint]()
        if not self.files.is_launched:
            inputs = await self._prepare(pins)
            if inputs is None:
                position = RunPosition.of(self.placed, follower.state.ranks)
                return self._build_report.released(position, clean=True, detail="no rank had been started")
            dataset, checkpoint = LateInput.of(inputs.dataset), LateInput.of(inputs.partial)
            await self._begin_outputs(inputs, follower)
        control = ControlSocket(self.files.socket, self.placed.generation, follower.ring_doorbell, dataset, checkpoint)
        # The ranks of an earlier life need their agent although the store may be away.
        reopening = self._reopen_inputs(dataset, checkpoint, follower, pins) if inputs is None else _do_nothing()
        peers = self._peers.follow() if self._peers is not None else _do_nothing()
        async with control, _background(reopening), _background(peers), _background(follower.run()) as following:
            if inputs is not None:
                await self._launch(inputs)
            async with _background(stager.run()) as staging, _background(self._keeper.run()) as keeping:
                await self._monitor(control, follower, stager, following, staging, keeping)
                await cancel_and_wait(following)
                await follower.drain()
                await cancel_and_wait(keeping)
                await self._wait_for_peers()
                await self._finish_outputs(follower)
                await cancel_and_wait(staging)
                await self._upload_rest(follower, stager)
                await self._add_last_of_peers(follower, stager)
            return await self._decide_report(follower, stager)

    # -- prepare ------------------------------------------------------------

    async def _prepare(self, pins: CachePins) -> GenerationInputs | None:
        """Prepare the inputs; return None if the generation is stopped first.

        Raises:
            GenerationFailure: an input is not available.
        """
        started = time.monotonic()
        work = prepare_inputs(self._context, self.placed, self.member, self.files.folder, pins, self._publish)
        task = asyncio.create_task(_traced("prepare", work))
        node = f"node {self.member.node_id}"
        try:
            while not task.done():
                self._requests.raise_if_dropped()
                if self._requests.stop is not None:
                    return None
                await self._requests.wait_for_task(task)
            return task.result()
        except PackagesError as error:
            raise GenerationFailure(str(error), infrastructure=False, permanent=error.permanent) from error
        except (PackageError, CacheError) as error:
            raise GenerationFailure(str(error), infrastructure=False) from error
        except UnfitDeviceError as error:
            # Published before the slots are released, or the run would be placed here again.
            await self._report_unfit(error.slots, str(error))
            reason = f"{node} has a device that failed its check: {error}"
            raise GenerationFailure(reason, infrastructure=True) from error
        except (TransientError, OSError, TimeoutError) as error:
            raise GenerationFailure(f"{node} could not prepare the run: {error}", infrastructure=True) from error
        finally:
            await cancel_and_wait(task)
            work.close()  # a task that is stopped before its first step never began it
            metrics.PREPARE_SECONDS.observe(time.monotonic() - started)

    async def _reattach(self) -> None:
        """Find the ranks that an earlier life of the agent started.

        Raises:
            GenerationFailure: it was killed before it wrote down which processes there are.
        """
        if not self._group.load():
            await self._group.sweep()
            raise GenerationFailure("the agent was killed while it started the ranks", infrastructure=True)
        metrics.REATTACHED.inc()
        log.info("reattached to ranks", pids=self.pids)

    async def _reopen_inputs(
        self,
        dataset: LateInput[DatasetView],
        checkpoint: LateInput[PartialCheckpoint],
        follower: JournalFollower,
        pins: CachePins,
    ) -> None:
        """Go on to fetch what ranks read that an earlier life of the agent started."""
        opening = partial(open_dataset, self._context, self.placed, self.member, self.files.folder, pins)
        await asyncio.gather(
            dataset.open_again("the run's dataset", opening),
            checkpoint.open_again("the run's checkpoint", partial(self._reopen_checkpoint, follower, pins)),
        )

    async def _reopen_checkpoint(self, follower: JournalFollower, pins: CachePins) -> PartialCheckpoint | None:
        launch = Launch.model_validate_json(self.files.launch.read_bytes())
        has_to_load = any(follower.state.ranks[rank].started is None for rank in self.member.ranks)
        if launch.resume is None or launch.resume_folder is None or not launch.resume_is_partial or not has_to_load:
            return None
        return await self._context.cache.reopen_checkpoint(launch.resume, launch.resume_folder, pins)

    def _follow_journals(self) -> JournalFollower:
        try:
            patterns = compile_patterns(self.placed.spec.metric_patterns)
        except ValueError as error:
            raise GenerationFailure(str(error), infrastructure=False, permanent=True) from error
        follower = JournalFollower(
            JournalSource(self.placed.run_id, self.placed.generation, self.member.node_id),
            self.member.ranks,
            self.files.folder,
            self._publish,
            self._now,
            interval_s=self._context.settings.follow_interval_s,
            patterns=patterns,
            launch_is_start=is_command(self.placed.spec),
            homes={rank: member.node_id for member in self.placed.members for rank in member.ranks},
        )
        self._survivors.follow(follower.state.ranks)
        return follower

    # -- outputs ------------------------------------------------------------

    def _keep_outputs(self, follower: JournalFollower, output_dir: Path | None) -> OutputKeeper:
        folder = self.files.folder
        settings = self._context.settings
        outputs = output_dir or folder / "outputs"
        return OutputKeeper(
            settings, self.placed, self.member, folder, outputs, follower, self._script_pids, self._peers
        )

    def _script_pids(self) -> list[int]:
        """Return the processes that may write into the output folder; none once one has failed or all are to end."""
        return [] if self._group.terminated or first_failure(self._group.exits) is not None else self.pids

    async def _begin_outputs(self, inputs: GenerationInputs, follower: JournalFollower) -> None:
        self._keeper = self._keep_outputs(follower, inputs.output_dir)
        if not is_command(self.placed.spec):
            return
        if inputs.resume is not None and inputs.resume_folder is not None:
            follower.resume = inputs.resume
            await run_in_thread(self._keeper.continue_from, inputs.resume, inputs.resume_folder, inputs.kept_layout)
            await follower.save()
        elif inputs.init is not None and inputs.init_folder is not None:
            await run_in_thread(self._keeper.begin_with, inputs.init, inputs.init_folder, inputs.kept_layout)

    async def _finish_outputs(self, follower: JournalFollower) -> None:
        """Keep what the script left, as far as it is complete."""
        exits, group = self._group.exits, self._group
        was_stopped = self._requests.stop is not None and not group.killed
        ended_at = max((each.at for each in exits), default=self._now())
        stopped_at, written = group.terminated_at, group.written_files
        if written is None and self._has_script_stopped:
            # It ended before it could be held. A script that asks handles SIGTERM: it has closed what it wrote.
            stopped_at, written = stopped_at or ended_at, set()
        await self._keeper.finish(
            ended_at=ended_at,
            is_complete=first_failure(exits) is None,
            stopped_at=stopped_at if was_stopped else None,
            written_at_stop=written,
        )
        if self._have_finished and not self._keeper.has_kept and self._requests.stop is None:
            write_to_log(self.files.folder, self._notice())
        await follower.drain()  # what was written there meanwhile

    async def _wait_for_peers(self) -> None:
        """Wait for what the other nodes' scripts write until their end, if this one's is done and no stop comes."""
        if self._peers is None or not self._have_finished:
            return
        waiting = asyncio.create_task(self._peers.wait_until_final())
        try:
            while not waiting.done() and self._requests.stop is None:
                self._requests.raise_if_dropped()
                await self._requests.wait_for_task(waiting, POLL_S)
        finally:
            await cancel_and_wait(waiting)

    async def _add_last_of_peers(self, follower: JournalFollower, stager: CheckpointStager) -> None:
        """Add what other nodes list while this one is stopped to what it has stored itself by now.

        Where a rank here has failed, the others run on: what they have listed by now is all there is.
        """
        if self._peers is None:
            return
        has_failed = self._requests.stop is None and first_failure(self._group.exits) is not None
        if not has_failed:
            grace_s = self._requests.remaining_grace_s()
            limit_s = FINISHED_UPLOAD_S if grace_s is None else grace_s * PEER_WAIT_SHARE
            await self._within_grace(self._peers.wait_until_final(), limit_s)
        await self._keeper.add_last_of_peers(tells_unfinished=not has_failed)
        await follower.drain()
        await self._upload_rest(follower, stager)

    # -- launch -------------------------------------------------------------

    async def _launch(self, inputs: GenerationInputs) -> None:
        """Start the ranks; from ``launch.json`` on, a restarted agent looks for them.

        Raises:
            GenerationFailure: one could not be started; the others are killed.
        """
        self._requests.raise_if_dropped()
        start_before = self._context.term.start_before()
        if start_before is None:
            raise GenerationFailure(f"the lease of node {self.member.node_id} is over", infrastructure=True)
        environment = self._node_environment(inputs)
        specs = build_process_specs(self.placed, self.member, self._context.environment, environment)
        try:
            self._write_launch(inputs)
            await self._group.start(specs, inputs.code_folder or self.files.folder, start_before)
        except (RankStartError, OSError, ValueError) as error:
            if is_refused_by_exec(error):
                reason = f"the command cannot be started on any machine: {error}"
                raise GenerationFailure(reason, infrastructure=False, permanent=True) from error
            reason = f"node {self.member.node_id} could not start the ranks: {error}"
            raise GenerationFailure(reason, infrastructure=True) from error

    def _write_launch(self, inputs: GenerationInputs) -> None:
        """Write what a later life of the agent needs to find the ranks, and hold space for how they end."""
        self.files.write_placement(self.record)
        self.files.hold_space()
        if self._survivors.is_resumable:
            survivor_dir(self.files.run_folder).mkdir(exist_ok=True)
        write_atomically(self.files.launch, self._launch_of(inputs).model_dump_json())

    def _launch_of(self, inputs: GenerationInputs) -> Launch:
        placed, survivors = self.placed, self._survivors
        memory = self._context.memory.prepare(placed.run_id, placed.generation) if survivors.can_use_memory else None
        return Launch(
            run_id=placed.run_id,
            generation=placed.generation,
            node_id=self.member.node_id,
            world_size=placed.world_size,
            spec=placed.spec,
            folder=self.files.folder,
            socket=self.files.socket,
            code_folder=inputs.code_folder,
            dataset_folder=inputs.dataset.folder if inputs.dataset else None,
            dataset_id=placed.dataset.dataset_id if placed.dataset else None,
            resume_folder=inputs.resume_folder,
            resume=inputs.resume,
            resume_is_partial=inputs.partial is not None,
            init_folder=inputs.init_folder,
            output_dir=inputs.output_dir,
            failures_seen=placed.failures_seen,
            run_s=placed.run_s,
            memory_folder=memory,
            memory_max_bytes=self._context.memory.max_bytes,
            spill_folder=self._context.memory.spill_dir(placed.run_id) if survivors.is_resumable else None,
            survivor_dir=survivor_dir(self.files.run_folder) if survivors.is_resumable else None,
            machine=self._context.inventory.machine,
        )

    def _node_environment(self, inputs: GenerationInputs) -> NodeEnvironment:
        inventory, settings = self._context.inventory, self._context.settings
        code = map(str, find_import_folders(inputs.code_folder)) if inputs.code_folder is not None else ()
        packages = (str(inputs.packages_dir),) if inputs.packages_dir is not None else ()
        master = inputs.master
        return NodeEnvironment(
            launch_path=str(self.files.launch),
            master_address=master.host,
            master_port=master.port,
            python_path=(*code, *packages, str(PYTHON_ROOT)),
            packages_dir="".join(packages),
            mlflow_uri=find_mlflow_uri(),
            bin_folder=str(Path(sys.executable).parent),
            cores=inventory.cores,
            slots=inventory.slots,
            interface=master.interface,
            is_ipv6=master.is_ipv6,
            gpus=tuple(gpu.uuid for gpu in inventory.gpus),
            profiles=inventory.slot_profiles,
            slot_memory_bytes=inventory.slot_memory_bytes,
            mps_pipe=find_mps_pipe(settings.mps_pipe_dir, self._context.environment),
            output_dir=str(inputs.output_dir),
            data_dir=str(inputs.data_dir or ""),
            resume_dir=str(inputs.resume_folder or ""),
            resume_step=inputs.resume.step if inputs.resume is not None else 0,
            init_dir=str(inputs.init_folder or ""),
            cache_home=self._context.cache_home,
        )

    # -- monitor ------------------------------------------------------------

    async def _monitor(
        self, control: ControlSocket, follower: JournalFollower, stager: CheckpointStager, *tasks: asyncio.Task[None]
    ) -> None:
        """Wait until every rank has ended; meanwhile watch for stalls and measure the node."""
        watcher = StallWatcher(
            self.placed,
            self.member.node_id,
            self.files.folder,
            follower,
            lambda: self._group.running,
            self._publish,
            lambda: self._requests.stop is not None,
            stager.upload_artifacts,
        )
        metrics_published = publish_system_metrics(
            self.placed,
            self.member,
            self._context.meter,
            follower,
            lambda: self.pids,
            self._publish,
            self._now,
            self._context.settings.system_interval_s,
        )
        async with _background(watcher.run()) as watching, _background(metrics_published) as sampling:
            await _traced("ranks", self._monitor_ranks(control, *tasks, watching, sampling))

    async def _monitor_ranks(self, control: ControlSocket, *tasks: asyncio.Task[None]) -> None:
        await self._group.wait_until_ended(control, tasks, listens=not is_command(self.placed.spec))

    # -- stop ---------------------------------------------------------------

    @property
    def _have_finished(self) -> bool:
        """Whether the ranks have ended by themselves, with their work done."""
        return all_succeeded(self._group.exits) and not self._group.terminated and not self._has_script_stopped

    @property
    def _has_script_stopped(self) -> bool:
        """Whether a script has seen that it is to stop: it ends with exit code 0 then, perhaps before it is signalled.

        A Task needs no such mark: the Trainer that stops ends with EXIT_STOPPED.
        """
        return is_command(self.placed.spec) and self._group.has_seen_stop

    @property
    def _has_peers_that_broke(self) -> bool:
        """Whether a script is stopped without grace while this node alone can store what the others have listed."""
        return self._peers is not None and self._requests.stop is not None and self._requests.stop.grace_s == 0

    async def _upload_rest(self, follower: JournalFollower, stager: CheckpointStager) -> None:
        """Upload what the ranks completed, until it is done or the grace of a stop is over."""
        limit_s = math.inf
        if self._requests.remaining_grace_s() is None and first_failure(self._group.exits):
            # What has diverged goes on from a committed checkpoint, and nothing else of it stays.
            is_in_memory = self._survivors.has_newer_state() and not have_diverged(follower.state.ranks)
            limit_s = 0.0 if is_in_memory else CRASH_UPLOAD_S
        await self._within_grace(stager.stage_rest(), limit_s)

    async def _within_grace(self, work: Coroutine[Any, Any, T], limit_s: float = math.inf) -> T | None:
        """Return what the work comes to; None if the grace of a stop, or ``limit_s``, is over before."""
        task = asyncio.create_task(work)
        started = time.monotonic()
        if self._stored_until is None and self._have_finished:
            self._stored_until = started + FINISHED_UPLOAD_S
        elif self._stored_until is None and self._has_peers_that_broke:
            self._stored_until = started + CRASH_UPLOAD_S
        try:
            while not task.done():
                self._requests.raise_if_dropped()
                now = time.monotonic()
                is_over = self._requests.remaining_grace_s() == 0 and now >= (self._stored_until or started)
                if is_over or now - started >= limit_s:
                    return None
                await self._requests.wait_for_task(task, POLL_S)
            return task.result()
        finally:
            await cancel_and_wait(task)

    # -- report -------------------------------------------------------------

    async def _decide_report(self, follower: JournalFollower, stager: CheckpointStager) -> Report:
        exits, ranks = self._group.exits, follower.state.ranks
        if have_diverged(ranks):
            await run_in_thread(self._remove_uncommitted_state)
        await self._report_drift(ranks)
        failure = first_own_failure(exits, lambda rank: follower.tail(rank, SEARCHED_LINES))
        if is_command(self.placed.spec) and self._requests.stop is not None and not self._group.killed:
            failure = None  # a script that ends on SIGTERM has ended as it should, with any exit code
        if failure is not None and self._requests.stop is None:
            lines = follower.tail(failure.rank, SEARCHED_LINES)
            return self._build_report.crashed(failure, ranks, lines, self._read_code_folder())
        step = follower.state.staged_step
        committed = False
        if step is not None and failure is None:
            committed = await self._requests.wait_until_committed(step, self._context.settings.commit_timeout_s)
        position = RunPosition.of(self.placed, ranks)
        if self._have_finished:
            artifacts = None if stager.has_rest else await self._within_grace(self._upload_artifacts(ranks, stager))
            if artifacts is None:
                # The run would be completed without what it came to: it goes on from what is stored, and ends again.
                detail = "its ranks have finished, but what they left could not be stored within the grace of the stop"
                return self._build_report.released(position, clean=False, detail=detail)
            return self._build_report.succeeded(ranks, artifacts, self._notice())
        if failure is not None:
            detail = f"rank {failure.rank} {describe_exit(failure.code)} after the request to stop"
            return self._build_report.released(position, clean=False, detail=detail)
        clean = (committed and step is not None and step >= position.step) or position.step <= position.resumed_step
        if is_command(self.placed.spec):
            clean = committed or stager.has_listed_all
        detail = "" if clean else "the last steps are not in a committed checkpoint"
        return self._build_report.released(position, clean=clean, detail=detail)

    async def _report_drift(self, ranks: Mapping[int, RankState]) -> None:
        """Report this node's slots as unfit whose ranks computed another state than the majority."""
        ends = [state.ended for state in ranks.values() if state.ended is not None and state.ended.drifted_ranks]
        drifted = {rank for ended in ends for rank in ended.drifted_ranks}
        if len(drifted) == self.placed.world_size:
            return  # nobody knows which is right
        slots = [slot for rank, slot in zip(self.member.ranks, self.member.slots, strict=True) if rank in drifted]
        if slots:
            await self._report_unfit(tuple(slots), ends[0].error)

    def _remove_uncommitted_state(self) -> None:
        """Remove what only this node has: what diverges once does so again from the steps just before."""
        self._context.memory.remove_run(self.placed.run_id)
        remove_survivor_checkpoints(self.files.run_folder)
        shutil.rmtree(self.files.folder / "checkpoints", ignore_errors=True)

    async def _upload_artifacts(self, ranks: Mapping[int, RankState], stager: CheckpointStager) -> tuple[Artifact, ...]:
        results = [state.result for _, state in sorted(ranks.items()) if state.result is not None]
        named = await stager.upload_artifacts([name for result in results for name in result.artifacts])
        return named + await stager.upload_artifacts(self._keeper.artifacts, self._keeper.folder)

    def _read_code_folder(self) -> Path | None:
        """Return where the ranks found their code; an earlier life of the agent may have launched them."""
        folder = (read_json(self.files.launch) or {}).get("code_folder")
        return None if folder is None else Path(folder)

    def _notice(self) -> str:
        """Return what the author of a run that kept nothing should know."""
        if self._keeper.has_kept:
            return self._keeper.unkept_notice
        command, since = self.placed.spec.command or (), self.files.launch.stat().st_mtime
        return describe_unkept(self._read_code_folder(), since, command, self._keeper.origin, self._keeper.problems)

    async def _report(self, report: Report) -> None:
        if await self._reports.is_done(report):
            return
        self._reports.write(report)
        if self._survivors.is_resumable and not is_complete(report):
            # Before the scheduler can place anything on what the report releases.
            await run_in_thread(save_survivor_checkpoints, self.files.folder, self._requests.may_commit)
        await self._reports.publish(report)

    async def _is_published(self, fact: Fact) -> bool:
        history = await self._context.bus.read_history(fact.subject)
        return any(message.envelope.id == fact.event_id for message in history)

    async def _publish(self, fact: Any) -> None:
        """Publish a fact that the placement caused."""
        cause = Envelope(
            id=self.record.causation_id,
            source=self._context.bus.source,
            type=RunPlaced.type,
            time=self._context.bus.clock.now(),
            correlation_id=self.record.correlation_id,
            traceparent=self.record.traceparent,
        )
        await self._context.bus.publish(fact, cause if cause.id else None)

    def _now(self) -> float:
        return self._context.bus.clock.now().timestamp()


@asynccontextmanager
async def _background(work: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Task[None]]:
    """Run ``work`` during the block; raise its error when the block ends."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        await cancel_and_wait(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error


async def _do_nothing() -> None:
    """Stand for work that there is none of."""


async def _traced(name: str, work: Coroutine[Any, Any, T]) -> T:
    with telemetry.start_span(name):
        return await work
