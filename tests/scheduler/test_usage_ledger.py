"""The ledger: exact sums whatever the order of questions, along the path of a team."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.state.usage import TeamUsage, lineage

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S


@pytest.mark.parametrize(
    ("team", "names"),
    [
        (None, ("",)),
        ("", ("",)),
        ("research", ("", "research")),
        ("research/vision", ("", "research", "research/vision")),
        ("/research//vision/", ("", "research", "research/vision")),
    ],
)
def test_a_team_is_part_of_its_ancestors(team: str | None, names: tuple[str, ...]) -> None:
    assert lineage(team) == names


def decayed(ledger: TeamUsage, team: str, now: float) -> float:
    """Return the slot-seconds of the team, each counted half for every half-life since."""
    account = ledger.account(team)
    return account.decayed_at(now, ledger.half_life_s) if account else 0.0


def test_what_a_part_uses_counts_for_the_whole() -> None:
    ledger = TeamUsage()
    ledger.change("research/vision", "ann", "h100", 8, 0.0)
    ledger.change("research", "bob", "a100", 2, 0.0)
    ledger.change(None, None, "a100", 1, 0.0)
    assert ledger.using("research/vision") == 8
    assert ledger.using("research") == 10
    assert ledger.using("research", "a100") == 2
    assert ledger.using(None) == ledger.using("") == 11
    assert ledger.using("sales") == 0
    assert (ledger.user_using("ann"), ledger.user_using("bob", "a100"), ledger.user_using("bob", "h100")) == (8, 2, 0)
    assert ledger.user_using(None) == 1


def test_shares_of_an_accelerator_add_up_and_go_to_nothing() -> None:
    ledger = TeamUsage()
    for _ in range(3):
        ledger.change("t", "u", "h100", 0.1, 0.0)
    assert ledger.using("t") == 0.3
    for _ in range(3):
        ledger.change("t", "u", "h100", -0.1, 5.0)
    assert ledger.using("t") == 0
    assert ledger.user_using("u") == 0


@pytest.mark.parametrize(
    ("after_s", "left"),
    [(0.0, 1.0), (100.0, 0.5), (200.0, 0.25), (50.0, math.sqrt(0.5))],
)
def test_use_counts_half_after_a_half_life(after_s: float, left: float) -> None:
    ledger = TeamUsage(half_life_s=100.0)
    ledger.change("t", None, "cpu", 4, 0.0)
    ledger.change("t", None, "cpu", -4, 10.0)
    at_end = decayed(ledger, "t", 10.0)
    assert at_end == pytest.approx(4 * 100 / math.log(2) * (1 - 2 ** (-10 / 100)))
    assert decayed(ledger, "t", 10.0 + after_s) == pytest.approx(at_end * left)


def test_a_constant_use_comes_to_rest() -> None:
    ledger = TeamUsage(half_life_s=100.0)
    ledger.change("t", None, "cpu", 3, 0.0)
    assert decayed(ledger, "t", 1e6) == pytest.approx(3 * 100 / math.log(2))


@given(st.lists(st.tuples(st.floats(0, 5e4), st.integers(-3, 8)), max_size=20), st.floats(60, 1e6))
def test_decayed_use_is_the_integral(steps: list[tuple[float, int]], half_life_s: float) -> None:
    """Against the sum over constant pieces; asking in between changes nothing."""
    ledger, now, slots, pieces = TeamUsage(half_life_s), 0.0, 0, []
    for dt, delta in steps:
        pieces.append((now, now + dt, slots))
        now += dt
        delta = max(delta, -slots)
        decayed(ledger, "t", now + 1e9)
        ledger.change("t", None, "cpu", delta, now)
        slots += delta
    end = now + 1000.0
    pieces.append((now, end, slots))
    rate = math.log(2) / half_life_s
    expected = sum(n / rate * (math.exp(rate * (b - end)) - math.exp(rate * (a - end))) for a, b, n in pieces)
    assert decayed(ledger, "t", end) == pytest.approx(expected, rel=1e-6, abs=1e-3)


@given(
    st.lists(st.tuples(st.floats(0, 3 * DAY_S), st.integers(-3, 8)), max_size=20),
    st.sampled_from([1.0, 5.5, 24.0, 168.0]),
)
def test_spent_slot_hours_are_those_of_the_period(steps: list[tuple[float, int]], period_h: float) -> None:
    ledger, now, slots, pieces = TeamUsage(periods_h=(1.0, 5.5)), 1.7e9, 0, []
    for dt, delta in steps:
        pieces.append((now, now + dt, slots))
        now += dt
        delta = max(delta, -slots)
        ledger.change("t", None, "cpu", delta, now)
        slots += delta
    end = now + 3 * HOUR_S
    pieces.append((now, end, slots))
    begun = math.floor(end / (period_h * HOUR_S)) * period_h * HOUR_S
    for ago, (low, high) in enumerate([(begun, end), (begun - period_h * HOUR_S, begun)]):
        expected = sum(n * max(min(b, high) - max(a, low), 0.0) for a, b, n in pieces) / HOUR_S
        spent = ledger.spent_slot_h("t", "cpu", period_h, end, ago)
        assert spent == pytest.approx(expected, rel=1e-6, abs=1e-3)


def test_periods_begin_at_whole_multiples_since_1970() -> None:
    ledger = TeamUsage()
    ledger.change("t", None, "cpu", 2, 23 * HOUR_S)
    assert ledger.spent_slot_h("t", "cpu", 24.0, 24 * HOUR_S - 1) == pytest.approx(2, rel=1e-3)
    assert ledger.spent_slot_h("t", "cpu", 24.0, 24 * HOUR_S) == 0
    assert ledger.spent_slot_h("t", "cpu", 24.0, 24 * HOUR_S, ago=1) == 2
    assert ledger.spent_slot_h("t", None, 168.0, 25 * HOUR_S) == 4
    assert ledger.spent_slot_h("t", "cpu", 24.0, 49 * HOUR_S, ago=1) == 48


def test_another_policy_counts_from_when_it_is_adopted() -> None:
    ledger = TeamUsage(half_life_s=100.0)
    ledger.change("t", None, "cpu", 2, 0.0)
    before = decayed(ledger, "t", 50.0)
    ledger.adopt(1e12, (2.0,), 50.0)
    assert decayed(ledger, "t", 50.0) == pytest.approx(before)
    assert decayed(ledger, "t", 150.0) == pytest.approx(before + 200.0)
    assert ledger.spent_slot_h("t", "cpu", 2.0, 50.0 + HOUR_S) == 2
    assert ledger.spent_slot_h("t", "cpu", 24.0, HOUR_S) == 2
    assert ledger.spent_slot_h("t", "cpu", 3.0, HOUR_S) == 0


def test_a_clock_that_is_set_back_stands_still() -> None:
    ledger = TeamUsage(half_life_s=100.0)
    ledger.change("t", None, "cpu", 2, 100.0)
    ledger.change("t", None, "cpu", -2, 90.0)
    assert ledger.using("t") == 0
    assert decayed(ledger, "t", 100.0) == 0


@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "a/b", "c", None]), st.sampled_from(["u", None]), st.floats(0, 1e5)),
        max_size=20,
    )
)
def test_a_snapshot_is_the_same_ledger(steps: list[tuple[str | None, str | None, float]]) -> None:
    ledger, now = TeamUsage(1e4, (3.0,)), 1.7e9
    for team, user, dt in steps[: len(steps) // 2]:
        now += dt
        ledger.change(team, user, "h100", 1, now)
    copy = TeamUsage.from_state(json.loads(json.dumps(ledger.to_state())))
    assert copy == ledger
    for team, user, dt in steps[len(steps) // 2 :]:
        now += dt
        ledger.change(team, user, "h100", 1, now)
        copy.change(team, user, "h100", 1, now)
    assert copy == ledger
