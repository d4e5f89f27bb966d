"""Many facts in one round trip: all of them or none, each under its own expectation."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from contracts import subjects, topology
from contracts.events.run import RunCancelled, RunPlaced, RunQueued
from services.kit.batch import BatchPublisher, DuplicateMessage, WrongLastSequence, split_into_batches
from services.kit.bus import Bus, ExpectedSequence, OutgoingMessage, TransientError
from services.kit.reconcile import reconcile
from tests.kit.support import TOPOLOGY

PLACED = RunPlaced.subject_filter()


def queued(bus: Bus, run_id: str, generation: int = 1, last: int | None = None, subject: str = "") -> OutgoingMessage:
    expected = None if last is None else ExpectedSequence(last, subject or subjects.run(run_id))
    return bus.build_message(RunQueued(run_id=run_id, next_generation=generation), expected=expected)


def cancelled(bus: Bus, run_id: str) -> OutgoingMessage:
    return bus.build_message(RunCancelled(run_id=run_id, reason="test"))


async def stored(bus: Bus) -> list[tuple[int, str]]:
    return [(message.sequence, message.envelope.id) for message in await bus.read_history()]


async def test_a_batch_is_stored_in_order_behind_each_others_backs(bus: Bus) -> None:
    first = await bus.publish(RunCancelled(run_id="before", reason="test"))
    facts = [queued(bus, f"r{number:03}", last=0) for number in range(300)]
    done = await BatchPublisher(bus).publish([*facts, cancelled(bus, "r000")])
    assert (done.first, done.last) == (first.sequence + 1, first.sequence + 301)
    ids = [event_id for _, event_id in await stored(bus)]
    assert ids[1:] == [*(fact.id for fact in facts), "run/r000/cancelled"]


async def test_one_failed_expectation_stores_nothing_and_names_the_last_sequence(bus: Bus) -> None:
    ack = await bus.publish(RunCancelled(run_id="r7", reason="test"))
    facts = [queued(bus, f"r{number}", last=0) for number in range(10)]
    with pytest.raises(WrongLastSequence) as caught:
        await BatchPublisher(bus).publish(facts)
    assert caught.value.sequence == ack.sequence
    assert len(await stored(bus)) == 1
    assert (
        await BatchPublisher(bus).publish([fact for fact in facts if "r7" not in fact.subject])
    ).last == ack.sequence + 9


async def test_a_fence_over_many_subjects_holds_for_the_batch_behind_it(bus: Bus) -> None:
    """The expectation speaks of the stream before the batch, and guards what comes after it in the batch."""
    fence = ExpectedSequence(0, "run.*.queued")
    facts = [bus.build_message(RunQueued(run_id="a", next_generation=1), expected=fence), queued(bus, "b")]
    done = await BatchPublisher(bus).publish(facts)
    late = [bus.build_message(RunQueued(run_id="c", next_generation=1), expected=fence), queued(bus, "d")]
    with pytest.raises(WrongLastSequence) as caught:
        await BatchPublisher(bus).publish(late)
    assert caught.value.sequence == done.last
    assert len(await stored(bus)) == 2


async def test_what_is_there_already_is_said_and_nothing_is_added(bus: Bus) -> None:
    facts = [queued(bus, "a", last=0), queued(bus, "b", last=0)]
    await BatchPublisher(bus).publish(facts)
    with pytest.raises(DuplicateMessage):
        await BatchPublisher(bus).publish(facts)  # the answer was lost, say
    with pytest.raises(DuplicateMessage):
        await BatchPublisher(bus).publish([queued(bus, "c"), queued(bus, "b")])
    assert len(await stored(bus)) == 2
    acks = [await bus.send(fact) for fact in facts]
    assert [ack.duplicate for ack in acks] == [True, True]


async def test_a_stream_without_batches_gets_none(make_bus: Callable[..., Any]) -> None:
    """A server that does not know the headers would store the messages one by one, past their fence."""
    bus: Bus = await make_bus()
    await bus.js.delete_stream("FACTS")
    await reconcile(bus.js, TOPOLOGY)  # its own stream on the same subjects, without
    batches = BatchPublisher(bus, "TEST")
    assert not await batches.is_available()
    with pytest.raises(TransientError):
        await batches.publish([queued(bus, "a"), queued(bus, "b")])
    assert (await bus.js.stream_info("TEST")).state.messages == 0


async def test_a_stream_from_before_is_allowed_batches(make_bus: Callable[..., Any]) -> None:
    bus: Bus = await make_bus()
    await bus.js.delete_stream("FACTS")
    await reconcile(bus.js, topology.Topology((replace(topology.FACTS, atomic=False),), (), ()))
    assert not await BatchPublisher(bus).is_available()
    changes = await reconcile(bus.js, topology.Topology((topology.FACTS,), (), ()))
    assert changes == ["updated stream FACTS"]
    assert await BatchPublisher(bus).is_available()
    assert await reconcile(bus.js, topology.Topology((topology.FACTS,), (), ())) == []


async def test_everything_twice_changes_nothing(make_bus: Callable[..., Any], settings: Any) -> None:
    bus = Bus("test", settings.model_copy(update={"inject_duplicates": True}))
    await bus.connect()
    try:
        await BatchPublisher(bus).publish([queued(bus, "a", last=0), queued(bus, "b", last=0)])
        assert len(await stored(bus)) == 2
    finally:
        await bus.close()


def test_parts_keep_the_order_and_the_limits() -> None:
    facts = [OutgoingMessage(str(n), "t", f"run.{n}.queued", {}, json.dumps(n).encode() * 10) for n in range(25)]
    cut = split_into_batches(facts, max_messages=10)
    assert [len(part) for part in cut] == [10, 10, 5]
    assert [one for part in cut for one in part] == facts
    assert [len(part) for part in split_into_batches(facts[:4], max_bytes=20)] == [2, 2]
    assert split_into_batches([]) == []
