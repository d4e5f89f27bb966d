"""The agent of a node: joins the cluster, follows the facts that concern the node, leaves."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from pydantic import BaseModel

from contracts import subjects, topology
from contracts.base import Event, Fact
from contracts.earlier_events import subject_filters
from contracts.events.checkpoint import CheckpointCommitted, CheckpointRefused, CheckpointRotten
from contracts.events.node import NodeDraining, NodeJoined, NodeLeft, NodeLost, NodeUnfit
from contracts.events.run import (
    RunCancelled,
    RunCompleted,
    RunExited,
    RunFailed,
    RunPlaced,
    RunReleased,
    RunStaging,
    RunStopping,
)
from contracts.grace import NOTICE_MARGIN_S
from contracts.state.node import NodeStatement
from services.kit.bus import Message, TransientError
from services.kit.concurrency import cancel_and_wait, run_in_thread
from services.worker import metrics
from services.worker.agent.generation_supervisor import LEAVING, GenerationSupervisor
from services.worker.agent.node_lease import NodeLease
from services.worker.checkpoints.blob_repair import BlobRepairer
from services.worker.core.node_decisions import running_generations
from services.worker.data_dir import DataDirLock, DataDirLockedError, RunFolders
from services.worker.data_folders.data_staging import DataStaging
from services.worker.local_files import read_json, write_if_space
from services.worker.node_context import NodeContext
from services.worker.notices.notice import NodeNotices, Notice
from services.worker.retry import retry_transient

log = structlog.get_logger(__name__)

FOLLOWED: tuple[type[Event], ...] = (
    RunStaging,
    RunPlaced,
    RunStopping,
    CheckpointCommitted,
    CheckpointRefused,
    CheckpointRotten,
    RunCompleted,
    RunFailed,
    RunCancelled,
    RunReleased,
    RunExited,
)
#: Seconds that an agent which is stopped tries to report how its generations ended.
REPORT_TIMEOUT_S = 15.0
#: Seconds that it tries to publish that the node has left.
LEFT_TIMEOUT_S = 10.0
#: Seconds between two looks whether the node's lease is over.
LEASE_POLL_S = 0.1
REASON_MAX_CHARS = 2000
LEASE_OVER = "the node's lease is over: the bus could not be reached to renew it"


class AgentState(BaseModel):
    """``agent/state.json``: the place in the stream, and the incarnation under which the agent joined last."""

    position: int | None = None
    incarnation: str = ""


class Agent:
    """One node's agent. ``run`` follows the stream; ``shut_down`` ends it in good order.

    An incarnation lasts from ``joined`` to ``left`` or ``lost``. A node that was declared lost joins as a new one.
    """

    def __init__(self, context: NodeContext) -> None:
        self._context, self._settings = context, context.settings
        data_dir = self._settings.data_dir.resolve()
        self._state_file: Path = data_dir / "agent" / "state.json"
        self._lock = DataDirLock(data_dir)
        folders = RunFolders(data_dir / "runs", self._settings.keep_finished)
        self._generations = GenerationSupervisor(context, folders, self._report_unfit)
        self._term = context.term
        self._lease = NodeLease(
            context.bus, self._settings.node_id, self._settings.lease_ttl_s, self._term, self._state_what_runs
        )
        self._notices = NodeNotices(self._settings.node_id)
        self._repairer = BlobRepairer(context)
        self._stored = AgentState()
        self._is_stopping = self._has_left = False
        self.joined = asyncio.Event()
        self._staging = DataStaging(context, lambda: self._generations.state.incarnation)

    async def run(self) -> None:
        """Join and follow until cancelled; join again after the node was declared lost.

        Raises:
            DataDirLockedError: another agent uses the data folder.
        """
        with self._lock.acquire():
            self._stored = AgentState.model_validate(read_json(self._state_file) or {})
            self._term.load()
            self._generations.restore()
            while not self._is_stopping:
                try:
                    await self._live()
                except TransientError as error:
                    # The ranks train on for as long as the node's lease may be trusted.
                    log.warning("the bus is away, joining again", error=str(error))

    async def watch_lease(self) -> None:
        """Stop the ranks when the node's lease is over, and keep their guard running, until cancelled."""
        was_over = False
        while True:
            await asyncio.sleep(LEASE_POLL_S)
            if not self._term.is_over:
                was_over = False
                with suppress(OSError):  # until there is one, no rank starts, and those that run are stopped from here
                    await self._term.ensure_guard()
            elif not was_over:
                self._stop_in_time()
                was_over = True

    def _stop_in_time(self) -> None:
        """Stop the ranks before the guard kills them: their runs are placed elsewhere once the lease has expired."""
        left_s = max(self._term.kill_in_s - self._settings.kill_after_s, 0.0)
        # What they leave is uploaded, and reported, when the bus is back.
        self._generations.stop_all(LEASE_OVER, lambda requested_s: min(requested_s, left_s), bounds_upload=False)

    async def shut_down(self) -> None:
        """Stop every generation within its grace, report all of them, and leave."""
        self._is_stopping = True
        self._generations.refuse_new()
        await asyncio.gather(self._repairer.close(), self._staging.close())
        try:
            with self._lock.acquire():
                await self._leave_cluster()
        except DataDirLockedError as error:
            log.warning("another agent has the data folder, and with it the ranks", error=str(error))

    async def end_offline(self) -> None:
        """End the ranks of an earlier life without a bus; a later life reports them."""
        self._is_stopping = True
        try:
            with self._lock.acquire():
                self._generations.restore()
                await self._generations.end_offline("the node's agent was stopped")
                self._term.close()
        except DataDirLockedError as error:
            log.warning("another agent has the data folder, and with it the ranks", error=str(error))

    # -- notices ------------------------------------------------------------

    async def handle_notice(self, notice: Notice) -> None:
        """Publish that the machine will be taken away; if that is certain, stop every generation in time."""
        publishing = self._publish_notice(notice)
        if notice.leave:
            self._generations.refuse_new()
            reason = f"the machine is taken away ({notice.source}: {notice.kind})"
            self._generations.stop_all(reason, lambda requested_s: self._notices.grace_s(notice, requested_s))
        await publishing

    async def wait_until_idle(self) -> None:
        """Wait until no generation runs on this node."""
        await self._generations.wait_until_idle()

    def _publish_notice(self, notice: Notice) -> asyncio.Task[None]:
        """Begin to publish a notice, as soon as the node has joined."""
        self._notices.add(notice)
        return asyncio.create_task(self._publish_notices())

    async def _publish_notices(self) -> None:
        await self.joined.wait()
        for fact in self._notices.facts(self._generations.state.incarnation):
            await retry_transient(partial(self._context.bus.publish, fact), "a notice could not be published")

    async def _report_unfit(self, slots: tuple[int, ...], reason: str) -> None:
        log.error("a device failed its check", slots=slots, reason=reason)
        await self._context.bus.publish(
            NodeUnfit(
                node_id=self._settings.node_id,
                incarnation=self._generations.state.incarnation,
                reason=reason[:REASON_MAX_CHARS],
                slots=slots,
            )
        )

    # -- join and follow ----------------------------------------------------

    async def _live(self) -> None:
        """Catch up, join and follow; return when the node was declared lost, its lease is over, or it has left."""
        previous, incarnation = self._stored.incarnation, uuid.uuid4().hex[:12]
        self.joined.clear()
        self._generations.pause_starts()
        if self._term.is_over:
            self._stop_in_time()
            await self._term.settle()
        await self._catch_up()
        await self._generations.drop_ended()
        # Dead before the scheduler learns that they are not resumed, and places their runs elsewhere.
        await self._generations.end_dropped()
        # On disk before it is on the bus: after a crash, a lease under this name is ours.
        self._generations.state = replace(self._generations.state, incarnation=incarnation)
        await self._save()
        async with self._lease.renew_in_background(incarnation, previous):
            await self._lease.wait_until_held()
            await asyncio.gather(self._join(incarnation), self._term.ensure_guard())
            if self._term.is_over:
                return
            self._generations.start_all()
            async for batch in self._context.bus.follow(
                topology.FACTS.name, self._filters(), (self._stored.position or 0) + 1, idle_s=1.0
            ):
                if rejoin := await self._apply(batch):
                    log.warning("joining again", reason=rejoin)
                if rejoin or self._has_left or self._term.is_over:
                    return
                self._generations.reap()
                self._lease.raise_error()

    async def _catch_up(self) -> None:
        """Read what happened while no agent ran here. A new node starts at the end of the stream."""
        if self._stored.position is None:
            self._stored.position = await self._context.bus.get_last_sequence(">")
            await self._save()
            return
        async for batch in self._context.bus.follow(
            topology.FACTS.name, self._filters(), self._stored.position + 1, until_caught_up=True
        ):
            await self._apply(batch)

    async def _join(self, incarnation: str) -> None:
        inventory = self._context.inventory
        address = await self._context.addresses.find_again()
        joined = NodeJoined(
            node_id=self._settings.node_id,
            incarnation=incarnation,
            address=address.announced,
            slots=inventory.slots,
            accelerator=inventory.accelerator,
            memory_bytes=inventory.memory_bytes,
            slot_memory_bytes=inventory.slot_memory_bytes,
            cpus=inventory.cpus,
            slot_profiles=inventory.slot_profiles,
            labels=self._settings.labels,
            datasets=await asyncio.to_thread(self._context.cache.datasets),
            data_folders=await asyncio.to_thread(self._context.data_folders.dataset_ids),
            lease_ttl_s=self._settings.lease_ttl_s,
            software=inventory.software,
            machine_digest=inventory.machine_digest,
            running=running_generations(self._generations.state),
        )
        ack = await self._context.bus.publish(joined)
        self._generations.state = replace(self._generations.state, joined_sequence=ack.sequence)
        self._term.note_joined()
        self.joined.set()
        # Notices to earlier incarnations hold for this one, too.
        await self._publish_notices()
        metrics.JOINS.inc()
        metrics.SLOTS.set(inventory.slots)
        log.info("joined", incarnation=incarnation, slots=inventory.slots, running=len(joined.running))

    def _state_what_runs(self) -> dict[str, str]:
        running = running_generations(self._generations.state)
        return NodeStatement(self._stored.position or 0, running).as_lease_data()

    def _filters(self) -> tuple[str, ...]:
        own: tuple[type[Fact], ...] = (NodeLost, NodeDraining, NodeJoined)
        node = (subjects.fact("node", self._settings.node_id, fact.fact) for fact in own)
        return (*(subject for event in FOLLOWED for subject in subject_filters(event)), *node)

    async def _apply(self, batch: list[Message[Any]]) -> str:
        """Act on the facts and save the position; return why the node must join again, '' if it need not."""
        rejoin = ""
        for message in batch:
            # The bus being slow to answer is no reason for another incarnation.
            asking = partial(self._generations.is_unsupported, message)
            if await retry_transient(asking, "what supports a fact could not be read", subject=message.subject):
                continue
            self._repairer.handle_fact(message.event)
            # The scheduler waits for no earlier life of this agent: what it missed is not staged.
            if self.joined.is_set() or not isinstance(message.event, RunStaging):
                self._staging.handle_fact(message)
            rejoin = self._generations.apply(message) or rejoin
        if batch:
            self._stored.position = batch[-1].sequence
            await self._save()
        return rejoin

    async def _save(self) -> None:
        self._stored.incarnation = self._generations.state.incarnation or self._stored.incarnation
        await run_in_thread(write_if_space, self._state_file, self._stored.model_dump_json())

    # -- leave --------------------------------------------------------------

    async def _leave_cluster(self) -> None:
        # An agent that is stopped before it has joined also ends the ranks of an earlier life.
        self._generations.restore()
        self._generations.start_all()
        longest_s = self._generations.longest_grace_s
        publishing: asyncio.Task[None] | None = None
        if not self._notices.must_leave:  # otherwise a notice with the real deadline is published already
            # Published first, so that nothing is placed here and ranks on other nodes stop together with ours.
            grace_s = longest_s + NOTICE_MARGIN_S
            publishing = self._publish_notice(Notice("signal", "terminate", grace_s, LEAVING))
            await asyncio.sleep(0)  # the publishing starts before the first rank is asked to stop
        self._generations.stop_all(LEAVING)
        await self._generations.finish(longest_s + self._settings.kill_after_s + REPORT_TIMEOUT_S)
        if publishing is not None:
            await asyncio.wait([publishing], timeout=1 if self.joined.is_set() else 0)
            await cancel_and_wait(publishing)
        if self.joined.is_set():
            left = NodeLeft(
                node_id=self._settings.node_id,
                incarnation=self._generations.state.incarnation,
                reason="the agent was stopped",
            )
            # The end of its lease says the same. Whatever becomes of the bus, the ranks are dead and the term closes.
            with suppress(TransientError, TimeoutError):
                await asyncio.wait_for(self._context.bus.publish(left), LEFT_TIMEOUT_S)
        self._has_left = True
        self._context.memory.clear()
        self._term.close()
        await self._lease.release()
