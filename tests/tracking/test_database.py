"""MLflow's database, at an address that others open too: before there is one, and while it is made."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from services.tracking.store import Store, TrackingUnavailable
from tests.tracking.conftest import eventually, is_begun

OPEN_IT = "import sys, mlflow; mlflow.MlflowClient(sys.argv[1]).search_experiments()"
#: In the middle of a migration: a second one meets its table and fails.
DIE_AT_A_COPY = """
import os, signal, sqlalchemy

def die(connection, cursor, statement, *rest):
    if statement.lstrip().startswith("ALTER TABLE _alembic_tmp"):
        os.kill(os.getpid(), signal.SIGKILL)

sqlalchemy.event.listen(sqlalchemy.Engine, "before_cursor_execute", die)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mlflow.db"


@pytest.fixture
def store(path: Path) -> Store:
    return Store(f"sqlite:///{path}", None)


def test_what_a_killed_client_began_is_no_database(path: Path, store: Store) -> None:
    assert open_by_client(store, DIE_AT_A_COPY + OPEN_IT) == -signal.SIGKILL
    assert path.stat().st_size > 0
    assert_whole(path, store)


def test_what_a_client_made_is_kept(path: Path, store: Store) -> None:
    assert open_by_client(store) == 0
    made = path.stat().st_ino
    assert_whole(path, store)
    assert path.stat().st_ino == made


async def test_a_client_that_writes_while_the_database_is_made_damages_nothing(path: Path, store: Store) -> None:
    async def being_made() -> bool:
        return is_begun(path)

    opening = asyncio.create_task(asyncio.to_thread(store.open))
    await eventually(being_made)
    with closing(sqlite3.connect(path, isolation_level=None)) as client:
        client.execute("CREATE TABLE experiments (experiment_id INTEGER)")
        client.execute("PRAGMA cache_size=1")
        client.execute("BEGIN IMMEDIATE")
        client.executemany("INSERT INTO experiments VALUES (?)", [(number,) for number in range(5000)])
        with pytest.raises(TrackingUnavailable, match="database is locked"):
            await opening
        client.execute("ROLLBACK")
        store.open()
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            client.execute("INSERT INTO experiments VALUES (0)")
    assert_whole(path, store)


async def test_journals_of_a_database_that_is_gone_are_not_its_own(path: Path, store: Store) -> None:
    with closing(sqlite3.connect(path)) as earlier:
        earlier.execute("PRAGMA journal_mode=WAL")
        earlier.execute("CREATE TABLE earlier (number INTEGER)")
        logged = path.with_name("mlflow.db-wal").read_bytes()
    path.unlink()
    path.with_name("mlflow.db-wal").write_bytes(logged)
    assert_whole(path, store)


def open_by_client(store: Store, code: str = OPEN_IT) -> int:
    return subprocess.run([sys.executable, "-c", code, store.uri], stderr=subprocess.DEVNULL, check=False).returncode


def assert_whole(path: Path, store: Store) -> None:
    """A run is tracked there, for a client too, and SQLite finds no damage."""
    page = store.create("digits", "first", 0, {})
    other = Store(store.uri, None)
    assert [other.find("digits", "x", 1), store.answers()] == [None, True]
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert database.execute("SELECT run_uuid FROM runs").fetchall() == [(page.mlflow_run_id,)]
        assert "earlier" not in {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
    assert list(path.parent.glob(".mlflow.db.new-*")) == []
