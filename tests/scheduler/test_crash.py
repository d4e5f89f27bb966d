"""Leaders are killed while messages come twice and late, and the policy changes: nothing happens twice or is lost."""

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
    assert outcome.policy_requests > outcome.adoptions > 0
