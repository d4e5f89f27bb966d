"""The watch: a version is taken back for what it does worse than the one before, and for nothing else."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import deque
from typing import Any

import pytest

from contracts.events.model import ModelDeployFailed
from loadtest.served_models import draw_rows
from services.serving.core.batch_times import FullBatchTime
from services.serving.core.watch import RequestTally, WatchLimits, find_regression
from services.serving.deployer import MAX_UNEXPLAINED_ENDS
from tests.serving.conftest import House, wait_until

ROWS = draw_rows(5, seed=17)
LARGE = {"a": 1000, "b": 0, "c": 0, "d": 0}
#: Beyond the embedding, so to speak: every version fails on it.
BEYOND = {"a": 5e5, "b": 0, "c": 0, "d": 0}


def tally(**fields: Any) -> RequestTally:
    return RequestTally(last_error="why", **fields)


@pytest.mark.parametrize(
    ("new", "reason"),
    [
        # 95% refused, and the version before never saw such input.
        (tally(answered=1, refused=19), ""),
        (tally(answered=1, errors=19, compared=19), ""),
        (tally(answered=1, errors=2, compared=2, worse=2), ""),
        (tally(answered=1000, errors=10, compared=10, worse=10), ""),
        (tally(answered=100, errors=3, compared=3, worse=3), "3 of 103 requests failed or were refused"),
        # Of a flood some are compared, and stand for the rest.
        (tally(answered=100, refused=100, compared=20, worse=10), "answers 10 of the 20"),
        (tally(answered=1000, refused=30, compared=30, worse=3), ""),
        (tally(answered=1000, errors=1, compared=1, worse=1, worse_ends=1), "its process ended on an input"),
    ],
)
def test_errors_count_where_the_version_before_answers(new: RequestTally, reason: str) -> None:
    found = find_regression(new, tally(answered=1000), WatchLimits())
    assert reason in found
    assert bool(found) == bool(reason)


#: Answers of the version before and their seconds, what a full batch of its warm-up took -> the baseline.
BASELINES = [
    pytest.param(100, 0.2, 0.9, 0.2, "of the version before 200 ms", id="its answers"),
    pytest.param(
        99, 0.2, 0.3, 0.3, "of the version before, by the full batches of its warm-up, 300 ms", id="its warm-up"
    ),
    pytest.param(0, 0.0, 0.2, 0.2, "by the full batches of its warm-up, 200 ms", id="its warm-up alone"),
    pytest.param(99, 0.4, 0.3, 0.4, "by the full batches of its warm-up, 400 ms", id="few, slower answers"),
    pytest.param(0, 0.0, 0.0, 0.034, "by the full batches of its warm-up, 0 ms", id="too short to be measured"),
    pytest.param(0, 0.0, 0.001, 0.034, "by the full batches of its warm-up, 1 ms", id="never below 0.1 s"),
]


@pytest.mark.parametrize(("answers", "seconds", "full_batch_s", "baseline_s", "reason"), BASELINES)
def test_latency_is_compared_with_answers_or_else_with_a_warm_up(
    answers: int, seconds: float, full_batch_s: float, baseline_s: float, reason: str
) -> None:
    old = tally(latencies_s=deque([seconds] * answers), full_batch_s=full_batch_s)
    slower = deque([3.1 * baseline_s] * 100)
    assert reason in find_regression(tally(latencies_s=slower), old, WatchLimits())
    assert find_regression(tally(latencies_s=deque([*slower][1:])), old, WatchLimits()) == ""
    assert find_regression(tally(latencies_s=deque([2.9 * baseline_s] * 100)), old, WatchLimits()) == ""


def test_a_request_of_many_samples_takes_as_many_full_batches() -> None:
    old = tally(full_batch_s=0.2)
    for largest_request, reason in ((33, "by the full batches of its warm-up, 206 ms"), (320, "")):
        new = tally(latencies_s=deque([0.7] * 100), largest_request=largest_request)
        assert reason in (found := find_regression(new, old, WatchLimits()))
        assert bool(found) == bool(reason)


def test_nothing_is_too_slow_beside_a_version_without_answers_and_samples() -> None:
    slow = tally(latencies_s=deque([9.0] * 100))
    assert find_regression(slow, tally(latencies_s=deque([0.1] * 99)), WatchLimits()) == ""
    assert find_regression(slow, None, WatchLimits()) == ""


@pytest.mark.parametrize(
    ("batches", "seconds"),
    [
        # The first one, which imports and compiles, is the longest.
        ([(32, 0.5), (32, 0.2), (1, 0.1)], 0.5),
        # Both frames of a short batch may arrive at once: then its time is 0, and a single sample's is more.
        ([(32, 0.0), (1, 0.1), (1, 0.2)], 0.2),
        ([(32, 0.0)], 0.0),
        # An example of four rows fits in a batch eight times.
        ([(4, 0.1), (1, 0.1)], 0.8),
        ([(64, 0.3)], 0.3),
    ],
)
def test_a_full_batch_is_estimated_by_the_largest_batches(batches: list[tuple[int, float]], seconds: float) -> None:
    time = FullBatchTime(32)
    assert time.seconds is None
    for batch in batches:
        time.observe(*batch)
    assert time.seconds == pytest.approx(seconds)


async def ask_until_taken_back(house: House, version: int, *rows: dict[str, Any]) -> tuple[ModelDeployFailed, set[int]]:
    """Send requests until a version is taken back; return the fact, and the versions that answered."""
    versions = set()
    async with asyncio.timeout(120):
        while True:
            for _ in range(50):
                versions.add((await house.predict(*rows))["version"])
            if isinstance(fact := await house.conclusion(version), ModelDeployFailed):
                return fact, versions


@pytest.mark.shell
async def test_bad_input_has_one_status_and_takes_no_version_back(house: House) -> None:
    await house.deploy("r1")
    statuses = {(await house.http.post("/predict", json=[BEYOND])).status_code}
    await house.deploy("r2")
    for number in range(25):
        statuses.add((await house.http.post("/predict", json=[{**BEYOND, "b": number}])).status_code)
    assert statuses == {422}
    assert (await house.predict(ROWS[0]))["version"] == 2
    primary = house.served.primary
    assert primary is not None
    assert primary.tally.compared
    assert (primary.tally.worse, primary.is_watched) == (0, True)


@pytest.mark.shell
async def test_a_process_that_answers_nothing_any_more_is_at_fault_itself(house: House) -> None:
    await house.deploy("r1", "raise for ever")
    await house.predict(ROWS[0])
    for row in (LARGE, ROWS[0]):
        answer = await house.http.post("/predict", json=[row])
        assert answer.status_code == 500
        assert "device-side assert" in answer.json()["error"]


@pytest.mark.shell
async def test_errors_that_the_version_before_does_not_make_take_a_version_back(house: House) -> None:
    await house.deploy("r1")
    await house.deploy("r2", "raise on large")
    fact, versions = await ask_until_taken_back(house, 2, LARGE)
    assert (fact.stage, fact.serving_version, versions) == ("watch", 1, {1})
    assert "index out of range" in fact.reason


@pytest.mark.shell
async def test_a_process_that_ends_again_and_again_takes_its_version_back_and_one_end_does_not(house: House) -> None:
    await house.deploy("r1")
    await house.deploy("r2")
    host = house.host
    for _ in range(MAX_UNEXPLAINED_ENDS):
        assert house.host is host
        process = await wait_until(lambda: host.process, "the process runs")
        os.kill(process.pid, signal.SIGKILL)
        await process.ended.wait()
    fact = await house.taken_back(2)
    assert "its process ended 3 times by itself" in fact.reason


@pytest.mark.shell
@pytest.mark.parametrize(
    ("defect", "reason"), [("slow later", "99% of its answers take"), ("leak later", "its process has grown by")]
)
async def test_a_version_that_gets_worse_in_use_is_taken_back(start_house: Any, defect: str, reason: str) -> None:
    house: House = await start_house(serving_max_growth_bytes=64 * 2**20)
    await house.deploy("r1")
    for _ in range(100):
        await house.predict(ROWS[0])
    await house.deploy("r2", defect)
    fact, versions = await ask_until_taken_back(house, 2, ROWS[0])
    assert (fact.stage, fact.serving_version) == ("watch", 1)
    assert reason in fact.reason
    assert 2 in versions
    assert (await house.predict(ROWS[0]))["version"] == 1


@pytest.mark.shell
async def test_a_slow_version_is_taken_back_for_one_that_answered_nothing(start_house: Any) -> None:
    house: House = await start_house(serving_max_latency_ratio=1)
    await house.deploy("r1")
    warm_up_s = house.host.warm_up_time.seconds
    assert warm_up_s is not None
    await house.deploy("r2", "slow later")
    assert house.served.previous is not None
    # Other work on the machine must not make the baseline slower than the defect.
    house.served.previous.tally.full_batch_s = min(warm_up_s, 0.1)
    fact, _ = await ask_until_taken_back(house, 2, ROWS[0])
    assert "of the version before, by the full batches of its warm-up," in fact.reason
    assert house.host.warm_up_time.seconds == warm_up_s, "answers to users are no part of it"


@pytest.mark.shell
async def test_the_watch_goes_on_after_a_restart(start_house: Any) -> None:
    house: House = await start_house()
    await house.deploy("r1")
    await house.deploy("r2", "raise on large")
    await start_house.stop_all()
    again: House = await start_house()
    await again.wait_ready()
    assert (await again.predict(ROWS[0]))["version"] == 2
    await wait_until(lambda: again.served.previous, "the version before runs again")
    fact, versions = await ask_until_taken_back(again, 2, LARGE)
    assert (fact.stage, fact.serving_version, versions) == ("watch", 1, {1})
