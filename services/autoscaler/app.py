"""Follows the wanted capacity and starts or stops machines, on the one instance that holds the lease.

It stores nothing: the adapter lists the machines, the log has the wanted capacity.
"""

from __future__ import annotations

import asyncio
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Literal

import structlog
from pydantic import Field

from contracts import topology
from contracts.envelope import Envelope
from contracts.events.train import DrainRequested
from contracts.scheduling import Pool
from services.autoscaler import metrics
from services.autoscaler.adapters import Adapter, AdapterError
from services.autoscaler.adapters.command import CommandAdapter
from services.autoscaler.adapters.local import LocalAdapter
from services.autoscaler.core.decide import Decision, DrainNode, Machine, StartMachines, StopMachine, decide
from services.autoscaler.core.state import ALLOCATION_FACTS, STATE_FACTS, State, apply
from services.kit.bus import Bus, TransientError
from services.kit.concurrency import cancel_and_wait
from services.kit.lease import Lease
from services.kit.service import Service
from services.kit.settings import Settings

log = structlog.get_logger(__name__)

LEASE_KEY = "autoscaler"


class AutoscalerSettings(Settings):
    """The autoscaler's own settings."""

    #: ``local`` starts nodes of the embedded stack that it is part of; ``command`` runs TRAINBUS_AUTOSCALER_COMMAND.
    autoscaler_adapter: Literal["local", "command"] = "local"
    #: See ``services/autoscaler/adapters/command.py``.
    autoscaler_command: str = ""
    #: How often it looks at the machines.
    autoscaler_interval_s: float = Field(2.0, gt=0)
    #: How long a machine may be without a node before it is stopped and another one started.
    autoscaler_silence_s: float = Field(900.0, gt=0)


def build(settings: Settings, adapter: Adapter | None = None) -> Service:
    """Make an autoscaler, with another adapter than the settings name if one is given."""
    own = AutoscalerSettings.of(settings)
    service = Service("autoscaler", own)
    scaler = Autoscaler(service.bus, adapter or _adapter(own), own)
    service.add_background_task(scaler.follow)
    service.add_background_task(scaler.lead)
    service.add_readiness_check("folded", scaler.caught_up.is_set)
    return service


def _adapter(settings: AutoscalerSettings) -> Adapter:
    if settings.autoscaler_adapter == "local":
        return LocalAdapter(nodes_folder(settings.data_dir))
    if not settings.autoscaler_command:
        raise SystemExit("TRAINBUS_AUTOSCALER_ADAPTER=command needs TRAINBUS_AUTOSCALER_COMMAND: what to run")
    return CommandAdapter(settings.autoscaler_command)


def nodes_folder(data_dir: Path) -> Path:
    """Where the local adapter says which nodes shall be there."""
    return data_dir / "nodes"


class Autoscaler:
    """Brings machines in step with what is wanted."""

    def __init__(self, bus: Bus, adapter: Adapter, settings: AutoscalerSettings) -> None:
        self.bus, self.adapter, self.settings = bus, adapter, settings
        # Two processes with the same instance name are two holders all the same.
        self._holder = f"{settings.instance}-{uuid.uuid4().hex[:8]}"
        self.state = State()
        self.caught_up = asyncio.Event()
        self._news = asyncio.Event()
        self._machines: dict[str, list[Machine]] = {}

    async def follow(self) -> None:
        """Fold the log for as long as the service runs."""
        # The facts of runs are read from the oldest node's `joined` on: older runs are not needed.
        for received in await self.bus.read_history(*(fact.subject_filter() for fact in STATE_FACTS)):
            apply(self.state, received.event, received.sequence, received.stored_at or self.bus.clock.now())
        filters = tuple(fact.subject_filter() for fact in (*STATE_FACTS, *ALLOCATION_FACTS))
        start = self.state.first_relevant_sequence()
        async for batch in self.bus.follow(topology.FACTS.name, filters, start):
            for received in batch:
                apply(self.state, received.event, received.sequence, received.stored_at or self.bus.clock.now())
            if not batch or batch[-1].pending == 0:
                self.caught_up.set()
            if batch:
                self._news.set()

    async def lead(self) -> None:
        """Wait for the lease, act while it lasts, and wait again."""
        await self.caught_up.wait()
        bucket = await self.bus.open_bucket(topology.LEASES)
        while True:
            lease = Lease(bucket, LEASE_KEY, self._holder, self.settings.lease_ttl_s, clock=self.bus.clock)
            async with lease.leadership() as keeper:
                acting = asyncio.create_task(self._act_while_held(lease))
                try:
                    await asyncio.wait({keeper, acting}, return_when=asyncio.FIRST_COMPLETED)
                    if acting.done():
                        acting.result()
                finally:
                    await cancel_and_wait(acting)

    async def _act_while_held(self, lease: Lease) -> None:
        while lease.is_held:
            self._news.clear()
            await self.step()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), self.settings.autoscaler_interval_s)

    async def step(self) -> list[Decision]:
        """List the machines, decide, and carry it out; return the decisions."""
        # A pool that the policy no longer has is known by its name alone.
        pools = {name: self.state.pools.get(name) or Pool(name=name) for name in self.state.wanted}
        for name, pool in pools.items():
            try:
                self._machines[name] = await self.adapter.nodes(pool)
            except AdapterError as error:
                self._record_failure(name, error)
                # Too few machines for a while are better than too many.
                return []
            metrics.MACHINES.labels(name).set(len(self._machines[name]))
        decisions = decide(
            self.state, self._machines, self.bus.clock.now(), silence_s=self.settings.autoscaler_silence_s
        )
        for decision in decisions:
            await self._carry_out(decision, pools)
        return decisions

    async def _carry_out(self, decision: Decision, pools: dict[str, Pool]) -> None:
        try:
            match decision:
                case StartMachines():
                    started = await self.adapter.start(pools[decision.pool], decision.count)
                    metrics.STARTED.labels(decision.pool).inc(len(started))
                    log.info("machines started", pool=decision.pool, node_ids=started)
                case StopMachine():
                    await self.adapter.stop(pools[decision.pool], [decision.node_id])
                    metrics.STOPPED.labels(decision.pool).inc()
                    log.info("machine stopped", pool=decision.pool, node_id=decision.node_id, reason=decision.reason)
                case DrainNode():
                    await self._drain(decision)
        except AdapterError as error:
            self._record_failure(decision.pool if not isinstance(decision, DrainNode) else "", error)

    async def _drain(self, decision: DrainNode) -> None:
        # The next machine under this name is another one.
        request = DrainRequested(node_id=decision.node_id, reason=decision.reason, scope="incarnation")
        # One id for each incarnation of the node: repeated requests are dropped.
        event_id = f"drain/{decision.node_id}/{decision.incarnation}"
        now, kind = self.bus.clock.now(), DrainRequested.type
        envelope = Envelope(id=event_id, source=self.bus.source, type=kind, time=now, correlation_id=event_id)
        try:
            ack = await self.bus.publish_event(request, request.subject, envelope)
        except TransientError as error:
            log.warning("not asked to be drained, trying again", node_id=decision.node_id, error=str(error))
            return
        if not ack.duplicate:
            metrics.DRAINED.inc()
            log.info("node to be drained", node_id=decision.node_id, reason=decision.reason)

    def _record_failure(self, pool: str, error: AdapterError) -> None:
        metrics.FAILURES.labels(pool).inc()
        log.warning("the adapter failed, trying again", pool=pool, error=str(error))
