"""Leaders are killed while messages come twice and late: no slot is given twice, nothing is lost, replay is exact."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.scheduler.crash import trial

pytestmark = pytest.mark.shell


@pytest.mark.timeout(600)
async def test_leaders_killed_three_times(tmp_path: Path) -> None:
    outcome = await trial(3, tmp_path / "nats", seed=1)
    assert outcome.problems == []
    assert (outcome.rounds, outcome.zombies) == (3, 1)
    assert outcome.placements >= outcome.requests > 0
