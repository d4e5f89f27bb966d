"""Growing is priced: the restart against the slot-seconds that more slots gain."""

from __future__ import annotations

import pytest

from services.scheduler.core import price
from tests.scheduler.world import World, spec


def test_a_run_that_outlived_its_expected_time_gains_as_long_again_as_it_has_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    world.join("a", 4)
    world.accept("r", spec({"min": 1, "max": 2}))
    world.settle()
    world.start("r")
    run = world.run("r")
    world.wait(100)
    monkeypatch.setattr(price, "left_s", lambda *_: 0.0)
    growth = price.growth_price(world.cluster, run, run.slot_count + 2, world.now, world.policy)
    assert growth.gain_slot_s == 2 * run.ran_s(world.now) > 0
