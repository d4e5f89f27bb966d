"""Time comes from the log: no difference between a wall clock and a server's timestamp decides anything."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta

import pytest

from contracts.events.node import NodeLost
from contracts.events.run import RunPlaced, RunReleased, RunStarted, RunStopping
from services.kit.bus import Bus
from services.kit.clock import SystemClock
from services.kit.settings import Settings
from services.scheduler import leader as leading
from services.scheduler.app import SchedulerSettings
from services.scheduler.log_clock import STEP_BACK_S, LogClock
from tests.manual_clock import ManualClock
from tests.scheduler.test_shell import COMMAND, join, request, running, until

SERVER = datetime(2026, 5, 5, tzinfo=UTC)


class SkewedClock(ManualClock):
    """A machine whose wall clock is wrong, and can be set."""

    skew = timedelta(0)

    def now(self) -> datetime:
        return super().now() + self.skew


@pytest.mark.parametrize("skew_s", [-600.0, 0.0, 600.0])
def test_the_time_of_the_log_does_not_depend_on_the_wall_clock(skew_s: float) -> None:
    clock = SkewedClock()
    clock.skew = timedelta(seconds=skew_s)
    log_clock = LogClock(clock)
    log_clock.observe(SERVER)
    clock.advance(7.0)
    assert log_clock.now() == SERVER + timedelta(seconds=7)
    # The wall clock is set by hand.
    clock.skew = timedelta(hours=-3)
    assert log_clock.now() == SERVER + timedelta(seconds=7)
    # What was under way for a second sets nothing back; a newer timestamp sets it right.
    log_clock.observe(SERVER + timedelta(seconds=6))
    assert log_clock.now() == SERVER + timedelta(seconds=7)
    log_clock.observe(SERVER + timedelta(seconds=9))
    assert log_clock.now() == SERVER + timedelta(seconds=9)


@pytest.mark.parametrize("jump_s", [-600.0, 600.0])
def test_the_time_of_the_log_follows_a_server_whose_clock_is_set(jump_s: float) -> None:
    assert abs(jump_s) > STEP_BACK_S
    clock = ManualClock()
    log_clock = LogClock(clock)
    log_clock.observe(SERVER)
    log_clock.observe(SERVER + timedelta(seconds=jump_s))
    clock.advance(1.0)
    assert log_clock.now() == SERVER + timedelta(seconds=jump_s + 1)


def _skew(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(SystemClock, "now", lambda self: datetime.now(UTC) + timedelta(seconds=seconds))


@pytest.mark.parametrize("jump_s", [-600.0, 600.0, 2000.0])
async def test_a_leader_whose_wall_clock_jumps_loses_no_node_and_revokes_nothing(
    settings: Settings, bus: Bus, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    async with running(settings):
        await join(bus, "n1", 1)
        low = await request(bus, "train", COMMAND, "low")
        await until(bus, f"run.{low}.placed")
        _skew(monkeypatch, jump_s)
        # Its ranks have not started yet; a higher priority then takes its slot, and it lets go after a moment.
        await asyncio.sleep(1.5)
        assert not await bus.read_history(f"run.{low}.stopping")
        await bus.publish(RunStarted(run_id=low, generation=1, node_id="n1"))
        high = await request(bus, "train", {**COMMAND, "priority": 5}, "high")
        stop = (await until(bus, f"run.{low}.stopping"))[0].event
        assert isinstance(stop, RunStopping)
        await asyncio.sleep(1.5)
        assert not await bus.read_history("node.n1.lost")
        await bus.publish(RunReleased(run_id=low, generation=1, node_id="n1"))
        placed = (await until(bus, f"run.{high}.placed"))[0]
        assert isinstance(placed.event, RunPlaced)
        # The decision names the time of the log.
        assert placed.event.decision is not None
        assert abs((placed.event.decision.at - placed.stored_at).total_seconds()) < 60


async def test_a_leader_whose_wall_clock_is_behind_keeps_time_limits(
    settings: Settings, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    _skew(monkeypatch, -600.0)
    async with running(settings):
        await join(bus, "n1", 1)
        run_id = await request(bus, "train", {**COMMAND, "scheduling": {"limit_s": 0.5}})
        await until(bus, f"run.{run_id}.placed")
        await bus.publish(RunStarted(run_id=run_id, generation=1, node_id="n1"))
        stop = (await until(bus, f"run.{run_id}.stopping", timeout_s=20.0))[0].event
        assert stop.then == "fail"


async def test_a_long_cycle_keeps_the_lease_and_its_placements_get_out(
    settings: Settings, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease is 3 s and a cycle takes 4 s of pure Python: it runs beside the loop that renews."""
    honest = leading.run_cycle

    def slow(*arguments: object, **options: object) -> object:
        end_s = time.monotonic() + 4.0
        while time.monotonic() < end_s:
            sum(range(1000))
        return honest(*arguments, **options)  # type: ignore[arg-type]

    async with running(SchedulerSettings(**settings.model_dump() | {"lease_ttl_s": 3.0})):
        await join(bus, "n1", 1)
        first = await request(bus, "train", COMMAND, "1")
        await until(bus, f"run.{first}.placed")
        monkeypatch.setattr(leading, "INLINE_CYCLE_S", 0.0)
        monkeypatch.setattr(leading, "run_cycle", slow)
        before = leading.metrics.DROPPED_FACTS._value.get()
        await join(bus, "n2", 1)
        second = await request(bus, "train", COMMAND, "2")
        await until(bus, f"run.{second}.placed", timeout_s=30.0)
        assert leading.metrics.DROPPED_FACTS._value.get() == before
        assert not [fact for fact in await bus.read_history("node.*.lost") if isinstance(fact.event, NodeLost)]
