"""The read model on PostgreSQL holds the same rows as on SQLite, and the dashboard's SQL runs there too."""

from __future__ import annotations

import getpass
import os
import pwd
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from contracts.events.run import ProgressPoint, RunAccepted, RunCompleted, RunProgress
from services.gateway.rebuild import rebuild
from services.gateway.settings import GatewaySettings
from services.gateway.store import REVISION, ForeignSchema, Store
from services.kit.bus import Bus
from services.kit.ports import free_ports
from tests.deploy.test_grafana import filled_in, statements
from tests.gateway.conftest import EVALUATED_SPEC, SPEC, life, ref, running
from tests.gateway.test_api import FILTERS, publish_listed
from tests.gateway.test_projection import contents, differing_tables, project, publish
from tests.lives import supported

pytestmark = pytest.mark.needs("postgres")

MISSING = "PostgreSQL is not installed: apt-get install postgresql"


def _binary(name: str) -> str | None:
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return shutil.which(name) or (str(found[-1]) if found else None)


@pytest.fixture(scope="module")
def postgres_url() -> Iterator[str]:
    """A PostgreSQL of its own, where its programs are installed."""
    initdb, postgres = _binary("initdb"), _binary("postgres")
    assert initdb is not None, MISSING
    assert postgres is not None, MISSING
    folder = Path(tempfile.mkdtemp(prefix="trainbus-pg-"))
    user = getpass.getuser()
    if os.geteuid() == 0:  # it refuses to run as root
        user = "postgres"
        os.chown(folder, pwd.getpwnam(user).pw_uid, -1)
    data, port = folder / "data", free_ports(1)[0]
    subprocess.run(
        [initdb, "-D", data, "-U", "trainbus", "-A", "trust", "--no-sync"],
        user=user,
        cwd=folder,
        check=True,
        capture_output=True,
        timeout=120,
    )
    options = ["-p", str(port), "-h", "127.0.0.1", "-k", str(folder), "-c", "fsync=off"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([postgres, "-D", data, *options], user=user, cwd=folder, stdout=log, stderr=log)
    try:
        ready = _binary("pg_isready") or "pg_isready"
        deadline = time.monotonic() + 90
        while subprocess.run([ready, "-q", "-h", "127.0.0.1", "-p", str(port)], check=False).returncode != 0:
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.05)
        yield f"postgresql://trainbus@127.0.0.1:{port}/postgres"
    finally:
        process.terminate()
        process.wait(60)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def on_postgres(gateway_settings: GatewaySettings, postgres_url: str) -> GatewaySettings:
    return GatewaySettings(**{**gateway_settings.model_dump(), "gateway_database_url": postgres_url})


async def test_the_same_rows(bus: Bus, gateway_settings: GatewaySettings, on_postgres: GatewaySettings) -> None:
    for number in range(3):
        await publish(bus, *life(f"r{number}", EVALUATED_SPEC))
    found: list[dict[str, list[Any]]] = []
    for settings in (gateway_settings, on_postgres):
        async with Store(settings.database_url) as store:
            await project(bus, store)
            found.append(await contents(store))
            await rebuild(settings)
            assert await contents(store) == found[-1]
            if not store.sqlite:
                for _, statement in statements():
                    await store.fetch(sa.text(filled_in(statement)))
    assert found[0] == found[1]


async def test_two_gateways_share_it(bus: Bus, on_postgres: GatewaySettings) -> None:
    async with running(on_postgres) as one, running(on_postgres) as two:
        for number in range(4):
            await publish(bus, *life(f"r{number}"))
        for gateway in (one, two):
            await gateway.client.get("/training-runs/nothing")  # answers once everything is in
            page = await gateway.get("/training-runs", params={"limit": 3})
            rest = await gateway.get("/training-runs", params={"limit": 3, "cursor": page["next_cursor"]})
            assert [run["run_id"] for run in page["runs"] + rest["runs"]] == ["r3", "r2", "r1", "r0"]


async def test_the_same_filters(bus: Bus, on_postgres: GatewaySettings) -> None:
    async with running(on_postgres) as gateway:
        await publish_listed(gateway, bus)
        for query, expected in FILTERS:
            page = await gateway.get("/training-runs", params={**query, "counts": True})
            assert [run["run_id"] for run in page["runs"]] == expected, query


async def test_what_no_database_holds_ends_no_gateway(
    bus: Bus, gateway_settings: GatewaySettings, on_postgres: GatewaySettings
) -> None:
    """Names, metrics and steps come from users: a NUL, which PostgreSQL lacks, NaN, integers of any size."""
    await publish(bus, *life("r0", SPEC.model_copy(update={"name": "a\0b\u202e\x1b[31m"})))
    point = ProgressPoint(step=7, time=1000.5, values={"a\0b": 1.0, "none": float("nan")})
    beyond = ProgressPoint(step=10**30, time=1000.5, values={"loss": 1.0})
    timeless = ProgressPoint(step=1, time=float("nan"), values={"cpu": 1.0})
    endless = ProgressPoint(step=1, time=float("inf"), values={"cpu": 1.0})
    reports = [("training", beyond), ("system", timeless), ("system", endless), ("training", point)]
    for offset, (kind, each) in enumerate(reports):
        await publish(
            bus,
            RunProgress(run_id="r0", generation=2, node_id="n1", rank=0, offset=offset, kind=kind, points=(each,)),
        )
    for settings in (gateway_settings, on_postgres):
        async with Store(settings.database_url) as store:
            await project(bus, store)
            found = await contents(store)
            assert [run["state"] for run in found["runs"]] == ["completed"]
            assert "\0" not in found["runs"][0]["name"]
            assert 7 in [each["step"] for each in found["points"]]
            await rebuild(settings)
            assert await contents(store) == found


async def test_a_run_that_ends_with_a_number_that_json_lacks_has_ended(
    bus: Bus, gateway_settings: GatewaySettings, on_postgres: GatewaySettings
) -> None:
    metrics = {"loss": float("nan"), "margin": float("inf")}
    await publish(
        bus,
        RunAccepted(run_id="r0", spec=SPEC, request_id="q", request_source="t"),
        *supported(RunCompleted(run_id="r0", generation=1, checkpoint=ref(3, "r0"), metrics=metrics)),
    )
    for settings in (gateway_settings, on_postgres):
        async with Store(settings.database_url) as store:
            await project(bus, store)
            found = await contents(store)
            assert [run["state"] for run in found["runs"]] == ["completed"]
            assert found["events"][-1]["data"]["metrics"] == {"loss": "NaN", "margin": "Infinity"}
            await rebuild(settings)
            assert await contents(store) == found


@pytest.mark.parametrize("field", ["name", "user", "team", "model"])
async def test_a_text_that_no_index_holds_stops_nothing(bus: Bus, on_postgres: GatewaySettings, field: str) -> None:
    """Requests have limits for it; facts are read leniently, and anybody can publish one."""
    text = random.Random(0).randbytes(20_000).hex()
    await publish(
        bus,
        RunAccepted(run_id="r0", spec=SPEC.model_copy(update={field: text}), request_id="q", request_source="t"),
        RunAccepted(run_id="r1", spec=SPEC, request_id="q1", request_source="t"),
    )
    async with Store(on_postgres.database_url) as store:
        await project(bus, store)
        assert "r1" in [run["run_id"] for run in (await contents(store))["runs"]]


async def test_the_tables_of_a_later_gateway_stay(on_postgres: GatewaySettings, bus: Bus) -> None:
    await publish(bus, *life())
    async with Store(on_postgres.database_url) as store:
        await project(bus, store)
        async with store.engine.begin() as connection:
            assert await connection.run_sync(differing_tables) == []
            await connection.execute(REVISION.update().values(version_num="9999"))
        with pytest.raises(ForeignSchema, match="of a later gateway"):
            async with Store(on_postgres.database_url):
                pass
        assert len((await contents(store))["runs"]) == 1
    async with Store(on_postgres.database_url, replaces_later=True) as store:
        assert (await contents(store))["runs"] == []
        await project(bus, store)
        assert len((await contents(store))["runs"]) == 1
