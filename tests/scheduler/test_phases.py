"""Each phase of a scheduling cycle is measured."""

from __future__ import annotations

import pytest
from prometheus_client import REGISTRY

from services.kit.bus import Bus
from services.kit.settings import Settings
from services.scheduler.core.decide import run_steps
from tests.scheduler.test_shell import COMMAND, join, request, running, until
from tests.scheduler.world import World, spec


@pytest.mark.parametrize(
    ("slots", "phases"),
    [
        (0, ["settle", "order", "place", "grow", "explain"]),
        (1, ["settle", "order", "place", "explain"]),
        (4, ["settle", "order", "place", "preempt", "explain"]),
    ],
)
def test_a_cycle_names_each_phase_that_it_begins(slots: int, phases: list[str]) -> None:
    world, begun = World(), []
    world.join("n1", 2)
    world.join("n2", 2)
    if slots:
        world.accept("r1", spec(1, priority=0))
        world.settle()
        world.accept("r2", spec(slots, priority=1))
    run_steps(world.cluster, world.now, world.policy, begin_phase=begun.append)
    assert begun == phases


async def test_each_phase_of_a_cycle_has_its_duration(settings: Settings, bus: Bus) -> None:
    before = {phase: _count(phase) for phase in ("settle", "order", "place", "explain", "record", "publish", "fold")}
    async with running(settings):
        await join(bus, "n1", 1)
        run_id = await request(bus, "train", COMMAND)
        await until(bus, f"run.{run_id}.placed")
    assert [phase for phase, count in before.items() if _count(phase) <= count] == []


def _count(phase: str) -> float:
    return REGISTRY.get_sample_value("trainbus_scheduler_phase_seconds_count", {"phase": phase}) or 0.0
