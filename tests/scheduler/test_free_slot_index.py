"""Placing without a look at every node comes to what placing with one comes to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from contracts.scheduling import Policy
from services.scheduler.core.place.placer import Placer
from services.scheduler.core.place.resource_request import resource_request_of
from services.scheduler.core.place.snapshot import ClusterSnapshot
from services.scheduler.core.place.strategies import pack
from services.scheduler.core.state.slot_spec import SIMPLE
from tests.scheduler.world import World, spec


def cluster(sizes: list[int]) -> World:
    world = World()
    for number, slots in enumerate(sizes):
        world.join(f"n{number}", slots)
    world.accept("r1", spec(1))
    return world


@given(
    sizes=st.lists(st.integers(0, 8), min_size=1, max_size=12),
    counts=st.lists(st.integers(1, 20), min_size=1, max_size=12),
    back=st.integers(0, 3),
)
def test_the_quick_way_places_as_the_thorough_one(sizes: list[int], counts: list[int], back: int) -> None:
    world = cluster(sizes)
    run = world.run("r1")
    placer, space = Placer(world.cluster, Policy(), world.now), ClusterSnapshot.free(world.cluster)
    request = resource_request_of(world.cluster, run)
    assert placer._only_cell(request)
    given_away = []
    for number, count in enumerate(counts):
        rooms = [room for room in space.nodes.values() if room.whole_slots]
        enough = sum(room.whole_slots for room in rooms) >= count
        taken = placer.find(space, run, count, request)
        assert taken == (pack(rooms, SIMPLE, count) if enough else None)
        if taken is not None:
            space.allocate(SIMPLE, taken)
            given_away.append(taken)
        if given_away and number % 4 == back:
            space.release(SIMPLE, given_away.pop(0))


def test_where_nodes_differ_the_thorough_way_is_gone() -> None:
    world = cluster([2, 2])
    world.join("other", 2, machine="b")
    placer = Placer(world.cluster, Policy(), world.now)
    assert placer._only_cell(resource_request_of(world.cluster, world.run("r1"))) == ()
    scarce = Policy.model_validate({"place": {"scarce": ["H100"]}})
    alone = cluster([2, 2])
    assert (
        Placer(alone.cluster, scarce, alone.now)._only_cell(resource_request_of(alone.cluster, alone.run("r1"))) == ()
    )
