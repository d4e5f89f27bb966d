"""Where runs are placed: by pool and tier, by cluster, and around maintenance; each in a small world."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from contracts.events.node import NodeJoined
from contracts.events.run import RunPlaced, RunPrepared
from contracts.scheduling import Policy
from tests.scheduler.world import START, World, spec

SPOT = {"name": "spot", "capacity": "spot", "slots_per_node": 4, "max_nodes": 2, "price_per_slot_hour": 1.0}
SAFE = {"name": "safe", "slots_per_node": 4, "max_nodes": 2, "price_per_slot_hour": 3.0}
TIERS = {"production": ["on-demand", "spot"], "research": ["spot", "on-demand"], "strict": ["on-demand"]}
DATASET = "d" * 64


def world(**policy: Any) -> World:
    return World(Policy.model_validate(policy))


def join(there: World, node_id: str, slots: int = 4, datasets: tuple[str, ...] = (), **labels: str) -> None:
    there.publish(
        NodeJoined(
            node_id=node_id, incarnation="1", address="h", slots=slots, lease_ttl_s=5, labels=labels, datasets=datasets
        )
    )


def placed(there: World, run_id: str, wanted: Any) -> str:
    """Where a run lies once everything has come to rest."""
    there.accept(run_id, wanted)
    there.settle()
    found = [fact for fact in there.facts(RunPlaced) if fact.run_id == run_id]
    return " ".join(sorted(member.node_id for member in found[-1].members)) if found else ""


POOLS = {"pools": {"pools": [SPOT, SAFE], "tiers": TIERS}}


@pytest.mark.parametrize(
    ("scheduling", "slots", "expected"),
    [
        pytest.param({"tier": "production"}, 4, "a", id="production on demand"),
        pytest.param({"tier": "research"}, 4, "b", id="research on spot"),
        pytest.param({}, 4, "b", id="anything where it is cheapest"),
        pytest.param({"tier": "production"}, 6, "a b", id="and on the other if it takes both"),
        pytest.param({"tier": "strict"}, 6, "", id="unless the tier has one kind alone"),
        pytest.param({"capacity": "spot"}, 4, "b", id="spot, as asked for"),
        pytest.param({"capacity": "on-demand"}, 6, "", id="on demand, as asked for"),
    ],
)
def test_tiers(scheduling: dict[str, Any], slots: int, expected: str) -> None:
    there = world(**POOLS)
    join(there, "a", pool="safe")
    join(there, "b", pool="spot", capacity="spot")
    assert placed(there, "r", spec(slots, scheduling=scheduling)) == expected


def test_production_falls_back_on_spot_when_the_rest_is_full() -> None:
    there = world(**POOLS)
    join(there, "a", pool="safe")
    join(there, "b", pool="spot", capacity="spot")
    production = spec(4, scheduling={"tier": "production"})
    assert [placed(there, name, production) for name in ("r1", "r2")] == ["a", "b"]


def test_owned_nodes_precede_paid_nodes() -> None:
    there = world(**POOLS)
    join(there, "a", pool="safe")
    join(there, "own")
    assert placed(there, "r", spec(2, scheduling={"tier": "production"})) == "own"


def test_a_policy_that_is_adopted_later_counts_from_then_on() -> None:
    there = world()
    join(there, "b", capacity="spot")
    assert placed(there, "r1", spec(1, scheduling={"tier": "strict"})) == "b"
    there.policy = Policy.model_validate(POOLS)
    assert placed(there, "r2", spec(1, scheduling={"tier": "strict"})) == ""


def clusters(**datasets: Any) -> World:
    there = world(pools={"pools": [{**SAFE, "cluster": "east"}, {**SAFE, "name": "west", "cluster": "west",
                                                                       "price_per_slot_hour": 2.0}]})  # fmt: skip
    join(there, "e", cluster="east", pool="safe", datasets=datasets.get("east", ()))
    join(there, "w", cluster="west", pool="west", datasets=datasets.get("west", ()))
    return there


def test_a_run_is_placed_on_the_cheaper_cluster_unless_it_names_one() -> None:
    assert placed(clusters(), "r", spec(2)) == "w"
    assert placed(clusters(), "r", spec(2, scheduling={"clusters": ["east"]})) == "e"
    assert placed(clusters(), "r", spec(6)) == ""  # never across two


def test_a_run_is_placed_where_its_data_is() -> None:
    there = clusters(east=(DATASET,))
    there.accept("r", spec(2, data={"dataset_id": DATASET}))
    there.publish(RunPrepared(run_id="r", dataset_id=DATASET, manifest_uri="s3://datasets/m.json", train_samples=1))
    there.settle()
    assert [member.node_id for member in there.facts(RunPlaced)[0].members] == ["e"]


def test_slots_of_a_cluster_are_left_to_runs_that_fit_nowhere_else() -> None:
    there = clusters()
    there.accept("big", spec(8, scheduling={"clusters": ["west"]}))
    there.settle()
    there.accept("west", spec(4, scheduling={"clusters": ["west"]}, priority=-1))
    there.accept("free", spec(4))
    there.settle()
    where = {fact.run_id: fact.members[0].node_id for fact in there.facts(RunPlaced)}
    assert where == {"free": "e", "west": "w"}


WINDOW = {"start": START + timedelta(hours=1), "end": START + timedelta(hours=2), "node_ids": ["n1"]}


def limited(slots: int, minutes: float, **more: Any) -> Any:
    return spec(slots, scheduling={"limit_s": minutes * 60, **more}, grace_s=30)


def test_nothing_starts_that_would_not_be_done_before_maintenance() -> None:
    there = world(maintenance=[WINDOW])
    join(there, "n1")
    assert placed(there, "long", limited(2, 61)) == ""
    assert there.run("long").waiting_code == "maintenance"
    # Whoever is done by then goes ahead: it keeps nobody waiting.
    assert placed(there, "short", limited(2, 59)) == "n1"
    join(there, "n2")
    there.settle()
    assert there.run("long").parts.keys() == {"n2"}


def test_it_starts_when_maintenance_is_over() -> None:
    there = world(maintenance=[WINDOW])
    join(there, "n1")
    assert placed(there, "long", limited(2, 61)) == ""
    there.wait(2 * 3600)
    there.settle()
    assert there.run("long").parts.keys() == {"n1"}


def test_runs_on_nodes_under_maintenance_stop_in_time() -> None:
    there = world()
    join(there, "n1")
    assert placed(there, "r", spec(2, grace_s=30)) == "n1"
    there.policy = Policy.model_validate({"maintenance": [WINDOW]})
    there.start("r")
    there.wait(3600 - 40)
    there.settle()
    assert there.run("r").stopping is None
    there.wait(15)
    there.settle()
    stop = there.run("r").stopping
    assert stop is not None
    assert (stop.reason, "maintenance" in stop.message) == ("maintenance", True)
    assert stop.grace_s == 30
