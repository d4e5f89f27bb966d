"""The read model in SQL: tables made from the core's rows, and transactions that keep it exact.

Its schema is made and changed by the revisions in ``migrations``. A gateway leaves the tables of a later one alone.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
import types
import typing
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
import structlog
from pydantic_core import from_json, to_json
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from services.gateway.core.fold import Keys, Rows
from services.gateway.core.rows import (
    Checkpoint,
    Dataset,
    Ingestion,
    Model,
    Node,
    Point,
    Progress,
    RegisteredModel,
    Run,
    Study,
)
from services.gateway.migrations import HEAD, VERSION_TABLE, is_known, read_revision, upgrade
from services.gateway.sqlite_reader import SqliteReader, set_pragmas

log = structlog.get_logger(__name__)

METADATA = sa.MetaData()
CONNECT_PATIENCE_S = 60.0
#: Rows a statement: SQLite takes at most 32,766 values.
CHUNK = 500

R = TypeVar("R")


class Text(sa.TypeDecorator[str]):
    """Text that PostgreSQL can hold too: it has no NUL. It is ordered by its bytes, in every database and locale."""

    impl = sa.Text
    cache_ok = True

    @property
    def python_type(self) -> type[str]:
        return str

    def load_dialect_impl(self, dialect: sa.Dialect) -> sa.types.TypeEngine[str]:
        return dialect.type_descriptor(sa.Text(collation="C" if dialect.name == "postgresql" else None))

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> str | None:
        return value if value is None else value.replace("\0", "\N{SYMBOL FOR NULL}")


def _write_json(value: Any) -> str:
    """Return JSON that every database takes: NaN and infinity, which are no JSON, are text as in facts."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(from_json(to_json(value, inf_nan_mode="strings")))


def begins_with(column: sa.ColumnElement[str], text: str) -> sa.ColumnElement[bool]:
    """Return the condition that a column begins with ``text``, as a range: ``LIKE`` would read the whole table."""
    return sa.and_(column >= text, column < text + "\U0010ffff")


def is_about_values(error: Exception) -> bool:
    """Whether a row was refused for what is in it, so that writing it again would not help."""
    if isinstance(error, sa.exc.DBAPIError):
        cause = error.orig.__cause__ if error.orig is not None else None
        # Of SQL's states class 22 is "data exception", and 54 "program limit exceeded": a text that is too long for an
        # index. The driver itself raises a ValueError.
        return isinstance(cause, ValueError) or str(getattr(cause, "sqlstate", None)).startswith(("22", "54"))
    # SQLite's driver raises the first for an integer; what is folded, the second for a time that is no number.
    return isinstance(error, (OverflowError, ValueError))


def _table(name: str, row: type[Any], key: tuple[str, ...], indexes: Sequence[tuple[str, ...]] = ()) -> sa.Table:
    """A table with one column for each field of ``row``."""
    hints = typing.get_type_hints(row)
    columns = [sa.Column(f.name, *_type(hints[f.name]), primary_key=f.name in key) for f in dataclasses.fields(row)]
    return sa.Table(
        name, METADATA, *columns, *(sa.Index(f"ix_{name}_{'_'.join(fields)}", *fields) for fields in indexes)
    )


def _type(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    simple = {str: Text(), int: sa.BigInteger(), float: sa.Double(), bool: sa.Boolean()}
    # A missing document is SQL's NULL, not the JSON text "null".
    return (simple.get(hint, sa.JSON(none_as_null=True)),)


RUNS = _table(
    "runs",
    Run,
    ("run_id",),
    [
        ("requested_at", "run_id"),
        ("name", "requested_at", "run_id"),
        ("evaluates", "requested_at"),
        ("study", "requested_at", "run_id"),
        ("study", "state", "requested_at", "run_id"),
        ("verdict",),
        ("dataset_id", "requested_at"),
        *((column, "requested_at", "run_id") for column in ("state", "user", "team", "model")),
    ],
)
#: How many runs have each value of a column: kept, since counting a million of them takes seconds.
COUNTED_COLUMNS = ("state", "kind", "user", "team", "model")
KEPT_COUNTS = (*COUNTED_COLUMNS, "dataset_id")
RUN_COUNTS = sa.Table(
    "run_counts",
    METADATA,
    sa.Column("column", Text, primary_key=True),
    sa.Column("value", Text, primary_key=True),
    sa.Column("runs", sa.BigInteger, nullable=False),
    sa.Index("ix_run_counts_column_runs", "column", "runs"),
)
PROGRESS = _table("progress", Progress, ("run_id",))
CHECKPOINTS = _table("checkpoints", Checkpoint, ("uri",), [("run_id", "step", "generation", "uri")])
NODES = _table("nodes", Node, ("node_id",))
STUDIES = _table("studies", Study, ("study_id",), [("requested_at", "study_id")])
DATASETS = _table("training_datasets", Dataset, ("dataset_id",), [("created_at", "dataset_id"), ("fingerprint",)])
INGESTIONS = _table(
    "ingestions", Ingestion, ("ingestion_id",), [("dataset_id", "at", "ingestion_id"), ("fingerprint", "dataset_id")]
)
MODELS = _table("models", Model, ("name", "version"), [("run_id",)])
REGISTERED = _table("registered_models", RegisteredModel, ("name",))
POINTS = _table("points", Point, ("run_id", "kind", "name", "node_id", "step"), [("time",)])
EVENTS = sa.Table(
    "events",
    METADATA,
    sa.Column("sequence", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("time", sa.Double, nullable=False),
    sa.Column("subject", Text, nullable=False),
    sa.Column("type", Text, nullable=False),
    sa.Column("event_id", Text, nullable=False),
    sa.Column("causation_id", Text, nullable=False),
    sa.Column("correlation_id", Text, nullable=False),
    sa.Column("run_id", Text),
    sa.Column("summary", Text, nullable=False),
    sa.Column("data", sa.JSON, nullable=False),
    sa.Index("ix_events_run_id_sequence", "run_id", "sequence"),
    sa.Index("ix_events_time", "time"),
)
#: What the events add up to.
ROWS = (
    RUNS, RUN_COUNTS, PROGRESS, CHECKPOINTS, NODES, STUDIES, DATASETS, INGESTIONS, MODELS, REGISTERED, POINTS
)  # fmt: skip
PROJECTIONS = sa.Table(
    "projections",
    METADATA,
    sa.Column("stream", sa.Text, primary_key=True),
    #: Sequence of the last event that is in the read model.
    sa.Column("position", sa.BigInteger, nullable=False),
    #: When the stream was made: another stream under the same name needs another read model.
    sa.Column("stream_created", sa.Double, nullable=False),
    sa.Column("commits", sa.BigInteger, nullable=False),
    sa.Column("updated_at", sa.Double, nullable=False),
)
REVISION = sa.table(VERSION_TABLE, sa.column("version_num"))
#: What gateways that start on one database take turns by.
SCHEMA_LOCK = 0x7261_696E
#: Every writer updates this projection's row first, so that writers of all streams take turns.
LOCK_STREAM = "FACTS"


class ProjectionMoved(Exception):
    """Another instance has moved the projection: read its position and continue from there."""


class ForeignSchema(Exception):
    """The tables are of a later version of the gateway, which alone may write to them."""

    def __init__(self, revision: str | None) -> None:
        super().__init__(
            f"the read model is of a later gateway (its revision is {revision}, this one's {HEAD}): start that one, "
            "give this one a database of its own (TRAINBUS_GATEWAY_DATABASE_URL), or have `python -m services.gateway "
            "rebuild` of this version drop and build it again"
        )


class Store:
    """One connection pool to the read model. An async context manager.

    ``replaces_later``: tables of a later gateway are dropped. Those in SQLite always are, as it belongs to one gateway.
    """

    def __init__(self, url: str, *, replaces_later: bool = False) -> None:
        self.url, self._replaces_later = url, replaces_later
        self.sqlite = make_url(url).get_backend_name() == "sqlite"
        self._engine: AsyncEngine | None = None
        self._reader: SqliteReader | None = None

    async def __aenter__(self) -> Store:
        url = make_url(self.url)
        is_file = self.sqlite and url.database and url.database != ":memory:"
        if is_file:
            Path(str(url.database)).parent.mkdir(parents=True, exist_ok=True)
        self._engine = create_async_engine(self.url, pool_pre_ping=not self.sqlite, json_serializer=_write_json)
        if self.sqlite:
            sa.event.listen(self._engine.sync_engine, "connect", set_pragmas)
        try:
            await self._ensure_schema_with_retries()
        except BaseException:
            await self._engine.dispose()
            raise
        if is_file:
            self._reader = SqliteReader(url)
        return self

    async def _ensure_schema_with_retries(self) -> None:
        """Wait for a database that is still starting, as a container beside us may be."""
        deadline = time.monotonic() + CONNECT_PATIENCE_S
        while True:
            try:
                return await self._ensure_schema()
            except (OSError, sa.exc.OperationalError, sa.exc.InterfaceError) as error:
                if self.sqlite or time.monotonic() > deadline:
                    raise
                log.warning("waiting for the database", error=str(error).splitlines()[0])
                await asyncio.sleep(0.5)

    async def __aexit__(self, *_: object) -> None:
        if self._reader is not None:
            await self._reader.close()
        await self.engine.dispose()

    @property
    def engine(self) -> AsyncEngine:
        if self._engine is None:
            raise RuntimeError("the store is not open: use `async with Store(url)`")
        return self._engine

    async def _ensure_schema(self) -> None:
        async with self.engine.begin() as connection:
            if not self.sqlite:
                await connection.execute(sa.select(sa.func.pg_advisory_xact_lock(SCHEMA_LOCK)))
            found = await connection.run_sync(read_revision)
            if found == HEAD:
                return
            if found is None or not is_known(found):
                if found is not None and not (self.sqlite or self._replaces_later):
                    raise ForeignSchema(found)
                await connection.run_sync(_drop_tables)
            log.info("the read model's tables are brought up to date", revision=HEAD, before=found)
            await connection.run_sync(upgrade)

    async def has_own_tables(self) -> bool:
        """Whether the tables are those of this version."""
        async with self.engine.connect() as connection:
            return await connection.run_sync(read_revision) == HEAD

    # -- reading ------------------------------------------------------------

    async def fetch(self, statement: sa.Executable) -> list[sa.RowMapping]:
        """The rows a query gives."""
        if self._reader is not None:
            return await self._reader.fetch(statement)
        async with self.engine.connect() as connection:
            return list((await connection.execute(statement)).mappings())

    async def position(self, stream: str) -> int:
        """Sequence of the last event of ``stream`` that is in the read model."""
        query = sa.select(PROJECTIONS.c.position).where(PROJECTIONS.c.stream == stream)
        rows = await self.fetch(query)
        return int(rows[0]["position"]) if rows else 0

    # -- writing ------------------------------------------------------------

    async def adopt(self, streams: dict[str, float]) -> None:
        """Begin projecting ``streams`` (name -> when it was made); start over if one was created again."""
        async with self.engine.begin() as connection:
            known = {row.stream: row.stream_created for row in (await connection.execute(sa.select(PROJECTIONS))).all()}
            if any(name in known and abs(known[name] - created) > 0.001 for name, created in streams.items()):
                await self._clear(connection)
                known = {}
            for name, created in streams.items():
                if name not in known:
                    statement = self._insert(PROJECTIONS).values(
                        stream=name, position=0, stream_created=created, commits=0, updated_at=time.time()
                    )
                    await connection.execute(statement.on_conflict_do_nothing())

    @asynccontextmanager
    async def advance_projection(self, stream: str, position: int, to: int) -> AsyncIterator[AsyncConnection]:
        """A transaction that moves a projection from ``position`` to ``to``, with what it adds.

        Raises:
            ProjectionMoved: the projection is not at ``position``; nothing is changed.
        """
        async with self.engine.begin() as connection:
            await self._lock_writers(connection)
            moved = await connection.execute(
                PROJECTIONS.update()
                .where(PROJECTIONS.c.stream == stream, PROJECTIONS.c.position == position)
                .values(position=to, updated_at=time.time())
            )
            if moved.rowcount != 1:
                raise ProjectionMoved(f"projection of {stream} is no longer at {position}")
            yield connection

    @asynccontextmanager
    async def rewind_projection(self, position: int) -> AsyncIterator[AsyncConnection]:
        """A transaction in which all rows but the events up to ``position`` are gone, to be folded again."""
        async with self.engine.begin() as connection:
            await self._lock_writers(connection)
            await self._clear(connection, keep_events_to=position)
            yield connection

    async def _lock_writers(self, connection: AsyncConnection) -> None:
        # An update comes first: SQLite's write lock and PostgreSQL's row lock are held from here on,
        # so what is read below cannot change before it is written.
        is_own = sa.exists().where(REVISION.c.version_num == HEAD)
        lock = PROJECTIONS.update().where(PROJECTIONS.c.stream == LOCK_STREAM, is_own)
        locked = await connection.execute(lock.values(commits=PROJECTIONS.c.commits + 1))
        if not locked.rowcount and (found := await connection.run_sync(read_revision)) != HEAD:
            raise ForeignSchema(found)

    async def _clear(self, connection: AsyncConnection, keep_events_to: int = 0) -> None:
        for table in ROWS:
            await connection.execute(table.delete())
        await connection.execute(EVENTS.delete().where(EVENTS.c.sequence > keep_events_to))
        if keep_events_to:
            others = PROJECTIONS.update().where(PROJECTIONS.c.stream != LOCK_STREAM)
            await connection.execute(others.values(position=0))
            facts = PROJECTIONS.update().where(PROJECTIONS.c.stream == LOCK_STREAM)
            await connection.execute(facts.values(position=keep_events_to))
        else:
            await connection.execute(PROJECTIONS.delete())

    async def load(self, connection: AsyncConnection, keys: Keys) -> Rows:
        """The existing rows that ``keys`` name."""
        registered = await _rows(connection, REGISTERED, RegisteredModel, REGISTERED.c.name, keys.registered)
        ingestions = await _rows(connection, INGESTIONS, Ingestion, INGESTIONS.c.ingestion_id, keys.ingestions)
        inputs = keys.inputs | {each.fingerprint for each in ingestions if each.fingerprint is not None}
        is_open = INGESTIONS.c.dataset_id.is_(None)
        ingestions += await _rows(connection, INGESTIONS, Ingestion, INGESTIONS.c.fingerprint, inputs, is_open)
        return Rows(
            runs={r.run_id: r for r in await _rows(connection, RUNS, Run, RUNS.c.run_id, keys.runs)},
            checkpoints={
                c.uri: c for c in await _rows(connection, CHECKPOINTS, Checkpoint, CHECKPOINTS.c.uri, keys.checkpoints)
            },
            nodes={n.node_id: n for n in await _rows(connection, NODES, Node, NODES.c.node_id, keys.nodes)},
            datasets={
                d.dataset_id: d for d in await _rows(connection, DATASETS, Dataset, DATASETS.c.fingerprint, inputs)
            },
            ingestions={i.ingestion_id: i for i in ingestions},
            registered={m.name: m for m in registered},
            studies={s.study_id: s for s in await _rows(connection, STUDIES, Study, STUDIES.c.study_id, keys.studies)},
        )

    async def load_progress(self, connection: AsyncConnection, runs: set[str]) -> dict[str, Progress]:
        """Return how far each of ``runs`` is, where a report exists."""
        found = await _rows(connection, PROGRESS, Progress, PROGRESS.c.run_id, runs)
        return {progress.run_id: progress for progress in found}

    async def save(self, connection: AsyncConnection, before: Rows, after: Rows) -> None:
        """Write the rows of ``after`` that differ from ``before``."""
        changed = _changed_rows(before.runs, after.runs)
        await self.upsert(connection, RUNS, changed)
        await self._count(connection, [before.runs.get(run.run_id) for run in changed], changed)
        await self.upsert(connection, CHECKPOINTS, _changed_rows(before.checkpoints, after.checkpoints))
        await self.upsert(connection, NODES, _changed_rows(before.nodes, after.nodes))
        await self.upsert(connection, STUDIES, _changed_rows(before.studies, after.studies))
        await self.upsert(connection, DATASETS, _changed_rows(before.datasets, after.datasets))
        await self.upsert(connection, INGESTIONS, _changed_rows(before.ingestions, after.ingestions))
        await self.upsert(connection, MODELS, after.models.values())
        await self.upsert(connection, REGISTERED, _changed_rows(before.registered, after.registered))

    async def _count(self, connection: AsyncConnection, before: list[Run | None], after: list[Run]) -> None:
        """Bring the counts of runs from what the rows were to what they are."""
        change: Counter[tuple[str, str | None]] = Counter()
        for column in KEPT_COUNTS:
            change.update((column, getattr(run, column)) for run in after)
            change.subtract((column, getattr(run, column)) for run in before if run is not None)
        rows = [
            {"column": column, "value": value, "runs": runs}
            for (column, value), runs in change.items()
            if value is not None and runs
        ]
        for start in range(0, len(rows), CHUNK):
            statement = self._insert(RUN_COUNTS)
            added = {"runs": RUN_COUNTS.c.runs + statement.excluded.runs}
            statement = statement.on_conflict_do_update(index_elements=["column", "value"], set_=added)
            await connection.execute(statement, rows[start : start + CHUNK])
        if any(runs < 0 for runs in change.values()):
            await connection.execute(RUN_COUNTS.delete().where(RUN_COUNTS.c.runs == 0))

    async def upsert(
        self, connection: AsyncConnection, table: sa.Table, rows: Iterable[Any], *, where: str | None = None
    ) -> None:
        """Insert rows or overwrite those with the same key (only where column ``where`` is not lower)."""
        values = [dataclasses.asdict(row) for row in rows]
        for start in range(0, len(values), CHUNK):
            statement = self._insert(table)
            new = statement.excluded
            statement = statement.on_conflict_do_update(
                index_elements=list(table.primary_key.columns),
                set_={c.name: new[c.name] for c in table.columns if not c.primary_key},
                where=new[where] >= table.c[where] if where else None,
            )
            await connection.execute(statement, values[start : start + CHUNK])

    async def add_points(
        self, connection: AsyncConnection, points: Iterable[Point], abandoned: Iterable[tuple[str, int, int]]
    ) -> None:
        """Keep points, the newest generation's for each step, and drop abandoned tails.

        ``abandoned``: (run, generation, resume_step): what older generations trained beyond is gone.
        """
        await self.upsert(connection, POINTS, points, where="generation")
        for run_id, generation, resume_step in abandoned:
            await connection.execute(
                POINTS.delete().where(
                    POINTS.c.run_id == run_id,
                    POINTS.c.kind == "training",
                    POINTS.c.generation < generation,
                    POINTS.c.step > resume_step,
                )
            )

    async def add_events(self, connection: AsyncConnection, events: list[dict[str, Any]]) -> None:
        """Append events; one that is there is left as it is."""
        if events:
            await connection.execute(self._insert(EVENTS).on_conflict_do_nothing(), events)

    async def prune_points(self, before_s: float) -> int:
        """Delete points older than ``before_s``: the read model keeps no more than the stream does."""
        async with self.engine.begin() as connection:
            await self._lock_writers(connection)
            return (await connection.execute(POINTS.delete().where(POINTS.c.time < before_s))).rowcount

    def _insert(self, table: sa.Table) -> Any:
        # The two dialects spell "on conflict" alike, but SQLAlchemy keeps them apart.
        return sqlite.insert(table) if self.sqlite else postgresql.insert(table)


def _drop_tables(connection: sa.Connection) -> None:
    """Drop every table of the read model, of earlier versions too."""
    METADATA.drop_all(connection)
    for name in (VERSION_TABLE, "read_model_schema"):
        sa.Table(name, sa.MetaData()).drop(connection, checkfirst=True)


async def _rows(
    connection: AsyncConnection,
    table: sa.Table,
    row: type[R],
    column: sa.Column[Any],
    wanted: set[str],
    *conditions: sa.ColumnElement[bool],
) -> list[R]:
    found: list[R] = []
    names = sorted(wanted)
    for start in range(0, len(names), CHUNK):
        query = sa.select(table).where(column.in_(names[start : start + CHUNK]), *conditions)
        found += [row(**mapping) for mapping in (await connection.execute(query)).mappings()]
    return found


def _changed_rows(before: dict[Any, R], after: dict[Any, R]) -> list[R]:
    return [row for key, row in after.items() if before.get(key) is not row]
