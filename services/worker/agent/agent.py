"""The node's agent: reads the facts that concern it, and keeps its placements, its lease and its word."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, ParamSpec

import nats.errors
import structlog
from nats.js.errors import APIError

from contracts import subjects, topology
from contracts.base import Event
from contracts.events.checkpoint import CheckpointCommitted, CheckpointRefused, CheckpointRotten
from contracts.events.node import NodeDraining, NodeJoined, NodeLeft, NodeLost, NodeNotice, NodeUnfit
from contracts.events.run import RunCancelled, RunCompleted, RunFailed, RunPlaced, RunPreempting
from services.kit.bus import Message, TransientError
from services.kit.concurrency import cancel_and_wait, run_in_thread
from services.kit.lease import Lease, read_record
from services.worker import metrics
from services.worker.checkpoints import survivor_checkpoints
from services.worker.checkpoints.blob_repair import BlobRepairer
from services.worker.core import node_decisions
from services.worker.generation.requests import PlacementRecord
from services.worker.generation.runner import GenerationRunner
from services.worker.local_files import read_json, write_atomically
from services.worker.node_context import NodeContext
from services.worker.notices.base import Notice

log = structlog.get_logger(__name__)

P = ParamSpec("P")

FOLLOWED: tuple[type[Event], ...] = (
    RunPlaced,
    RunPreempting,
    CheckpointCommitted,
    CheckpointRefused,
    CheckpointRotten,
    RunCompleted,
    RunFailed,
    RunCancelled,
)
ENDS = (RunCompleted, RunFailed, RunCancelled)
#: Seconds that an agent which is stopped tries to say how its runs ended.
REPORT_PATIENCE_S = 15.0

#: However late a notice is heard, the ranks are given the time for a small checkpoint.
LEAST_GRACE_S = 1.0


class DataDirLockedError(RuntimeError):
    """Another agent uses the data folder."""


class Agent:
    """One node's agent. ``run`` is its life; ``shut_down`` its orderly end."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._settings = context.settings
        self._folder = self._settings.data_dir.resolve()
        self._runs = self._folder / "runs"
        self._state_file = self._folder / "agent" / "state.json"
        self._placements: dict[tuple[str, int], GenerationRunner] = {}
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._repairer = BlobRepairer(context)
        self._state = node_decisions.NodeState(self._settings.node_id)
        self._position: int | None = None
        self._previous_incarnation = ""
        self._lease: Lease | None = None
        self._leaving = self._left = self._recovered = self._alone = False
        self._tidying: set[asyncio.Task[object]] = set()
        #: Runs have ended since their folders were looked through; at first, those of an earlier life.
        self._runs_ended = True
        #: What was said of the machine's end, and when; and what is wrong with its devices.
        self._notices: list[tuple[Notice, float]] = []
        self.joined = asyncio.Event()
        context.on_unfit = self._report_unfit
        context.held_beside = self._held_beside

    # -- life ---------------------------------------------------------------

    async def run(self) -> None:
        """Live until cancelled; after being declared lost, live again under a new name."""
        with self._only_one():
            stored = read_json(self._state_file) or {}
            self._position = stored.get("position")
            self._previous_incarnation = stored.get("incarnation", "")
            self._recover()
            while not self._leaving:
                try:
                    await self._one_life()
                except TransientError as error:
                    # The ranks train on; ending them because the bus is away for long would help nobody.
                    log.warning("the bus is away, joining anew", error=str(error))

    async def shut_down(self) -> None:
        """Let every run go with its grace, say so, and leave."""
        self._leaving = True
        await self._repairer.close()
        try:
            with nullcontext() if self._alone else self._only_one():
                await self._let_go()
        except DataDirLockedError as error:
            log.warning("another agent has the folder, and with it the ranks", error=str(error))

    async def handle_notice(self, notice: Notice) -> None:
        """Say that the machine will be taken away; if that is certain, let every run go within the time left."""
        saying = self._note(notice)
        if notice.leave:
            reason = f"the machine is taken away ({notice.source}: {notice.kind})"
            for key, placement in self._placements.items():
                if key in self._tasks:
                    placement.stop(self._grace_s(notice, placement), reason)
        await saying

    def _note(self, notice: Notice) -> asyncio.Task[None]:
        """Remember a notice, and begin to say it."""
        metrics.NOTICES.labels(notice.source).inc()
        log.warning("notice", source=notice.source, kind=notice.kind, grace_s=notice.grace_s, detail=notice.detail)
        self._notices.append((notice, time.monotonic()))
        return asyncio.create_task(self._say_notices())

    async def wait_until_idle(self) -> None:
        """Wait until no run has anything here any more."""
        while running := [task for task in self._tasks.values() if not task.done()]:
            await asyncio.wait(running)

    @property
    def _must_leave(self) -> bool:
        return any(notice.leave for notice, _ in self._notices)

    def _grace_s(self, notice: Notice, placement: GenerationRunner) -> float:
        """Seconds that a run has to leave its state behind."""
        wanted_s = placement.placed.spec.grace_s
        if notice.grace_s is None:
            return wanted_s
        return min(wanted_s, max(notice.grace_s - self._settings.notice_margin_s, LEAST_GRACE_S))

    async def _say_notices(self) -> None:
        """Publish them under the name of this life. Said again, they are the same facts."""
        await self.joined.wait()
        for notice, at_s in tuple(self._notices):
            passed_s = time.monotonic() - at_s
            fact = NodeNotice(
                node_id=self._settings.node_id,
                incarnation=self._state.incarnation,
                source=notice.source,
                kind=notice.kind,
                grace_s=None if notice.grace_s is None else max(notice.grace_s - passed_s, 0.0),
                detail=notice.detail,
            )
            while True:
                try:
                    await self._context.bus.publish(fact)
                    break
                except TransientError as error:
                    log.warning("a notice could not be told", error=str(error))

    def _held_beside(self, placed: RunPlaced) -> dict[int, list[float]]:
        """Slot -> the shares of it that other runs have here, whose ranks may be running."""
        held: dict[int, list[float]] = {}
        for placement in self._placements.values():
            share = placement.placed.spec.resources.share
            if placement.placed.run_id != placed.run_id and share and not placement.over.is_set():
                for slot in placement.member.slots:
                    held.setdefault(slot, []).append(share)
        return held

    async def _report_unfit(self, slots: tuple[int, ...], reason: str) -> None:
        log.error("a device failed its check", slots=slots, reason=reason)
        incarnation = self._state.incarnation
        await self._context.bus.publish(
            NodeUnfit(node_id=self._settings.node_id, incarnation=incarnation, reason=reason[:2000], slots=slots)
        )

    async def _let_go(self) -> None:
        # Asked to stop before it had joined: ranks of an earlier life are ours to end all the same.
        self._recover()
        self._start_all()
        longest_s = max((placement.placed.spec.grace_s for placement in self._placements.values()), default=0)
        saying = None
        if not self._must_leave:  # else it is said already, with the time that there really is
            # First, so that nothing is placed here in the meantime and ranks on other nodes let go with ours.
            grace_s = longest_s + self._settings.notice_margin_s
            saying = self._note(Notice("signal", "terminate", grace_s, "the node's agent is stopping"))
            await asyncio.sleep(0)  # it is on its way before the first rank is asked to stop
        for key, placement in self._placements.items():
            if key in self._tasks:
                placement.stop(placement.placed.spec.grace_s, "the node's agent is stopping")
        running = [task for task in self._tasks.values() if not task.done()]
        if running:
            log.info("waiting for runs to let go", runs=len(running))
            patience_s = longest_s + self._settings.kill_after_s + REPORT_PATIENCE_S
            _, late = await asyncio.wait(running, timeout=patience_s)
            # Their ranks are dead. What could not be said is on disk, and is said by the next life.
            await cancel_and_wait(*late)
        if saying is not None:
            await asyncio.wait([saying], timeout=1 if self.joined.is_set() else 0)
            await cancel_and_wait(saying)
        if self.joined.is_set():
            left = NodeLeft(
                node_id=self._settings.node_id, incarnation=self._state.incarnation, reason="the agent was stopped"
            )
            with suppress(TransientError):
                await asyncio.wait_for(self._context.bus.publish(left), 10)
        self._left = True
        self._context.memory.clear()
        if self._lease is not None:
            await self._lease.release()

    async def end_unheard(self) -> None:
        """Stopped before there was a bus: end the ranks of an earlier life, which then has to say so."""
        self._leaving = True
        try:
            with self._only_one():
                self._recover()
                for placement in self._placements.values():
                    await placement.end_unheard("the node's agent was stopped")
        except DataDirLockedError as error:
            log.warning("another agent has the folder, and with it the ranks", error=str(error))

    async def _one_life(self) -> None:
        """Catch up, join, follow; return when declared lost."""
        incarnation = uuid.uuid4().hex[:12]
        self.joined.clear()
        await self._catch_up()
        await self._forget_what_is_over()
        # Known on disk before it is known on the bus: a lease of this name is ours after a crash.
        self._state = node_decisions.joining(self._state, incarnation)
        await self._save()
        held = asyncio.Event()
        keeper = asyncio.create_task(self._keep_lease(incarnation, held))
        try:
            await self._await_lease(held, keeper)
            await self._join(incarnation)
            self._start_all()
            async for batch in self._context.bus.follow(
                topology.FACTS.name, self._filters(), (self._position or 0) + 1, idle_s=1.0
            ):
                if self._left or await self._apply(batch):
                    return
                self._reap()
                if keeper.done():
                    keeper.result()
        finally:
            await cancel_and_wait(keeper)

    async def _join(self, incarnation: str) -> None:
        found = self._context.inventory
        joined = NodeJoined(
            node_id=self._settings.node_id,
            incarnation=incarnation,
            address=self._settings.address,
            slots=found.slots,
            accelerator=found.accelerator,
            memory_bytes=found.memory_bytes,
            slot_memory_bytes=found.slot_memory_bytes,
            cpus=found.cpus,
            slot_profiles=found.slot_profiles,
            labels=self._settings.labels,
            datasets=await asyncio.to_thread(self._context.cache.datasets),
            lease_ttl_s=self._settings.lease_ttl_s,
            software=found.software,
            machine_digest=found.machine_digest,
            running=node_decisions.still_running(self._state),
        )
        ack = await self._context.bus.publish(joined)
        self._state = node_decisions.joined_at(self._state, ack.sequence)
        self.joined.set()
        if self._notices:
            await self._say_notices()  # of an earlier life, true of this one
        metrics.JOINS.inc()
        metrics.SLOTS.set(found.slots)
        log.info("joined", incarnation=incarnation, slots=found.slots, running=len(joined.running))

    async def _catch_up(self) -> None:
        """Read what happened while no agent was here. A node that is new starts at the stream's end."""
        if self._position is None:
            self._position = await self._context.bus.get_last_sequence(">")
            await self._save()
            return
        async for batch in self._context.bus.follow(
            topology.FACTS.name, self._filters(), self._position + 1, until_caught_up=True
        ):
            await self._apply(batch)

    async def _await_lease(self, held: asyncio.Event, keeper: asyncio.Task[None]) -> None:
        """Wait until the node's name is ours. A second agent of the same name waits here for ever."""
        waiting = asyncio.create_task(held.wait())
        try:
            while not held.is_set():
                await asyncio.wait({waiting, keeper}, timeout=10, return_when=asyncio.FIRST_COMPLETED)
                if keeper.done():
                    keeper.result()
                if not held.is_set():
                    log.warning("another agent has this node's name: give each a TRAINBUS_NODE_ID of its own")
        finally:
            waiting.cancel()

    async def _keep_lease(self, incarnation: str, held: asyncio.Event) -> None:
        """Hold the lease for as long as this life lasts, whatever the bus does in between."""
        while not self._left:
            try:
                bucket = await self._context.bus.open_bucket(topology.LEASES)
                key = subjects.node_lease(self._settings.node_id)
                record = await read_record(bucket, key)
                if record is not None and self._previous_incarnation and record.holder == self._previous_incarnation:
                    # Our own, from before we were killed: no need to wait until it expires.
                    await bucket.delete(key, last=record.revision)
                self._lease = Lease(
                    bucket, key, incarnation, self._settings.lease_ttl_s, data={"node_id": self._settings.node_id}
                )
                async with self._lease.leadership() as keeper:
                    held.set()
                    await keeper
            except (nats.errors.Error, APIError, TimeoutError, TransientError) as error:
                log.warning("the node's lease cannot be kept", error=repr(error))
                await asyncio.sleep(0.2)

    # -- facts --------------------------------------------------------------

    def _filters(self) -> tuple[str, ...]:
        own = (subjects.fact("node", self._settings.node_id, fact.fact) for fact in (NodeLost, NodeDraining))
        return (*(event.subject_filter() for event in FOLLOWED), *own)

    async def _apply(self, batch: list[Message[Any]]) -> bool:
        """Act on the facts and remember the place; True when this life is over."""
        rejoin = False
        for received in batch:
            self._repairer.notice(received.event)
            self._state, decisions = node_decisions.decide(self._state, received.event, received.sequence)
            for decision in decisions:
                rejoin |= self._carry_out(decision, received)
        if batch:
            self._position = batch[-1].sequence
            await self._save()
        return rejoin

    def _carry_out(self, decision: node_decisions.Decision, received: Message[Any]) -> bool:
        match decision:
            case node_decisions.StartGeneration():
                self._take_up(decision, received)
            case node_decisions.DropGeneration():
                log.warning("dropping a placement", run_id=decision.run_id, reason=decision.why)
                self._with(decision, lambda placement: placement.drop(decision.why))
            case node_decisions.StopGeneration():
                self._with(
                    decision,
                    lambda placement: placement.stop(decision.grace_s, decision.reason, peer_lost=decision.peer_lost),
                )
            case node_decisions.SettleCheckpoint():
                self._with(decision, lambda placement: placement.settle(decision.step, decision.committed))
            case node_decisions.CleanUpRun():
                write_atomically(self._runs / decision.run_id / "over", "")
                self._beside(self._context.memory.forget, decision.run_id)
                self._beside(survivor_checkpoints.drop, self._runs / decision.run_id)
                self._runs_ended = True
            case node_decisions.ForgetRun():
                self._context.memory.forget(decision.run_id)
                self._beside(survivor_checkpoints.drop, self._runs / decision.run_id)
            case node_decisions.RejoinCluster():
                log.warning("this node was declared lost, joining anew", reason=decision.reason)
                return True
        return False

    def _with(
        self,
        decision: node_decisions.DropGeneration | node_decisions.StopGeneration | node_decisions.SettleCheckpoint,
        action: Any,
    ) -> None:
        placement = self._placements.get((decision.run_id, decision.generation))
        if placement is not None:
            action(placement)

    def _take_up(self, place: node_decisions.StartGeneration, received: Message[Any]) -> None:
        """Make the placement durable; its work begins once we have joined."""
        envelope = received.envelope
        record = PlacementRecord(
            placed=place.placed,
            sequence=place.sequence,
            correlation_id=envelope.correlation_id,
            causation_id=envelope.id,
            traceparent=envelope.traceparent,
        )
        folder = self._runs / place.placed.run_id / f"g{place.placed.generation}"
        if (folder / "done.json").exists() or (folder.parent / "over").exists():
            log.warning("a placement that is over was published again", run_id=place.placed.run_id)
            self._state = self._state.over(place.placed.run_id, place.placed.generation)
            return
        if not (folder / "placement.json").exists():
            write_atomically(folder / "placement.json", record.model_dump_json())
        self._placements[place.placed.run_id, place.placed.generation] = GenerationRunner(self._context, record, folder)
        if self._leaving or self._must_leave:
            self._placements[place.placed.run_id, place.placed.generation].stop(0, "the node's agent is stopping")
        if self.joined.is_set():
            self._start(place.placed.run_id, place.placed.generation)

    # -- placements ---------------------------------------------------------

    def _recover(self) -> None:
        """Find the placements of an earlier life on disk, once."""
        if self._recovered:
            return
        self._recovered = True
        held: list[node_decisions.LocalGeneration] = []
        for file in sorted(self._runs.glob("*/g*/placement.json")):
            try:
                record = PlacementRecord.model_validate_json(file.read_bytes())
            except ValueError as error:
                # Torn by a full disk, or of a version that says what this one does not know. Nobody can go on with it;
                # it is not among what we say we run, so that the scheduler takes it for lost.
                log.error("a placement cannot be read and is set aside", path=str(file), error=str(error))
                file.rename(file.with_name("placement.unreadable.json"))
                continue
            run_id, generation = record.placed.run_id, record.placed.generation
            over = (file.parent / "done.json").exists()
            if not (file.parents[1] / "over").exists():
                held.append(node_decisions.LocalGeneration(run_id, generation, record.sequence, over))
            if not over:
                self._placements[run_id, generation] = GenerationRunner(self._context, record, file.parent)
        self._context.memory.keep_only({each.run_id for each in held})
        self._state = node_decisions.holding(self._settings.node_id, held)
        for key, placement in self._placements.items():
            newest = self._state.held.get(key[0])
            if newest is None or newest.generation != key[1]:
                placement.drop("a newer generation was placed, or the run is over")

    async def _forget_what_is_over(self) -> None:
        """Drop what ended without our hearing of it, and hear of checkpoints committed in the meantime."""
        for (run_id, generation), placement in self._placements.items():
            if (placement.folder / "done.json").exists():
                continue
            ends = await asyncio.gather(
                *(self._context.bus.get_last_message(subjects.fact("run", run_id, end.fact)) for end in ENDS)
            )
            placed = await self._context.bus.get_last_message(subjects.fact("run", run_id, RunPlaced.fact))
            if any(ends):
                placement.drop("the run is over")
            elif placed is not None and placed.event.generation > generation:
                placement.drop("a newer generation was placed")
            else:
                for received in await self._context.bus.read_history(
                    subjects.fact("run", run_id, CheckpointCommitted.fact), start_sequence=placement.record.sequence
                ):
                    if received.event.generation == generation:
                        placement.settle(received.event.checkpoint.step, True)
                continue
            self._state = self._state.over(run_id, generation)

    def _start_all(self) -> None:
        for run_id, generation in list(self._placements):
            self._start(run_id, generation)

    def _start(self, run_id: str, generation: int) -> None:
        key = (run_id, generation)
        if key in self._tasks or key not in self._placements:
            return
        before = [task for (other, older), task in self._tasks.items() if other == run_id and older != generation]
        self._tasks[key] = asyncio.create_task(self._live(self._placements[key], before), name=f"{run_id}/{generation}")
        self._count()

    async def _live(self, placement: GenerationRunner, before: list[asyncio.Task[None]]) -> None:
        # What is left of an older generation is dead before a new one starts.
        await asyncio.gather(*before, return_exceptions=True)
        run_id = placement.placed.run_id
        try:
            if placement.fresh and await self._is_void(placement):
                placement.drop("it was placed long ago and is over")
            await placement.run()
        except Exception as error:
            log.exception("a placement broke", run_id=run_id, generation=placement.placed.generation)
            await placement.give_up(error)
        finally:
            self._state = self._state.over(run_id, placement.placed.generation)

    async def _is_void(self, placement: GenerationRunner) -> bool:
        """Whether the fact is a repetition: somebody published an old placement again."""
        run_id = placement.placed.run_id
        ends = await asyncio.gather(
            *(self._context.bus.get_last_message(subjects.fact("run", run_id, end.fact)) for end in ENDS)
        )
        placed = await self._context.bus.get_last_message(subjects.fact("run", run_id, RunPlaced.fact))
        return any(ends) or (placed is not None and placed.event.generation > placement.placed.generation)

    def _reap(self) -> None:
        """Look at placements that are over; tidy up behind runs that are."""
        for key, task in list(self._tasks.items()):
            if task.done():
                del self._tasks[key]
                placement = self._placements.pop(key)
                task.result()  # what goes wrong even in giving up must end the agent, not be forgotten
                self._beside(placement.tidy)
        self._count()
        if self._runs_ended:
            self._runs_ended = False
            self._beside(self._remove_old_runs, {run_id for run_id, _ in self._placements})

    def _beside(self, work: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Remove what nobody needs any more, in a thread: it may be gigabytes, and there is a lease to renew."""
        task = asyncio.create_task(asyncio.to_thread(work, *args, **kwargs))
        self._tidying.add(task)
        task.add_done_callback(self._tidied)

    def _tidied(self, task: asyncio.Task[object]) -> None:
        self._tidying.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("what is not needed any more cannot be removed", error=repr(error))

    def _count(self) -> None:
        live = [self._placements[key] for key in self._tasks]
        shares = [len(placement.member.slots) * placement.placed.spec.resources.share for placement in live]
        metrics.SLOTS_USED.set(sum(shares))
        metrics.RANKS_RUNNING.set(sum(len(placement.pids) for placement in live))

    def _remove_old_runs(self, active: set[str]) -> None:
        """Keep the folders of the last few runs that are over."""
        over = sorted(self._runs.glob("*/over"), key=lambda path: path.stat().st_mtime, reverse=True)
        for marker in over[self._settings.keep_finished :]:
            if marker.parent.name not in active:
                shutil.rmtree(marker.parent, ignore_errors=True)

    # -- disk ---------------------------------------------------------------

    async def _save(self) -> None:
        state = {"position": self._position, "incarnation": self._state.incarnation or self._previous_incarnation}
        await run_in_thread(write_atomically, self._state_file, json.dumps(state))

    @contextmanager
    def _only_one(self) -> Iterator[None]:
        """Hold the data folder: two agents on it would train everything twice."""
        self._state_file.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self._state_file.parent / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise DataDirLockedError(
                    f"another agent uses {self._folder}: give each node a TRAINBUS_DATA_DIR of its own"
                ) from error
            self._alone = True
            yield
        finally:
            self._alone = False
            os.close(handle)
