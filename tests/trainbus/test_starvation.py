"""Reports of a rank that waits for its data: when, with which hint, how often."""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from contracts.ranks import MetricsLine, StarvationLine
from contracts.spec.training import DataLoading, Training
from tests.trainbus.support import LINEAR_TASK, journal, linear_dataset
from trainbus.data.batch_timings import BatchTimings, Cause
from trainbus.trainer.starvation import StarvationDetector, advise
from trainbus.trainer.step_data import TrainingData
from trainbus.trainer.trainer import Trainer, TrainerSettings
from trainbus.trainer.world import limit_threads

pytestmark = pytest.mark.shell

namespace: dict[str, Any] = {}
exec(LINEAR_TASK, namespace)  # noqa: S102  (the same source that the rank processes import)
Linear = namespace["Linear"]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Rank:
    """A rank whose steps take a given time."""

    def __init__(self, **loading: Any) -> None:
        self.clock, self.waits, self.reports = Clock(), BatchTimings(), list[StarvationLine]()
        self.starvation = StarvationDetector(DataLoading(**loading), self.waits, 3, self.reports.append, self.clock)
        self.step = 0

    def steps(self, count: int, busy_s: float, waited_s: float, cause: Cause = "decode") -> None:
        for _ in range(count):
            self.step += 1
            self.clock.now += busy_s + waited_s
            self.waits.add(cause, waited_s)
            self.starvation.add_step(self.step, waited_s)


def test_starvation_is_reported_once_an_episode() -> None:
    rank = Rank(starved_s=30, starved_share=0.2)
    rank.steps(299, 0.05, 0.05)
    assert not rank.reports  # 29.9 s: shorter than a window
    rank.steps(1000, 0.05, 0.05)
    (line,) = rank.reports
    assert (line.step, line.rank, line.over_steps, line.bound_by) == (line.over_steps, 3, line.over_steps, "decode")
    assert line.wait_share == pytest.approx(0.5)
    assert 30 <= line.over_s < 30.2
    rank.steps(700, 0.1, 0.0)  # data comes in time for two windows
    assert len(rank.reports) == 1
    rank.steps(700, 0.05, 0.05, "fetch")
    assert [line.bound_by for line in rank.reports] == ["decode", "fetch"]


def test_a_share_below_the_threshold_is_not_reported() -> None:
    rank = Rank(starved_s=30, starved_share=0.2)
    rank.steps(2000, 0.09, 0.01)
    assert not rank.reports


def test_a_long_wait_of_one_step_is_reported_when_it_ends() -> None:
    rank = Rank(starved_s=30)
    rank.steps(10, 0.1, 0.0)
    rank.steps(1, 0.1, 60.0, "fetch")
    (line,) = rank.reports
    assert (line.bound_by, line.over_steps) == ("fetch", 11)
    assert "TRAINBUS_CACHE_MAX_BYTES" in line.hint


def test_a_wait_without_end_is_reported_while_it_lasts() -> None:
    rank = Rank(starved_s=30)
    rank.steps(10, 0.1, 0.0)
    rank.starvation.on_data_wait()
    rank.clock.now += 29
    rank.starvation.check_current_wait()
    assert not rank.reports
    with rank.waits.during("read"), rank.waits.during("fetch"):
        rank.clock.now += 2
        rank.starvation.check_current_wait()
        rank.clock.now += 600
        rank.starvation.check_current_wait()
    (line,) = rank.reports
    assert (line.step, line.bound_by, line.over_steps) == (10, "fetch", 10)
    rank.starvation.add_step(11, 631.0)  # it ends, in the same episode
    rank.starvation.check_current_wait()
    assert len(rank.reports) == 1
    rank.steps(400, 0.1, 0.0)
    rank.starvation.on_data_wait()
    rank.clock.now += 100
    rank.starvation.check_current_wait()
    assert len(rank.reports) == 2


def test_a_long_computation_is_not_a_wait() -> None:
    rank = Rank(starved_s=30)
    rank.starvation.on_data_wait()
    rank.clock.now += 1
    rank.starvation.add_step(1, 1.0)
    rank.clock.now += 3600  # a long validation
    rank.starvation.check_current_wait()
    assert not rank.reports


@pytest.mark.parametrize(
    ("cause", "spent_s", "workers", "cores", "hint"),
    [
        ("decode", 30.0, 0, 16, "training.loading.workers to 3 (it is 0)"),  # 30 s of decoding beside 15 s of training
        ("decode", 30.0, 2, 16, "training.loading.workers to 5 (it is 2)"),
        ("decode", 30.0, 8, 16, "training.loading.workers to 16 (it is 8), all this node's cores, and make"),
        ("decode", 30.0, 16, 16, "all 16 cores: make Task.decode cheaper"),
        ("decode", 1.0, 4, 16, "training.loading.workers to 5 (it is 4)"),
        ("read", 30.0, 0, 16, "faster disk"),
        ("transfer", 30.0, 0, 16, "uint8"),
        ("fetch", 30.0, 0, 16, "shared folder"),
    ],
)
def test_the_hint_names_the_setting(cause: Cause, spent_s: float, workers: int, cores: int, hint: str) -> None:
    spent: dict[Cause, float] = {"fetch": 0.0, "read": 0.0, "decode": 0.0, "transfer": 0.0, cause: spent_s}
    assert hint in advise(cause, spent, 15.0, DataLoading(workers=workers), cores)


def test_the_hint_for_a_rank_that_only_waited() -> None:
    spent: dict[Cause, float] = {"fetch": 0.0, "read": 0.0, "decode": 9.0, "transfer": 0.0}
    assert "workers to 2" in advise("decode", spent, 0.0, DataLoading(), 16)


def test_waits_are_counted_from_all_threads() -> None:
    waits = BatchTimings()

    def add() -> None:
        for _ in range(1000):
            waits.add("read", 0.5)

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    clock = Clock()
    timed = BatchTimings(clock)
    with suppress(ValueError), timed.during("fetch"):
        clock.now += 2
        raise ValueError("what was waited for nothing was waited all the same")
    assert waits.totals() == {"fetch": 0.0, "read": 2000.0, "decode": 0.0, "transfer": 0.0}
    assert timed.totals()["fetch"] == 2.0


def test_a_run_reports_starvation_before_its_data_arrives(tmp_path: Path) -> None:
    limit_threads({})
    begun, reported = threading.Event(), threading.Event()

    class Stuck(Linear):  # type: ignore[misc, valid-type]
        """Decodes nothing before the starvation is reported."""

        def decode(self, fields: dict[str, bytes]) -> Any:
            begun.set()
            assert reported.wait(60)
            return super().decode(fields)

    training = Training.model_validate({"max_steps": 2, "loading": {"starved_s": 0.05}})
    task = Stuck()
    data = TrainingData(task, linear_dataset(tmp_path / "data"), training)
    trainer = Trainer(task, data, training, TrainerSettings(tmp_path / "run"))
    report = trainer.journal.append

    def report_and_continue(line: StarvationLine) -> None:
        report(line)
        reported.set()

    trainer._starvation._report = report_and_continue
    # The clock stands until a sample is being decoded; then each look at the clock advances it by a second.
    seconds = itertools.count(1)
    trainer._starvation._clock = lambda: float(next(seconds)) if begun.is_set() else 0.0
    trainer.fit()
    starved = [line for line in journal(tmp_path / "run") if isinstance(line, StarvationLine)]
    assert (starved[0].step, starved[0].over_steps, starved[0].bound_by) == (0, 0, "decode")


class Slow(Linear):  # type: ignore[misc, valid-type]
    """Decoding takes longer than training, also on a busy machine."""

    def decode(self, fields: dict[str, bytes]) -> Any:
        time.sleep(0.01)
        return super().decode(fields)


def test_slow_decoding_is_reported_and_each_step_records_its_wait(tmp_path: Path) -> None:
    limit_threads({})
    dataset = linear_dataset(tmp_path / "data")
    loading = {"starved_s": 0.5, "starved_share": 0.05}
    training = Training.model_validate({"epochs": 2, "global_batch": 16, "loading": loading})
    task = Slow()
    outcome = Trainer(task, TrainingData(task, dataset, training), training, TrainerSettings(tmp_path / "run")).fit()
    lines = journal(tmp_path / "run")
    starved = [line for line in lines if isinstance(line, StarvationLine)]
    assert starved
    assert starved[0].bound_by == "decode"
    assert "training.loading.workers" in starved[0].hint
    waited = {
        line.step: line.values["train/data_wait_s"]
        for line in lines
        if isinstance(line, MetricsLine) and "train/data_wait_s" in line.values
    }
    assert sorted(waited) == list(range(1, outcome.step + 1))
    assert sum(waited.values()) > 0.1
