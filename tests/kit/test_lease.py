"""Leases: one holder at a time, by the watcher's own clock."""

from __future__ import annotations

import asyncio

from prometheus_client import REGISTRY

from contracts import topology
from services.kit.bus import Bus
from services.kit.lease import Lease, LeaseWatch, read_record, read_records
from tests.manual_clock import ManualClock


async def test_a_lease_has_one_holder_and_is_handed_on_when_released(bus: Bus) -> None:
    bucket = await bus.open_bucket(topology.LEASES)
    a, b = Lease(bucket, "x", "a", 1.0), Lease(bucket, "x", "b", 1.0)
    assert await a.try_acquire()
    assert not await b.try_acquire()
    assert await a.renew()
    await a.release()
    assert not a.is_held
    assert await b.try_acquire()


async def test_a_lease_that_is_not_renewed_is_taken_over_and_the_old_holder_finds_out(bus: Bus) -> None:
    bucket = await bus.open_bucket(topology.LEASES)
    clock = ManualClock()
    a, b = Lease(bucket, "x", "a", 3.0, clock=clock), Lease(bucket, "x", "b", 3.0, clock=clock)
    assert await a.try_acquire()
    token = a.token
    assert not await b.try_acquire()  # b sees the revision for the first time now
    clock.advance(2.9)
    assert not a.is_held, "the holder stops trusting itself before a rival may take over"
    assert not await b.try_acquire()
    clock.advance(0.2)
    assert await b.try_acquire()
    assert b.token > token
    assert not await a.renew()


async def test_of_many_rivals_one_wins(bus: Bus) -> None:
    bucket = await bus.open_bucket(topology.LEASES)
    rivals = [Lease(bucket, "x", str(n), 1.0) for n in range(20)]
    outcomes = await asyncio.gather(*(rival.try_acquire() for rival in rivals))
    assert sum(outcomes) == 1


async def test_a_watch_finds_expired_leases_by_its_own_clock(bus: Bus) -> None:
    bucket = await bus.open_bucket(topology.LEASES)
    clock = ManualClock()
    lease = Lease(bucket, "node.n1", "n1", 1.0, data=lambda: {"address": "127.0.0.1"})
    await lease.try_acquire()
    watch = LeaseWatch(clock)
    records = await read_records(bus, "node.")
    assert records["node.n1"].data == {"address": "127.0.0.1"}
    assert not watch.is_expired("node.n1", records["node.n1"], 1.0)
    clock.advance(1.1)
    assert watch.is_expired("node.n1", await read_record(bucket, "node.n1"), 1.0)
    await lease.renew()
    assert not watch.is_expired("node.n1", await read_record(bucket, "node.n1"), 1.0)
    clock.advance(1.1)
    assert watch.is_expired("node.n2", None, 1.0) is False


async def test_leadership_ends_when_another_takes_over(bus: Bus) -> None:
    bucket = await bus.open_bucket(topology.LEASES)
    async with Lease(bucket, "x", "a", 0.5).leadership() as keeper:
        await bucket.put("x", b'{"holder":"b","ttl_s":9}')
        await asyncio.wait_for(keeper, 60)


async def test_an_invalid_record_is_a_lease_without_a_holder(bus: Bus) -> None:
    bucket = await bus.open_bucket(topology.LEASES)
    assert await Lease(bucket, "node.n1", "n1", 1.0).try_acquire()
    times = (b'{"holder": "x", "ttl_s": "soon"}', b'{"holder": "x", "ttl_s": NaN}')
    for nonsense in (b"", b"no json", b"[]", b"[" * 100_000, *times):
        await bucket.put("node.n2", nonsense)
        records = await read_records(bus, "node.")
        assert records["node.n1"].holder == "n1"
        assert records["node.n2"].ttl_s == 0
    clock = ManualClock()
    lease = Lease(bucket, "node.n2", "n2", 1.0, clock=clock)
    assert not await lease.try_acquire()
    clock.advance(0.1)
    assert await lease.try_acquire()


async def test_no_node_is_in_a_label(bus: Bus) -> None:
    lease = Lease(await bus.open_bucket(topology.LEASES), "node.gpu-17", "a", 10.0)
    async with lease.leadership():
        assert REGISTRY.get_sample_value("trainbus_leader", {"lease": "node"}) == 1
    assert REGISTRY.get_sample_value("trainbus_leader", {"lease": "node"}) == 0


async def test_a_write_whose_answer_was_lost_renews_nothing(bus: Bus) -> None:
    """It may have arrived long ago: the rivals count from then. The lease is renewed by the next write."""
    bucket = await bus.open_bucket(topology.LEASES)
    confirmed: list[float] = []

    async def note(asked_at: float) -> None:
        confirmed.append(asked_at)

    lease = Lease(bucket, "x", "a", 1.0, clock=ManualClock(), on_confirmed=note)
    assert await lease.try_acquire()
    arrived = await bucket.put("x", lease._value())
    assert await lease.renew()
    record = await read_record(bucket, "x")
    assert record is not None
    assert record.revision == lease.token > arrived
    assert len(confirmed) == 2
