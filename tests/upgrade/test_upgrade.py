"""This version reads what every released version wrote: its streams, and the database that it made of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from contracts import topology
from contracts.base import Fact
from contracts.envelope import EnvelopeError, RawMessage, decode
from contracts.events.run import TERMINAL
from services.gateway.rebuild import rebuild
from services.gateway.settings import GatewaySettings
from services.gateway.store import Store
from services.kit.bus import Bus
from services.kit.reconcile import reconcile
from services.kit.settings import Settings
from services.scheduler.core.fold import fold
from tests.upgrade.recording import RecordedMessage, load_database, read_messages, read_rows, recorded_versions

#: Headers by which the server decided whether to store a message; the ids stay, since they name the requests.
CONDITIONS = ("Nats-Expected", "Nats-Batch")
EVENTS = ("REQUESTS", "FACTS", "PROGRESS")
#: Rows that follow from the streams alone; ``events`` and ``projections`` hold places and times of one server.
TABLES = ("runs", "checkpoints", "nodes", "training_datasets", "models", "points")
#: A bare request has no time of its own: the server's is taken, and this server stored it just now.
SERVER_TIMES = {"requested_at"}

pytestmark = pytest.mark.parametrize("version", recorded_versions())


def raw_message(message: RecordedMessage) -> RawMessage:
    return RawMessage(message.subject, message.body.encode(), message.headers, message.stream, message.sequence)


def _as_it_was(stream: topology.Stream) -> topology.Stream:
    return replace(stream, names_messages=False)


async def publish_recording(bus: Bus, version: str) -> None:
    """Store the recorded messages in their order, as they were but for the server's own conditions."""
    await bus.js.delete_stream(topology.REQUESTS.name)
    # Today's begins at another sequence than those of that time.
    await reconcile(bus.js, topology.Topology(streams=tuple(map(_as_it_was, topology.STREAMS))))
    for message in read_messages(version):
        headers = {name: value for name, value in message.headers.items() if not name.startswith(CONDITIONS)}
        ack = await bus.js.publish(message.subject, message.body.encode(), headers=headers)
        if message.stream in EVENTS:
            assert ack.seq == message.sequence


def test_every_message_is_readable(version: str) -> None:
    unreadable = []
    for message in read_messages(version):
        if message.stream not in EVENTS:
            continue
        try:
            decode(raw_message(message))
        except EnvelopeError as error:
            unreadable.append((message.stream, message.body, str(error)))
    # Two requests were refused when they were published: one has slots.max below slots.min, one is no JSON.
    assert [stream for stream, _, _ in unreadable] == ["REQUESTS", "REQUESTS"], unreadable
    assert unreadable[1][1] == "this is no JSON"


async def test_the_streams_give_the_recorded_rows(version: str, bus: Bus, settings: Settings, tmp_path: Path) -> None:
    recorded = tmp_path / "recorded.sqlite"
    load_database(version, recorded)
    await publish_recording(bus, version)
    await rebuild(settings)
    own = Path(GatewaySettings.of(settings).database_url.split("///")[1])
    for table in TABLES:
        expected, found = read_rows(recorded, table), read_rows(own, table)
        assert len(found) == len(expected), table
        for old, new in zip(expected, found, strict=True):
            # A later version may add columns; what is there keeps its meaning.
            assert {name: new[name] for name in old} | {name: old[name] for name in SERVER_TIMES & old.keys()} == old


async def test_the_recorded_database_is_taken_over(version: str, bus: Bus, settings: Settings, tmp_path: Path) -> None:
    own = GatewaySettings.of(settings)
    database = Path(own.database_url.split("///")[1])
    database.parent.mkdir(parents=True, exist_ok=True)
    await asyncio.to_thread(load_database, version, database)
    before = Counter(row["state"] for row in read_rows(database, "runs"))
    await publish_recording(bus, version)
    async with Store(own.database_url):
        pass
    await rebuild(settings)
    assert Counter(row["state"] for row in read_rows(database, "runs")) == before


def test_the_scheduler_folds_the_facts(version: str, tmp_path: Path) -> None:
    """The scheduler's state agrees with the recorded read model about every run that has ended."""
    recorded = tmp_path / "recorded.sqlite"
    load_database(version, recorded)
    facts = []
    for message in read_messages(version):
        if message.stream == "FACTS":
            envelope, fact = decode(raw_message(message))
            assert isinstance(fact, Fact)
            facts.append((fact, message.sequence, envelope.time))
    cluster = fold(facts)
    ended = {fact.fact for fact in TERMINAL} - {"rejected"}
    recorded_states = {row["run_id"]: row["state"] for row in read_rows(recorded, "runs") if row["state"] in ended}
    assert len(recorded_states) >= 4
    assert {run_id: cluster.runs[run_id].phase.value for run_id in recorded_states} == recorded_states
    assert not cluster.active
    assert not cluster.queued
