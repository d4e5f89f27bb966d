"""Records of a ring are published once each, in step with the journal, also after losses and kills."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from contracts.events.run import RunProgress, RunStraggler
from contracts.ranks import StragglerLine
from services.kit.bus import TransientError
from services.worker.ranks.journal_follower import JournalFollower
from services.worker.ranks.ring_reader import RingReader
from tests.manual_clock import ManualClock
from tests.worker.test_journal_follower import Bus, follower
from trainbus.agent_link.channels import Journal
from trainbus.agent_link.ring import RingWriter


def steps(bus: Bus) -> list[int]:
    return [point.step for fact in bus.distinct() if isinstance(fact, RunProgress) for point in fact.points]


async def attempt(following: JournalFollower) -> None:
    with suppress(TransientError):
        await following.poll()


async def test_small_ring_lossy_bus_and_killed_agents_lose_no_record(tmp_path: Path) -> None:
    # A ring with room for ten: most records that are written while there is no reader go to the journal instead.
    RingWriter(tmp_path / "rank_0.ring", capacity=10).close()
    bus, clock, journal = Bus(), ManualClock(), Journal(tmp_path / "rank_0.jsonl")
    step = 0
    for life in range(6):
        agent = follower(tmp_path, bus, clock)
        for burst in (3, 12, 25, 1):
            for _ in range(burst):
                step += 1
                journal.metrics(step, {"loss": 1 / step}, samples_consumed=8 * step, total_steps=1000)
            bus.lose_answers = (life + burst) % 3
            await attempt(agent)
        if life % 2:
            await attempt(agent)
        agent.close()  # killed: its successor has only the files
    last = follower(tmp_path, bus, clock)
    await last.drain()
    assert sorted(steps(bus)) == list(range(1, step + 1))
    state = last.state.ranks[0]
    assert (state.step, state.samples_consumed, state.total_steps) == (step, 8 * step, 1000)
    ring = RingReader.open(tmp_path / "rank_0.ring")
    assert ring is not None
    assert 10 < ring.head < step  # both ways were taken


async def test_line_is_read_with_all_records_before_it(tmp_path: Path) -> None:
    bus, journal = Bus(), Journal(tmp_path / "rank_0.jsonl")
    for step in range(1, 1001):
        journal.metrics(step, {"loss": 1.0})
    journal.append(StragglerLine(time=0, step=1000, rank=3, factor=2.5, over_steps=50))
    agent = follower(tmp_path, bus, ManualClock(), homes={3: "n7"})
    await agent.poll()
    assert steps(bus) == list(range(1, 1001))
    (straggler,) = [fact for fact in bus.stored if isinstance(fact, RunStraggler)]
    assert (straggler.node_id, straggler.rank, straggler.factor) == ("n7", 3, 2.5)
    assert isinstance(bus.stored[0], RunProgress)
