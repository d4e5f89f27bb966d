"""A rank's report that it waits for data becomes one fact, also if the bus loses messages, and is counted."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from prometheus_client import REGISTRY

from contracts.events.run import RunStarved
from contracts.spec.training import DataLoading
from services.kit.bus import TransientError
from tests.manual_clock import ManualClock
from tests.worker.test_journal_follower import Bus, follower
from trainbus.agent_link.channels import Journal
from trainbus.data.batch_timings import BatchTimings
from trainbus.trainer.starvation import StarvationDetector


def counted() -> float:
    return REGISTRY.get_sample_value("trainbus_worker_starved_total", {"bound_by": "decode"}) or 0.0


async def test_starved_rank_is_reported_once_with_cause_and_hint(tmp_path: Path) -> None:
    bus, journal, waits, before = Bus(), Journal(tmp_path / "rank_0.jsonl"), BatchTimings(), counted()
    now = [0.0]
    starvation = StarvationDetector(DataLoading(starved_s=30), waits, 0, journal.append, lambda: now[0])
    for step in range(1, 1001):
        now[0] += 0.1
        waits.add("decode", 0.06)
        starvation.add_step(step, 0.06)
    bus.lose_answers = 2
    agent = follower(tmp_path, bus, ManualClock(), homes={0: "n7"})
    for _ in range(4):
        with suppress(TransientError):
            await agent.poll()
    starved = [fact for fact in bus.distinct() if isinstance(fact, RunStarved)]
    assert [(fact.node_id, fact.rank, fact.bound_by) for fact in starved] == [("n7", 0, "decode")]
    assert round(starved[0].wait_share, 2) == 0.6
    assert "training.loading.workers" in starved[0].hint
    assert counted() == before + 1
