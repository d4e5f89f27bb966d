"""Facts about datasets, on ``dataset.<id>.<fact>``.

Before sharding the id is the ingestion's (the run's id, or one derived from the request);
after it, the dataset's own: the hash of its manifest.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from contracts import subjects
from contracts.base import Fact, FactPart, Instant, ObjectUri, Sha256, Token
from contracts.lenient import Lenient
from contracts.spec.data import DataSource


class DatasetFact(Fact, aggregate="dataset"):
    pass


class IngestionFact(DatasetFact, id_field="ingestion_id"):
    ingestion_id: Token


class QuarantineCount(FactPart):
    """How many records of one kind of fault were set aside."""

    code: str
    count: int
    example: str


class DatasetIngested(IngestionFact, fact="ingested"):
    """The source was listed, validated and split; what is broken is in quarantine."""

    #: The run that waits for it, if one does, and what the run calls it.
    run_id: Token | None = None
    name: str | None = None
    data: Lenient[DataSource]
    #: Hash of the listing and the settings: the same input gives the same one.
    fingerprint: Sha256
    #: Where the list of accepted records is, in the order of their keys.
    index_uri: ObjectUri
    accepted: int
    quarantined: tuple[QuarantineCount, ...] = ()
    quarantine_uri: ObjectUri | None = None
    split_counts: dict[str, int]
    classes: tuple[str, ...] = ()
    #: Sound records that are in no split: within the embargo before a border, or a second copy of an id.
    left_out: int = 0
    #: Where the statistics of the train split are, if there are any.
    statistics_uri: ObjectUri | None = None
    #: Files among images that are none, by their names, and the first of them. They count neither as records nor as
    #: broken.
    skipped_files: int = 0
    skipped_example: str = ""


class DatasetIngestFailed(IngestionFact, fact="ingest_failed"):
    """The source cannot be used, and what to change."""

    run_id: Token | None = None
    reason: str


class DatasetShardFailed(IngestionFact, fact="shard_failed"):
    """The ingested records cannot be made into a dataset, and what to change."""

    run_id: Token | None = None
    reason: str


class DatasetProgress(IngestionFact, fact="progress", occurrence="phase/number/time"):
    """How far an ingestion or its sharding has got, on ``progress.dataset.<id>``: every few seconds, not kept long."""

    phase: Literal["listing", "joining", "validating", "sharding", "uploading"]
    #: Place in this attempt's sequence of reports.
    number: int
    #: Records, or objects while listing; ``total`` is null while it is not known.
    done: int
    total: int | None = None
    done_bytes: int = 0
    records_per_s: float = 0.0
    eta_s: float | None = None
    time: float

    @classmethod
    def subject_filter(cls) -> str:
        return subjects.dataset_progress()

    @property
    def subject(self) -> str:
        return subjects.dataset_progress(self.ingestion_id)


class DatasetSharded(DatasetFact, fact="sharded", id_field="dataset_id"):
    """The dataset exists: its shards and manifest are in the store. The training_datasets record."""

    dataset_id: Sha256
    #: The ingestion that it was made of.
    ingestion_id: Token | None = None
    manifest_uri: ObjectUri
    #: Version of the features the data was joined from; for plain sources, the fingerprint of the listing.
    feature_store_version: str
    split_config_hash: Sha256
    row_count: int
    split_counts: dict[str, int]
    shard_count: int
    size_bytes: int
    classes: tuple[str, ...] = ()
    created_at: Instant


class ShardFile(FactPart):
    """One shard and its offset index in a manifest. In the store both lie under their hashes."""

    #: What it is called in a folder, ``train/shard-00000.tar``.
    path: str
    sha256: Sha256
    size_bytes: int
    samples: int = Field(ge=1)
    index_path: str
    index_sha256: Sha256
    index_bytes: int = Field(0, ge=0)
