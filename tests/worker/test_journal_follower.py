"""Lines of a journal are published under the same ids with the same content, however often."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from contracts.base import Fact
from contracts.events.run import RunLog, RunProgress, RunStarted
from contracts.ranks import MetricsLine, json_line
from services.kit.bus import TransientError
from services.worker.core.journal import JournalSource
from services.worker.core.metric_patterns import compile_patterns
from services.worker.ranks.journal_follower import BAR_INTERVAL_S, JournalFollower
from tests.manual_clock import ManualClock


class Bus:
    """Stores everything, and its answer to some publishes gets lost. It remembers no id, as after two minutes."""

    def __init__(self) -> None:
        self.stored: list[Fact] = []
        self.lose_answers = 0

    async def publish(self, fact: Fact) -> None:
        self.stored.append(fact)
        if self.lose_answers:
            self.lose_answers -= 1
            raise TransientError("no answer")

    def distinct(self) -> list[Any]:
        """One of each id; all of an id must be equal."""
        by_id: dict[str, Fact] = {}
        for fact in self.stored:
            assert by_id.setdefault(fact.event_id, fact) == fact, f"{fact.event_id} means two things"
        return list(by_id.values())


def follower(folder: Path, bus: Bus, clock: ManualClock, **more: Any) -> JournalFollower:
    patterns = compile_patterns({"loss": r"loss=([0-9.]+)"})
    placed = JournalSource("r1", 1, "n1")

    def now() -> float:
        return clock.now().timestamp()

    return JournalFollower(placed, (0,), folder, bus.publish, now, interval_s=0.01, patterns=patterns, **more)


def write(folder: Path, *steps: int) -> None:
    with (folder / "rank_0.jsonl").open("ab") as journal, (folder / "rank_0.log").open("ab") as output:
        for step in steps:
            journal.write(json_line(MetricsLine(time=float(step), step=step, values={"x": step})))
            output.write(f"loss={step}.5\n".encode())


async def test_lost_reply_and_late_restart_publish_the_same_events(tmp_path: Path) -> None:
    bus, clock = Bus(), ManualClock()
    write(tmp_path, 1, 2)
    first = follower(tmp_path, bus, clock)
    for step in range(3, 12, 2):
        bus.lose_answers = 1
        try:
            await first.poll()
        except TransientError:
            clock.advance(1)
        # More is written before it is tried again.
        write(tmp_path, step, step + 1)
    await first.drain()
    published = bus.distinct()
    points = [point for fact in published if isinstance(fact, RunProgress) for point in fact.points]
    assert sorted(point.step for point in points if "x" in point.values) == list(range(1, 13))
    assert sorted(point.step for point in points if "loss" in point.values) == list(range(1, 13))
    assert [line for fact in published if isinstance(fact, RunLog) for line in fact.lines] == [
        f"loss={step}.5" for step in range(1, 13)
    ]
    # Killed before it saved its offsets; its successor publishes the last lines again, an hour later.
    write(tmp_path, 13)
    await first.poll()
    published = bus.distinct()
    clock.advance(3600)
    await follower(tmp_path, bus, clock).drain()
    assert bus.distinct() == published


async def test_command_without_a_journal_is_started_once_it_runs(tmp_path: Path) -> None:
    bus = Bus()
    command = follower(tmp_path, bus, ManualClock(), launch_is_start=True)
    await command.poll()
    assert bus.stored == []
    (tmp_path / "processes.json").write_text("[]")
    await command.poll()
    await command.poll()
    (started,) = bus.stored
    assert isinstance(started, RunStarted)


async def test_reading_ahead_includes_what_is_not_read_or_not_published(tmp_path: Path) -> None:
    bus, clock = Bus(), ManualClock()
    write(tmp_path, 1, 2)
    ahead = follower(tmp_path, bus, clock)
    before = ahead.state.model_copy(deep=True)
    state = await ahead.read_ahead(0)
    assert (state.step, state.values) == (2, {"x": 2.0, "loss": 2.5})
    assert ahead.state == before
    assert bus.stored == []
    bus.lose_answers = 1
    with pytest.raises(TransientError):
        await ahead.poll()
    write(tmp_path, 3)
    state = await ahead.read_ahead(0)
    assert (state.step, state.values) == (3, {"x": 3.0, "loss": 3.5})
    assert ahead.state.ranks[0].values == {"x": 2.0}


async def test_a_metric_that_every_rank_prints_is_one_point_a_step(tmp_path: Path) -> None:
    bus = Bus()
    patterns = compile_patterns({"loss": r"loss=([0-9.]+)", "memory": r"memory=([0-9.]+)"})
    source = JournalSource("r1", 1, "n1")
    ahead = JournalFollower(source, (0, 1), tmp_path, bus.publish, lambda: 1.0, interval_s=0.01, patterns=patterns)
    for step in (1, 2):
        for rank in (0, 1):
            with (tmp_path / f"rank_{rank}.log").open("a") as output:
                output.write(f"loss={step}.{rank}\n" + f"memory={step}\n" * rank)
        await ahead.poll()
    points = [point for fact in bus.distinct() if isinstance(fact, RunProgress) for point in fact.points]
    assert [(point.step, point.values) for point in points] == [
        (1, {"loss": 1.0}),
        (1, {"memory": 1.0}),
        (2, {"loss": 2.0}),
        (2, {"memory": 2.0}),
    ]


async def test_the_next_attempt_counts_the_matches_on(tmp_path: Path) -> None:
    bus, clock = Bus(), ManualClock()
    resumed = follower(tmp_path, bus, clock)
    resumed.continue_matches(0, {"loss": 7})
    (tmp_path / "rank_0.log").write_text("loss=0.5\n")
    await resumed.poll()
    [fact] = [each for each in bus.distinct() if isinstance(each, RunProgress)]
    assert (fact.step, resumed.state.ranks[0].matches_end) == (8, {"loss": 8})


async def test_a_progress_bar_is_seen_before_its_end(tmp_path: Path) -> None:
    """What the clock reads of it enters the log. It is no metric of a count: a faster machine would count others."""
    bus, clock = Bus(), ManualClock()
    patterns = compile_patterns({"loss": r"loss=([0-9.]+)", "error": r"(?P<step>\d+)/3 error=(?P<value>[0-9.]+)"})

    def now() -> float:
        return clock.now().timestamp()

    reader = JournalFollower(
        JournalSource("r1", 1, "n1"), (0,), tmp_path, bus.publish, now, interval_s=0.01, patterns=patterns
    )

    async def write_state(text: str) -> None:
        with (tmp_path / "rank_0.log").open("ab") as output:
            output.write(text.encode())
        await reader.poll()

    await write_state("begin\n\r1/3 error=0.9 loss=3")
    await write_state("\r2/3 error=0.8 loss=2")
    clock.advance(BAR_INTERVAL_S)
    await write_state("")
    await write_state("\r3/3 error=0.7 loss=1")
    await write_state("\n")
    lines = [line for fact in bus.distinct() if isinstance(fact, RunLog) for line in fact.lines]
    assert lines == ["begin", "1/3 error=0.9 loss=3", "3/3 error=0.7 loss=1"]
    points = [point for fact in bus.distinct() if isinstance(fact, RunProgress) for point in fact.points]
    assert [(point.step, point.values) for point in points] == [
        (1, {"error": 0.9}),
        (1, {"loss": 1.0}),
        (3, {"error": 0.7}),
    ]
