"""Tables in folders of this machine, and a cancelled join."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as parquet
import pytest

from contracts.spec.data import FeatureJoin, FeatureTable
from services.ingestion.features import enrich
from services.ingestion.features.source import FeatureSource
from services.ingestion.sources import Source, SourceObject, open_source


async def opened(folder: Path) -> tuple[FeatureSource, Source, list[SourceObject]]:
    """A feature table in two files and an entity table of three rows."""
    times = pyarrow.array([1, 2, 3]).cast(pyarrow.timestamp("s"))
    for name, column in (("features/b", 20), ("features/a", 10), ("entities/all", 0)):
        path = folder / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = {"user": [1, 2, 3], "event_timestamp": times, "value": [column + n for n in range(3)]}
        parquet.write_table(pyarrow.table(rows), path)
    nothing: Any = None
    open_one = partial(open_source, objects=nothing, folders=(folder,))
    spec = FeatureTable(name="t", source=f"file://{folder}/features", keys=("user",), created_time=None)
    features = FeatureSource(open_one, FeatureJoin(tables=(spec,)))
    entities = open_one(f"file://{folder}/entities")
    return features, entities, [listed async for page in entities.list_objects() for listed in page]


async def test_the_last_file_wins_among_equal_rows(tmp_path: Path) -> None:
    features, entities, listed = await opened(tmp_path / "lake")
    versions = await features.list()
    assert [version.path.rpartition("/")[2] for version in versions] == ["a.parquet", "b.parquet"]
    assert all(version.etag and version.size for version in versions)
    (tmp_path / "work").mkdir()
    joined = await features.join(entities, listed, tmp_path / "work")
    path = joined["all.parquet"]
    assert isinstance(path, Path)
    assert parquet.read_table(path)["t__value"].to_pylist() == [20, 21, 22]
    # What was copied for it is gone; the tables themselves are not.
    assert [one for one in (tmp_path / "work").rglob("*") if one.is_file()] == [path]
    assert len(list((tmp_path / "lake").rglob("*.parquet"))) == 3


async def test_a_cancelled_join_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enrich, "CHUNK_ROWS_MAX", 1)
    features, entities, listed = await opened(tmp_path / "lake")
    await features.list()
    (tmp_path / "work").mkdir()
    begun, go_on = asyncio.Event(), threading.Event()
    loop, calls = asyncio.get_running_loop(), []

    def progress(done: int, total: int) -> None:
        calls.append((done, total))
        loop.call_soon_threadsafe(begun.set)
        go_on.wait()

    task = asyncio.create_task(features.join(entities, listed, tmp_path / "work", progress))
    await begun.wait()
    task.cancel()
    # The cancellation reaches the task before the thread may go on.
    for _ in range(10):
        await asyncio.sleep(0)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert calls == [(0, 3)]
