"""The real process, killed with SIGKILL: while it makes its database, and in the middle of a run."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from services.kit.bus import Bus
from services.kit.settings import Settings
from services.tracking.settings import TrackingSettings
from services.tracking.store import Store
from tests.tracking.conftest import World, eventually, is_begun
from tests.tracking.test_service import SURVIVING, publish_killed_run

Spawn = Callable[[], subprocess.Popen[bytes]]


@pytest.fixture
def spawn(settings: Settings, tmp_path: Path) -> Iterator[Spawn]:
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        environment = {
            "TRAINBUS_NATS_URL": settings.nats_url,
            "TRAINBUS_DATA_DIR": str(settings.data_dir),
            "TRAINBUS_HTTP_PORT": "-1",
            "TRAINBUS_RETRY_FIRST_S": "0.02",
        }
        with (tmp_path / "tracking.log").open("ab") as log:
            command = [sys.executable, "-m", "services.tracking"]
            started.append(subprocess.Popen(command, env=os.environ | environment, stdout=log, stderr=log))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.e2e
async def test_killed_at_the_worst_moments(bus: Bus, settings: Settings, spawn: Spawn) -> None:
    folder = settings.data_dir
    world = World(bus, TrackingSettings(**settings.model_dump()), Store(f"sqlite:///{folder}/mlflow.db", None))

    await kill_while_the_database_is_made(spawn, folder)

    # As soon as the run is in the database: somewhere between its creation and its last point.
    await publish_killed_run(world)
    second = spawn()
    await eventually(partial(written_to, folder / "mlflow.db"))
    second.kill()
    spawn()
    await world.settled()
    (page,) = world.pages()
    assert world.series(page) == SURVIVING
    assert list(folder.glob(".mlflow.db.new-*")) == []


async def kill_while_the_database_is_made(spawn: Spawn, folder: Path) -> None:
    """Kill a process that has half made its database, which must not count as the database."""

    async def half_made() -> bool:
        return is_begun(folder / "mlflow.db") or (folder / "mlflow.db").exists()

    for _ in range(10):
        process = spawn()
        await eventually(half_made)
        process.kill()
        process.wait()
        if not (folder / "mlflow.db").exists():
            return
        # This process looked too late, as happens on a busy machine: once more.
        for path in folder.glob("*mlflow.db*"):
            path.unlink()
    pytest.fail("the database was made whole ten times before the process could be killed")


async def written_to(database: Path) -> bool:
    """Whether a run is in it. Who opens the address while the database is put there meets an empty file."""
    if not database.exists():
        return False
    with closing(sqlite3.connect(database)) as connection:
        if not connection.execute("SELECT name FROM sqlite_master WHERE name = 'runs'").fetchone():
            return False
        return bool(connection.execute("SELECT count(*) FROM runs").fetchone()[0])
