"""Processes that read tables may die of them: of the files only the culprit is set aside, and no row comes twice."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as parquet
import pytest

from contracts.spec.data import FeatureJoin, FeatureTable
from loadtest.data import fuzzed
from loadtest.data.quarantine import ingest
from services.ingestion import isolated_process
from services.ingestion.core.records import InvalidRecord
from services.ingestion.decoders import DecoderPool
from services.ingestion.features import source as feature_source
from services.ingestion.features.source import FeatureSource
from services.ingestion.formats import isolated_reader
from services.ingestion.formats.isolated_reader import IsolatedParquetReader
from services.ingestion.formats.parquet import python_rows
from services.ingestion.sources import FolderSource
from services.kit.bus import PoisonMessage, TransientError

pytestmark = pytest.mark.shell

ROWS = 2500  # three batches
TRAIN = {"train": 1, "validation": 0, "test": 0}


def table(**columns: list[Any]) -> bytes:
    sink = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), sink)
    return sink.getvalue()


def deadly(connection: Connection) -> None:
    """In place of the process's work: reads, but for columns whose names a library written in C might not like."""
    sound = isolated_reader._batches

    def batches(local: Path) -> Iterator[tuple[Any, Any]]:
        for number, (schema, batch) in enumerate(sound(local)):
            if "crash" in schema.names and number == 2:
                os.kill(os.getpid(), signal.SIGSEGV)
            if "hang" in schema.names:
                signal.setitimer(signal.ITIMER_PROF, 0.05)  # stands for the time that was up
                while True:
                    pass
            if "eat" in schema.names:
                bytearray(isolated_process.MEMORY_BYTES)
            if "crash-once" in schema.names and number == 2:
                try:
                    local.with_name("crashed").touch(exist_ok=False)
                    os.kill(os.getpid(), signal.SIGSEGV)
                except FileExistsError:
                    pass
            yield schema, batch

    isolated_reader._batches = batches
    isolated_reader._serve(connection)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated_reader, "_serve", deadly)


def read(unpacker: IsolatedParquetReader, path: Path) -> tuple[list[Any], str | None]:
    """The rows of a file, and what is wrong with it."""
    rows: list[Any] = []
    with closing(unpacker.read(path)) as found:
        for one in found:
            if isinstance(one, InvalidRecord):
                return rows, one.code
            rows += python_rows(one)
    return rows, None


@pytest.mark.parametrize(
    ("column", "rows", "code"),
    [
        ("fine", ROWS, None),
        ("crash", 1000, "broken_parquet"),
        ("crash-once", ROWS, None),
        ("hang", 0, "broken_parquet"),
        ("eat", 0, "bomb"),
    ],
)
def test_a_file_that_kills_its_reader_is_rejected(
    planted: None, tmp_path: Path, column: str, rows: int, code: str | None
) -> None:
    (tmp_path / "it").write_bytes(table(**{column: list(range(ROWS))}))
    (tmp_path / "next").write_bytes(table(x=[1, 2]))
    with closing(IsolatedParquetReader()) as unpacker:
        assert read(unpacker, tmp_path / "it") == ([{column: n} for n in range(rows)], code)
        assert read(unpacker, tmp_path / "next") == ([{"x": 1}, {"x": 2}], None)


def test_reading_stops_when_the_caller_stops(tmp_path: Path) -> None:
    (tmp_path / "it").write_bytes(table(x=list(range(ROWS))))
    with closing(IsolatedParquetReader()) as unpacker:
        for _ in range(3):
            with closing(unpacker.read(tmp_path / "it")) as found:
                assert [next(found).table.num_rows for _ in range(2)] == [0, 1000]  # type: ignore[union-attr]
        assert len(read(unpacker, tmp_path / "it")[0]) == ROWS


def test_no_file_is_blamed_when_no_process_can_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(isolated_process, "_run", refuse)
    (tmp_path / "it").write_bytes(table(x=[1]))
    with closing(IsolatedParquetReader()) as unpacker, pytest.raises(TransientError, match="no process can be started"):
        read(unpacker, tmp_path / "it")


def refuse(*_: Any) -> None:
    os._exit(1)


def test_no_process_outlives_its_reader(tmp_path: Path) -> None:
    (tmp_path / "it").write_bytes(table(x=[1]))
    unpacker = IsolatedParquetReader()
    read(unpacker, tmp_path / "it")
    assert unpacker._child is not None
    process = unpacker._child._process
    assert process.is_alive()
    unpacker.close()
    assert process.exitcode == -signal.SIGKILL


def test_damaged_footers_do_not_end_the_service(tmp_path: Path) -> None:
    """Any bytes in a footer yield rows or a reason, and the next file is read."""
    rng = random.Random(7)
    sound = table(x=list(range(20)), y=[str(n) for n in range(20)])
    footer = struct.unpack("<I", sound[-8:-4])[0]
    (tmp_path / "sound").write_bytes(sound)
    with closing(IsolatedParquetReader()) as unpacker:
        for _ in range(60):
            content = bytearray(sound)
            for _ in range(rng.randint(1, 4)):
                content[len(sound) - 8 - 1 - rng.randrange(footer)] = rng.randrange(256)
            (tmp_path / "spoiled").write_bytes(content)
            rows, code = read(unpacker, tmp_path / "spoiled")
            assert code in (None, "broken_parquet", "bomb")
            assert len(rows) <= 20 or code is None
        assert len(read(unpacker, tmp_path / "sound")[0]) == 20


# -- whole ingestions -----------------------------------------------------------------


async def test_an_ingestion_continues_after_a_fatal_file(planted: None, decoders: DecoderPool, tmp_path: Path) -> None:
    files = {f"{n}.parquet": table(x=[n]) for n in range(5)} | {"2.parquet": table(crash=[1] * ROWS)}
    case = fuzzed.Case("parquet", files, settings={"split": TRAIN})
    result, store = await ingest(case, decoders, tmp_path)
    assert result.outcome.accepted == 4  # its columns are others, too
    aside = [json.loads(line) for line in store.objects[result.quarantine_uri].splitlines()]
    rejected = [(entry["uri"].rpartition("/")[2], entry["code"], entry["detail"]) for entry in aside]
    assert rejected[0] == ("2.parquet", "broken_parquet", "its reader dies, or does not come to an end")


async def test_a_table_of_labels_that_kills_its_reader_is_refused(
    planted: None, decoders: DecoderPool, tmp_path: Path
) -> None:
    labels = table(file=[f"{n}.png" for n in range(ROWS)], label=["a"] * ROWS, crash=[1] * ROWS)
    case = fuzzed.Case("images", {"0.png": b"x", "labels.parquet": labels})
    with pytest.raises(PoisonMessage, match=r"labels\.parquet cannot be read as Parquet: its reader dies"):
        await ingest(case, decoders, tmp_path)


# -- joins ----------------------------------------------------------------------------


def deadly_join(report: Any, spec: FeatureJoin, entities: Any, tables: Any, folder: Path) -> Any:
    """Dies of what ``deadly`` dies of, after it has used up the first entity file."""
    paths = [path for files in (entities, *tables) for _, path in files]
    if any("crash" in parquet.read_schema(path).names for path in paths):
        entities[0][1].unlink()
        os.kill(os.getpid(), signal.SIGSEGV)
    return feature_source._join(report, spec, entities, tables, folder)


@pytest.fixture
def lake(planted: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Join an entity table and a feature table, by file the columns that they have besides."""
    monkeypatch.setattr(feature_source, "_join", deadly_join)

    async def join(entities: dict[str, str], features: dict[str, str]) -> dict[str, Path | InvalidRecord]:
        times = pyarrow.array([1] * ROWS).cast(pyarrow.timestamp("s"))
        for folder, files in (("entities", entities), ("features", features)):
            (tmp_path / folder).mkdir()
            for name, column in files.items():
                rows = {"user": list(range(ROWS)), "event_timestamp": times, column: [0] * ROWS}
                parquet.write_table(pyarrow.table(rows), tmp_path / folder / f"{name}.parquet")
        spec = FeatureTable(name="t", source="s3://lake/t", keys=("user",), created_time=None, features=("value",))
        source = FeatureSource(lambda _: FolderSource(tmp_path / "features"), FeatureJoin(tables=(spec,)))
        await source.list()
        asked = FolderSource(tmp_path / "entities")
        listed = [one async for page in asked.list_objects() for one in page]
        return await source.join(asked, sorted(listed), Path(tempfile.mkdtemp(dir=tmp_path)))

    return join


async def test_a_join_continues_without_a_fatal_entity_file(lake: Any) -> None:
    found = await lake({"a": "label", "b": "crash", "c": "label"}, {"f": "value"})
    assert isinstance(found["b.parquet"], InvalidRecord)
    assert found["b.parquet"].code == "broken_parquet"
    for name in ("a.parquet", "c.parquet"):
        assert parquet.read_table(found[name])["t__value"].to_pylist() == [0] * ROWS


async def test_a_join_names_a_fatal_feature_file(lake: Any, tmp_path: Path) -> None:
    with pytest.raises(
        PoisonMessage, match=r"g\.parquet of feature table 't' cannot be read as Parquet \(its reader dies"
    ):
        await lake({"a": "label"}, {"f": "value", "g": "crash"})
