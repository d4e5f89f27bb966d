"""What becomes of a message: dead letters, limits, a connection that the server closes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from faststream.nats import TestNatsBroker

from contracts.envelope import RawMessage
from contracts.events.run import RunCancelled
from services.kit import metrics, pull_subscriber
from services.kit.batch import BatchPublisher
from services.kit.bus import Bus, Message, PoisonMessage
from services.kit.clock import SystemClock
from services.kit.handlers import Handlers
from services.kit.reconcile import reconcile
from services.kit.settings import Settings
from tests.kit.support import CONSUMER, OFTEN, TOPOLOGY, until
from trainbus.client.errors import TrainbusError
from trainbus.operate import dead_letters
from trainbus.operate.connection import Connection

FACT = RunCancelled(run_id="r1", reason="x")


def handled(outcome: str, event_type: str = RunCancelled.type) -> float:
    return metrics.HANDLED.labels(CONSUMER.name, event_type, outcome)._value.get()


@pytest_asyncio.fixture
async def bus(settings: Settings) -> AsyncIterator[Bus]:
    limits = {"dead_letter_max_consecutive": 3}
    made = Bus("test", settings.model_copy(update=limits))
    await made.connect(reconcile_topology=False)
    await reconcile(made.js, TOPOLOGY)
    await made.js.update_stream((await made.js.stream_info("TEST")).config.evolve(allow_atomic=True))
    yield made
    await made.close()


async def count_dead_letters(bus: Bus) -> int:
    return (await bus.js.stream_info("DEAD_LETTERS")).state.messages


async def wait_for_dead_letters(bus: Bus, count: int) -> None:
    async def stored() -> bool:
        return await count_dead_letters(bus) == count

    await until(stored, f"{count} dead letters")


async def test_a_fact_of_an_atomic_batch_becomes_a_dead_letter(bus: Bus) -> None:
    """Its ``Nats-Batch-*`` headers would make the server refuse the dead letter, for ever."""

    @bus.subscriber(CONSUMER, RunCancelled)
    async def on_cancelled(_: Message[RunCancelled]) -> None:
        raise PoisonMessage("never")

    facts = [bus.build_message(RunCancelled(run_id=f"r{n}", reason="x")) for n in range(2)]
    await BatchPublisher(bus, "TEST").publish(facts)
    await bus.start()
    await wait_for_dead_letters(bus, 2)


@pytest.mark.parametrize("header", ["Nats-Expected-Stream", "Nats-Expected-Last-Sequence", "nats-expected-last-msg-id"])
async def test_a_clients_control_headers_do_not_keep_a_message_from_being_a_dead_letter(bus: Bus, header: str) -> None:
    @bus.subscriber(CONSUMER, RunCancelled)
    async def on_cancelled(_: Message[RunCancelled]) -> None:
        raise PoisonMessage("never")

    value = {"Nats-Expected-Stream": "TEST", "Nats-Expected-Last-Sequence": "0"}.get(header, "")
    await bus.nc.publish(FACT.subject, b'{"run_id":"r1","reason":"x"}', headers={header: value, "Nats-Msg-Id": "one"})
    await bus.start()
    await wait_for_dead_letters(bus, 1)


async def test_headers_that_fill_a_message_leave_room_for_the_reason(bus: Bus) -> None:
    @bus.subscriber(CONSUMER, RunCancelled)
    async def on_cancelled(_: Message[RunCancelled]) -> None:
        raise PoisonMessage("never")

    large = {"x-large": "x" * 60_000, "ce-id": "kept"}
    await bus.js.publish(FACT.subject, b'{"run_id":"r1","reason":"x"}', headers=large)
    await bus.start()
    await wait_for_dead_letters(bus, 1)
    letter = await bus.js.get_last_msg("DEAD_LETTERS", "dead.>")
    assert letter.headers["ce-id"] == "kept"
    assert letter.headers["trainbus-dead-headers-cut"] == "true"


async def test_an_event_whose_id_fills_a_message_is_refused_and_the_connection_stays(bus: Bus) -> None:
    """The id becomes two headers of each fact that it leads to: the server closes the connection at such a message."""

    @bus.subscriber(CONSUMER, RunCancelled)
    async def on_cancelled(message: Message[RunCancelled]) -> None:
        await bus.publish(RunCancelled(run_id="answer", reason="x"), message.envelope)

    attributes = {"specversion": "1.0", "id": "x" * 900_000, "source": "test", "type": RunCancelled.type}
    event = json.dumps({**attributes, "data": {"run_id": "r1", "reason": "x"}}).encode()
    await bus.js.publish(FACT.subject, event, headers={"content-type": "application/cloudevents+json"})
    await bus.start()
    await wait_for_dead_letters(bus, 1)
    assert bus.connected
    letter = await bus.js.get_last_msg("DEAD_LETTERS", "dead.>")
    assert "more than the server takes" in letter.headers["trainbus-dead-reason"]


async def test_a_connection_that_the_server_closes_is_opened_again(bus: Bus) -> None:
    seen: list[str] = []

    @bus.subscriber(CONSUMER, RunCancelled)
    async def on_cancelled(message: Message[RunCancelled]) -> None:
        seen.append(message.event.run_id)

    async def follow() -> None:
        async for batch in bus.follow("TEST"):
            followed.extend(message.event.run_id for message in batch)

    followed: list[str] = []
    reader = asyncio.create_task(follow())
    await bus.start()
    await bus.publish(FACT)
    await until(lambda: seen == followed == ["r1"], "the first event")
    await bus.nc.publish("elsewhere", b"", headers={"x": "x" * (bus.nc.max_payload + 1)})
    await until(lambda: not bus.connected, "the end of the connection")
    await until(lambda: bus.connected, "the connection")
    await bus.publish(RunCancelled(run_id="r2", reason="x"))
    await until(lambda: seen == followed == ["r1", "r2"], "the second event")
    assert not reader.done()
    reader.cancel()
    with pytest.raises(TrainbusError, match="no dead letter 1"):
        await dead_letters.retry_dead_letter(Connection(bus.nc), 1)
    answer = await Connection(bus.nc).query(CONSUMER.name, "retry", {"sequence": 1}, 5.0)
    assert answer is not None, "its endpoints answer on the new connection"


async def test_a_dead_letter_that_cannot_be_stored_is_counted(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    before = handled("failed")

    @bus.subscriber(CONSUMER, RunCancelled)
    async def on_cancelled(_: Message[RunCancelled]) -> None:
        raise PoisonMessage("never")

    async def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("the server refuses")

    await bus.start()
    publish = type(bus.js).publish
    monkeypatch.setattr(bus._handlers._groups[CONSUMER.name], "dead_letter", refuse)
    await publish(bus.js, FACT.subject, b'{"run_id":"r1","reason":"x"}')
    await until(lambda: handled("failed") == before + 1, "the failure to be counted")


async def test_a_consumer_stops_rather_than_dead_letter_a_whole_stream(bus: Bus) -> None:
    @bus.subscriber(CONSUMER, RunCancelled)
    async def on_cancelled(_: Message[RunCancelled]) -> None:
        raise ValueError("a bad deploy")

    for number in range(8):
        await bus.publish(RunCancelled(run_id=f"r{number}", reason="x"))
    await bus.start()
    await until(lambda: bus.stopped_consumers == [CONSUMER.name], "the consumer to stop")
    await asyncio.sleep(0.5)  # time for anything that it would still do
    assert await count_dead_letters(bus) == 3
    info = await bus.js.consumer_info("TEST", CONSUMER.name)
    assert info.num_pending + info.num_ack_pending == 5, "the others wait"


@pytest.mark.parametrize("body", [b"no JSON", b'{"run_id":"r1","reason":"x"}'], ids=["unreadable", "senseless"])
async def test_nonsense_in_a_services_name_stops_no_consumer(bus: Bus, body: bytes) -> None:
    @bus.subscriber(CONSUMER, RunCancelled)
    async def on_cancelled(_: Message[RunCancelled]) -> None:
        raise PoisonMessage("nothing in the log supports it")

    for number in range(8):
        named = {"ce-source": "trainbus/scheduler", "ce-id": str(number)}
        await bus.js.publish(FACT.subject, body, headers=named)
    await bus.start()
    await wait_for_dead_letters(bus, 8)
    assert bus.stopped_consumers == []


async def test_a_long_handler_keeps_the_messages_behind_it(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is pulled ahead must not be delivered again meanwhile."""
    monkeypatch.setattr(pull_subscriber, "EXTEND_SHARE", OFTEN)
    seen: list[tuple[str, int]] = []
    release = asyncio.Event()

    @bus.subscriber(CONSUMER, RunCancelled)
    async def on_cancelled(message: Message[RunCancelled]) -> None:
        seen.append((message.event.run_id, message.deliveries))
        await release.wait()

    for number in range(3):
        await bus.publish(RunCancelled(run_id=f"r{number}", reason="x"))
    await bus.start()
    await until(lambda: len(seen) == 1, "the first delivery")
    await asyncio.sleep(CONSUMER.ack_wait_s * 1.5)
    release.set()
    await until(lambda: len(seen) == 3, "the others")
    assert seen == [("r0", 1), ("r1", 1), ("r2", 1)]


async def test_what_was_pulled_ahead_goes_back_at_the_end(bus: Bus, settings: Settings) -> None:
    entered, release = asyncio.Event(), asyncio.Event()

    @bus.subscriber(CONSUMER, RunCancelled)
    async def on_cancelled(_: Message[RunCancelled]) -> None:
        entered.set()
        await release.wait()

    for number in range(3):
        await bus.publish(RunCancelled(run_id=f"r{number}", reason="x"))
    await bus.start()
    await entered.wait()
    asyncio.get_running_loop().call_soon(release.set)  # while the bus stops
    await bus.stop()
    other = await bus.js.pull_subscribe_bind(consumer=CONSUMER.name, stream="TEST")
    found = []
    while len(found) < 2:  # a fetch ends with what there is, and each message goes back by itself
        found += await other.fetch(2 - len(found), timeout=30)
    assert sorted(msg.subject for msg in found) == ["run.r1.cancelled", "run.r2.cancelled"]


async def test_handlers_run_without_a_server() -> None:
    """FastStream's test broker runs decoding, middlewares and handler in memory."""
    seen: list[RunCancelled] = []
    letters: list[str] = []

    async def dead_letter(_: object, raw: RawMessage, reason: str) -> None:
        letters.append(f"{raw.subject}: {reason}")

    async def on_cancelled(message: Message[RunCancelled]) -> None:
        seen.append(message.event)
        if message.event.reason == "bad":
            raise PoisonMessage("never")

    bus = Bus("test", Settings(), SystemClock())
    handlers = Handlers("test", Settings(), SystemClock(), dead_letter)
    handlers.add(CONSUMER, RunCancelled)(on_cancelled)
    handlers.include_in(bus.broker)
    async with TestNatsBroker(bus.broker) as broker:
        for run_id, reason in (("r1", "x"), ("r2", "bad")):
            body = {"run_id": run_id, "reason": reason}
            await broker.publish(body, f"run.{run_id}.cancelled", headers={"ce-id": run_id})
        await broker.publish("nonsense", "run.r3.cancelled", headers={"ce-id": "r3"})
    assert [event.run_id for event in seen] == ["r1", "r2"]
    assert [letter.split(":")[0] for letter in letters] == ["run.r2.cancelled", "run.r3.cancelled"]


async def test_a_retry_reaches_its_consumer_alone_and_removes_the_dead_letter(bus: Bus) -> None:
    deployed, seen = asyncio.Event(), []

    @bus.subscriber(CONSUMER, RunCancelled)
    async def on_cancelled(message: Message[RunCancelled]) -> None:
        seen.append((message.stream, message.sequence, message.envelope.id))
        if not deployed.is_set():
            raise PoisonMessage("a bad deploy")

    await bus.publish(FACT)
    await bus.start()
    await wait_for_dead_letters(bus, 1)
    link = Connection(bus.nc)
    (letter,) = await dead_letters.list_dead_letters(link, CONSUMER.name)
    assert (letter.reason, letter.message.subject) == ("a bad deploy", FACT.subject)
    with pytest.raises(TrainbusError, match="a bad deploy"):
        await dead_letters.retry_dead_letter(link, letter.sequence)
    assert await count_dead_letters(bus) == 1, "it failed again and is kept"
    deployed.set()
    await dead_letters.retry_dead_letter(link, letter.sequence)
    assert seen == [("TEST", 1, FACT.event_id)] * 3
    assert await count_dead_letters(bus) == 0
    assert (await bus.js.stream_info("TEST")).state.messages == 1, "no other consumer got it again"


async def test_a_retry_that_succeeds_lets_a_stopped_consumer_go_on(bus: Bus) -> None:
    deployed, seen = asyncio.Event(), []

    @bus.subscriber(CONSUMER, RunCancelled)
    async def on_cancelled(message: Message[RunCancelled]) -> None:
        if not deployed.is_set():
            raise ValueError("a bad deploy")
        seen.append(message.event.run_id)

    for number in range(8):
        await bus.publish(RunCancelled(run_id=f"r{number}", reason="x"))
    await bus.start()
    await until(lambda: bus.stopped_consumers == [CONSUMER.name], "the consumer to stop")
    deployed.set()
    for letter in await dead_letters.list_dead_letters(Connection(bus.nc)):
        await dead_letters.retry_dead_letter(Connection(bus.nc), letter.sequence)
    await until(lambda: len(seen) == 8, "every message to be handled")
    assert bus.stopped_consumers == []


async def test_a_dead_letter_is_dropped_and_a_missing_one_is_named(bus: Bus) -> None:
    @bus.subscriber(CONSUMER, RunCancelled)
    async def on_cancelled(_: Message[RunCancelled]) -> None:
        raise PoisonMessage("never")

    await bus.publish(FACT)
    await bus.start()
    await wait_for_dead_letters(bus, 1)
    link = Connection(bus.nc)
    (letter,) = await dead_letters.list_dead_letters(link)
    await dead_letters.drop_dead_letter(link, letter.sequence)
    assert await dead_letters.list_dead_letters(link) == []
    with pytest.raises(TrainbusError, match=f"no dead letter {letter.sequence}"):
        await dead_letters.retry_dead_letter(link, letter.sequence)
