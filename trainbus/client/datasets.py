"""Datasets: found by the log, read from the object store by the client itself, without any service."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from contracts import subjects
from contracts.datasets import IndexRecord, Manifest, dataset_uri, ingestion_uri
from services.kit.store.errors import ObjectNotFound
from services.kit.store.objects import ObjectStore
from services.kit.store.uris import split_uri
from trainbus.client.address import StackAddress
from trainbus.client.connection import Connection
from trainbus.client.errors import NotFoundError, TrainbusError
from trainbus.datasets.history import AmbiguousName, DatasetRecord, History

SHA256_CHARS = 64
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


def iterate_records(path: Path) -> Iterator[IndexRecord]:
    """Yield the records of an index one at a time."""
    with path.open("rb") as file:
        for line in file:
            record: IndexRecord = json.loads(line)
            yield record
