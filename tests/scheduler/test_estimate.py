"""Wait estimates: who is expected to start when, and how wide the range is."""

from __future__ import annotations

import random
from datetime import datetime, timedelta
from typing import Any

import pytest

from contracts.scheduling import Policy
from services.scheduler import policies
from services.scheduler.core.explain.estimate import (
    Errors,
    Estimate,
    Estimator,
    PoolAllocation,
    PoolRequest,
    play,
    quantile,
    taken_from,
)
from services.scheduler.core.explain.why import answer
from services.scheduler.core.state.cluster import Cluster
from services.scheduler.core.state.durations import run_kind_of, wait_kind_of
from tests.scheduler.world import World, spec
from trainbus.operate.simulation import generate
from trainbus.operate.simulation.agents import Agents
from trainbus.operate.simulation.engine import Core, play_trace
from trainbus.operate.simulation.traces import at


def world(slots: int = 4, run_s: float = 600.0, policy: Policy | None = None) -> World:
    """One node, and a history in which everything took about as long."""
    made = World(policy)
    made.join("n0", slots)
    for number in range(200):
        made.cluster.history.add(run_kind_of(spec(1)), run_s + number % 10, made.now)
    return made


def submit(made: World, run_id: str, slots: int = 1, **more: Any) -> None:
    made.accept(run_id, spec(slots, **more))
    made.settle()


def estimates(made: World, estimator: Estimator | None = None) -> dict[str, Estimate]:
    return (estimator or Estimator()).estimates(made.cluster, made.policy, made.now)


def waits_s(made: World) -> dict[str, float]:
    return {run_id: (each.p50 - made.now).total_seconds() for run_id, each in estimates(made).items()}


def test_a_start_is_not_expected_before_the_holders_release_their_slots() -> None:
    """The pace of the last hours, when all was short, would have it start at once."""
    made = world(slots=4)
    for _ in range(100):
        made.cluster.waits.add(wait_kind_of(1, 0.0), 1.0, made.now)
        made.wait(1)
    submit(made, "a", 2)
    made.wait(100)
    submit(made, "b", 2)
    submit(made, "c", 4)
    said = answer(made.cluster, "c", made.now, made.policy)
    untils = [datetime.fromisoformat(holder["until"]) for holder in said["holders"]]
    assert len(untils) == 2
    room_at = datetime.fromisoformat(said["room_at"])
    assert room_at == max(untils)
    estimate = estimates(made)["c"]
    assert estimate.p50 < room_at
    shown = estimate.not_before(room_at)
    assert shown.p10 <= shown.p50 <= shown.p90
    assert shown.p50 == room_at
    assert estimate.not_before(None) == estimate


# -- the plan -----------------------------------------------------------------------------------------


def one(pool: int, milli: int, *left_s: float) -> PoolAllocation:
    return PoolAllocation(pool, milli, left_s)


def claim(run_id: str, milli: int, *takes_s: float, pools: tuple[int, ...] = (0,)) -> PoolRequest:
    return PoolRequest(run_id, pools, milli, takes_s)


def starts(free: list[int], holders: list[PoolAllocation], entitlements: list[PoolRequest]) -> list[float]:
    return play(free, holders, entitlements, random.Random(1))


def test_requests_start_as_holders_release_slots() -> None:
    assert starts([0], [one(0, 2, 10.0), one(0, 2, 30.0)], [claim("a", 2, 5.0), claim("b", 2, 50.0)]) == [10, 15]


def test_no_run_overtakes_in_a_pool() -> None:
    assert starts([1], [one(0, 3, 100.0)], [claim("large", 4, 9.0), claim("small", 1, 9.0)]) == [100, 109]


def test_pools_do_not_wait_for_each_other() -> None:
    waiting = [claim("a", 1, 9.0), claim("b", 1, 9.0, pools=(1,)), claim("c", 1, 9.0, pools=(0, 1))]
    assert starts([0, 2], [one(0, 1, 70.0)], waiting) == [70, 0, 0]


@pytest.mark.parametrize(("q", "value"), [(-1, 1), (0, 1), (0.25, 2), (0.5, 3), (0.75, 6.5), (1, 10), (2, 10)])
def test_quantile_of_a_few(q: float, value: float) -> None:
    assert quantile([1, 3, 10], q) == value


# -- a cluster ----------------------------------------------------------------------------------------


def test_each_in_line_waits_for_those_before() -> None:
    made = world(slots=4)
    for number in range(6):
        submit(made, f"r{number}", 4)
    found = waits_s(made)
    assert list(found) == ["r1", "r2", "r3", "r4", "r5"]
    assert found["r1"] < found["r2"] < found["r3"] < found["r4"] < found["r5"]


def test_a_higher_priority_starts_before() -> None:
    made = world(slots=1, policy=Policy.model_validate({"preemption": {"by": []}}))
    submit(made, "holder")
    submit(made, "first")
    submit(made, "urgent", priority=5)
    found = waits_s(made)
    assert found["urgent"] < found["first"]


def test_a_higher_priority_preempts() -> None:
    holders = [one(0, 2, 900.0), PoolAllocation(0, 2, (900.0,), -1, 30.0), PoolAllocation(0, 2, (900.0,), -2, 40.0)]
    waiting = [PoolRequest("urgent", (0,), 3, (5.0,), priority=1), claim("next", 2, 5.0)]
    after = taken_from([0], holders, waiting)
    assert [each.left_s for each in after] == [(900.0,), (30.0,), (40.0,)]
    assert play([0], after, waiting, random.Random(1)) == [40, 45]


def test_what_can_never_run_is_left_out() -> None:
    made = world(slots=2)
    submit(made, "holder", 2)
    submit(made, "large", 3)
    submit(made, "small", 1)
    assert list(estimates(made)) == ["small"]


def test_a_limit_is_the_most_that_a_run_takes() -> None:
    made = world(slots=1, run_s=50_000)
    submit(made, "holder", scheduling={"limit_s": 60})
    submit(made, "waits")
    assert waits_s(made)["waits"] <= 60


def test_estimates_come_nearer() -> None:
    made = world(slots=1)
    submit(made, "holder")
    submit(made, "waits")
    before = estimates(made)["waits"]
    made.wait(500)
    after = estimates(made)["waits"]
    assert (after.p50 - made.now) < (before.p50 - made.now + timedelta(seconds=500)) / 2


def test_the_same_question_has_the_same_answer() -> None:
    made = world(slots=2)
    for number in range(8):
        submit(made, f"r{number}", 1 + number % 2)
    assert estimates(made) == estimates(made)


def test_a_range_is_learned_from_what_came_of_it() -> None:
    """Runs take four times as long as they used to: the range reaches that far once it has been seen."""
    made = world(slots=1, run_s=600)
    estimator = Estimator()
    submit(made, "r0")
    held = []
    for number in range(1, 30):
        submit(made, f"r{number}")
        told = estimates(made, estimator)[f"r{number}"]
        made.wait(2400)
        held.append(told.p10 <= made.now <= told.p90)
        made.exit(f"r{number - 1}")
        made.settle()
    assert not all(held[:3])
    assert sum(held[-10:]) >= 7
    assert len(estimator.errors.known) > 20


# -- errors -------------------------------------------------------------------------------------------


def learned(ratio: float, count: int = 200, apart_s: float = 10_000.0) -> Errors:
    errors = Errors()
    source = random.Random(3)
    for number in range(count):
        made_s = number * apart_s
        errors.note(f"r{number}/1", made_s, 1000.0)
        errors.started(f"r{number}/1", made_s + 1000.0 * ratio * source.uniform(0.8, 1.25))
    return errors


def test_before_anything_is_known_the_range_is_wide() -> None:
    spread = Errors().widened({}, 0.0)(1000.0)
    assert spread.low_s < 400
    assert spread.high_s > 2500


@pytest.mark.parametrize("ratio", [1.0, 2.5, 0.4])
def test_the_range_holds_what_was_seen(ratio: float) -> None:
    spread = learned(ratio).widened({}, 1e9)(1000.0)
    assert spread.low_s <= 1000 * ratio <= spread.high_s
    assert spread.low_s <= spread.middle_s <= spread.high_s


def test_errors_of_one_time_count_as_few() -> None:
    apart = learned(1.0).widened({}, 1e9)(1000.0)
    at_once = learned(1.0, apart_s=1.0).widened({}, 1e9)(1000.0)
    assert at_once.high_s > apart.high_s
    assert at_once.low_s < apart.low_s


def test_those_that_still_wait_tell_already() -> None:
    errors = learned(1.0)
    for number in range(200):
        errors.note(f"w{number}/1", 2e6, 1000.0)
    before = errors.widened({}, 2e6)(1000.0).high_s
    later = errors.widened({f"w{number}/1": 5000.0 for number in range(200)}, 2e6 + 5000)(1000.0).high_s
    assert later > 3 * before


def test_a_run_that_never_starts_is_forgotten() -> None:
    made = world(slots=1)
    estimator = Estimator()
    submit(made, "holder")
    submit(made, "waits")
    estimates(made, estimator)
    assert list(estimator.errors.made) == ["waits/1"]
    made.cancel("waits")
    made.settle()
    estimates(made, estimator)
    assert not estimator.errors.made
    assert not estimator.errors.known


# -- whole traces ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fifo", "fifo-skip", "", "least-attained", "fair-share"])
def test_every_run_of_a_trace_gets_a_valid_estimate(name: str) -> None:
    policy = policies.load(name) if name else Policy()
    trace = generate.jobs(150, 16, 4, load=2.0)
    core = Core(policy)
    estimator = Estimator()
    player = play_trace(trace, Agents.of(trace, 60.0))
    turn, told = next(player), 0
    try:
        while True:
            said = core.turn(turn)
            if not said.facts and core.cluster.queued and told < 3_000:
                told += sound(core.cluster, estimator.estimates(core.cluster, policy, at(turn.now_s)), turn.now_s)
            turn = player.send(said)
    except StopIteration:
        pass
    assert told > 100
    assert estimator.errors.known


def sound(cluster: Cluster, found: dict[str, Estimate], now_s: float) -> int:
    assert set(found) == set(cluster.queued)
    for each in found.values():
        assert at(now_s) <= each.p10 <= each.p50 <= each.p90
    return len(found)
