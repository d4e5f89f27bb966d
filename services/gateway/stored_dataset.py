"""Finds a dataset by its id or the beginning of one, and reads its manifest."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

import sqlalchemy as sa
from pydantic import ValidationError

from contracts.datasets import Manifest, dataset_uri
from services.gateway.projection import Projection
from services.gateway.queries import NotFound, Row
from services.gateway.run_lookup import RunNotFound, find_run
from services.gateway.store import DATASETS, INGESTIONS, begins_with
from services.kit.store.uris import split_uri

#: A whole id.
DATASET_ID = re.compile("[0-9a-f]{64}")
#: Datasets named where the beginning of an id is that of several.
MAX_CANDIDATES = 10


@dataclass(frozen=True, slots=True)
class StoredDataset:
    """A dataset and where its manifest is. ``row``: what the read model has of it; None: nothing."""

    dataset_id: str
    manifest_uri: str
    row: Row | None = None

    @property
    def bucket(self) -> str:
        return split_uri(self.manifest_uri)[0]

    def read(self, content: bytes) -> Manifest:
        """Return the manifest.

        Raises:
            ValueError: these bytes are not the manifest, or not one this version reads.
        """
        if hashlib.sha256(content).hexdigest() != self.dataset_id:
            raise ValueError("is damaged, its hash is not the dataset's id")
        try:
            return Manifest.model_validate_json(content)
        except ValidationError as error:
            raise ValueError(f"is not one this version reads: {error.errors()[0]['msg']}") from error


async def find_dataset(projection: Projection, bucket: str, reference: str) -> StoredDataset:
    """Return the dataset with this id or the beginning of one, that of an ingestion, or that of a run or its name.

    A whole id need not be known: the store may have it.

    Raises:
        NotFound: there is none, or there are several.
        AmbiguousReference: there are several runs.
    """
    query = sa.select(DATASETS).where(begins_with(DATASETS.c.dataset_id, reference)).order_by(DATASETS.c.dataset_id)
    is_whole = DATASET_ID.fullmatch(reference) is not None
    rows = await projection.store.fetch(query.limit(MAX_CANDIDATES)) if is_whole else []
    if not rows:
        await projection.catch_up()
        rows = await projection.store.fetch(query.limit(MAX_CANDIDATES))
    if len(rows) == 1:
        row = rows[0]
        return StoredDataset(row["dataset_id"], dataset_uri(split_uri(row["s3_path"])[0], row["dataset_id"]), row)
    if rows:
        listed = "\n".join(f"  {row['dataset_id']}" for row in rows)
        raise NotFound(f"{reference!r} means {len(rows)} datasets; give more of one's id:\n{listed}")
    if is_whole:
        return StoredDataset(reference, dataset_uri(bucket, reference))
    of_others = await _find_by_ingestion(projection, reference) or await _find_by_run(projection, reference)
    return await find_dataset(projection, bucket, of_others)


async def _find_by_ingestion(projection: Projection, reference: str) -> str | None:
    """Return the id of the dataset that was made of an ingestion; None: no ingestion is called so."""
    named = sa.select(INGESTIONS.c.ingestion_id, INGESTIONS.c.dataset_id, INGESTIONS.c.failed)
    query = named.where(begins_with(INGESTIONS.c.ingestion_id, reference)).order_by(INGESTIONS.c.ingestion_id)
    rows = await projection.store.fetch(query.limit(MAX_CANDIDATES))
    found = {row["dataset_id"] for row in rows} - {None}
    if len(found) == 1:
        return str(found.pop())
    if len(rows) == 1:
        why = rows[0]["failed"] or "it is not sharded yet"
        raise NotFound(f"ingestion {rows[0]['ingestion_id']} has no dataset: {why}")
    return None


async def _find_by_run(projection: Projection, reference: str) -> str:
    """Return the id of the dataset that a run was prepared with."""
    try:
        row = await find_run(projection, reference)
    except RunNotFound as error:
        raise NotFound(f"there is no dataset {reference!r}: `trainbus datasets` lists them") from error
    if row["dataset_id"] is None:
        raise NotFound(f"run {row['run_id']} has no dataset")
    return str(row["dataset_id"])
