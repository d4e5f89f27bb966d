"""Whatever happens in whatever order: no slot twice, gangs whole, every run ends, every fold the same."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.scheduling import Elastic, Faults, Policy
from services.scheduler.core.fold import fold
from tests.scheduler.world import Chaos, World


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), acts=st.integers(10, 150))
def test_any_history_keeps_the_invariants_and_every_run_ends(seed: int, acts: int) -> None:
    """``World.check`` runs after each fact; ``calm`` fails if a run is lost or hangs."""
    chaos = Chaos(
        World(Policy(elastic=Elastic(resize_interval_s=0.5, grow_anyway_s=5), faults=Faults(start_deadline_s=30))),
        random.Random(seed),
    )
    for _ in range(3):
        chaos.submit()
    for _ in range(acts):
        chaos.act()
    chaos.calm()
    refolded = fold(chaos.world.log)
    assert refolded == chaos.world.cluster
    assert refolded.slots_used == 0
    for run in refolded.runs.values():
        assert run.failures < run.spec.max_attempts
