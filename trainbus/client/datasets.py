"""Datasets: found by the log, read from the object store by the client itself, without any service."""

from __future__ import annotations

import asyncio
import hashlib
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from pydantic import ValidationError

from contracts import subjects
from contracts.datasets import SPLITS, IndexRecord, Manifest, dataset_uri, ingestion_uri, shard_uri
from services.kit.concurrency import gather_limited
from services.kit.store.errors import ObjectNotFound
from services.kit.store.files import hash_file
from services.kit.store.uris import split_uri
from trainbus.client.address import StackAddress
from trainbus.client.connection import Connection
from trainbus.client.errors import NotFoundError, TrainbusError, UsageError
from trainbus.datasets.diff import Difference, UnsortedIndex, compare
from trainbus.datasets.history import AmbiguousName, DatasetRecord, History

if TYPE_CHECKING:
    from services.kit.store.objects import ObjectStore

SHA256_CHARS = 64
#: Files that are fetched at the same time.
PARALLEL = 4
#: The facts that make the history of datasets; the many others of long trainings stay on the server.
FACTS = (
    subjects.dataset(),
    subjects.model(),
    *(
        subjects.fact("run", subjects.WILDCARD, name)
        for name in ("accepted", "prepared", "started", "completed", "failed", "cancelled")
    ),
)


@dataclass(frozen=True, slots=True)
class LoadedDataset:
    """A dataset with its manifest, whose hash is the dataset's id."""

    known: DatasetRecord
    manifest: Manifest
    #: The manifest's bytes as they are stored: their hash is the id.
    content: bytes
    bucket: str


async def read_history(connection: Connection) -> History:
    """Return the datasets, ingestions and uses that the log has."""
    return History((each.envelope.time, each.event) for each in await connection.read(*FACTS))


def find_dataset(history: History, name: str, address: StackAddress) -> DatasetRecord:
    """Return the dataset that ``name`` means. A full id is valid even if the log no longer has its facts.

    Raises:
        NotFoundError: there is none, or there are several.
    """
    try:
        known = history.find(name)
    except AmbiguousName as error:
        if error.found:
            listed = "\n".join(f"  {dataset_id}" for dataset_id in error.found[:10])
            raise NotFoundError(
                f"{name!r} means {len(error.found)} datasets; give more of one's id:\n{listed}"
            ) from None
        if not _is_id(name):
            made = [each for each in history.ingestions.values() if each.ingestion_id.startswith(name)]
            if len(made) == 1:
                why = made[0].failed or "it is not sharded yet"
                raise NotFoundError(f"ingestion {made[0].ingestion_id} has no dataset: {why}") from None
            raise NotFoundError(f"there is no dataset {name!r}: `trainbus datasets` lists them") from None
        known = DatasetRecord(name)
    known.manifest_uri = known.manifest_uri or dataset_uri(address.settings().bucket_datasets, known.dataset_id)
    return known


def _is_id(name: str) -> bool:
    return len(name) == SHA256_CHARS and set(name) <= set("0123456789abcdef")


async def load_dataset(objects: ObjectStore, known: DatasetRecord) -> LoadedDataset:
    """Read a dataset's manifest.

    Raises:
        TrainbusError: it is missing, or its hash is not the dataset's id.
    """
    uri = known.manifest_uri
    try:
        content = await objects.get(uri)
    except ObjectNotFound:
        raise TrainbusError(f"{uri} is not in the store: `trainbus datasets verify --repair` makes it again") from None
    if hashlib.sha256(content).hexdigest() != known.dataset_id:
        raise TrainbusError(f"{uri} is damaged, its hash is not the dataset's id: `trainbus datasets verify --repair`")
    try:
        return LoadedDataset(known, Manifest.model_validate_json(content), content, split_uri(uri)[0])
    except ValidationError as error:
        raise TrainbusError(f"{uri} is not one this version reads: {error.errors()[0]['msg']}") from error


async def fetch_index(objects: ObjectStore, loaded: LoadedDataset, path: Path) -> None:
    """Download the list of a dataset's records, sorted by key.

    Raises:
        TrainbusError: it is no longer in the store.
    """
    uri = ingestion_uri(loaded.bucket, loaded.manifest.fingerprint, "index.jsonl")
    try:
        await objects.download(uri, path)
    except ObjectNotFound:
        raise TrainbusError(
            f"{uri} is no longer in the store, so the records of dataset {loaded.known.dataset_id[:12]} cannot be "
            f"listed: ingest {loaded.manifest.source} again"
        ) from None


async def count_classes(objects: ObjectStore, loaded: LoadedDataset) -> Counter[tuple[str, str]]:
    """Return (split, class) -> number of records, from the dataset's index."""
    with tempfile.TemporaryDirectory(prefix="trainbus-") as folder:
        path = Path(folder) / "index.jsonl"
        await fetch_index(objects, loaded, path)
        return Counter((each["split"], each["label"] or "") for each in iterate_records(path))


async def compare_datasets(objects: ObjectStore, old: LoadedDataset, new: LoadedDataset, examples: int) -> Difference:
    """Compare the records of two datasets; ``examples`` keys of each kind of change are named.

    Raises:
        TrainbusError: an index is no longer in the store, or is damaged.
    """
    with tempfile.TemporaryDirectory(prefix="trainbus-") as folder:
        paths = Path(folder) / "before.jsonl", Path(folder) / "after.jsonl"
        for loaded, path in zip((old, new), paths, strict=True):
            await fetch_index(objects, loaded, path)
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


@dataclass(frozen=True, slots=True)
class FetchedDataset:
    """A dataset in a local folder. ``fetched`` files were missing there, or differed."""

    files: int
    fetched: int
    size_bytes: int


async def fetch_dataset(
    objects: ObjectStore,
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
            try:
                await objects.download(shard_uri(loaded.bucket, sha256), path, sha256=sha256)
            except (ObjectNotFound, ValueError) as error:
                raise TrainbusError(
                    f"{name} cannot be had, {error}: `trainbus datasets verify --repair` makes it again"
                ) from error
            fetched += 1
        done += size
        advance(done, total)

    await gather_limited((fetch_file(*each) for each in files), limit=PARALLEL)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / ".manifest.json"
    partial.write_bytes(loaded.content)
    partial.replace(manifest)
    return FetchedDataset(len(files), fetched, total)


def _check_path(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise TrainbusError(f"the manifest names {name!r}, which leads out of its folder")
    return path
