"""What a run learns from: raw data and what becomes of it, or a dataset that is there."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import AwareDatetime, Field, model_validator

from contracts.base import DataUri, Sha256, Token
from contracts.spec.base import SpecPart


class Split(SpecPart):
    """How samples are divided: by a hash of each sample's split key, so that it is stable as data grows."""

    train: float = Field(0.8, ge=0, le=1)
    validation: float = Field(0.1, ge=0, le=1)
    test: float = Field(0.1, ge=0, le=1)
    seed: int = 0
    #: What samples must share to fall into one split. ``content``: their bytes, so that duplicates never leak;
    #: ``near``: what near-duplicates have in common (a perceptual hash of an image, a normalised text); ``group``: the
    #: value of ``group_field``; ``file``: the object they were read from; ``key``: nothing. ``time`` divides at dates.
    by: Literal["content", "near", "group", "file", "key", "time"] = "content"
    #: Field (jsonl, parquet, features) or column of labels.csv (images) that tells the group.
    group_field: str | None = Field(None, min_length=1, max_length=200)
    #: The same shares within each class. Counted, not hashed: growth may then move samples at the borders.
    stratify: bool = False
    #: For ``time``: the field that holds it, and where the validation and the test split begin.
    time_field: str | None = Field(None, min_length=1, max_length=200)
    validation_from: AwareDatetime | None = None
    test_from: AwareDatetime | None = None
    #: For ``time``: what lies less than so long before a border is left out.
    embargo_s: float = Field(0.0, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _sum(self) -> Self:
        if abs(self.train + self.validation + self.test - 1) > 1e-6:
            raise ValueError("split.train + split.validation + split.test must be 1")
        if self.train == 0:
            raise ValueError("split.train must be above 0")
        return self

    @model_validator(mode="after")
    def _by(self) -> Self:
        if (self.by == "group") != (self.group_field is not None):
            raise ValueError("split.by 'group' goes with split.group_field: give both or neither")
        borders = [border for border in (self.validation_from, self.test_from) if border is not None]
        if self.by != "time":
            if self.time_field is not None or borders or self.embargo_s:
                raise ValueError("split.time_field, validation_from, test_from and embargo_s need split.by 'time'")
            return self
        if self.time_field is None or not borders:
            raise ValueError("split.by 'time' needs split.time_field, and split.validation_from or split.test_from")
        if borders != sorted(borders):
            raise ValueError("split.validation_from must be before split.test_from")
        if self.stratify:
            raise ValueError("split.stratify does not go with split.by 'time': dates divide, regardless of the classes")
        return self


class Bounds(SpecPart):
    """What a number may be, both ends included."""

    min: float | None = None
    max: float | None = None

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min ({self.min}) is above max ({self.max})")
        return self


class RecordChecks(SpecPart):
    """What a record must be, beyond being readable. What is not goes to quarantine."""

    #: The allowed labels; empty: any.
    labels: tuple[str, ...] = Field((), max_length=10_000)
    #: Numeric fields and what they may be.
    ranges: dict[str, Bounds] = Field(default_factory=dict, max_length=1000)
    #: Fields that must be there and not null.
    required: tuple[str, ...] = Field((), max_length=1000)
    #: Field that identifies a record: equal copies count once, copies that differ are all set aside.
    id_field: str | None = Field(None, min_length=1, max_length=200)
    #: Field that holds a record's time, which may not lie after ``not_after``, or after its object was written.
    time_field: str | None = Field(None, min_length=1, max_length=200)
    not_after: AwareDatetime | None = None
    #: Records (images, lines, rows, files) may be so large.
    max_record_bytes: int = Field(64 * 2**20, ge=1, le=4 * 2**30)


class FeatureTable(SpecPart):
    """Features of an entity over time: Parquet files, as Feast lays them out."""

    #: Comes before the names of its features, ``<name>__<feature>``.
    name: Token
    source: DataUri
    #: The columns that identify the entity; ``entity_keys`` are their names in the entity table, where they differ.
    keys: tuple[str, ...] = Field(min_length=1, max_length=20)
    entity_keys: tuple[str, ...] = Field((), max_length=20)
    event_time: str = Field("event_timestamp", min_length=1)
    #: When the row became known; null: not recorded.
    created_time: str | None = "created"
    #: The columns to join; empty: all the others.
    features: tuple[str, ...] = Field((), max_length=10_000)
    #: How old a value may be; null: any age.
    ttl_s: float | None = Field(None, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if self.entity_keys and len(self.entity_keys) != len(self.keys):
            raise ValueError(f"{len(self.entity_keys)} entity_keys for {len(self.keys)} keys: give one for each")
        return self


class FeatureJoin(SpecPart):
    """Features as of the time of each row of the entity table (``data.source``)."""

    #: Column of the entity table: as of when.
    time_field: str = Field("event_timestamp", min_length=1)
    tables: tuple[FeatureTable, ...] = Field(min_length=1, max_length=100)
    #: Only what was known at the row's time; false: corrections made later count too.
    as_known: bool = True
    #: Leave out rows that became known after this.
    snapshot_at: AwareDatetime | None = None

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        names = [table.name for table in self.tables]
        if len(set(names)) < len(names):
            raise ValueError("two feature tables have one name: their features could not be distinguished")
        return self


class DataSource(SpecPart):
    """Raw data to be ingested and sharded before training.

    ``images``: one folder a class, or a ``labels.csv`` or ``labels.parquet`` (columns ``file``, ``label``) beside the
    files. ``jsonl``, ``csv`` and ``parquet``: one record a line or row; with ``features`` each row of Parquet gets
    features as of its time.
    ``text``: bytes, cut into windows. ``tokens``: flat files of little-endian integers, cut into windows.
    ``binary``: arbitrary files, named by a ``manifest.jsonl`` or ``manifest.csv`` (``file``, ``label``, more fields).
    ``webdataset`` and ``mds``: folders of shards that those libraries wrote.
    """

    source: DataUri
    #: ``auto``: ingestion recognises it by the names of the files; what it found is in ``dataset.ingested``.
    format: Literal["images", "jsonl", "csv", "parquet", "text", "tokens", "binary", "webdataset", "mds", "auto"] = (
        "auto"
    )
    split: Split = Split.defaults()
    checks: RecordChecks = RecordChecks.defaults()
    features: FeatureJoin | None = None
    #: Share of broken records above which ingestion fails instead of quarantining them; also of every class.
    max_invalid_fraction: float = Field(0.01, ge=0, le=1)
    #: Bytes of one sample for ``text``, tokens of one for ``tokens``.
    window_length: int = Field(129, ge=2, le=1_048_576)
    #: Bytes of one integer, for ``tokens`` alone.
    token_bytes: Literal[1, 2, 4] = 2
    #: Column or field that is the sample's label.
    label_field: str | None = None
    #: Mean, deviation and range of every numeric field, or of the channels of images, over the train split.
    statistics: bool = True
    shard_bytes: int = Field(128 * 2**20, ge=2**16, le=4 * 2**30)

    @model_validator(mode="after")
    def _features_of_rows(self) -> Self:
        if self.features is not None and self.format not in ("parquet", "auto"):
            raise ValueError("data.features needs data.format 'parquet': the entity table is a Parquet file")
        return self


class DatasetRef(SpecPart):
    """A dataset that is already sharded."""

    dataset_id: Sha256
