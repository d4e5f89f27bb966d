"""A snapshot and the tail of the log are the same as the whole log; a bad snapshot is no snapshot."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts import topology
from contracts.events.run import RunExited
from services.kit.bus import Bus
from services.kit.concurrency import cancel_and_wait
from services.kit.settings import Settings
from services.scheduler import snapshot
from services.scheduler.cluster_cache import ClusterCache
from services.scheduler.core.decide import decide
from services.scheduler.core.decisions import fact_of
from services.scheduler.core.fold import apply, fold
from services.scheduler.core.state import codec
from services.scheduler.core.state.cluster import Cluster
from services.scheduler.core.state.run import Phase
from services.scheduler.core.state.runs import Runs, pack, unpack
from services.scheduler.snapshot import (
    FORMAT_VERSION,
    OTHER_SNAPSHOTS_KEPT,
    SNAPSHOTS_KEPT,
    SnapshotRefused,
    SnapshotStore,
    decode,
    encode,
    name_of,
)
from services.scheduler.snapshot_process import take_snapshot
from tests.scheduler.test_shell import COMMAND, join, request, running, until
from tests.scheduler.world import Chaos, World, spec

STREAM = "stream 1"


def lively(seed: int, acts: int) -> World:
    """A world to which much has happened, and that has come to rest or not."""
    world = World()
    chaos = Chaos(world, random.Random(seed))
    for _ in range(3):
        chaos.submit()
    for _ in range(acts):
        chaos.act()
    if seed % 3 == 0:
        chaos.calm()
    return world


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), acts=st.integers(5, 150), share=st.floats(0, 1))
def test_snapshot_and_tail_are_the_whole_log(seed: int, acts: int, share: float) -> None:
    world = lively(seed, acts)
    cut = int(share * len(world.log))
    early = fold(world.log[:cut])
    recalled = decode(encode(early, STREAM), STREAM)
    assert recalled == early
    for entry in world.log[cut:]:
        apply(recalled, *entry)
    assert recalled == fold(world.log) == world.cluster
    # And it decides the same, whatever the one that has lived through it remembers.
    made = [decide(cluster, world.now, world.policy) for cluster in (recalled, world.cluster)]
    # (In which order runs are settled, each alone, is no part of the decision.)
    facts = [
        sorted((fact_of(each, cluster, world.now) for each in decisions), key=lambda fact: fact.event_id)
        for decisions, cluster in zip(made, (recalled, world.cluster), strict=True)
    ]
    assert facts[0] == facts[1]


@cache
def some_snapshot() -> bytes:
    return encode(lively(3, 120).cluster, STREAM)


@settings(max_examples=100, deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), cut=st.booleans())
def test_a_broken_snapshot_is_refused(place: float, bit: int, cut: bool) -> None:
    content = bytearray(some_snapshot())
    at = int(place * len(content))
    if cut:
        del content[at:]
    else:
        content[at] ^= 1 << bit
    with pytest.raises(SnapshotRefused):
        decode(bytes(content), STREAM)


def test_a_snapshot_of_another_version_or_of_another_stream_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    content = some_snapshot()
    assert isinstance(decode(content, STREAM), Cluster)
    with pytest.raises(SnapshotRefused, match="another stream"):
        decode(content, "stream 2")
    monkeypatch.setattr(snapshot, "FORMAT_VERSION", FORMAT_VERSION + 1)
    with pytest.raises(SnapshotRefused, match=f"of version {FORMAT_VERSION}"):
        decode(content, STREAM)


def test_every_part_of_a_cluster_is_saved() -> None:
    """What a cluster is compared by is in its sections; the index alone follows from the rest."""
    sections = codec.save(Cluster())
    missing = {name for name in Cluster.__dataclass_fields__ if name not in sections}
    assert missing == {"index"}
    assert codec.restore(sections) == Cluster()


# -- runs that are over -------------------------------------------------------------------------------


def ended() -> World:
    world = World()
    world.join("n1", 2)
    world.accept("r1", spec({"min": 1, "max": 2}, params={"lr": 0.1}, tags={"a": "ä"}))
    world.settle()
    world.start("r1")
    world.commit("r1", 7)
    world.exit("r1")
    world.wait(100)
    world.settle()
    return world


def test_a_run_that_is_over_is_small_and_is_what_it_was() -> None:
    world = ended()
    runs = world.cluster.runs
    assert (len(runs), runs.total, list(runs.ids())) == (0, 1, ["r1"])
    assert "r1" in runs
    assert "r2" not in runs
    assert runs.get("r2") is None
    with pytest.raises(KeyError):
        runs["r2"]
    run = runs["r1"]
    assert (run.phase, run.spec.params, run.spec.tags["a"]) == (Phase.COMPLETED, {"lr": 0.1}, "ä")
    assert len(runs.packed["r1"]) < 600
    assert unpack(pack(run)) == run
    assert pack(unpack(pack(run))) == pack(run)


def test_facts_about_a_run_that_is_over_are_kept() -> None:
    world = ended()
    uri = world.commit("r1", 8, final=True)
    assert list(world.run("r1").checkpoints) == [f"s3://models/e/r1/g1/step_{step}.json" for step in (7, 8)]
    assert world.run("r1").last_sequence == len(world.log)
    assert uri in world.cluster.checkpoints
    assert world.cluster.runs.total == 1
    assert not world.step()


def test_a_late_placement_makes_the_run_active_until_it_has_released_its_slots() -> None:
    placed = next(fact for fact, _, _ in ended().log if fact.fact == "placed")
    world = World()
    world.accept("r1", placed.spec)
    world.settle()
    # It was cancelled while a former leader placed it.
    world.cancel("r1")
    world.settle()
    world.join("n1", 2)
    assert (list(world.cluster.runs), world.phase("r1")) == ([], "cancelled")
    world.publish(placed.model_copy(update={"generation": 2}))
    assert list(world.cluster.runs) == []
    world.publish(placed)
    assert list(world.cluster.runs) == ["r1"]
    world.settle()
    assert world.run("r1").stopping is not None
    world.release("r1")
    world.settle()
    assert list(world.cluster.runs) == []
    assert world.phase("r1") == "cancelled"
    assert world.cluster.slots_used == 0


def test_runs_compare_by_all_of_them() -> None:
    one, other = ended().cluster.runs, ended().cluster.runs
    assert one == other
    other.packed["r1"] += b"x"
    assert one != other
    assert one != Runs()


# -- over a real bus ----------------------------------------------------------------------------------


@asynccontextmanager
async def remembering(bus: Bus) -> AsyncIterator[ClusterCache]:
    cache = ClusterCache(bus)
    task = asyncio.create_task(cache.follow())
    try:
        async with asyncio.timeout(90):
            await cache.caught_up.wait()
        yield cache
    finally:
        await cancel_and_wait(task)


async def history(settings: Settings, bus: Bus) -> list[str]:
    """Two runs, one of them over, as a real scheduler has them."""
    async with running(settings):
        await join(bus, "n1", 1)
        first = await request(bus, "train", COMMAND, "first")
        await until(bus, f"run.{first}.placed")
        second = await request(bus, "train", COMMAND, "second")
        await bus.publish(RunExited(run_id=first, generation=1, node_id="n1", outcome="succeeded"))
        await until(bus, f"run.{second}.placed")
        await until(bus, f"run.{first}.completed")
    return [first, second]


async def test_an_instance_begins_with_the_newest_snapshot(
    settings: Settings, make_bus: Callable[..., Any], bus: Bus
) -> None:
    first, second = await history(settings, bus)
    async with remembering(bus) as cache:
        assert cache.snapshot_sequence == 0
        whole = cache.cluster
    await take_snapshot(settings)
    await bus.publish(RunExited(run_id=second, generation=1, node_id="n1", outcome="failed"))
    async with remembering(bus) as cache:
        assert cache.snapshot_sequence == whole.sequence
        assert cache.cluster.sequence > whole.sequence
        assert cache.cluster.runs[first] == whole.runs[first]
        recalled = cache.cluster
    store = await bus.js.object_store(topology.SNAPSHOTS.name)
    for info in await store.list(ignore_deletes=True):
        await store.delete(info.name)
    async with remembering(bus) as cache:
        assert cache.snapshot_sequence == 0
        assert cache.cluster == recalled
    # And a scheduler that has recalled goes on deciding.
    await take_snapshot(settings)
    async with running(settings):
        assert (await until(bus, f"run.{second}.queued", 2))[1].event.reason == "crashed"


async def test_a_bad_snapshot_is_passed_over_for_the_one_before(settings: Settings, bus: Bus) -> None:
    await history(settings, bus)
    name = await take_snapshot(settings)
    store = await bus.js.object_store(topology.SNAPSHOTS.name)
    later = name_of(int(name.partition("/")[2]) - 1)
    await store.put(later, b"this is no snapshot")
    await store.put(name_of(10**15), b"of a stream that was longer")
    assert (found := await SnapshotStore(bus).newest()) is not None
    await store.put(name, (await store.get(name)).data[:-5])
    assert await SnapshotStore(bus).newest() is None
    async with remembering(bus) as cache:
        assert cache.snapshot_sequence == 0
        assert cache.cluster == found


async def test_a_recreated_stream_has_no_snapshots(settings: Settings, bus: Bus) -> None:
    await history(settings, bus)
    await take_snapshot(settings)
    await bus.js.delete_stream("FACTS")
    await bus.connect()
    fresh = Bus("test", settings)
    await fresh.connect()
    try:
        for number in range(20):
            await join(fresh, f"m{number}", 1)
        assert await SnapshotStore(fresh).newest() is None
    finally:
        await fresh.close()


async def test_old_snapshots_are_removed(settings: Settings, bus: Bus) -> None:
    store = await bus.js.object_store(topology.SNAPSHOTS.name)
    for number in range(4):
        # (Earlier versions named snapshots by a digest of the code.)
        await store.put(f"{'0a1b2c3d4e5f6071' if number % 2 else FORMAT_VERSION + 1}/{number:020}", b"x")
    for _ in range(4):
        await join(bus, f"n{_}", 1)
        await take_snapshot(settings)
    names = [info.name for info in await store.list(ignore_deletes=True)]
    own = [name for name in names if name.startswith(f"{FORMAT_VERSION}/")]
    assert (len(own), len(names) - len(own)) == (SNAPSHOTS_KEPT, OTHER_SNAPSHOTS_KEPT)
    newest = await SnapshotStore(bus).newest()
    assert newest is not None
    assert len(newest.nodes) == 4
