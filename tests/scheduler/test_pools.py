"""Pools: what a run costs where, which pool it goes to, how many nodes are wanted; clusters; maintenance."""

from __future__ import annotations

import math
import random
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.events.capacity import CapacityWanted
from contracts.scheduling import Maintenance, Policy, Pool
from services.scheduler.core.capacity import demand
from services.scheduler.core.capacity.demand import CapacityDemand
from services.scheduler.core.place import pools
from services.scheduler.core.place.clusters import Candidate, choose_cluster
from services.scheduler.core.place.maintenance import closed, must_leave
from services.scheduler.core.place.pools import Preferences
from services.scheduler.core.state import pool_demand
from services.scheduler.core.state.cluster import Cluster, Node
from services.scheduler.core.state.pool_demand import PoolDemand
from services.scheduler.core.state.run import EPOCH, Phase, Run
from services.scheduler.core.state.slot_spec import slot_spec_of
from tests.scheduler.world import spec

NOW = datetime(2026, 1, 1, tzinfo=UTC)
HOUR_S = 3600.0


def pool(name: str, capacity: str = "on-demand", price: float = 0.0, rate: float = 0.0, **more: Any) -> Pool:
    fields = {"slots_per_node": 8, "max_nodes": 4, "price_per_slot_hour": price, "interruptions_per_hour": rate, **more}
    return Pool.model_validate({"name": name, "capacity": capacity, **fields})


def policy(*given_pools: Pool, **more: Any) -> Policy:
    return Policy.model_validate({"pools": {"pools": given_pools, **more}})


# -- cost -----------------------------------------------------------------------------------------


def test_without_interruptions_a_run_costs_its_work() -> None:
    assert pools.expected_cost(pool("a", price=2.0), 16, 5 * HOUR_S, math.inf, 60) == 2.0 * 16 * 5
    assert pools.expected_time_s(pool("a"), 16, 77.0, 600, 60) == 77.0


def test_rare_interruptions_cost_their_rate_times_what_each_takes() -> None:
    """For small rates: each costs half an interval of work on average, and the restart."""
    spot = pool("a", "spot", rate=0.01)
    time_s = pools.expected_time_s(spot, 8, 10 * HOUR_S, 600.0, 60.0)
    assert time_s - 10 * HOUR_S == pytest.approx(0.1 * (300 + 60), rel=0.01)


def test_a_gang_is_as_frail_as_all_its_nodes_together() -> None:
    one, four = pool("a", "spot", rate=0.4), pool("b", "spot", rate=0.1)
    assert pools.expected_time_s(one, 8, HOUR_S, 600, 60) == pools.expected_time_s(four, 32, HOUR_S, 600, 60)


def test_a_run_without_checkpoints_may_never_get_through() -> None:
    spot = pool("a", "spot", price=1.0, rate=1.0)
    assert pools.expected_time_s(spot, 8, 100 * HOUR_S, math.inf, 60) == math.inf
    assert pools.expected_cost(spot, 8, 100 * HOUR_S, math.inf, 60) == math.inf


def simulated_s(rate_per_s: float, work_s: float, interval_s: float, restart_s: float, chance: random.Random) -> float:
    """One run under interruptions at random, second by second in effect."""
    time_s, done_s, ready_s = 0.0, 0.0, 0.0
    while True:
        until_s = chance.expovariate(rate_per_s)
        needed_s = ready_s + (work_s - done_s)
        if until_s >= needed_s:
            return time_s + needed_s
        time_s += until_s
        worked_s = max(until_s - ready_s, 0.0)
        done_s += worked_s // interval_s * interval_s
        ready_s = restart_s


def test_the_formula_is_what_comes_out_on_average() -> None:
    chance = random.Random(7)
    spot = pool("a", "spot", rate=2.0)
    mean_s = sum(simulated_s(2.0 / 3600, 4 * HOUR_S, 900, 120, chance) for _ in range(4000)) / 4000
    assert pools.expected_time_s(spot, 8, 4 * HOUR_S, 900, 120) == pytest.approx(mean_s, rel=0.02)


# -- preference -----------------------------------------------------------------------------------

CHEAP = pool("cheap", "spot", price=1.0, rate=0.05)
FRAIL = pool("frail", "spot", price=1.0, rate=30.0)
SAFE = pool("safe", price=3.0)
BEST = pool("best", price=4.0)
TIERS = {"production": ("on-demand", "spot"), "research": ("spot", "on-demand"), "strict": ("on-demand",)}


@pytest.mark.parametrize(
    ("scheduling", "there", "expected"),
    [
        pytest.param({}, (SAFE, CHEAP, BEST), "cheap safe best", id="by what it costs in the end"),
        pytest.param({}, (SAFE, FRAIL), "safe frail", id="cheap by the hour, dear in the end"),
        pytest.param(
            {"tier": "production"}, (CHEAP, BEST, SAFE), "safe best cheap", id="production falls back on spot"
        ),
        pytest.param({"tier": "research"}, (SAFE, CHEAP), "cheap safe", id="research falls back on on-demand"),
        pytest.param({"tier": "research"}, (FRAIL, SAFE, CHEAP), "cheap safe frail", id="but not on spot at any price"),
        pytest.param({"tier": "strict"}, (CHEAP, SAFE), "safe", id="a tier without spot"),
        pytest.param({"tier": "unheard-of"}, (SAFE, CHEAP), "cheap safe", id="a tier that nobody knows"),
        pytest.param({"capacity": "spot", "tier": "strict"}, (SAFE, FRAIL), "frail", id="the run's own word counts"),
        pytest.param({"preemptible": False}, (CHEAP, SAFE), "safe cheap", id="one whose slots nobody may take"),
        pytest.param({"clusters": ["b"]}, (SAFE, pool("far", cluster="b")), "far", id="one cluster"),
    ],
)
def test_the_order_of_pools(scheduling: dict[str, Any], there: tuple[Pool, ...], expected: str) -> None:
    ordered = pools.in_order(spec(8, scheduling=scheduling), policy(*there, tiers=TIERS))
    assert " ".join(each.name for each in ordered) == expected


def test_a_command_has_no_checkpoints_and_stays_off_spot_for_long() -> None:
    there = policy(SAFE, pool("spot", "spot", price=1.0, rate=0.5))
    assert pools.in_order(spec(8), there, 24 * HOUR_S)[0].name == "spot"
    assert pools.in_order(spec(8, command=True), there, 24 * HOUR_S)[0].name == "safe"
    assert pools.in_order(spec(8, command=True), there, 600.0)[0].name == "spot"


def test_only_pools_whose_nodes_can_hold_it() -> None:
    there = policy(pool("cpu"), pool("h200", accelerator="H200"), pool("small", accelerator="H200", slots_per_node=4))

    def names(**more: Any) -> list[str]:
        return [each.name for each in pools.in_order(spec(8, **more), there)]

    assert names(resources={"accelerators": ["H200"]}) == ["h200", "small"]
    assert names(resources={"accelerators": ["H200"]}, gang={"bundle": 8}) == ["h200"]
    assert names(resources={"mig_profile": "1g.10gb"}) == []
    assert names(resources={"share": 0, "accelerators": ["A100"]}) == ["cpu", "h200", "small"]


def test_nodes_in_the_order_of_their_pools() -> None:
    preferences = Preferences.of(spec(8), policy(SAFE, CHEAP, tiers=TIERS))
    labels: list[dict[str, str]] = [
        {"pool": "safe"}, {"pool": "cheap", "capacity": "spot"}, {}, {"capacity": "spot"}, {"pool": "of old"}
    ]  # fmt: skip
    numbers = [preferences.number(each) for each in labels]
    # What is there anyway goes before what is paid for; spot first, since it costs less here.
    assert numbers == [3, 1, 2, 0, 2]
    strict = Preferences.of(spec(8, scheduling={"tier": "strict"}), policy(SAFE, CHEAP, tiers=TIERS))
    assert [strict.number(each) is None for each in labels] == [False, True, False, True, False]


def test_without_pools_nodes_are_alike_unless_a_run_names_one() -> None:
    assert pools.allowed({"capacity": "spot"}, spec(), Policy())
    assert not pools.allowed({"capacity": "spot"}, spec(scheduling={"capacity": "on-demand"}), Policy())
    assert not pools.allowed({}, spec(scheduling={"capacity": "spot"}), Policy())
    assert not pools.allowed({"cluster": "a"}, spec(scheduling={"clusters": ["b"]}), Policy())
    assert pools.Preferences.of(spec(scheduling={"preemptible": False}), Policy()).number({}) == 0


# -- wanted ---------------------------------------------------------------------------------------


def node(name: str, left: int, of: str = "a", idle_s: float | None = None, slots: int = 8, **labels: str) -> Node:
    free = [0] * (slots - left) + [1000] * left
    idle_since = EPOCH if idle_s is None else NOW - timedelta(seconds=idle_s)
    labels |= {"pool": of} if of else {}
    return Node(name, "1", slots, 5.0, labels=labels, free_milli=free, idle_since=idle_since)


def waiting(*runs: Any) -> list[Run]:
    """Runs that wait for slots, in order."""
    found = []
    for number, each in enumerate(runs):
        given = spec(each) if isinstance(each, int) else each
        run = Run(f"r{number}", given, number, NOW, slot_spec=slot_spec_of(given), least=given.slots.min)
        run.phase, run.waiting_code, run.waiting_generation = Phase.QUEUED, "slots", 1
        found.append(run)
    return found


def cluster(there: list[Node], runs: list[Run], said: dict[str, PoolDemand] | None = None) -> Cluster:
    found = Cluster(nodes={each.node_id: each for each in there}, capacity=said or {})
    for run in runs:
        found.runs[run.run_id] = run
        found.queued[run.run_id] = None
    return found


def ask(
    there: list[Node], runs: list[Run], said: dict[str, PoolDemand] | None = None, *of: Pool, **more: Any
) -> dict[str, CapacityDemand]:
    found = demand.compute_demand(cluster(there, runs, said), NOW, policy(*(of or (pool("a"),)), **more))
    return {want.pool: want for want in found}


def test_what_waits_wants_as_many_nodes_as_it_needs() -> None:
    want = ask([], waiting(8, 3, 3, 2, 8))["a"]
    assert (want.nodes, want.run_ids) == (3, ("r0", "r1", "r2", "r3", "r4"))
    assert "5 runs could use 3 more" in want.reason


def test_what_fits_on_what_is_there_wants_nothing_more() -> None:
    assert ask([node("n", 4, idle_s=None)], waiting(4))["a"].nodes == 1
    assert ask([node("n", 4), node("m", 8, of="")], waiting(4, 8))["a"].nodes == 1


@pytest.mark.parametrize(
    ("run", "nodes"),
    [
        pytest.param(spec(32), 4, id="all there can be"),
        pytest.param(spec(33), None, id="more than there can be: not a part of it either"),
        pytest.param(spec({"min": 8, "max": 32}), 1, id="no more than it needs"),
        pytest.param(spec(9, gang={"bundle": 3}), 2, id="bundles that do not fill a node"),
        pytest.param(spec(3, gang={"apart": True}), 3, id="each on a node of its own"),
        pytest.param(spec(4, resources={"share": 0.5}), 1, id="shares"),
        pytest.param(spec(1, resources={"accelerators": ["H200"]}), None, id="not of this kind"),
        pytest.param(spec(5, resources={"share": 0}), 1, id="no accelerator, but a node"),
    ],
)
def test_how_many_nodes_a_run_wants(run: Any, nodes: int | None) -> None:
    found = ask([], waiting(run))
    assert (found["a"].nodes if found else None) == nodes


def test_shares_of_several_runs_go_together() -> None:
    half = spec(8, resources={"share": 0.5})
    assert ask([], waiting(half, half, half))["a"].nodes == 2


def test_the_cheapest_in_the_end_is_wanted_and_the_next_one_when_that_is_full() -> None:
    cheap, safe = pool("cheap", "spot", price=1.0, rate=0.01, max_nodes=1), pool("safe", price=3.0)
    found = ask([], waiting(8, 8, 8), {}, safe, cheap)
    assert {name: want.nodes for name, want in found.items()} == {"cheap": 1, "safe": 2}


def test_a_gang_may_lie_across_pools_of_one_cluster_but_never_across_clusters() -> None:
    near = [pool("a", max_nodes=1, cluster="x"), pool("b", max_nodes=1, cluster="x")]
    far = [pool("a", max_nodes=1, cluster="x"), pool("b", max_nodes=1, cluster="y")]
    assert {name: want.nodes for name, want in ask([], waiting(16), {}, *near).items()} == {"a": 1, "b": 1}
    assert ask([], waiting(16), {}, *far) == {}
    exact = spec(16, training={"epochs": 1, "logical_ranks": 16})
    assert ask([], waiting(exact), {}, *near) == {}


def test_idle_nodes_may_go_after_a_while_unless_somebody_wants_them() -> None:
    there = [node("old", 8, idle_s=700), node("young", 8, idle_s=100), node("busy", 2)]
    want = ask(there, [])["a"]
    assert (want.nodes, want.spare) == (2, ("old",))
    again = ask(there, waiting(16))
    assert (again["a"].nodes, again["a"].spare) == (3, ())


def test_nothing_is_published_twice() -> None:
    there = [node("old", 8, idle_s=700), node("busy", 2)]
    first = ask(there, waiting(12))["a"]
    assert first.nodes == 3
    said = {"a": pool_demand.update_demand(None, fact(first), NOW)}
    assert ask(there, waiting(12), said) == {}
    assert ask([], []) == {}
    assert demand.compute_demand(cluster(there, waiting(12)), NOW, Policy()) == []


def fact(want: CapacityDemand) -> CapacityWanted:
    return CapacityWanted(pool=want.pool, nodes=want.nodes, spare=want.spare, timed_out=want.timed_out, decided_at=NOW)


def test_nodes_that_do_not_join_are_wanted_of_another_pool_for_a_while() -> None:
    """Spot that nobody sells falls back on on-demand; later spot is asked for again."""
    there = (pool("spot", "spot", price=1.0), pool("safe", price=3.0))
    said: dict[str, PoolDemand] = {}
    history = []
    for minutes in (0, 4, 6, 20, 40):
        at = NOW + timedelta(minutes=minutes)
        found = demand.compute_demand(cluster([], waiting(8), said), at, policy(*there))
        for want in found:
            said[want.pool] = pool_demand.update_demand(said.get(want.pool), fact(want), at)
        history.append({want.pool: (want.nodes, want.timed_out) for want in found})
    assert history == [
        {"spot": (1, False)},
        {},
        {"spot": (0, True), "safe": (1, False)},
        # The other one does not come either: it is as far as anybody can go, until spot is tried again.
        {"safe": (0, True)},
        {"spot": (1, False)},
    ]


def test_a_lost_node_is_awaited_again() -> None:
    said = {"a": PoolDemand(2, NOW - timedelta(hours=1))}
    there = [node("n1", 0)]
    moved = {"a": pool_demand.reset_patience(said["a"], NOW - timedelta(seconds=10))}
    assert ask(there, waiting(8), moved) == {}
    assert ask(there, waiting(8), said)["a"].timed_out


def test_the_next_cycle_is_due_when_the_demand_may_change() -> None:
    there, given_policy = [node("n", 8, idle_s=100)], policy(pool("a"))
    assert demand.wake_at(cluster(there, []), NOW, given_policy) == NOW + timedelta(seconds=500)
    said = {"a": PoolDemand(1, NOW - timedelta(seconds=20))}
    assert demand.wake_at(cluster(there, [], said), NOW, given_policy) == NOW + timedelta(seconds=280)
    assert demand.wake_at(cluster(there, []), NOW, Policy()) is None


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_wanted_is_bounded_enough_and_at_rest(data: st.DataObject) -> None:
    """Never above the pool's most; every run in what is wanted has room there; saying it again changes nothing."""
    most = data.draw(st.integers(0, 4))
    of = pool("a", max_nodes=most, slots_per_node=4)
    there = [
        node(f"n{number}", left, idle_s=1000.0 if left == 4 else None, slots=4)
        for number, left in enumerate(data.draw(st.lists(st.integers(0, 4), max_size=most)))
    ]
    sizes = data.draw(st.lists(st.integers(1, 9), max_size=8))
    found = ask(there, waiting(*sizes), {}, of)
    busy = sum(each.idle_since == EPOCH for each in there)
    if "a" not in found:
        assert not there
        assert not any(size <= 4 * most for size in sizes)
        return
    want = found["a"]
    assert busy <= want.nodes <= most
    assert not {each.node_id for each in there if each.idle_since == EPOCH} & set(want.spare)
    room = (want.nodes - len(there) + len(want.spare)) * 4 + sum(sum(each.free_milli) for each in there) // 1000
    assert sum(size for number, size in enumerate(sizes) if f"r{number}" in want.run_ids) <= room
    assert ask(there, waiting(*sizes), {"a": pool_demand.update_demand(None, fact(want), NOW)}, of) == {}


# -- clusters -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("candidates", "expected"),
    [
        pytest.param([Candidate("small", 4, 4), Candidate("big", 16, 16)], "big", id="only where it can ever lie"),
        pytest.param([Candidate("full", 0, 16), Candidate("free", 8, 16)], "free full", id="free slots"),
        pytest.param(
            [Candidate("long", 0, 16, queued=160), Candidate("short", 0, 16, queued=16)], "short long", id="the queue"
        ),
        pytest.param(
            [Candidate("mine", 8, 16, queued=8), Candidate("free", 8, 16)], "free mine", id="free, but spoken for"
        ),
        pytest.param(
            [Candidate("far", 8, 16), Candidate("near", 8, 16, local=1.0)], "near far", id="where its data lies"
        ),
        pytest.param(
            [Candidate("near", 0, 16, queued=64, local=1.0), Candidate("far", 8, 16)], "far near",
            id="data is fetched sooner than a long queue ends",
        ),
        pytest.param(
            [Candidate("dear", 8, 16, cost=3), Candidate("cheap", 8, 16, cost=1)],
            "cheap dear", id="the price",
        ),
        pytest.param(
            [Candidate("now", 8, 16, cost=3), Candidate("later", 0, 16, cost=1)],
            "now later", id="the price does not outweigh a wait",
        ),
    ],
)  # fmt: skip
def test_the_order_of_clusters(candidates: list[Candidate], expected: str) -> None:
    found = choose_cluster(candidates, 8, work_s=2400, turn_s=HOUR_S)
    assert " ".join(each.name for each in found) == expected


# -- maintenance ----------------------------------------------------------------------------------

IN_AN_HOUR = {"start": NOW + timedelta(hours=1), "end": NOW + timedelta(hours=2)}


@pytest.mark.parametrize(
    ("window", "minutes", "end_minutes", "expected"),
    [
        pytest.param({}, 0, 59, False, id="done by then"),
        pytest.param({}, 0, 61, True, id="not done by then"),
        pytest.param({}, 0, None, True, id="perhaps never done"),
        pytest.param({}, 90, 91, True, id="in the middle of it"),
        pytest.param({}, 121, None, False, id="over"),
        pytest.param({"node_ids": ["n2"]}, 0, None, False, id="other nodes"),
        pytest.param({"node_ids": ["n1"]}, 0, None, True, id="this node"),
        pytest.param({"labels": {"zone": "a"}}, 0, None, True, id="its zone"),
        pytest.param({"labels": {"zone": "a", "rack": "7"}}, 0, None, False, id="another rack of its zone"),
    ],
)
def test_what_may_not_start_before_maintenance(
    window: dict[str, Any], minutes: float, end_minutes: float | None, expected: bool
) -> None:
    given_window = Maintenance.model_validate({**IN_AN_HOUR, **window})
    end = None if end_minutes is None else NOW + timedelta(minutes=end_minutes)
    assert closed("n1", {"zone": "a"}, given_window, NOW + timedelta(minutes=minutes), end) is expected


def test_who_has_to_leave_for_maintenance() -> None:
    window = Maintenance.model_validate(IN_AN_HOUR)
    at = [NOW, NOW + timedelta(minutes=59, seconds=40), NOW + timedelta(minutes=90), NOW + timedelta(minutes=121)]
    assert [must_leave("n", {}, [window], each, 30.0) for each in at] == [False, True, True, False]
