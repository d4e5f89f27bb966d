"""Victims: the cheapest set of runs after which one that waits fits."""

from __future__ import annotations

import random
import time
from itertools import product

import pytest

from contracts.events.run import RunStopping
from contracts.scheduling import Policy
from services.scheduler.core.place.snapshot import NodeCapacity
from services.scheduler.core.state.cluster import Node
from services.scheduler.core.state.slot_spec import SLOT_MILLI, SlotSpec
from services.scheduler.core.victims import Candidate, PreemptionProblem, Victim, select_victims
from tests.scheduler.world import World, spec


def room(node_id: str, slots: int, left: list[int] | None = None) -> NodeCapacity:
    return NodeCapacity.of(
        Node(node_id, "1", slots, 3.0, free_milli=left if left is not None else [SLOT_MILLI] * slots)
    )


def bundles_after(problem: PreemptionProblem, cell: tuple[str, ...], victims: list[Victim]) -> int:
    """Count what fits once the victims are gone, without the code under test."""
    total = 0
    by_id = {each.run_id: each for each in problem.candidates}
    for node_id in cell:
        left = list(problem.nodes[node_id].free_milli)
        for victim in victims:
            for home, slots in victim.freed:
                for slot in slots if home == node_id else ():
                    left[slot] += by_id[victim.run_id].slot_spec.milli
        free = sum(milli >= problem.slot_spec.milli for milli in left)
        bundle = problem.slot_spec.bundle
        total += min(free // bundle, 1) if problem.slot_spec.one_bundle_per_node else free // bundle
    return total


def choices(candidate: Candidate) -> list[Victim | None]:
    """Every way to preempt a run: not at all, altogether, or by any of the slots of its only node."""
    found: list[Victim | None] = [None, Victim(candidate.run_id, candidate.parts)]
    if len(candidate.parts) == 1:
        node_id, slots = candidate.parts[0]
        for by in range(1, candidate.spare + 1):
            found.append(Victim(candidate.run_id, ((node_id, slots[-by:]),), by))
    return found


def cost(problem: PreemptionProblem, victims: list[Victim]) -> tuple[float, ...]:
    """What is compared: stopped slots by priority, slots, stopped slots, slots by priority, then work."""
    by_id = {each.run_id: each for each in problem.candidates}
    priorities = sorted({each.priority for each in problem.candidates})
    stopped = dict.fromkeys(priorities, 0)
    lost = levels = 0
    work = 0.0
    for victim in victims:
        candidate = by_id[victim.run_id]
        slots = candidate.slots if victim.by is None else victim.by
        lost += slots
        levels += slots * priorities.index(candidate.priority)
        work += candidate.lost_slot_s
        if victim.by is None:
            stopped[candidate.priority] += slots
    return *(stopped[each] for each in reversed(priorities[1:])), lost, sum(stopped.values()), levels, work


def brute_force(problem: PreemptionProblem) -> tuple[float, ...] | None:
    needed = -(-problem.count // problem.slot_spec.bundle)
    best: tuple[float, ...] | None = None
    for chosen in product(*(choices(each) for each in problem.candidates)):
        victims = [each for each in chosen if each is not None]
        price = cost(problem, victims)
        if (best is None or price < best) and any(
            bundles_after(problem, tuple(cell), victims) >= needed for cell in problem.cells
        ):
            best = price
    return best


def small_problem(rng: random.Random) -> PreemptionProblem:
    """A few nodes with a few runs on them, some of them gangs, and a run that waits."""
    nodes = {f"n{number}": rng.randint(1, 4) for number in range(rng.randint(1, 4))}
    left = {node_id: [SLOT_MILLI] * slots for node_id, slots in nodes.items()}
    candidates = []
    for number in range(rng.randint(1, 6)):
        share = rng.choice([SLOT_MILLI, SLOT_MILLI, SLOT_MILLI, 500])
        parts = []
        for node_id in rng.sample(sorted(nodes), min(rng.choice([1, 1, 1, 2, 3]), len(nodes))):
            free = [slot for slot, milli in enumerate(left[node_id]) if milli >= share]
            if free:
                taken = tuple(free[: rng.randint(1, len(free))])
                for slot in taken:
                    left[node_id][slot] -= share
                parts.append((node_id, taken))
        if parts:
            slots = sum(len(taken) for _, taken in parts)
            spare = rng.randint(0, slots - 1) if len(parts) == 1 and rng.random() < 0.3 else 0
            priority = rng.choice([0, 0, 0, 1, 2])
            work = float(rng.randint(0, 20))
            slot_spec = SlotSpec(milli=share)
            candidates.append(Candidate(f"r{number}", slot_spec, tuple(parts), priority, spare, lost_slot_s=work))
    for node_id in nodes:  # and some that may not be preempted
        for slot, milli in enumerate(left[node_id]):
            if milli == SLOT_MILLI and rng.random() < 0.5:
                left[node_id][slot] = 0
    bundle = rng.choice([1, 1, 2, 3])
    slot_spec = SlotSpec(
        milli=rng.choice([SLOT_MILLI, SLOT_MILLI, 500]), bundle=bundle, one_bundle_per_node=rng.random() < 0.2
    )
    ids = sorted(nodes)
    cells = [ids] if rng.random() < 0.6 else [ids[: len(ids) // 2], ids[len(ids) // 2 :]]
    rooms = {node_id: room(node_id, nodes[node_id], left[node_id]) for node_id in nodes}
    return PreemptionProblem(slot_spec, bundle * rng.randint(1, 4), rooms, cells, candidates)


@pytest.mark.parametrize("part", range(10))
def test_brute_force_over_small_clusters_finds_nothing_cheaper(part: int) -> None:
    rng = random.Random(part)
    solved = 0
    for number in range(1000):
        problem = small_problem(rng)
        found, expected = select_victims(problem), brute_force(problem)
        assert (found is None) == (expected is None), (part, number, problem)
        if found is not None:
            assert cost(problem, found) == expected, (part, number, problem, found)
            solved += bool(found)
    assert solved > 200


def full(nodes: int, slots: int = 8) -> World:
    """A cluster full of runs of one slot."""
    world = World(Policy())
    for number in range(nodes):
        world.join(f"n{number:03}", slots)
    for number in range(nodes * slots):
        world.accept(f"r{number:04}", spec(1))
    world.settle()
    for number in range(nodes * slots):
        world.start(f"r{number:04}")
    return world


@pytest.mark.parametrize("nodes", [20, 40, 120, 250])
def test_a_bundle_of_eight_preempts_eight_of_a_full_cluster(nodes: int) -> None:
    rng = random.Random(nodes)
    rooms = {f"n{number:03}": room(f"n{number:03}", 8, [0] * 8) for number in range(nodes)}
    candidates = [
        Candidate(f"{node_id}-{slot}", SlotSpec(), ((node_id, (slot,)),), lost_slot_s=rng.random() * 1000)
        for node_id in rooms
        for slot in range(8)
    ]
    rng.shuffle(candidates)
    problem = PreemptionProblem(SlotSpec(bundle=8), 8, rooms, [list(rooms)], candidates)
    found = select_victims(problem)
    assert found is not None
    assert len(found) == 8
    work = {node_id: sum(e.lost_slot_s for e in candidates if e.parts[0][0] == node_id) for node_id in rooms}
    assert {victim.freed[0][0] for victim in found} == {min(work, key=work.__getitem__)}


def test_a_bundle_preempts_the_runs_of_one_node_alone() -> None:
    world = full(5)
    rng = random.Random(1)
    for run_id in rng.sample(sorted(world.cluster.active), 30):
        world.wait(1)
        world.commit(run_id, 1)
    world.accept("bundle", spec(8, priority=5, gang={"bundle": 8}))
    world.settle()
    stops = world.facts(RunStopping)
    assert len(stops) == 8
    assert len({part.node_id for stop in stops for part in world.run(stop.run_id).parts.values()}) == 1


@pytest.mark.parametrize("strict", [False, True])
def test_a_gang_that_lies_together_preempts_within_one_zone(strict: bool) -> None:
    rng = random.Random(2)
    rooms = {f"n{number}": room(f"n{number}", 4, [0] * 4) for number in range(8)}
    zones = [[f"n{number}" for number in range(8) if number % 2 == zone] for zone in range(2)]
    candidates = [
        Candidate(f"{node_id}-{slot}", SlotSpec(), ((node_id, (slot,)),), lost_slot_s=rng.randint(1, 100))
        for node_id in rooms
        for slot in range(4)
    ]
    cells = zones if strict else [*zones, list(rooms)]
    found = select_victims(PreemptionProblem(SlotSpec(), 8, rooms, cells, candidates))
    assert found is not None
    by_work = sorted(candidates, key=lambda each: each.lost_slot_s)
    within = [[each for each in by_work if each.parts[0][0] in zone][:8] for zone in zones] if strict else [by_work[:8]]
    best = min(sum(each.lost_slot_s for each in group) for group in within)
    work = {each.run_id: each.lost_slot_s for each in candidates}
    assert sum(work[victim.run_id] for victim in found) == best


def test_a_gang_that_spans_nodes_is_preempted_rather_than_more_slots_of_others() -> None:
    rooms = {f"n{number}": room(f"n{number}", 8, [0] * 8) for number in range(40)}
    candidates = [
        Candidate(f"gang{number}", SlotSpec(), tuple((f"n{number * 2 + i}", tuple(range(8))) for i in range(2)))
        for number in range(20)
    ]
    problem = PreemptionProblem(SlotSpec(bundle=8), 64, rooms, [list(rooms)], candidates)
    found = select_victims(problem)
    assert found is not None
    assert len(found) == 4


def test_victims_of_a_large_cluster_are_found_in_time() -> None:
    rng = random.Random(3)
    rooms = {f"n{number:03}": room(f"n{number:03}", 8, [0] * 8) for number in range(250)}
    candidates, left = [], {node_id: list(range(8)) for node_id in rooms}
    for number in range(60):
        homes = rng.sample(sorted(rooms), rng.choice([2, 4, 8]))
        parts = tuple((home, tuple(left[home])) for home in homes if len(left[home]) == 8)
        for home, _ in parts:
            left[home] = []
        if parts:
            candidates.append(Candidate(f"g{number}", SlotSpec(), parts, lost_slot_s=rng.random() * 1000))
    for node_id, slots in left.items():
        while slots:
            taken = tuple(slots[: rng.choice([1, 1, 2, 4])])
            del slots[: len(taken)]
            run_id = f"{node_id}-{taken[0]}"
            candidates.append(Candidate(run_id, SlotSpec(), ((node_id, taken),), lost_slot_s=rng.random() * 1000))
    for slot_spec, count in (
        (SlotSpec(bundle=8), 8),
        (SlotSpec(bundle=8), 512),
        (SlotSpec(), 1),
        (SlotSpec(), 1024),
    ):
        started = time.process_time()
        found = select_victims(PreemptionProblem(slot_spec, count, rooms, [list(rooms)], candidates))
        spent_s = time.process_time() - started
        assert found is not None
        slots = sum(len(slots) for victim in found for _, slots in victim.freed)
        assert slots <= count * 1.02
        assert spent_s < 5.0
