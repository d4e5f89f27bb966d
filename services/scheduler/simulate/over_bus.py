"""A trace through the whole service over a real nats-server, in lock-step with a virtual clock.

The service folds the log, holds its lease, decides and publishes as it always does; but it reads a
virtual clock, and runs a cycle only when the simulation asks for one. Its placements are those of ``engine.simulate``.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from contracts import topology
from contracts.base import Fact
from contracts.scheduling import Policy
from services.kit.bus import Bus
from services.kit.concurrency import cancel_and_wait
from services.kit.settings import Settings
from services.scheduler.app import Scheduler, assemble
from services.scheduler.simulate.agents import Agents
from services.scheduler.simulate.engine import CycleOutcome, Effort, Listener, WorldEvents, play_trace, wake_s
from services.scheduler.simulate.traces import Trace, at

#: A pass of the real service may take so long before the simulation is given up.
PATIENCE_S = 120.0
#: Longer than any pass: the service must not lose its lease while it decides.
LEASE_TTL_S = 600.0


class VirtualClock:
    """A clock whose time of day is the simulation's; what is measured with it is real."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> datetime:
        return at(self.now_s)

    def monotonic(self) -> float:
        return time.monotonic()


class LockStepPacer:
    """Holds every cycle until the simulation asks for one, and reports its end."""

    def __init__(self) -> None:
        self._let_go = asyncio.Semaphore(0)
        self._done: asyncio.Queue[tuple[int, datetime | None]] = asyncio.Queue()
        self.ready = asyncio.Event()

    async def before_cycle(self) -> None:
        self.ready.set()
        await self._let_go.acquire()

    def after_cycle(self, published: int, wake_at: datetime | None) -> None:
        self._done.put_nowait((published, wake_at))

    async def one_pass(self) -> tuple[int, datetime | None]:
        """Run one cycle; return the highest sequence it published, and when the next one is due."""
        self._let_go.release()
        return await self._done.get()


@dataclass(frozen=True, slots=True)
class _LogFact:
    sequence: int
    fact: Fact


class Log:
    """Everything that stands in the log, as it comes."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._facts: list[_LogFact] = []
        self._last = 0
        self._news = asyncio.Condition()

    async def follow(self) -> None:
        async for batch in self._bus.follow(topology.FACTS.name, idle_s=5.0):
            self._facts += [_LogFact(received.sequence, received.event) for received in batch]
            if batch:
                self._last = batch[-1].sequence
                async with self._news:
                    self._news.notify_all()

    async def read_until(self, sequence: int) -> list[_LogFact]:
        """Take what has come since the last call, which goes up to ``sequence`` at least."""
        async with self._news:
            await self._news.wait_for(lambda: self._last >= sequence)
        taken, self._facts = self._facts, []
        return taken


class Driver:
    """The world on the other end of the bus."""

    def __init__(
        self,
        scheduler: Scheduler,
        pace: LockStepPacer,
        clock: VirtualClock,
        bus: Bus,
        log: Log,
        listeners: Sequence[Listener],
    ) -> None:
        self.scheduler, self.pace, self.clock, self.bus, self.log = scheduler, pace, clock, bus, log
        self.listeners = tuple(listeners)
        self.effort = Effort()

    async def turn(self, turn: WorldEvents) -> CycleOutcome:
        """Say what happened, let the service make one pass, and hear what it said."""
        self.clock.now_s = turn.now_s
        said = 0
        for fact in turn.facts:
            said = (await self.bus.publish(fact)).sequence
        if said:
            await self.scheduler.cache.wait_for_sequence(said)
            self._record_facts(await self.log.read_until(said), turn.now_s)
        started = time.perf_counter()
        published, wake_at = await self.pace.one_pass()
        self.effort.pass_s.append(time.perf_counter() - started)
        heard = await self.log.read_until(published) if published else []
        self._record_facts(heard, turn.now_s)
        self.effort.decisions += len(heard)
        return CycleOutcome([each.fact for each in heard], wake_s(wake_at, turn.now_s))

    def _record_facts(self, heard: Sequence[_LogFact], now_s: float) -> None:
        for each in heard:
            for listener in self.listeners:
                listener(each.fact, each.sequence, now_s)


def simulate_over_bus(
    trace: Trace,
    policy: Policy,
    nats_url: str,
    *,
    resume_cost_s: float = 60.0,
    listeners: Sequence[Listener] = (),
    progress: Callable[[int], None] = lambda submitted: None,
) -> Effort:
    """As ``engine.simulate``, by the service on the nats-server at ``nats_url``, whose log must be empty."""
    return asyncio.run(drive(trace, policy, nats_url, resume_cost_s, listeners, progress))


async def drive(
    trace: Trace,
    policy: Policy,
    nats_url: str,
    resume_cost_s: float = 60.0,
    listeners: Sequence[Listener] = (),
    progress: Callable[[int], None] = lambda submitted: None,
) -> Effort:
    """``simulate_over_bus`` in a loop that runs already."""
    started = time.perf_counter()
    agents = Agents({job.run_id: job.duration_s for job in trace.jobs}, resume_cost_s)
    player = play_trace(trace, agents, progress)
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
    """A running service, and what drives it."""
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
            log = Log(bus)
            following = asyncio.create_task(log.follow())
            try:
                yield Driver(scheduler, pace, clock, bus, log, listeners), running
            finally:
                await cancel_and_wait(following)
        finally:
            scheduler.service.stopping.set()
            await running
            await bus.close()


T = TypeVar("T")


async def _unless_ended(wanted: Coroutine[Any, Any, T], running: asyncio.Task[None]) -> T:
    """What is waited for; if the service ends before, or never gets there, an error."""
    waiting = asyncio.create_task(wanted)
    await asyncio.wait({waiting, running}, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
    if waiting.done():
        return waiting.result()
    await cancel_and_wait(waiting)
    if running.done():
        running.result()
        raise RuntimeError("the scheduler ended in the middle of the simulation")
    raise TimeoutError(f"the scheduler made no pass for {PATIENCE_S:g} s")
