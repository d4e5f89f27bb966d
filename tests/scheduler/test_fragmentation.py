"""Placing by fragmentation: the measure by hand, memory against computation, nothing over-committed."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.events.node import NodeJoined
from contracts.scheduling import Policy
from services.scheduler.core.fold import fold
from services.scheduler.core.place.fragmentation import (
    RARITY_PARTS,
    UNCOUNTED_REST,
    FragmentationScores,
    Worth,
    rarity_of,
)
from services.scheduler.core.place.snapshot import NodeCapacity
from services.scheduler.core.state.cluster import Node
from services.scheduler.core.state.slot_spec import SLOT_MILLI, SlotSpec
from services.scheduler.core.state.workload import TYPICAL, Shape, Workload, piece_of, typical_of
from tests.scheduler.world import World, spec

GIB = 2**30


def shape(accelerators: int = 1, milli: int = SLOT_MILLI, cpus: float = 0, **more: Any) -> Shape:
    return Shape(accelerators, milli, int(cpus * 1000), 0)._replace(**more)


def room(
    name: str, left: list[int], cpus: float = 0, *, model: str = "A", memory: int = 0, of: int = 0
) -> NodeCapacity:
    """A node with so much left of its accelerators; ``of`` processors it has all in all (0: as many as are left)."""
    cpu_milli = int((of or cpus) * 1000)
    node = Node(name, "1", len(left), 1.0, accelerator=model, cpu_milli=cpu_milli, memory_bytes=memory)
    return NodeCapacity(node, list(left), int(cpus * 1000), memory, left.count(SLOT_MILLI), sum(left))


# -- the measure --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typical", "left", "cpus", "expected"),
    [
        # By one more run: all accelerators with at least 500, 1,700; by as many as fit: three halves.
        (shape(milli=500), (1000, 700, 300), 64, 2000 - (1700 + 1500) / 2),
        # Processors for one of the three.
        (shape(milli=500, cpus=40), (1000, 700, 300), 64, 2000 - (1700 + 500) / 2),
        # None at all: everything that is left is fragmented.
        (shape(milli=500, cpus=65), (1000, 700, 300), 64, 2000),
        # A gang of two can use all whole accelerators, though only four of the five at once.
        (shape(2), (1000, 1000, 1000, 1000, 1000, 900), 64, 5900 - (5000 + 4000) / 2),
        # ... and cannot use one alone.
        (shape(2), (1000, 900, 900), 64, 2800),
        # Full.
        (shape(), (0, 0), 64, 0),
    ],
)
def test_fragmentation_of_one_shape(typical: Shape, left: tuple[int, ...], cpus: float, expected: float) -> None:
    worth = Worth(((typical, 7),), "A", "")
    assert worth.fragmentation(left, int(cpus * 1000), UNCOUNTED_REST) == expected * worth.scale


def test_fragmentation_is_expected_over_the_workload() -> None:
    halves, wholes = shape(milli=500), shape()
    worth = Worth(((halves, 3), (wholes, 1)), "A", "")
    # 800 left: the halves could use it (one of them 500), the wholes could not.
    assert worth.fragmentation((800,), 0, 0) / worth.scale == (3 * (800 - (800 + 500) / 2) + 1 * 800) / 4


def test_memory_and_kind_of_accelerator_count() -> None:
    typical = ((shape(memory_bytes=60 * GIB), 1), (shape(models=frozenset("B")), 1))
    assert Worth(typical, "A", "").fragmentation((1000,), 0, 59 * GIB) == 1000 * 4
    assert Worth(typical, "A", "").fragmentation((1000,), 0, 60 * GIB) == 1000 * 2
    assert Worth(typical, "B", "").fragmentation((1000,), 0, 60 * GIB) == 0


def test_increase_by_hand() -> None:
    """A half on a half-used accelerator leaves nothing behind; on a whole one it spoils that for wholes."""
    packing = FragmentationScores(((shape(milli=500), 1), (shape(), 1)))
    state = packing.state([1000, 500], UNCOUNTED_REST, UNCOUNTED_REST)
    score = packing.increase(state, shape(milli=500))
    assert score is not None
    assert score.share_of == 500
    # Before, to halves 0 and to wholes 500; afterwards 0 and 0.
    assert score.increase == -500 * packing.worth("").scale / 2
    assert packing.increase(state, shape(2)) is None


def test_shares_go_where_they_fill_up() -> None:
    packing = FragmentationScores(((shape(milli=500), 1), (shape(), 1)))
    rooms = [room("a", [1000, 1000]), room("b", [1000, 500]), room("c", [1000, 600])]
    assert packing.choose(rooms, SlotSpec(milli=500), 1) == [("b", (1,))]


def test_of_equal_scores_the_node_with_the_least_left_wins_then_the_name() -> None:
    packing = FragmentationScores(((shape(), 1),))
    rooms = [room("c", [1000, 1000, 0]), room("b", [1000, 0, 0]), room("a", [1000, 1000, 1000])]
    assert packing.choose(rooms, SlotSpec(), 1) == [("b", (0,))]
    assert packing.choose([room("z", [1000]), room("y", [1000])], SlotSpec(), 1) == [("y", (0,))]


def test_a_run_without_accelerators_leaves_processors_to_those_with_free_ones() -> None:
    packing = FragmentationScores(((shape(cpus=8), 1),))
    rooms = [room("a", [1000], 8), room("b", [0], 8)]
    assert packing.choose(rooms, SlotSpec(milli=0, cpu_milli=4000), 1) == [("b", (0,))]


def test_a_kind_that_others_must_have_is_left_to_them() -> None:
    only_b = shape(models=frozenset("B"))
    packing = FragmentationScores(((only_b, 1), (shape(), 1)))
    rooms = [room("b", [1000], model="B"), room("a", [1000], model="A")]
    assert packing.choose(rooms, SlotSpec(), 1) == [("a", (0,))]


def test_a_rare_kind_that_few_others_must_have_is_left_to_them_although_its_node_is_fuller() -> None:
    only_b = shape(models=frozenset("B"))
    typical = ((only_b, 1), (shape(models=frozenset("A")), 5), (shape(), 4))
    rooms = [room("b", [1000], model="B"), room("a", [1000, 1000], model="A")]
    assert FragmentationScores(typical).choose(rooms, SlotSpec(), 1) == [("b", (0,))]
    rarity = rarity_of(typical, {"A": 90, "B": 10})
    assert rarity == {frozenset("B"): 10 * RARITY_PARTS, frozenset("A"): 100 * RARITY_PARTS // 90}
    assert FragmentationScores(typical, rarity).choose(rooms, SlotSpec(), 1) == [("a", (0,))]


def test_rarity_counts_all_models_that_a_shape_names_and_leaves_out_those_that_are_missing() -> None:
    typical = ((shape(models=frozenset("AB")), 1), (shape(models=frozenset("C")), 1), (shape(), 1))
    assert rarity_of(typical, {"A": 1, "B": 1, "D": 2}) == {frozenset("AB"): 2 * RARITY_PARTS}


def test_large_gangs_lie_on_few_nodes_and_bundles_stay_whole() -> None:
    packing = FragmentationScores(((shape(), 1),))
    rooms = [room("a", [1000] * 4), room("b", [1000] * 8), room("c", [1000] * 8)]
    taken = packing.choose(rooms, SlotSpec(), 12)
    assert sorted(len(slots) for _, slots in taken) == [4, 8]
    apart = packing.choose(rooms, SlotSpec(bundle=2, one_bundle_per_node=True), 6)
    assert sorted((name, len(slots)) for name, slots in apart) == [("a", 2), ("b", 2), ("c", 2)]


def test_nodes_to_avoid_are_taken_when_there_are_no_others() -> None:
    packing = FragmentationScores(((shape(), 1),))
    rooms = [room("a", [1000]), room("b", [1000, 1000])]
    assert packing.choose(rooms, SlotSpec(), 1, avoid={"a"}) == [("b", (0,))]
    assert packing.choose(rooms[:1], SlotSpec(), 1, avoid={"a"}) == [("a", (0,))]


def test_mig_slices_are_counted_by_profile() -> None:
    node = Node("a", "1", 3, 1.0, accelerator="A", profiles=("1g", "2g", "1g"))
    packing = FragmentationScores(((shape(profile="1g"), 1),))
    mig = NodeCapacity(node, [1000, 1000, 1000], 0, 0, 3, 3000)
    assert packing.choose([mig], SlotSpec(profile="2g"), 1) == [("a", (1,))]
    assert packing.choose([mig], SlotSpec(profile="1g"), 2) == [("a", (0, 2))]


# -- the workload -------------------------------------------------------------------------------------


def test_typical_shapes_are_those_that_ask_for_most_and_stand_for_those_like_them() -> None:
    counts = {shape(milli=100 + each): 10 for each in range(TYPICAL)} | {shape(8): 1, shape(milli=99): 2}
    typical = dict(typical_of(counts))
    assert len(typical) == TYPICAL
    assert shape(8) in typical, "rare, but large"
    assert shape(milli=99) not in typical
    assert typical[shape(milli=101)] > typical[shape(milli=102)], "stands for 99 and 100 too"
    assert sum(typical.values()) == pytest.approx(1e6, abs=TYPICAL)


def test_typical_shapes_are_computed_again_when_the_workload_drifts() -> None:
    workload = Workload()
    for _ in range(100):
        workload.add(shape())
    first = workload.typical
    assert [each for each, _ in first] == [shape()]
    for _ in range(5):
        workload.add(shape(8))
    assert workload.typical is first
    for _ in range(100):
        workload.add(shape(8))
    assert {each for each, _ in workload.typical} == {shape(), shape(8)}
    workload.add(Shape(0, 0, 1000, 0))
    assert workload.total == 205, "those without accelerators do not count"


def test_a_workload_survives_a_snapshot() -> None:
    workload = Workload()
    source = random.Random(1)
    for _ in range(500):
        workload.add(
            shape(source.randint(1, 4), cpus=source.randint(0, 4), models=frozenset(source.choice(["", "AB"])))
        )
    assert Workload.from_state(json.loads(json.dumps(workload.to_state()))) == workload


@pytest.mark.parametrize(
    ("slot_spec", "slots", "expected"),
    [
        (SlotSpec(cpu_milli=500), 4, Shape(4, SLOT_MILLI, 2000, 0)),
        (SlotSpec(), 64, Shape(8, SLOT_MILLI, 0, 0)),
        (SlotSpec(bundle=2), 64, Shape(2, SLOT_MILLI, 0, 0)),
        (SlotSpec(one_bundle_per_node=True), 4, Shape(1, SLOT_MILLI, 0, 0)),
        (SlotSpec(milli=0, cpu_milli=500), 2, Shape(0, 0, 1000, 0)),
        (SlotSpec(milli=300, accelerators=frozenset("A")), 1, Shape(1, 300, 0, 0, frozenset("A"))),
    ],
)
def test_the_piece_in_which_a_gang_comes(slot_spec: SlotSpec, slots: int, expected: Shape) -> None:
    assert piece_of(slot_spec, slots) == expected


def test_the_workload_is_learned_from_what_is_submitted() -> None:
    world = World()
    world.accept("r", spec(2, resources={"share": 1, "cpus": 3}))
    assert world.cluster.workload.counts == {Shape(2, SLOT_MILLI, 6000, 0): 1}


# -- whatever comes -------------------------------------------------------------------------------------

MILLI = st.sampled_from([0, 110, 250, 470, 500, 810, 1000])
SLOT_SPECS = st.builds(
    lambda milli, cpus, gib, models, profile: SlotSpec(milli, cpus * 500, gib * GIB, models, profile if milli else ""),
    MILLI,
    st.integers(0, 6),
    st.integers(0, 6),
    st.sampled_from([frozenset[str](), frozenset("A")]),
    st.just(""),
)
ASKED = st.tuples(SLOT_SPECS, st.integers(1, 4), st.booleans())
NODES = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 8), st.integers(0, 8), st.sampled_from("AB")), min_size=1)


@settings(max_examples=150, deadline=None)
@given(nodes=NODES.filter(lambda each: len(each) < 9), asked=st.lists(ASKED, max_size=40))
def test_nothing_is_over_committed_and_what_is_remembered_is_what_is_computed(
    nodes: list[tuple[int, int, int, str]], asked: list[tuple[SlotSpec, int, bool]]
) -> None:
    rooms = [
        NodeCapacity.of(
            Node(f"n{i}", "1", slots, 1.0, accelerator=model, cpu_milli=cpus * 1000, memory_bytes=gib * GIB)
        )
        for i, (slots, cpus, gib, model) in enumerate(nodes)
    ]
    workload = Workload()
    packing = FragmentationScores()
    for slot_spec, count, bundled in asked:
        slot_spec = slot_spec._replace(bundle=count) if bundled else slot_spec
        workload.add(piece_of(slot_spec, count))
        if packing.typical is not workload.typical:
            packing = FragmentationScores(workload.typical)
        fitting = [
            each
            for each in rooms
            if (not slot_spec.accelerators or each.node.accelerator in slot_spec.accelerators) and each.fits(slot_spec)
        ]
        if sum(each.fits(slot_spec) for each in fitting) < count:
            continue
        taken = packing.choose(fitting, slot_spec, count)
        assert taken == FragmentationScores(workload.typical).choose(fitting, slot_spec, count)
        assert sum(len(slots) for _, slots in taken) == count
        assert len({name for name, _ in taken}) == len(taken)
        for name, slots in taken:
            each = rooms[int(name[1:])]
            assert len(set(slots)) == len(slots)
            each.allocate(slot_spec, slots)
            assert min(each.free_milli) >= 0
            assert each.cpu_milli >= 0 or not each.node.cpu_milli
            assert each.memory_bytes >= 0 or not each.node.memory_bytes


@given(
    left=st.lists(st.integers(0, 1000), min_size=1, max_size=8),
    cpus=st.integers(0, 20),
    typical=st.lists(st.tuples(st.integers(1, 4), MILLI.filter(bool), st.integers(0, 9)), min_size=1, max_size=5),
)
def test_fragmentation_is_never_more_than_what_is_left_and_falls_with_more_processors(
    left: list[int], cpus: int, typical: list[tuple[int, int, int]]
) -> None:
    shapes = tuple((shape(count, milli if count == 1 else SLOT_MILLI, cpu), 5) for count, milli, cpu in typical)
    worth = Worth(shapes, "A", "")
    ordered = tuple(sorted(left, reverse=True))
    found = worth.fragmentation(ordered, cpus * 1000, 0)
    assert 0 <= found <= sum(left) * worth.scale
    assert worth.fragmentation(ordered, cpus * 1000 + 1000, 0) <= found


# -- through the scheduler ------------------------------------------------------------------------------


def test_the_scheduler_places_by_it() -> None:
    """Shares, wholes and runs without accelerators, through fold and decide; the same from the log alone."""
    world = World(Policy.model_validate({"order": {"skip": True}, "place": {"by": "fgd"}}))
    for i in range(3):
        world.publish(
            NodeJoined(node_id=f"n{i}", incarnation="1", address="a", slots=4, accelerator="A", cpus=16, lease_ttl_s=10)
        )
    source = random.Random(3)
    for i in range(40):
        count, share = source.choice([(1, 0.5), (1, 0.25), (1, 1), (2, 1), (1, 0)])
        resources = {"share": share, "cpus": source.choice([1, 2])}
        accepted = spec(count, resources=resources, gang={"bundle": count})
        world.accept(f"r{i}", accepted)
        world.settle()
        for node in world.cluster.nodes.values():
            assert min(node.free_milli) >= 0
            assert node.free_cpu_milli >= 0
    used = sum(SLOT_MILLI * node.slots - sum(node.free_milli) for node in world.cluster.nodes.values())
    assert used >= 0.9 * 12 * SLOT_MILLI
    assert fold(world.log).workload == world.cluster.workload
