"""A dataset on this node: its verified manifest and its splits."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from contracts.base import Sha256
from contracts.datasets import FieldStatistics
from contracts.events.dataset import ShardFile
from trainbus.data.reader import DatasetError, SplitReader, WaitForShard

SplitName = Literal["train", "validation", "test"]


class SplitManifest(BaseModel):
    model_config = ConfigDict(frozen=True)

    samples: int
    shards: tuple[ShardFile, ...] = ()


class Manifest(BaseModel):
    """``manifest.json``. The SHA-256 of its bytes is the dataset's id."""

    model_config = ConfigDict(frozen=True)

    version: Literal[2]
    format: str
    fingerprint: str
    split_config_hash: Sha256
    classes: tuple[str, ...] = ()
    token_bytes: Literal[1, 2, 4] | None = None
    statistics: dict[str, FieldStatistics] = Field(default_factory=dict)
    splits: dict[SplitName, SplitManifest]


class Dataset:
    """Opens a dataset folder and verifies that it is the dataset it should be."""

    def __init__(self, folder: Path, dataset_id: str | None = None, arrive: WaitForShard | None = None) -> None:
        """Read the manifest.

        Args:
            dataset_id: which it should be; None: whichever it is.
            arrive: called with each shard before it is opened; returns when its files are there.

        Raises:
            DatasetError: there is no manifest, or another one.
        """
        self.folder, self._arrive = folder, arrive
        try:
            data = (folder / "manifest.json").read_bytes()
        except OSError as error:
            raise DatasetError(f"the dataset has no manifest.json: {error}") from error
        self.dataset_id = hashlib.sha256(data).hexdigest()
        if dataset_id is not None and dataset_id != self.dataset_id:
            raise DatasetError(f"this is dataset {self.dataset_id[:12]}, not {dataset_id[:12]} which the run asked for")
        try:
            self.manifest = Manifest.model_validate_json(data)
        except ValidationError as error:
            raise DatasetError(f"manifest.json is not one this version reads: {error}") from error
        self.classes = self.manifest.classes
        #: Of the numeric fields, over the train split: to normalise with.
        self.statistics = self.manifest.statistics

    def split(self, name: SplitName) -> SplitReader:
        """Return the samples of one split; an absent split is an empty one."""
        split = self.manifest.splits.get(name, SplitManifest(samples=0))
        reader = SplitReader(self.folder, split.shards, self._arrive)
        if len(reader) != split.samples:
            raise DatasetError(
                f"split {name!r} has {split.samples} samples in the manifest, its shards have {len(reader)}"
            )
        return reader

    def shard_samples(self, name: SplitName) -> list[int]:
        """Return how many samples each shard of a split has, in the manifest's order."""
        split = self.manifest.splits.get(name)
        return [] if split is None else [shard.samples for shard in split.shards]
