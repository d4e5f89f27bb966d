"""The history of datasets in the log: source, ingestion, dataset, runs that trained on it, models of those runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from contracts.events import dataset, model, run

State = Literal["sharding", "sharded", "failed"]


@dataclass(slots=True)
class Ingestion:
    """One ingestion of a source, and its result."""

    ingestion_id: str
    at: datetime
    #: None: it failed.
    found: dataset.DatasetIngested | None = None
    dataset_id: str | None = None
    failed: str = ""

    @property
    def state(self) -> State:
        return "failed" if self.failed else "sharded" if self.dataset_id else "sharding"

    @property
    def quarantined(self) -> int:
        return sum(kind.count for kind in self.found.quarantined) if self.found else 0


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
    """A dataset and everything that the log relates to it."""

    dataset_id: str
    #: The record that sharding published; None where the log no longer has it.
    record: dataset.DatasetSharded | None = None
    manifest_uri: str = ""
    ingestions: list[Ingestion] = field(default_factory=list)
    runs: list[TrainingUse] = field(default_factory=list)

    @property
    def first_ingestion(self) -> Ingestion | None:
        """The first ingestion that succeeded."""
        return next((each for each in self.ingestions if each.found), None)

    @property
    def ingested(self) -> dataset.DatasetIngested | None:
        """The result of the first ingestion that succeeded."""
        return self.first_ingestion.found if self.first_ingestion else None

    @property
    def source(self) -> str:
        return self.ingested.data.source if self.ingested else ""


class AmbiguousName(LookupError):
    """A name matches no dataset, or the several in ``found``."""

    def __init__(self, name: str, found: list[str]) -> None:
        super().__init__(name)
        self.found = found


class History:
    """Datasets, folded from facts in the order of the log."""

    def __init__(self, facts: Iterable[tuple[datetime, Any]] = ()) -> None:
        self.datasets: dict[str, DatasetRecord] = {}
        self.ingestions: dict[str, Ingestion] = {}
        self.runs: dict[str, TrainingUse] = {}
        #: Ingestions of the same input, and so of one dataset, by fingerprint and size of shards.
        self._alike: dict[tuple[str, int], list[Ingestion]] = {}
        for at, fact in facts:
            self.apply(at, fact)

    def apply(self, at: datetime, fact: Any) -> None:
        """Apply one fact. Facts that do not concern datasets are ignored."""
        match fact:
            case dataset.DatasetIngested():
                self._on_ingested(at, fact)
            case dataset.DatasetIngestFailed() | dataset.DatasetShardFailed():
                self.ingestions.setdefault(fact.ingestion_id, Ingestion(fact.ingestion_id, at)).failed = fact.reason
            case dataset.DatasetSharded():
                self._on_sharded(fact)
            case run.RunAccepted():
                use = self._run(fact.run_id)
                use.name, use.kind, use.init_from = fact.spec.name, fact.spec.kind, fact.spec.init_from
            case run.RunPrepared():
                self._on_prepared(fact)
            case run.RunStarted():
                self._run(fact.run_id).state = "running"
            case run.RunCompleted() | run.RunFailed() | run.RunCancelled():
                self._run(fact.run_id).state = fact.fact
            case model.ModelPromoted():
                self._on_promoted(at, fact)

    def _on_ingested(self, at: datetime, fact: dataset.DatasetIngested) -> None:
        made = self.ingestions.setdefault(fact.ingestion_id, Ingestion(fact.ingestion_id, at))
        made.found = fact
        alike = self._alike.setdefault((fact.fingerprint, fact.data.shard_bytes), [])
        alike.append(made)
        # The same input results in the same dataset, for which no second fact is published.
        if (dataset_id := alike[0].dataset_id) is not None:
            self._tie(made, dataset_id)

    def _on_sharded(self, fact: dataset.DatasetSharded) -> None:
        known = self._ensure_record(fact.dataset_id)
        known.record, known.manifest_uri = fact, fact.manifest_uri
        made = self.ingestions.get(fact.ingestion_id or "")
        if made is not None and made.found is not None:
            inputs = [(made.found.fingerprint, made.found.data.shard_bytes)]
        else:
            inputs = [each for each in self._alike if each[0] == fact.feature_store_version]
        for each in inputs:
            for ingestion in self._alike.get(each, ()):
                self._tie(ingestion, fact.dataset_id)

    def _on_prepared(self, fact: run.RunPrepared) -> None:
        known, use = self._ensure_record(fact.dataset_id), self._run(fact.run_id)
        known.manifest_uri = known.manifest_uri or fact.manifest_uri
        if all(each is not use for each in known.runs):
            known.runs.append(use)
        if fact.run_id in self.ingestions:
            self._tie(self.ingestions[fact.run_id], fact.dataset_id)

    def _on_promoted(self, at: datetime, fact: model.ModelPromoted) -> None:
        for use in self.runs.values():
            for champion in use.champions:
                if champion.model == fact.model:
                    champion.reigns = False
        self._run(fact.run_id).champions.append(Champion(fact.model, fact.version, at, fact.metrics))

    def _tie(self, ingestion: Ingestion, dataset_id: str) -> None:
        if ingestion.dataset_id is None:
            ingestion.dataset_id = dataset_id
            self._ensure_record(dataset_id).ingestions.append(ingestion)

    def _ensure_record(self, dataset_id: str) -> DatasetRecord:
        return self.datasets.setdefault(dataset_id, DatasetRecord(dataset_id))

    def _run(self, run_id: str) -> TrainingUse:
        return self.runs.setdefault(run_id, TrainingUse(run_id))

    def find(self, name: str) -> DatasetRecord:
        """Return the dataset that ``name`` means: its id or a unique prefix, an ingestion's id, a run's id or name.

        Raises:
            AmbiguousName: there is none, or there are several.
        """
        starting = [known for dataset_id, known in self.datasets.items() if dataset_id.startswith(name)]
        if len(starting) == 1:
            return starting[0]
        if starting:
            raise AmbiguousName(name, [known.dataset_id for known in starting])
        of_ingestions = {
            each.dataset_id for each in self.ingestions.values() if each.ingestion_id.startswith(name)
        } - {None}  # fmt: skip
        if len(of_ingestions) == 1:
            return self.datasets[str(of_ingestions.pop())]
        of_runs = [
            known
            for known in self.datasets.values()
            if any(use.name == name or use.run_id.startswith(name) for use in known.runs)
        ]
        if len(of_runs) != 1:
            raise AmbiguousName(name, [known.dataset_id for known in of_runs])
        return of_runs[0]
