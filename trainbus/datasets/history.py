"""Where datasets come from and what was made of them: ingestions, runs that trained on them, models of those runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from contracts.events.dataset import DatasetIngested, DatasetSharded

State = Literal["sharding", "sharded", "failed"]


@dataclass(slots=True)
class Ingestion:
    """One ingestion of a source, and its result."""

    ingestion_id: str
    at: datetime
    #: None: it failed.
    found: DatasetIngested | None = None
    dataset_id: str | None = None
    failed: str = ""

    @property
    def state(self) -> State:
        return "failed" if self.failed else "sharded" if self.dataset_id else "sharding"

    @property
    def has_ended(self) -> bool:
        return self.state != "sharding"


@dataclass(slots=True)
class Champion:
    """A model that a run's result was promoted to."""

    model: str
    version: int
    at: datetime
    metrics: dict[str, float]
    #: Whether it is the current champion.
    reigns: bool = True


@dataclass(slots=True)
class TrainingUse:
    """A run that trained on the dataset, or was evaluated with it."""

    run_id: str
    name: str = ""
    kind: str = "train"
    state: str = "prepared"
    #: The checkpoint that its weights were initialised from.
    init_from: str | None = None
    champions: list[Champion] = field(default_factory=list)


@dataclass(slots=True)
class DatasetRecord:
    """A dataset, and what belongs to it: in a list of datasets without its ingestions and runs."""

    dataset_id: str
    #: The record that sharding published; None where the log no longer has it.
    record: DatasetSharded | None = None
    manifest_uri: str = ""
    #: '' and None where the log no longer has them.
    source: str = ""
    format: str | None = None
    #: Kind of fault -> records that were set aside.
    quarantined: dict[str, int] = field(default_factory=dict)
    run_count: int = 0
    ingestions: list[Ingestion] = field(default_factory=list)
    runs: list[TrainingUse] = field(default_factory=list)

    @property
    def first_ingestion(self) -> Ingestion | None:
        """The first ingestion that succeeded."""
        return next((each for each in self.ingestions if each.found), None)
