"""Publishing under conditions, reading the log, following it."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

import pytest
from structlog.testing import CapturingLogger

from contracts import topology
from contracts.base import run_id_for
from contracts.envelope import MAX_BODY_BYTES
from contracts.events.checkpoint import CheckpointCommitted
from contracts.events.run import CheckpointRef, RunCancelled, RunPlaced
from contracts.events.train import TrainRequested
from contracts.spec.run import RunSpec
from services.kit import follow
from services.kit.bus import Bus, Conflict, ExpectedSequence, PoisonMessage, UndecodableEvent
from services.kit.reconcile import reconcile
from tests.kit.support import until
from tests.manual_clock import ManualClock
from trainbus.embedded.servers import NatsServer

SPEC = RunSpec(name="a", command=["true"])


def placed(run_id: str, generation: int) -> RunPlaced:
    now = ManualClock().now()
    return RunPlaced(
        run_id=run_id, generation=generation, members=(), world_size=1, spec=SPEC, decided_at_sequence=0, decided_at=now
    )


def committed(run_id: str, generation: int) -> CheckpointCommitted:
    checkpoint = CheckpointRef(uri="s3://models/x.json", step=1, epoch=1, samples_consumed=1)
    return CheckpointCommitted(run_id=run_id, generation=generation, checkpoint=checkpoint, size_bytes=1)


async def test_the_same_fact_twice_is_stored_once(bus: Bus) -> None:
    fact = RunCancelled(run_id="r1", reason="x")
    first, second = await bus.publish(fact), await bus.publish(fact)
    assert (first.sequence, second.duplicate) == (second.sequence, True)


async def test_two_leaders_cannot_both_place(bus: Bus) -> None:
    """The condition is over the wildcard: a publisher that has not seen the other placement is refused."""
    await bus.publish(placed("r1", 1), expected=ExpectedSequence(0, "run.*.placed"))
    with pytest.raises(Conflict):
        await bus.publish(placed("r2", 1), expected=ExpectedSequence(0, "run.*.placed"))


async def test_a_zombie_cannot_commit(bus: Bus) -> None:
    old = await bus.publish(placed("r1", 1))
    new = await bus.publish(placed("r1", 2))
    with pytest.raises(Conflict):
        await bus.publish(committed("r1", 1), expected=ExpectedSequence(old.sequence, "run.r1.placed"))
    await bus.publish(committed("r1", 2), expected=ExpectedSequence(new.sequence, "run.r1.placed"))


async def test_a_publish_whose_answer_was_lost_is_recognised(bus: Bus) -> None:
    """Repeating a conditional publish that did succeed is no conflict, even past the duplicate window."""
    fact = RunCancelled(run_id="r1", reason="x")
    ack = await bus.publish(fact, expected=ExpectedSequence(0))
    await bus.js.update_stream((await bus.js.stream_info("FACTS")).config.evolve(duplicate_window=0.1))
    await asyncio.sleep(0.5)  # the server forgets ids after its window
    again = await bus.publish(fact, expected=ExpectedSequence(0))
    assert again.sequence == ack.sequence


async def test_closing_ends_well_where_the_connection_is_lost_meanwhile(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lose_connection() -> None:
        raise ConnectionResetError("Connection lost")

    bus.nc._pending, bus.nc._pending_data_size = [b"PING\r\n"], 6  # what the client sends before it closes
    monkeypatch.setattr(bus.nc._transport, "drain", lose_connection)
    await bus.close()


async def test_last_and_history(bus: Bus) -> None:
    assert await bus.get_last_message("run.r1.placed") is None
    for generation in (1, 2, 3):
        await bus.publish(placed("r1", generation))
    await bus.publish(placed("r2", 1))
    newest = await bus.get_last_message("run.r1.placed")
    assert newest is not None
    assert newest.event.generation == 3
    wildcard = await bus.get_last_message("run.*.placed")
    assert wildcard is not None
    assert wildcard.event.run_id == "r2"
    assert [r.event.generation for r in await bus.read_history("run.r1.placed")] == [1, 2, 3]
    assert await bus.read_history("run.missing.*") == []


async def test_nonsense_hides_no_event_and_moves_the_fence(bus: Bus) -> None:
    """An invalid message hides neither the event before it nor its sequence, which fences are compared with."""
    await bus.publish(placed("r1", 1))
    nonsense = (await bus.js.publish("run.r1.placed", b"\x00 no json")).seq
    newest = await bus.get_last_message("run.r1.placed")
    assert newest is not None
    assert (newest.event.generation, newest.sequence) == (1, nonsense)
    assert await bus.get_last_sequence("run.*.placed") == nonsense
    await bus.publish(placed("r1", 2), expected=ExpectedSequence(newest.sequence, "run.r1.placed"))
    await bus.js.publish("run.r2.placed", b"[]")
    assert await bus.get_last_message("run.r2.placed") is None
    kept = [r async for batch in bus.follow("FACTS", until_caught_up=True, include_undecodable=True) for r in batch]
    assert [isinstance(r.event, UndecodableEvent) for r in kept] == [False, True, False, True]


async def test_what_cannot_be_decoded_is_told_once_however_often_it_is_read(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request about a run reads its history again: one bad fact must not fill the disk with warnings."""
    for _ in range(3):
        await bus.js.publish("run.r1.placed", b"[]")
    monkeypatch.setattr("services.kit.bus.log", log := CapturingLogger())
    for _ in range(3):
        assert await bus.get_last_message("run.r1.placed") is None
        assert await bus.read_history("run.r1.*") == []
    assert [call.kwargs["sequence"] for call in log.calls] == [1, 2, 3]


async def test_a_fact_that_no_server_takes_is_refused_at_once(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus.nc, "_max_payload", 1000)
    with pytest.raises(PoisonMessage, match="max_payload"):
        await bus.publish(RunCancelled(run_id="r1", reason="x" * 1000))


async def test_a_fact_that_no_reader_decodes_is_refused_at_once(bus: Bus) -> None:
    """Stored, it would be skipped by each reader, and what it says would never have happened."""
    largest = MAX_BODY_BYTES - len(bus.build_message(RunCancelled(run_id="r1", reason="")).body)
    await bus.publish(RunCancelled(run_id="r1", reason="x" * largest))
    with pytest.raises(PoisonMessage, match=r"run\.r1\.cancelled has 1,048,577 bytes .* object store"):
        await bus.publish(RunCancelled(run_id="r1", reason="x" * (largest + 1)))
    [read] = await bus.read_history("run.r1.*")
    assert len(read.event.reason) == largest


async def test_filters_that_the_server_refuses_are_an_error(bus: Bus) -> None:
    with pytest.raises(ValueError, match="cannot be read by the filters"):
        await asyncio.wait_for(anext(bus.follow(topology.FACTS.name, ("run.*.placed", "run.>"))), 60)


async def test_long_history_is_read_over_one_subscription(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server ends a request that has brought all its messages with a status; it is no failure."""
    monkeypatch.setattr("services.kit.follow.log", log := CapturingLogger())
    await asyncio.gather(*(bus.publish(RunCancelled(run_id=f"a{n}", reason="x")) for n in range(1200)))
    assert len(await bus.read_history("run.*.*")) == 1200
    assert log.calls == []


async def test_following_survives_a_restart_without_loss_or_repeat(bus: Bus, nats_server: NatsServer) -> None:
    seen: list[int] = []

    async def read() -> None:
        async for batch in bus.follow("FACTS", ("run.*.*",)):
            seen.extend(message.sequence for message in batch)

    reader = asyncio.create_task(read())
    await asyncio.gather(*(bus.publish(RunCancelled(run_id=f"a{n}", reason="x")) for n in range(700)))
    await until(lambda: len(seen) == 700, "the first events")
    nats_server.kill()
    nats_server.start()
    await asyncio.gather(*(bus.publish(RunCancelled(run_id=f"b{n}", reason="x")) for n in range(50)))
    await until(lambda: len(seen) >= 750, "the rest")
    reader.cancel()
    assert seen == list(range(1, 751))


@pytest.fixture
def at_first_opening(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Actions on the first reader that is opened, before it asks for anything."""
    actions: list[Any] = []
    opening = follow._Reader.open

    async def opened(*arguments: Any) -> follow._Reader:
        reader = await opening(*arguments)
        while actions:
            await actions.pop()(reader)
        return reader

    monkeypatch.setattr(follow._Reader, "open", opened)
    return actions


async def test_reading_ends_although_what_was_to_come_is_deleted(bus: Bus, at_first_opening: list[Any]) -> None:
    await bus.publish(RunCancelled(run_id="r1", reason="x"))
    at_first_opening.append(lambda _: bus.js.purge_stream("FACTS"))
    async with asyncio.timeout(60):
        assert await bus.read_history() == []
    assert at_first_opening == []


async def test_the_last_message_is_missed_although_none_follows_it(bus: Bus, at_first_opening: list[Any]) -> None:
    async def narrow(reader: follow._Reader) -> None:
        reader._pull._inbox._pending_bytes_limit = 1  # nats-py drops what is larger, and goes on

    await bus.publish(RunCancelled(run_id="r1", reason="x"))
    at_first_opening.append(narrow)
    async with asyncio.timeout(60):
        assert [message.event.run_id for message in await bus.read_history()] == ["r1"]


async def test_it_is_closed_while_the_server_is_away(bus: Bus, nats_server: NatsServer) -> None:
    connection = bus.nc
    nats_server.kill()
    await until(lambda: not bus.connected, "the loss to be noticed")
    await bus.close()
    assert connection.is_closed


async def test_a_bare_publish_from_a_shell_is_a_request(make_bus: Any) -> None:
    bus: Bus = await make_bus("scheduler")
    seen: list[Any] = []

    @bus.subscriber(topology.SCHEDULER_REQUESTS, TrainRequested)
    async def on_train_requested(message: Any) -> None:
        seen.append(message)

    await bus.start()
    await bus.nc.publish("train.requested", b'{"name":"mnist","command":["true"]}')
    await until(lambda: len(seen) == 1, "the request")
    assert seen[0].envelope.id == f"REQUESTS:{seen[0].sequence}"
    assert run_id_for(seen[0].envelope.source, seen[0].envelope.id).startswith("r")


async def test_no_subject_that_the_server_lets_through_ends_a_reader(bus: Bus) -> None:
    host = urlsplit(bus.settings.nats_url)
    reader, writer = await asyncio.open_connection(host.hostname, host.port)
    await reader.readline()
    writer.write(b'CONNECT {"verbose": false, "headers": true}\r\n')
    for token in (b"\x0c", b"a\x0bb", b"\x85", b"\xff\xfe", b"\xc2\xa0", "\u2028".encode(), b"\x1b[2J", b"l" * 4000):
        for event in (b"placed", b"no_such_fact"):
            writer.write(b"PUB run." + token + b"." + event + b" 2\r\n{}\r\n")
            writer.write(b"HPUB run." + token + b"." + event + b" 12 14\r\nNATS/1.0\r\n\r\n{}\r\n")
    writer.write(b"PING\r\n")
    while b"PONG" not in await reader.readline():
        pass
    writer.close()
    await bus.publish(placed("r1", 1))
    assert [message.event.run_id for message in await bus.read_history("run.*.placed")] == ["r1"]
    found: list[Any] = []
    async for batch in bus.follow("FACTS", ("run.*.*",), until_caught_up=True):
        found += batch
    assert [message.event.run_id for message in found] == ["r1"]
    assert found[0].sequence > 1, "the server let none of them through"


async def test_a_stream_of_requests_that_is_made_anew_gives_no_id_twice(bus: Bus) -> None:
    first = await bus.js.publish("train.requested", b"{}")
    await bus.js.delete_stream(topology.REQUESTS.name)
    # By all services at once, as when they start.
    await asyncio.gather(*(reconcile(bus.js, topology.Topology()) for _ in range(8)))
    second = await bus.js.publish("train.requested", b"{}")
    assert second.seq > first.seq > 1
    assert await reconcile(bus.js, topology.Topology()) == []


async def test_a_request_without_a_handler_waits_for_a_version_that_has_one(make_bus: Any) -> None:
    bus: Bus = await make_bus("scheduler")

    @bus.subscriber(topology.SCHEDULER_REQUESTS, TrainRequested)
    async def on_train_requested(_: Any) -> None: ...

    await bus.start()
    await bus.nc.publish("cancel.requested", b'{"run_id":"r1"}')

    async def kept() -> bool:
        return (await bus.js.stream_info("DEAD_LETTERS")).state.messages == 1

    await until(kept, "a dead letter")


async def test_many_large_messages_are_all_read(bus: Bus) -> None:
    """More than nats-py's buffer holds: what was pulled beyond it was dropped, and pulled again, for ever."""
    body = json.dumps({"run_id": "r1", "reason": "x" * 1_000_000}).encode()
    # The bodies are not looked at: it is the pulling that is tested.
    for _ in range(160):
        await bus.js.publish("run.r1.cancelled", body)
    found = 0
    async with asyncio.timeout(120):
        async for batch in bus.follow(topology.FACTS.name, ("run.r1.cancelled",), until_caught_up=True):
            found += len(batch)
    assert found == 160
