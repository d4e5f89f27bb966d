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
from services.gateway.store import DATASETS, begins_with
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
    """Return the dataset with this id or beginning of one. A whole id need not be known: the store may have it.

    Raises:
        NotFound: there is none, or there are several.
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
        named = ", ".join(row["dataset_id"] for row in rows)
        raise NotFound(f"{reference!r} is the beginning of several datasets; give more of one's id: {named}")
    if is_whole:
        return StoredDataset(reference, dataset_uri(bucket, reference))
    raise NotFound(f"there is no dataset {reference!r}: `trainbus datasets` lists them")
