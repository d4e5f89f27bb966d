"""The read model is exact through crashes, rebuilds, rivals and another stream under the same name."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from contracts.events.node import NodeJoined, NodeLost
from contracts.events.run import RunAccepted, RunStopping
from services.gateway import migrations, queries
from services.gateway.migrations import HEAD
from services.gateway.projection import FACTS, PROGRESS, STREAMS, Projection
from services.gateway.rebuild import rebuild
from services.gateway.settings import GatewaySettings
from services.gateway.store import METADATA, PROJECTIONS, REVISION, ROWS, RUNS, ForeignSchema, ProjectionMoved, Store
from services.kit.bus import Bus
from tests.contracts.earlier_facts import as_version_1
from tests.gateway.conftest import EVALUATED_SPEC, SPEC, Running, life, placed, running
from tests.kit.support import until as eventually

TABLES = (*(table.name for table in ROWS), "events")


async def publish(bus: Bus, *events: Any) -> int:
    sequence = 0
    for event in events:
        sequence = (await bus.publish(event)).sequence
    return sequence


async def contents(store: Store) -> dict[str, list[Any]]:
    """Every row of the read model."""
    found = {}
    for name in TABLES:
        table = METADATA.tables[name]
        rows = await store.fetch(sa.select(table).order_by(*table.primary_key.columns))
        found[name] = [dict(row) for row in rows]
    return found


async def project(bus: Bus, store: Store) -> None:
    made = Projection(bus, store)
    await made.adopt()
    for stream in STREAMS:
        await made.run(stream, until_caught_up=True)


async def crash_in_mid_commit(store: Store) -> None:
    async with store.advance_projection(FACTS, 0, 5) as connection:
        await connection.execute(METADATA.tables["nodes"].delete())
        raise RuntimeError("crash")


async def test_rebuild_gives_the_same_rows(bus: Bus, gateway_settings: GatewaySettings) -> None:
    for number in range(3):
        await publish(bus, *life(f"r{number}", EVALUATED_SPEC))
    async with Store(gateway_settings.database_url) as store:
        await project(bus, store)
        live = await contents(store)
        assert len(live["runs"]) == 3
        assert len(live["points"]) == 3 * 40
        middle = live["events"][len(live["events"]) // 2]["sequence"]
        # What went wrong in between: a row was lost, another made up.
        async with store.engine.begin() as connection:
            await connection.execute(METADATA.tables["runs"].delete().where(sa.text("run_id = 'r1'")))
            await connection.execute(METADATA.tables["nodes"].update().values(state="gone"))
        whole = await rebuild(gateway_settings)
        assert (whole.from_sequence, whole.refolded, whole.runs) == (1, 0, 3)
        assert await contents(store) == live
        part = await rebuild(gateway_settings, from_sequence=middle)
        assert (part.from_sequence, part.refolded) == (middle, len(live["events"]) // 2)
        assert await contents(store) == live


async def test_a_log_of_version_1_gives_the_same_rows(bus: Bus, gateway_settings: GatewaySettings) -> None:
    old = [as_version_1(each) for each in life("rold")]
    await publish(bus, *life("rnew"), *old)
    async with Store(gateway_settings.database_url) as store:
        await project(bus, store)
        rows = await contents(store)
        [new_points, old_points] = [
            [{**row, "run_id": ""} for row in rows["points"] if row["run_id"] == name] for name in ("rnew", "rold")
        ]
        assert new_points == old_points
        [stop] = [row for row in rows["events"] if row["subject"] == "run.rold.preempting"]
        # What is served is today's event, where it is stored.
        assert (stop["type"], stop["data"]["reason"]) == (RunStopping.type, "preempted")
        last = rows["events"][-1]["sequence"]
        assert (await rebuild(gateway_settings, from_sequence=last)).refolded == len(rows["events"]) - 1
        assert await contents(store) == rows


async def test_slots_of_a_node_that_is_gone_are_not_counted(bus: Bus, gateway_settings: GatewaySettings) -> None:
    spare = NodeJoined(node_id="n3", incarnation="a", address="127.0.0.1", slots=3, lease_ttl_s=3)
    lost = NodeLost(node_id="n2", incarnation="a", reason="silent")
    await publish(bus, *life()[:4], placed(1, "n1", "n2"), spare, lost)
    async with Store(gateway_settings.database_url) as store:
        await project(bus, store)
        assert await queries.count_nodes(store) == {"up": 2, "lost": 1}
        assert await queries.count_slots(store) == (2, 3)
        assert [node.used for node in (await queries.list_nodes(store, limit=3)).nodes] == [2, 0, 0]


async def test_a_batch_counts_once(bus: Bus, gateway_settings: GatewaySettings) -> None:
    """A crash before the commit leaves nothing; the same batch after the commit is refused."""
    await publish(bus, *life())
    batch = await bus.read_history(stream=FACTS)
    async with Store(gateway_settings.database_url) as store:
        projection = Projection(bus, store)
        await projection.adopt()
        clean = await contents(store)
        with pytest.raises(RuntimeError, match="crash"):
            await crash_in_mid_commit(store)
        assert (await contents(store), await store.position(FACTS)) == (clean, 0)
        position = await projection.commit(FACTS, 0, batch)
        after = await contents(store)
        with pytest.raises(ProjectionMoved):
            await projection.commit(FACTS, 0, batch)
        assert (await contents(store), await store.position(FACTS)) == (after, position)


async def test_points_are_the_same_whichever_stream_is_read_first(bus: Bus, gateway_settings: GatewaySettings) -> None:
    await publish(bus, *life())
    found = []
    for order in ((FACTS, PROGRESS), (PROGRESS, FACTS)):
        url = f"sqlite+aiosqlite:///{gateway_settings.data_dir}/{'-'.join(order)}.sqlite"
        async with Store(url) as store:
            projection = Projection(bus, store)
            await projection.adopt()
            for stream in order:
                await projection.run(stream, until_caught_up=True)
            found.append((await contents(store))["points"])
    assert found[0] == found[1]
    assert {p["step"]: p["generation"] for p in found[0]} == {s: 1 if s <= 20 else 2 for s in range(1, 41)}


async def test_rivals_share_the_work(bus: Bus, gateway_settings: GatewaySettings) -> None:
    """Two gateways and a rebuild on one database, while events arrive: each event counts once."""
    async with running(gateway_settings) as one, running(gateway_settings) as two:
        for number in range(5):
            await publish(bus, *life(f"r{number}"))
            if number == 2:
                await rebuild(gateway_settings)
        for gateway in (one, two):
            await gateway.client.get("/training-runs/nothing")  # answers once everything is in
            listed = (await gateway.get("/training-runs"))["runs"]
            assert sorted(run["run_id"] for run in listed) == [f"r{i}" for i in range(5)]
    async with Store(gateway_settings.database_url) as store:
        await project(bus, store)
        shared = await contents(store)
        await rebuild(gateway_settings)
        assert await contents(store) == shared


async def test_who_asks_at_the_same_time_shares_a_look(
    bus: Bus, gateway_settings: GatewaySettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    async with Store(gateway_settings.database_url) as store:
        projection = Projection(bus, store)
        await projection.adopt()
        get_info = projection._stream_info

        async def count_info(stream: str) -> Any:
            asked.append(stream)
            return await get_info(stream)

        monkeypatch.setattr(projection, "_stream_info", count_info)
        projecting = [asyncio.create_task(projection.run(stream)) for stream in STREAMS]
        await publish(bus, RunAccepted(run_id="r0", spec=SPEC, request_id="e", request_source="t"))

        async def ask(number: int) -> None:
            event = RunAccepted(run_id=f"r{number}", spec=SPEC, request_id="e", request_source="t")
            await publish(bus, event)
            assert await projection.catch_up()
            found = await store.fetch(sa.select(RUNS.c.run_id).where(RUNS.c.run_id == event.run_id))
            assert len(found) == 1

        await asyncio.gather(*(ask(number) for number in range(1, 101)))
        assert len(asked) < 100
        # What cannot be decoded is waited for once.
        await bus.js.publish("run.rbad.accepted", b"{}")
        assert await projection.catch_up()
        reads: list[str] = []
        monkeypatch.setattr(bus, "read_history", reads.append)
        assert await projection.catch_up()
        assert reads == []
        for task in projecting:
            task.cancel()


async def test_the_counts_that_are_kept_are_those_that_are_counted(bus: Bus, gateway_settings: GatewaySettings) -> None:
    everyone = queries.RunFilter(since_s=0.0)  # a condition that all meet: then they are counted
    async with Store(gateway_settings.database_url) as store:
        for number, user in enumerate(["ada", "bob", None, "a\0"]):
            spec = SPEC.model_copy(update={"user": user, "team": "vision", "model": "digits"})
            await publish(bus, *life(f"r{number}", spec)[: 4 + 5 * number])
            await project(bus, store)
            kept = await queries.count_runs(store, queries.RunFilter())
            assert kept == await queries.count_runs(store, everyone)
            assert sum(kept["state"].values()) == number + 1
        await rebuild(gateway_settings)
        assert await queries.count_runs(store, queries.RunFilter()) == kept


async def test_another_stream_means_another_read_model(bus: Bus, gateway_settings: GatewaySettings) -> None:
    await publish(bus, *life())
    async with Store(gateway_settings.database_url) as store:
        await project(bus, store)
        async with store.engine.begin() as connection:
            await connection.execute(PROJECTIONS.update().values(stream_created=1.0, position=10_000))
            await connection.execute(METADATA.tables["runs"].update().values(name="of another life"))
        await project(bus, store)
        assert [run["name"] for run in (await contents(store))["runs"]] == ["digits"]


def test_the_last_revision_is_named() -> None:
    assert ScriptDirectory(str(Path(migrations.__file__).parent)).get_current_head() == HEAD
    assert (migrations.is_known(HEAD), migrations.is_known("9999")) == (True, False)


def differing_tables(connection: sa.Connection) -> list[Any]:
    """Return how the tables that are there differ from those of the store."""
    context = MigrationContext.configure(connection, opts={"version_table": migrations.VERSION_TABLE})
    return [*compare_metadata(context, METADATA)]


async def test_the_revisions_make_the_tables_of_the_store(gateway_settings: GatewaySettings) -> None:
    for _ in range(2):
        async with Store(gateway_settings.database_url) as store, store.engine.connect() as connection:
            assert await connection.run_sync(differing_tables) == []


async def test_a_gateway_writes_nothing_into_the_tables_of_a_later_one(
    bus: Bus, gateway_settings: GatewaySettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.projection.SCHEMA_POLL_S", 0.05)
    first, second = (RunAccepted(run_id=name, spec=SPEC, request_id=name, request_source="t") for name in ("r1", "r2"))
    async with running(gateway_settings) as gateway, Store(gateway_settings.database_url) as store:
        await publish(bus, first)
        await gateway.get("/training-runs/r1")

        async def set_revision(revision: str) -> None:
            async with store.engine.begin() as connection:
                await connection.execute(REVISION.update().values(version_num=revision))

        await set_revision("9999")
        with pytest.raises(ForeignSchema, match="of a later gateway"):
            await store.prune_points(0.0)
        await publish(bus, second)
        await eventually(partial(is_ready, gateway, False), "the gateway to be no longer ready", 60)
        assert [run["run_id"] for run in (await contents(store))["runs"]] == ["r1"]
        assert (await gateway.get("/training-runs/r1"))["state"] == "accepted"
        await set_revision(HEAD)
        await eventually(partial(is_ready, gateway, True), "the gateway to be ready again", 60)
        assert (await gateway.get("/training-runs/r2"))["state"] == "accepted"


async def is_ready(gateway: Running, expected: bool) -> bool:
    return (await gateway.client.get("/ready")).is_success == expected


async def test_another_schema_is_rebuilt(bus: Bus, gateway_settings: GatewaySettings) -> None:
    await publish(bus, *life())
    async with Store(gateway_settings.database_url) as store:
        await project(bus, store)
        async with store.engine.begin() as connection:
            await connection.execute(REVISION.update().values(version_num="0000"))
            await connection.execute(sa.text("ALTER TABLE runs DROP COLUMN artifacts"))
    async with Store(gateway_settings.database_url) as store:
        assert (await contents(store))["runs"] == []
        await project(bus, store)
        assert len((await contents(store))["runs"]) == 1


async def test_what_cannot_be_read_holds_nothing_up(bus: Bus, gateway_settings: GatewaySettings) -> None:
    async with running(gateway_settings) as gateway:
        await bus.js.publish("train.requested", b"no json")
        await bus.js.publish("run.rbad.accepted", b"{}")
        missing = await gateway.client.get("/training-runs/nothing")
        assert missing.status_code == 404
        await publish(bus, RunAccepted(run_id="rgood", spec=SPEC, request_id="e", request_source="t"))
        assert (await gateway.get("/training-runs/rgood"))["state"] == "accepted"


async def test_a_forged_fact_changes_no_run(bus: Bus, gateway_settings: GatewaySettings) -> None:
    """A client that may publish about one run changes no other run."""
    async with Store(gateway_settings.database_url) as store:
        await publish(bus, RunAccepted(run_id="rgood", spec=SPEC, request_id="e", request_source="t"))
        await bus.js.publish("run.rother.cancelled", b'{"run_id": "rgood", "reason": "forged"}')
        await bus.js.publish(
            "run.rother.queued", b'{"run_id": "rgood"}', headers={"ce-type": "trainbus.run.cancelled.v1"}
        )
        await project(bus, store)
        assert [(row["run_id"], row["state"]) for row in (await contents(store))["runs"]] == [("rgood", "accepted")]


async def test_kill_minus_nine_in_mid_projection(bus: Bus, gateway_settings: GatewaySettings) -> None:
    """A gateway process killed at any moment goes on where its last commit was."""
    environment = {
        **os.environ,
        "TRAINBUS_NATS_URL": gateway_settings.nats_url,
        "TRAINBUS_DATA_DIR": str(gateway_settings.data_dir),
        "TRAINBUS_GATEWAY_PORT": "0",
        "TRAINBUS_HTTP_PORT": "-1",
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.gateway", env=environment, stderr=asyncio.subprocess.PIPE
    )
    try:
        assert process.stderr is not None
        async with asyncio.timeout(120):
            while b"gateway listens" not in await process.stderr.readline():
                pass
        for number in range(10):
            await publish(bus, *life(f"r{number}"))
    finally:
        process.send_signal(signal.SIGKILL)
        await process.wait()
    async with Store(gateway_settings.database_url) as store:
        await project(bus, store)
        resumed = await contents(store)
        await rebuild(gateway_settings)
        assert await contents(store) == resumed
    assert len(resumed["runs"]) == 10
