"""Datasets in the object store, by what the log says of them: read here, without any service."""

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
from trainbus.client.address import Address
from trainbus.client.connection import Link
from trainbus.client.errors import USAGE, CliError
from trainbus.datasets.history import History, Known, NotOne

SHA256_CHARS = 64
#: The facts that tell the history of datasets; those of long trainings' steps are left on the server.
FACTS = (
    subjects.dataset(),
    subjects.model(),
    *(
        subjects.fact("run", subjects.WILDCARD, name)
        for name in ("accepted", "prepared", "started", "completed", "failed", "cancelled")
    ),
)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A dataset with its manifest, whose hash is its id."""

    known: Known
    manifest: Manifest
    #: The manifest's very bytes, whose hash is the id: written anew they may be others.
    content: bytes
    bucket: str


async def read_history(link: Link) -> History:
    return History((each.envelope.time, each.event) for each in await link.read(*FACTS))


def find(history: History, name: str, address: Address) -> Known:
    """The dataset that ``name`` means. An id in full is one even when the log has forgotten it.

    Raises:
        CliError: there is none, or there are several.
    """
    try:
        known = history.find(name)
    except NotOne as error:
        if error.found:
            listed = "\n".join(f"  {dataset_id}" for dataset_id in error.found[:10])
            raise CliError(
                f"{name!r} means {len(error.found)} datasets; give more of one's id:\n{listed}", USAGE
            ) from None
        if not _is_id(name):
            made = [each for each in history.ingestions.values() if each.ingestion_id.startswith(name)]
            if len(made) == 1:
                why = made[0].failed or "it is not sharded yet"
                raise CliError(f"ingestion {made[0].ingestion_id} has no dataset: {why}", USAGE) from None
            raise CliError(f"there is no dataset {name!r}: `trainbus datasets` lists them", USAGE) from None
        known = Known(name)
    known.manifest_uri = known.manifest_uri or dataset_uri(address.settings().bucket_datasets, known.dataset_id)
    return known


def _is_id(name: str) -> bool:
    return len(name) == SHA256_CHARS and set(name) <= set("0123456789abcdef")


async def load(objects: ObjectStore, known: Known) -> Loaded:
    """The dataset's manifest.

    Raises:
        CliError: it is not there, or not the one whose hash is the dataset's id.
    """
    uri = known.manifest_uri
    try:
        content = await objects.get(uri)
    except ObjectNotFound:
        raise CliError(f"{uri} is not in the store: `trainbus datasets verify --repair` makes it anew") from None
    if hashlib.sha256(content).hexdigest() != known.dataset_id:
        raise CliError(f"{uri} is damaged, its hash is not the dataset's id: `trainbus datasets verify --repair`")
    try:
        return Loaded(known, Manifest.model_validate_json(content), content, split_uri(uri)[0])
    except ValidationError as error:
        raise CliError(f"{uri} is not one this version reads: {error.errors()[0]['msg']}") from error


async def fetch_index(objects: ObjectStore, loaded: Loaded, path: Path) -> None:
    """The list of a dataset's records, sorted by key, as a local file."""
    uri = ingestion_uri(loaded.bucket, loaded.manifest.fingerprint, "index.jsonl")
    try:
        await objects.download(uri, path)
    except ObjectNotFound:
        raise CliError(
            f"{uri} is not in the store any more, so the records of dataset {loaded.known.dataset_id[:12]} cannot be "
            f"told one from another: ingest {loaded.manifest.source} again"
        ) from None


def records(path: Path) -> Iterator[IndexRecord]:
    """The lines of an index, one at a time."""
    with path.open("rb") as file:
        for line in file:
            record: IndexRecord = json.loads(line)
            yield record
