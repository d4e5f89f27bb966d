"""A trace through the whole service over a real nats-server, in lock-step with a virtual clock.

The service folds the log, holds its lease, decides and publishes as it always does; but it reads a
virtual clock, and runs a cycle only when the simulation asks for one. Its placements are those of ``engine.simulate``.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from contracts import topology
from contracts.scheduling import Policy
from services.kit.bus import Bus, Message
from services.kit.concurrency import cancel_and_wait
from services.kit.ports import free_ports
from services.kit.settings import Settings
from services.scheduler.app import Scheduler, assemble
from trainbus.client.errors import TrainbusError
from trainbus.embedded.servers import NatsServer, ServerError
from trainbus.operate.simulation.agents import Agents
from trainbus.operate.simulation.engine import (
    CycleOutcome,
    Effort,
    Listener,
    Progress,
    WorldEvents,
    ignore_progress,
    play_trace,
    wake_s,
)
from trainbus.operate.simulation.traces import Trace, at

#: How long a cycle of the service may take before the simulation fails.
CYCLE_TIMEOUT_S = 120.0
#: Longer than any cycle: the service must not lose its lease while it decides.
LEASE_TTL_S = 600.0

T = TypeVar("T")


class VirtualClock:
    """A clock whose time of day is the simulation's. Elapsed times are real."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> datetime:
        return at(self.now_s)

    def monotonic(self) -> float:
        return time.monotonic()


class LockStepPacer:
    """Holds every cycle until the simulation asks for one, and reports its end."""

    def __init__(self) -> None:
        self._permits = asyncio.Semaphore(0)
        self._done: asyncio.Queue[tuple[int, datetime | None]] = asyncio.Queue()
        self.ready = asyncio.Event()

    async def before_cycle(self) -> None:
        self.ready.set()
        await self._permits.acquire()

    def after_cycle(self, published: int, wake_at: datetime | None) -> None:
        self._done.put_nowait((published, wake_at))

    async def run_cycle(self) -> tuple[int, datetime | None]:
        """Run one cycle; return the highest sequence it published, and when the next one is due."""
        self._permits.release()
        return await self._done.get()


class Driver:
    """The world on the other end of the bus."""

    def __init__(
        self,
        scheduler: Scheduler,
        pace: LockStepPacer,
        clock: VirtualClock,
        bus: Bus,
        log: AsyncIterator[list[Message[Any]]],
        listeners: Sequence[Listener],
    ) -> None:
        self.scheduler, self.pace, self.clock, self.bus, self.listeners = scheduler, pace, clock, bus, listeners
        self.effort = Effort()
        self._log, self._sequence = log, 0

    async def turn(self, turn: WorldEvents) -> CycleOutcome:
        """Publish what happened, run one cycle of the service, and return what it published."""
        self.clock.now_s = turn.now_s
        sequence = 0
        for fact in turn.facts:
            sequence = (await self.bus.publish(fact)).sequence
        await self.scheduler.cache.wait_for_sequence(sequence)
        await self._read_until(sequence, turn.now_s)
        started = time.perf_counter()
        published, wake_at = await self.pace.run_cycle()
        self.effort.cycle_s.append(time.perf_counter() - started)
        facts = await self._read_until(published, turn.now_s)
        self.effort.decisions += len(facts)
        return CycleOutcome(facts, wake_s(wake_at, turn.now_s))

    async def _read_until(self, sequence: int, now_s: float) -> list[Any]:
        """Read the log up to ``sequence``, for the listeners too; return the facts."""
        facts = []
        while self._sequence < sequence:
            for message in await anext(self._log):
                self._sequence = message.sequence
                facts.append(message.event)
                for listener in self.listeners:
                    listener(message.event, message.sequence, now_s)
        return facts


def simulate_with_server(
    trace: Trace,
    policy: Policy,
    *,
    resume_cost_s: float = 60.0,
    listeners: Sequence[Listener] = (),
    progress: Progress = ignore_progress,
) -> Effort:
    """Simulate as ``simulate_over_bus``, on a nats-server that is started for it.

    Raises:
        TrainbusError: the server does not start.
    """
    with tempfile.TemporaryDirectory(prefix="trainbus-nats-") as folder:
        server = NatsServer(Path(folder), free_ports(1)[0])
        try:
            server.start()
        except ServerError as error:
            raise TrainbusError(str(error)) from error
        try:
            return asyncio.run(
                simulate_over_bus(
                    trace, policy, server.url, resume_cost_s=resume_cost_s, listeners=listeners, progress=progress
                )
            )
        finally:
            server.stop()


async def simulate_over_bus(
    trace: Trace,
    policy: Policy,
    nats_url: str,
    *,
    resume_cost_s: float = 60.0,
    listeners: Sequence[Listener] = (),
    progress: Progress = ignore_progress,
) -> Effort:
    """Simulate as ``engine.simulate``, by the service on the nats-server at ``nats_url``, whose log must be empty."""
    started = time.perf_counter()
    player = play_trace(trace, Agents.of(trace, resume_cost_s), progress)
    async with _driver(policy, listeners, nats_url) as (driver, running):
        with suppress(StopIteration):
            turn = next(player)
            while True:
                turn = player.send(await _unless_ended(driver.turn(turn), running))
    driver.effort.wall_s = time.perf_counter() - started
    return driver.effort


@asynccontextmanager
async def _driver(
    policy: Policy, listeners: Sequence[Listener], nats_url: str
) -> AsyncIterator[tuple[Driver, asyncio.Task[None]]]:
    """Run a service, and yield what drives it."""
    with tempfile.TemporaryDirectory(prefix="trainbus-simulate-") as folder:
        settings = Settings(
            nats_url=nats_url, data_dir=Path(folder), http_port=-1, lease_ttl_s=LEASE_TTL_S, instance="simulate"
        )
        pace, clock = LockStepPacer(), VirtualClock()
        scheduler = assemble(settings, policy, clock=clock, pace=pace)
        bus = Bus("simulate", settings, clock)
        running = asyncio.create_task(scheduler.service.run())
        try:
            await _unless_ended(pace.ready.wait(), running)
            await bus.connect(reconcile_topology=False)
            async with aclosing(bus.follow(topology.FACTS.name, idle_s=5.0)) as log:
                yield Driver(scheduler, pace, clock, bus, log, listeners), running
        finally:
            scheduler.service.stopping.set()
            await running
            await bus.close()


async def _unless_ended(wanted: Coroutine[Any, Any, T], running: asyncio.Task[None]) -> T:
    """Wait for a result of the service; raise an error if the service ends before, or takes too long."""
    waiting = asyncio.create_task(wanted)
    await asyncio.wait({waiting, running}, timeout=CYCLE_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
    if waiting.done():
        return waiting.result()
    await cancel_and_wait(waiting)
    if running.done():
        running.result()
        raise RuntimeError("the scheduler ended in the middle of the simulation")
    raise TimeoutError(f"the scheduler ran no cycle for {CYCLE_TIMEOUT_S:g} s")
