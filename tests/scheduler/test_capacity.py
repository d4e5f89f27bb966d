"""What is wanted, as the log makes it: no turns, no nodes for runs that get slots anyway."""

from __future__ import annotations

from typing import Any

import pytest

from contracts.events.capacity import CapacityWanted
from contracts.events.node import NodeJoined, NodeLost
from contracts.events.run import DecisionRecord
from contracts.scheduling import Policy
from services.scheduler.core.capacity import demand
from tests.scheduler.world import World, spec

POOL = {"name": "burst", "slots_per_node": 2, "max_nodes": 3, "price_per_slot_hour": 1.0}


class Pooled(World):
    """A world whose scheduler also says which nodes it wants."""

    def __init__(self, **pools: Any) -> None:
        super().__init__(Policy.model_validate({"pools": {"pools": [POOL], "idle_s": 60, **pools}}))

    def want(self) -> list[tuple[int, tuple[str, ...]]]:
        """Let it say what it wants, and say what that is."""
        self.settle()
        found = demand.compute_demand(self.cluster, self.now, self.policy)
        made = DecisionRecord(at_sequence=self.cluster.sequence, at=self.now)
        for each in found:
            self.publish(demand.capacity_fact(each, self.now, made))
        assert demand.compute_demand(self.cluster, self.now, self.policy) == []
        return [(each.nodes, each.spare) for each in found]

    def submit(self, wanted: Any) -> str:
        run_id = f"r{self.cluster.runs.total}"
        self.accept(run_id, wanted)
        return run_id

    def node_comes(self, node_id: str, life: str = "1") -> None:
        self.publish(
            NodeJoined(node_id=node_id, incarnation=life, address="h", slots=2, lease_ttl_s=5, labels={"pool": "burst"})
        )


def test_a_node_comes_is_used_and_goes() -> None:
    world = Pooled()
    world.join("own", 1)
    run_id = world.submit(spec(3))
    assert world.want() == [(1, ())]
    world.wait(30)
    assert world.want() == []
    world.node_comes("b0")
    # There it is: neither more nor less is wanted, whether the run is placed yet or not.
    assert demand.compute_demand(world.cluster, world.now, world.policy) == []
    assert world.want() == []
    assert world.run(run_id).live
    world.start(run_id)
    world.commit(run_id, 1, final=True)
    world.exit(run_id)
    assert world.want() == []
    world.wait(59)
    assert world.want() == []
    world.wait(2)
    assert world.want() == [(0, ("b0",))]
    world.submit(spec(2))
    assert world.want() == [(1, ())]


def test_a_run_that_is_given_slots_by_others_wants_no_nodes() -> None:
    world = Pooled()
    world.join("own", 2)
    low = world.submit(spec(2))
    world.settle()
    world.submit(spec(2, priority=5))
    world.settle()
    assert world.run(low).stopping is not None
    assert world.want() == []


def test_a_lost_node_is_wanted_again_with_patience() -> None:
    world = Pooled(patience_s=100)
    run_id = world.submit(spec(4))
    assert world.want() == [(2, ())]
    world.node_comes("b0")
    world.node_comes("b1")
    assert world.want() == []
    world.wait(1000)
    world.publish(NodeLost(node_id="b1", incarnation="1"))
    world.settle()
    world.release(run_id)
    world.settle()
    world.wait(2)
    assert world.want() == []
    world.wait(50)
    assert world.want() == []
    world.wait(60)
    # Half of the gang is of no use, and its node may go.
    assert world.want() == [(0, ("b0",))]
    assert world.cluster.capacity["burst"].gave_up_at == world.now


def test_the_fold_keeps_the_last_demand() -> None:
    world = Pooled()
    for sequence, nodes in enumerate((3, 1), 7):
        world.publish(CapacityWanted(pool="burst", nodes=nodes, decided_at=world.now, decided_at_sequence=sequence))
        world.wait(10)
    assert world.cluster.capacity["burst"].nodes == 1


@pytest.mark.parametrize(
    ("needs", "nodes"),
    [
        ({"cpus": 5}, 0),
        ({"memory_bytes": 9 << 30}, 0),
        ({"cpus": 4}, 2),  # one on each node
        ({"cpus": 2, "memory_bytes": 4 << 30}, 1),
        ({"mig_profile": "1g.10gb"}, 0),
    ],
)
def test_no_node_is_wanted_that_could_never_run_what_waits(needs: dict[str, Any], nodes: int) -> None:
    world = Pooled(pools=[POOL | {"cpus_per_node": 4, "memory_bytes_per_node": 8 << 30}])
    world.submit(spec(2, resources=needs))
    assert world.want() == ([(nodes, ())] if nodes else [])


MIG = ("1g.10gb", "2g.20gb")


@pytest.mark.parametrize(("profile", "slots", "nodes"), [("1g.10gb", 1, 1), ("2g.20gb", 2, 2), ("3g.40gb", 1, 0)])
@pytest.mark.parametrize("is_declared", [True, False])
def test_a_node_is_wanted_for_a_mig_profile_that_the_pool_has(
    profile: str, slots: int, nodes: int, is_declared: bool
) -> None:
    world = Pooled(pools=[POOL | ({"slot_profiles": MIG} if is_declared else {})])
    if not is_declared:
        joined = {"slots": 2, "lease_ttl_s": 5, "labels": {"pool": "burst"}, "slot_profiles": MIG}
        world.publish(NodeJoined.model_validate({"node_id": "b0", "incarnation": "1", "address": "h", **joined}))
        world.lose("b0")
    world.submit(spec(slots, resources={"mig_profile": profile}))
    assert world.want() == ([(nodes, ())] if nodes else [])


def test_a_pool_without_a_shape_has_nodes_like_those_that_joined() -> None:
    world = Pooled()
    joined = {"slots": 2, "lease_ttl_s": 5, "labels": {"pool": "burst"}, "cpus": 4}
    world.publish(NodeJoined.model_validate({"node_id": "b0", "incarnation": "1", "address": "h", **joined}))
    world.submit(spec(1, resources={"cpus": 3}))
    world.settle()
    world.submit(spec(1, resources={"cpus": 5}))
    world.submit(spec(1, resources={"cpus": 3}))
    assert world.want() == [(2, ())]
