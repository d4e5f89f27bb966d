"""Fair shares: level by level, at once as slots are given, and exact in the long run."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.scheduling import FairShare, Order, Policy
from services.scheduler.core.order.queue import iterate
from services.scheduler.core.order.share import Shares, standing
from services.scheduler.core.state.usage import TeamUsage
from tests.scheduler.test_usage_ledger import decayed

HALF_LIFE_S = 7200.0


def in_turns(items: list[tuple[str, int]], shares: Shares) -> Iterator[tuple[str, int]]:
    """The items (team, slots) in the order of the line under fair share."""
    groups: dict[str, list[tuple[tuple[float, ...], str]]] = {}
    for place, (team, _) in enumerate(items):
        groups.setdefault(team, []).append(((0.0, place), str(place)))
    for _, place in iterate(groups, shares.key, Policy(order=Order(by=("fair-share",)))):
        yield items[int(place)]


def ledger_of(uses: dict[str, float], seconds: float = 600.0) -> TeamUsage:
    """Each team has used so many slots for some minutes, and has none now."""
    ledger = TeamUsage(HALF_LIFE_S)
    for at, sign in ((0.0, 1), (seconds, -1)):
        for team, slots in uses.items():
            ledger.change(team, None, "cpu", sign * slots, at)
    return ledger


@pytest.mark.parametrize(
    ("weights", "uses", "order"),
    [
        pytest.param({}, {"a": 2, "b": 1}, ["c", "b", "a"], id="who has used less goes first"),
        pytest.param({"a": 3}, {"a": 2, "b": 1}, ["c", "a", "b"], id="use counts less the more weight a team has"),
        pytest.param(
            {},
            {"r/x": 1, "r/y": 3, "s": 2},
            ["s", "r/x", "r/y"],
            id="the whole of a team is compared, then its parts",
        ),
        pytest.param({"r": 4}, {"r/x": 1, "r/y": 3, "s": 2}, ["r/x", "r/y", "s"], id="weights are among siblings"),
        pytest.param(
            {"r/y": 6}, {"r/x": 1, "r/y": 3, "s": 9}, ["r/y", "r/x", "s"], id="weights of parts do not lift the whole"
        ),
        pytest.param({}, {"r": 3, "r/x": 1, "s": 9}, ["r/x", "r", "s"], id="a team's own runs are one of its parts"),
        pytest.param({"r/": 5}, {"r": 3, "r/x": 1, "s": 9}, ["r", "r/x", "s"], id="and have a weight"),
        pytest.param({"//r": 4}, {"r/x": 4, "s": 2}, ["r/x", "s"], id="slashes too many do no harm"),
    ],
)
def test_order(weights: dict[str, float], uses: dict[str, float], order: list[str]) -> None:
    config = FairShare(weights=weights, half_life_s=HALF_LIFE_S)
    ledger = ledger_of(uses)
    assert sorted(sorted(order), key=lambda team: standing(ledger, config, team, 700.0)) == order


def test_runs_without_a_team_are_a_team() -> None:
    ledger = ledger_of({"a": 2, "": 1})
    shares = Shares(ledger, FairShare(weights={"/": 0.1}), 700.0)
    assert shares.key("a") < shares.key(None) == shares.key("")
    assert Shares(ledger, FairShare(), 700.0).key(None) < shares.key("a")


def test_what_is_held_now_counts_before_time_has_passed() -> None:
    ledger = TeamUsage(HALF_LIFE_S)
    ledger.change("a", None, "cpu", 1, 0.0)
    assert standing(ledger, FairShare(), "b", 0.0) < standing(ledger, FairShare(), "a", 0.0)


def test_slots_given_in_a_pass_count_as_if_they_were_held() -> None:
    config = FairShare(weights={"r": 2})
    given_ones, held = TeamUsage(HALF_LIFE_S), TeamUsage(HALF_LIFE_S)
    held.change("r/x", None, "cpu", 3, 0.0)
    shares = Shares(given_ones, config, 0.0)
    shares.charge("r/x", 3)
    assert [shares.key(team) for team in ("r/x", "r", "s")] == [
        pytest.approx(standing(held, config, team, 0.0)) for team in ("r/x", "r", "s")
    ]


def test_free_slots_are_shared_within_one_cycle() -> None:
    """Not all of them go to the team that was furthest behind when the cycle began."""
    config = FairShare(weights={"a": 3, "b": 2, "c": 1})
    shares = Shares(TeamUsage(HALF_LIFE_S), config, 0.0)
    taken: list[str] = []
    for team, _ in in_turns([(team, 1) for team in "cba" for _ in range(60)], shares):
        shares.charge(team, 1)
        taken.append(team)
        if len(taken) == 60:
            break
    assert {team: taken.count(team) for team in "abc"} == {"a": 30, "b": 20, "c": 10}


def test_turns_keep_the_order_within_a_team_and_yield_everything() -> None:
    shares = Shares(ledger_of({"a": 2, "b": 1}), FairShare(), 700.0)
    items = [("a", 1), ("b", 1), ("a", 2), ("b", 2), ("", 1)]
    assert list(in_turns(items, shares)) == [("", 1), ("b", 1), ("b", 2), ("a", 1), ("a", 2)]


def test_teams_that_stand_equal_go_by_their_first_item() -> None:
    shares = Shares(TeamUsage(), FairShare(), 0.0)
    assert [team for team, _ in in_turns([("z", 1), ("a/b", 1), ("m", 1)], shares)] == ["z", "a/b", "m"]


@given(st.lists(st.tuples(st.sampled_from(["a", "b/x", "b/y", "b", ""]), st.integers(1, 9)), max_size=30))
def test_turns_are_those_of_the_key_at_the_time(items: list[tuple[str, int]]) -> None:
    config = FairShare(weights={"b": 2})
    shares, check = (Shares(TeamUsage(HALF_LIFE_S), config, 0.0) for _ in range(2))
    left = list(enumerate(items))
    for team, slots in in_turns(items, shares):
        index, expected = min(left, key=lambda each: (check.key(each[1][0]), each[0]))
        assert (team, slots) == expected
        left.remove((index, expected))
        if slots % 2:
            shares.charge(team, slots)
            check.charge(team, slots)
    assert not left


@pytest.mark.parametrize(
    ("waiter", "holder", "slots", "may"),
    [
        pytest.param("b", "a", 1, True, id="from a team that has more"),
        pytest.param("b", "a", 4, True, id="up to where both have the same"),
        pytest.param("b", "a", 5, False, id="not more than that, or it would be taken back"),
        pytest.param("a", "b", 1, False, id="not from a team that has less"),
        pytest.param("a", "a", 1, False, id="not within a team"),
        pytest.param("c/y", "c/x", 2, True, id="a part from another part of the same team"),
        pytest.param("c/y", "a", 1, False, id="not from elsewhere while the whole team has its share"),
    ],
)
def test_who_may_take_slots(waiter: str, holder: str, slots: float, may: bool) -> None:
    ledger = TeamUsage(HALF_LIFE_S)
    for team, used in {"a": 8, "b": 0, "c/x": 8}.items():
        ledger.change(team, None, "cpu", used, 0.0)
    assert Shares(ledger, FairShare(), 0.0).may_take(waiter, slots, holder, slots) is may


def saturated(rng: random.Random, sizes: dict[str, list[int]], weights: dict[str, float], slots: int) -> TeamUsage:
    """Three half-lives in which every team always has runs of a few minutes, after one team has had everything.

    Nothing overtakes the run whose turn it is: so large gangs get their share as well.
    """
    config = FairShare(weights=weights, half_life_s=HALF_LIFE_S)
    ledger, now, free, ends = TeamUsage(HALF_LIFE_S), 5 * HALF_LIFE_S, slots, list[tuple[float, int, str, int]]()
    first = next(iter(sizes))
    ledger.change(first, None, "cpu", slots, 0.0)
    ledger.change(first, None, "cpu", -slots, now)
    heads = {team: rng.choice(choices) for team, choices in sizes.items()}
    while now < 8 * HALF_LIFE_S:
        shares = Shares(ledger, config, now)
        while heads[team := min(sizes, key=shares.key)] <= free:
            size, heads[team] = heads[team], rng.choice(sizes[team])
            free -= size
            ledger.change(team, None, "cpu", size, now)
            shares.charge(team, size)
            heapq.heappush(ends, (now + rng.uniform(60, 600), len(ends), team, size))
        now, _, team, size = heapq.heappop(ends)
        free += size
        ledger.change(team, None, "cpu", -size, now)
    return ledger


@pytest.mark.parametrize("seed", range(3))
def test_shares_are_their_weights_after_three_half_lives(seed: int) -> None:
    sizes = {"sales": [1, 2, 4], "research/vision": [1, 2], "research/nlp": [8, 4], "ops": [32, 16]}
    weights = {"research": 3.0, "research/vision": 2.0, "ops": 2.0}
    ledger = saturated(random.Random(seed), sizes, weights, slots=64)
    now = 8 * HALF_LIFE_S
    whole, research = decayed(ledger, "", now), decayed(ledger, "research", now)
    for team, share in {"research": 3 / 6, "sales": 1 / 6, "ops": 2 / 6}.items():
        assert decayed(ledger, team, now) / whole == pytest.approx(share, abs=0.02), team
    assert decayed(ledger, "research/vision", now) / research == pytest.approx(2 / 3, abs=0.02)
