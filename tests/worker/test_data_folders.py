"""The plain files of datasets on a node: their names, and a cache of them that is shared, verified and bounded."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

import polars
import psutil
import pytest

from contracts.base import short_hash
from contracts.datasets import Manifest, SplitFiles
from contracts.events.run import PreparedDataset
from contracts.spec.data import Split
from loadtest.data.stored import Stored, node, store
from services.kit.settings import Settings
from services.kit.store.objects import ObjectStore
from services.kit.workdir import Workdir
from services.worker.cache.node_cache import CacheError, NodeCache
from services.worker.core.plain_paths import class_folder, sample_paths
from services.worker.data_folders.data_folders import DataFolders
from services.worker.data_folders.unpack import unpack_dataset
from tests.data.shards import Samples, write_tar
from tests.kit.support import until


@pytest.mark.parametrize(
    ("label", "folder"),
    [("cat", "cat"), ("a/b", "a%2Fb"), ("..", "%2E."), (".hidden", "%2Ehidden"), ("50%", "50%25"), ("", "%20")],
)
def test_a_class_is_a_folder_whatever_its_name(label: str, folder: str) -> None:
    assert class_folder(label) == folder


@pytest.mark.parametrize(
    ("key", "label", "path"),
    [
        ("cat/1", "cat", "cat/1.png"),
        ("2024/cat/1", "cat", "cat/2024/1.png"),
        ("images/1", "cat", "cat/images/1.png"),
        ("1", "a/b", "a%2Fb/1.png"),
        ("x.y/1", None, "x.y/1.png"),
    ],
)
def test_a_sample_lies_in_the_folder_of_its_class(key: str, label: str | None, path: str) -> None:
    assert sample_paths(key, label, ["png"]) == {"png": PurePosixPath(path)}


def write_dataset(
    folder: Path, data_format: str, splits: dict[str, list[Samples]], classes: tuple[str, ...] = ()
) -> None:
    """Write a dataset of archives, one a list of samples."""
    files = {
        split: tuple(write_tar(folder, f"{split}/shard-{number:05d}", each) for number, each in enumerate(shards))
        for split, shards in splits.items()
    }
    manifest = Manifest(
        format=data_format,
        source="made",
        fingerprint="0" * 64,
        split=Split(),
        split_config_hash="0" * 64,
        classes=classes,
        splits={
            split: SplitFiles(samples=sum(each.samples for each in shards), shards=shards)
            for split, shards in files.items()
        },
    )
    (folder / "manifest.json").write_bytes(manifest.to_bytes())


def test_rows_of_all_shards_have_one_schema(tmp_path: Path) -> None:
    rows: list[list[dict[str, Any]]] = [[{"a": 1, "b": None}], [{"a": 2.5, "b": "2020-01-01", "c": {"d": [1]}}]]
    shards = [[(f"{n}", {"json": json.dumps(row).encode()}) for n, row in enumerate(shard)] for shard in rows]
    write_dataset(tmp_path / "dataset", "jsonl", {"train": shards, "validation": shards[:1], "test": []})
    written = unpack_dataset(tmp_path / "dataset", tmp_path / "files")
    assert written.files == 3
    tables = [polars.read_parquet(path) for path in sorted((tmp_path / "files").rglob("*.parquet"))]
    assert len({str(table.schema) for table in tables}) == 1
    assert tables[0].to_dicts() == [{"a": 1.0, "b": None, "c": None}]
    assert tables[1].to_dicts() == [{"a": 2.5, "b": "2020-01-01", "c": {"d": [1]}}]


def test_every_class_has_a_folder_in_every_split_and_no_sample_replaces_another(tmp_path: Path) -> None:
    # Of these two one is named by its folder and one by a table of labels.
    train: Samples = [("x/cat/1", {"png": b"in a folder", "cls": b"0"}), ("x/1", {"png": b"in a table", "cls": b"0"})]
    test: Samples = [("dog/2", {"png": b"a dog", "json": b"{}", "cls": b"1"})]
    splits = {"train": [train], "validation": [], "test": [test]}
    write_dataset(tmp_path / "dataset", "images", splits, ("cat", "dog"))
    unpack_dataset(tmp_path / "dataset", tmp_path / "files")
    files = sorted(path for path in (tmp_path / "files").rglob("*") if path.is_file())
    assert {str(path.relative_to(tmp_path / "files")): path.read_bytes() for path in files} == {
        "train/cat/x/1.png": b"in a folder",
        f"train/cat/x/1-{short_hash('x/1')}.png": b"in a table",
        "test/dog/2.png": b"a dog",
        "test/dog/2.json": b"{}",
    }
    assert (tmp_path / "files" / "test" / "cat").is_dir()
    assert not (tmp_path / "files" / "val").exists()


@asynccontextmanager
async def data_folders(
    settings: Settings, folder: Path, max_bytes: int = 2**30
) -> AsyncIterator[tuple[NodeCache, DataFolders]]:
    async with (
        node(settings, folder, max_bytes=max_bytes) as (cache, _),
        Workdir(cache.files.trees.folder / ".work") as workdir,
    ):
        yield cache, DataFolders(cache, cache.files.trees, workdir)


def prepared(stored: Stored) -> PreparedDataset:
    return PreparedDataset(
        dataset_id=stored.dataset_id, manifest_uri=stored.manifest_uri, train_samples=stored.row_count
    )


async def lay_out(cache: NodeCache, folders: DataFolders, stored: Stored, target: Path) -> dict[str, bytes]:
    async with cache.pin_files() as pins:
        await folders.fetch(prepared(stored), pins)
        await folders.lay_out(prepared(stored), target, pins)
    return {str(path.relative_to(target)): path.read_bytes() for path in sorted(target.rglob("*")) if path.is_file()}


def samples(stored: Stored, size: int = 1000) -> dict[str, bytes]:
    found = {}
    for number, shard in enumerate(stored.shards()):
        content = stored.contents[shard.path]
        for row in range(shard.samples):
            found[f"train/train{number}/{row}.bin"] = content[row * size : (row + 1) * size]
    return found


async def test_what_a_run_does_to_its_files_does_not_reach_the_next_run(
    objects: ObjectStore, s3_settings: Settings, tmp_path: Path
) -> None:
    stored = await store(objects, s3_settings.bucket_datasets)
    async with data_folders(s3_settings, tmp_path / "cache") as (cache, folders):
        first = await lay_out(cache, folders, stored, tmp_path / "first")
        assert first == samples(stored)
        (tmp_path / "first" / "train" / "notes.txt").write_text("of this run")
        (tmp_path / "first" / "train" / "train0" / "0.bin").unlink()
        assert await lay_out(cache, folders, stored, tmp_path / "second") == first
        # Written to by one that may do everything: found by the file's time, and made again.
        victim = tmp_path / "second" / "train" / "train1" / "1.bin"
        victim.chmod(0o644)
        victim.write_bytes(b"overwritten")
        assert await lay_out(cache, folders, stored, tmp_path / "third") == first
        assert folders.dataset_ids() == (stored.dataset_id,)


async def test_a_tree_goes_when_the_cache_is_full_and_none_of_a_run_does(
    objects: ObjectStore, s3_settings: Settings, tmp_path: Path
) -> None:
    one, two = [await store(objects, s3_settings.bucket_datasets, seed=seed) for seed in (1, 2)]
    async with data_folders(s3_settings, tmp_path / "cache", max_bytes=110_000) as (cache, folders):
        trees = cache.files.trees
        async with cache.pin_files() as pins:
            await folders.fetch(prepared(one), pins)
            await lay_out(cache, folders, two, tmp_path / "two")
            assert one.dataset_id in trees.names()
        cache.evict()
        assert trees.names() == [two.dataset_id]
        assert not trees.path(one.dataset_id).exists()
        assert await lay_out(cache, folders, one, tmp_path / "one") == samples(one)


def unpacking_processes() -> Iterator[int]:
    """Yield the processes of this test that unpack a dataset."""
    for child in psutil.Process(os.getpid()).children():
        with suppress(psutil.Error):  # one of an earlier test, that has ended
            if "services.worker.data_folders.unpack" in child.cmdline():
                yield child.pid


async def test_unpacking_that_is_killed_leaves_nothing_and_is_done_again(
    objects: ObjectStore, s3_settings: Settings, tmp_path: Path
) -> None:
    stored = await store(objects, s3_settings.bucket_datasets, shards=2, samples=20_000, sample_bytes=100)
    async with data_folders(s3_settings, tmp_path / "cache") as (cache, folders):
        trees = cache.files.trees

        async def is_unpacking() -> bool:
            return any(trees.folder.glob(".work/*/*/files/train/*/*.bin"))

        async with cache.pin_files() as pins:
            fetching = asyncio.create_task(folders.fetch(prepared(stored), pins))
            await until(is_unpacking, "files", 60)
            fetching.cancel()
            with pytest.raises(asyncio.CancelledError):
                await fetching
        assert not list(unpacking_processes())
        assert trees.names() == []
        assert not list(trees.folder.glob(".work/*/*/files"))
        assert await lay_out(cache, folders, stored, tmp_path / "whole") == samples(stored, 100)


async def test_a_dataset_that_is_not_there_is_named(
    objects: ObjectStore, s3_settings: Settings, tmp_path: Path
) -> None:
    stored = await store(objects, s3_settings.bucket_datasets)
    await objects.delete(stored.manifest_uri)
    async with data_folders(s3_settings, tmp_path / "cache") as (cache, folders):
        with pytest.raises(CacheError, match=f"dataset {stored.dataset_id} is not in the store"):
            await lay_out(cache, folders, stored, tmp_path / "none")
