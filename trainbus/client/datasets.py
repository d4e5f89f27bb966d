"""Datasets: found, read and compared through the gateway."""

from __future__ import annotations

import asyncio
import hashlib
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

import httpx
from pydantic import ValidationError

from contracts.datasets import SPLITS, IndexRecord, Manifest, shard_uri
from contracts.events.dataset import DatasetIngested, DatasetSharded
from contracts.verification import DatasetVerification
from services.kit.concurrency import gather_limited
from services.kit.store.files import hash_file
from services.kit.store.uris import split_uri
from trainbus.client.connection import PAGE_ITEMS, Connection, check_answer
from trainbus.client.errors import StackUnreachableError, TrainbusError, UsageError
from trainbus.client.gateway import download
from trainbus.client.run_list import read_metrics
from trainbus.datasets.diff import Difference, UnsortedIndex, compare
from trainbus.datasets.history import Champion, DatasetRecord, Ingestion, TrainingUse

#: Files that are fetched at the same time.
PARALLEL = 4


@dataclass(frozen=True, slots=True)
class LoadedDataset:
    """A dataset with its manifest, whose hash is the dataset's id."""

    known: DatasetRecord
    manifest: Manifest
    #: The manifest's bytes as they are stored: their hash is the id.
    content: bytes
    bucket: str


async def list_datasets(connection: Connection) -> list[DatasetRecord]:
    """Return the datasets, the oldest first."""
    pages = connection.read_pages("/datasets")
    return [_read_record(each) async for page in pages for each in page["datasets"]][::-1]


async def list_unfinished(connection: Connection) -> list[Ingestion]:
    """Return the ingestions that have no dataset: they go on, or have failed. The oldest first."""
    pages = connection.read_pages("/ingestions", without_dataset=True)
    return [_read_ingestion(each) async for page in pages for each in page["ingestions"]][::-1]


async def list_newest_ingestions(connection: Connection) -> list[Ingestion]:
    """Return the newest ingestions that have found their records, or failed; the newest first."""
    page = await connection.get("/ingestions", {"limit": PAGE_ITEMS})
    return [_read_ingestion(each) for each in page["ingestions"]]


async def find_dataset(connection: Connection, name: str) -> DatasetRecord:
    """Return the dataset that ``name`` means: its id or the beginning of one, that of an ingestion, a run or its name.

    A full id is valid even if the log no longer has its facts.

    Raises:
        NotFoundError: there is none, or there are several.
        UsageError: the name is empty.
    """
    if not name:
        raise UsageError("name a dataset: `trainbus datasets` lists them")
    found = await connection.get(f"/datasets/{quote(name, safe='')}")
    known = DatasetRecord(found["dataset_id"]) if found["dataset"] is None else _read_record(found["dataset"])
    known.manifest_uri = found["manifest_uri"]
    known.ingestions = [_read_ingestion(each) for each in found["ingestions"]]
    known.runs = [_read_use(each) for each in found["runs"]]
    return known


def _read_record(found: Mapping[str, Any]) -> DatasetRecord:
    return DatasetRecord(
        found["dataset_id"],
        DatasetSharded.model_validate(found),
        found["manifest_uri"],
        found["source"],
        found["format"],
        found["quarantined"],
        found["run_count"],
    )


def _read_ingestion(found: Mapping[str, Any]) -> Ingestion:
    result = None if found["found"] is None else DatasetIngested.model_validate(found["found"])
    return Ingestion(
        found["ingestion_id"],
        datetime.fromisoformat(found["at"]),
        result,
        found["dataset_id"],
        found["failed"],
    )


def _read_use(found: Mapping[str, Any]) -> TrainingUse:
    champions = [
        Champion(
            each["model"],
            each["version"],
            datetime.fromisoformat(each["promoted_at"]),
            read_metrics(each["metrics"]),
            each["champion"],
        )
        for each in found["champions"]
    ]
    taken = {name: found[name] for name in ("run_id", "name", "kind", "state", "init_from")}
    return TrainingUse(**taken, champions=champions)


async def load_dataset(http: httpx.AsyncClient, known: DatasetRecord) -> LoadedDataset:
    """Read a dataset's manifest.

    Raises:
        TrainbusError: it is missing, or its hash is not the dataset's id.
    """
    answer = await http.get(f"/datasets/{known.dataset_id}/manifest")
    check_answer(answer)
    content, uri = answer.content, answer.headers["Content-Location"]
    if hashlib.sha256(content).hexdigest() != known.dataset_id:
        raise TrainbusError(f"{uri} arrived damaged, its hash is not the dataset's id: ask again")
    try:
        manifest = Manifest.model_validate_json(content)
    except ValidationError as error:
        raise TrainbusError(f"{uri} is not one this version reads: {error.errors()[0]['msg']}") from error
    known.manifest_uri = uri
    return LoadedDataset(known, manifest, content, split_uri(uri)[0])


async def fetch_index(http: httpx.AsyncClient, loaded: LoadedDataset, path: Path) -> None:
    """Download the list of a dataset's records, sorted by key.

    Raises:
        TrainbusError: it is no longer in the store.
    """
    await download(http, f"/datasets/{loaded.known.dataset_id}/index", path)


async def count_classes(http: httpx.AsyncClient, loaded: LoadedDataset) -> Counter[tuple[str, str]]:
    """Return (split, class) -> number of records, from the dataset's index."""
    with tempfile.TemporaryDirectory(prefix="trainbus-") as folder:
        path = Path(folder) / "index.jsonl"
        await fetch_index(http, loaded, path)
        return Counter((each["split"], each["label"] or "") for each in iterate_records(path))


async def compare_datasets(
    http: httpx.AsyncClient, old: LoadedDataset, new: LoadedDataset, examples: int
) -> Difference:
    """Compare the records of two datasets; ``examples`` keys of each kind of change are named.

    Raises:
        TrainbusError: an index is no longer in the store, or is damaged.
    """
    with tempfile.TemporaryDirectory(prefix="trainbus-") as folder:
        paths = Path(folder) / "before.jsonl", Path(folder) / "after.jsonl"
        for loaded, path in zip((old, new), paths, strict=True):
            await fetch_index(http, loaded, path)
        try:
            return await asyncio.to_thread(compare, iterate_records(paths[0]), iterate_records(paths[1]), examples)
        except UnsortedIndex as error:
            raise TrainbusError(f"{error}: the index is damaged; ingest the source again") from error


def list_shard_uris(loaded: LoadedDataset, split: str | None) -> list[str]:
    """Return the addresses of a dataset's shards, or of one split's, in the order of the manifest.

    Raises:
        UsageError: there is no such split.
    """
    if split is not None and split not in SPLITS:
        raise UsageError(f"there is no split {split!r}; there are {', '.join(SPLITS)}")
    splits = loaded.manifest.splits
    names = [split] if split else SPLITS
    return [shard_uri(loaded.bucket, shard.sha256) for name in names for shard in splits[name].shards]


def iterate_records(path: Path) -> Iterator[IndexRecord]:
    """Yield the records of an index one at a time."""
    with path.open("rb") as file:
        for line in file:
            record: IndexRecord = json.loads(line)
            yield record


async def verify_datasets(
    connection: Connection, dataset_ids: Sequence[str], advance: Callable[[int, int], None]
) -> DatasetVerification:
    """Have the gateway read datasets back, all if none is named, and compare every hash.

    ``advance`` gets (bytes read, all bytes).
    """
    found = await connection.await_result("/datasets/verify", advance, json={"datasets": list(dataset_ids)})
    return DatasetVerification.model_validate(found)


@dataclass(frozen=True, slots=True)
class FetchedDataset:
    """A dataset in a local folder. ``fetched`` files were missing there, or differed."""

    files: int
    fetched: int
    size_bytes: int


async def fetch_dataset(
    http: httpx.AsyncClient,
    loaded: LoadedDataset,
    folder: Path,
    splits: Sequence[str],
    advance: Callable[[int, int], None],
) -> FetchedDataset:
    """Fetch shards and indexes and verify them; intact files stay. The manifest is written last.

    ``advance`` gets (bytes done, all bytes). Without ``splits`` every split is fetched.

    Raises:
        UsageError: there is no such split, or the folder holds another dataset.
        TrainbusError: a file is missing or damaged.
    """
    known = loaded.manifest.splits
    if unknown := [split for split in splits if split not in known]:
        raise UsageError(f"there is no split {unknown[0]!r}: choose among {', '.join(known)}")
    manifest = folder / "manifest.json"
    if manifest.exists() and manifest.read_bytes() != loaded.content:
        raise UsageError(f"{folder} holds another dataset: give a folder of its own")
    files = [
        file
        for split in splits or known
        for shard in known[split].shards
        for file in (
            (shard.path, shard.sha256, shard.size_bytes),
            (shard.index_path, shard.index_sha256, shard.index_bytes),
        )
    ]
    total = sum(size for _, _, size in files)
    fetched = done = 0

    async def fetch_file(name: str, sha256: str, size: int) -> None:
        nonlocal fetched, done
        path = folder / _check_path(name)
        if not (path.exists() and await asyncio.to_thread(hash_file, path) == sha256):
            await _fetch_file(http, loaded.known.dataset_id, name, sha256, path)
            fetched += 1
        done += size
        advance(done, total)

    await gather_limited((fetch_file(*each) for each in files), limit=PARALLEL)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / ".manifest.json"
    partial.write_bytes(loaded.content)
    partial.replace(manifest)
    return FetchedDataset(len(files), fetched, total)


async def _fetch_file(http: httpx.AsyncClient, dataset_id: str, name: str, sha256: str, path: Path) -> None:
    """Write a file of a dataset once it has arrived whole."""
    partial = path.with_name(f".{path.name}.part")
    try:
        await download(http, f"/datasets/{dataset_id}/files/{quote(name)}", partial)
        if await asyncio.to_thread(hash_file, partial) != sha256:
            raise TrainbusError("it does not have the hash that the manifest names")
        partial.replace(path)
    except StackUnreachableError:
        raise
    except TrainbusError as error:
        raise TrainbusError(
            f"{name} cannot be had, {error}: `trainbus datasets verify --repair` makes it again"
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def _check_path(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise TrainbusError(f"the manifest names {name!r}, which leads out of its folder")
    return path
