"""Registered models: their versions, gates, aliases and candidates, read from the log; and requests about them."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from contracts import subjects
from contracts.events.model import ModelDeployed, ModelDeployFailed, ModelFact, ModelPromoted
from contracts.events.run import RunNotPromoted, RunPromoted, RunPromotionPending
from contracts.problems import describe_problems, join_problems
from contracts.spec.gates import ModelGates
from contracts.state.model import ModelSettings, champion_of
from trainbus.client.connection import Connection
from trainbus.client.errors import NotFoundError, UsageError
from trainbus.client.stored_event import StoredEvent

#: The facts that the view of a model is folded from.
FACTS = (
    subjects.model(),
    *(
        subjects.fact("run", subjects.WILDCARD, event.fact)
        for event in (RunPromotionPending, RunPromoted, RunNotPromoted)
    ),
)


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """One champion that a model has had."""

    version: int
    run_id: str
    checkpoint_uri: str
    dataset_id: str | None
    metrics: dict[str, float]
    reason: str
    rollback: bool
    promoted_at: datetime


@dataclass(slots=True)
class ModelRecord:
    """A registered model as the log has it."""

    model: str
    versions: list[ModelVersion] = field(default_factory=list)
    settings: ModelSettings = field(default_factory=ModelSettings)
    #: Run -> the fact that says what its promotion waits for.
    pending: dict[str, RunPromotionPending] = field(default_factory=dict)
    #: The version that answers requests, and why it is not a newer one.
    served_version: int | None = None
    serving_problem: str = ""

    @property
    def champion(self) -> ModelVersion | None:
        return champion_of(self.versions)

    def find(self, name: str) -> ModelVersion:
        """Return the version that a number or an alias names; ``champion`` and '' are the present one.

        Raises:
            NotFoundError: there is no such version.
        """
        if name in ("", "champion"):
            if self.champion is None:
                raise NotFoundError(f"model {self.model} has no champion yet: `trainbus models show {self.model}`")
            return self.champion
        staged = self.settings.aliases.get(name)
        number = str(staged.version) if staged else name.removeprefix("v")
        found = next((each for each in self.versions if str(each.version) == number), None)
        if found is None:
            there = ", ".join([*(str(each.version) for each in self.versions[-20:]), *self.settings.aliases])
            raise NotFoundError(f"model {self.model} has no version {name!r}; there is: {there or 'none'}")
        return found

    def to_plain(self) -> dict[str, Any]:
        """Return the model as JSON."""
        champion = self.champion
        return {
            "model": self.model,
            "champion": champion.version if champion else None,
            "versions": self.versions,
            "gates": self.settings.gates.model_dump(mode="json", exclude_defaults=True),
            "configuration": self.settings.configuration,
            "served_version": self.served_version,
            "serving_problem": self.serving_problem,
            "aliases": {alias: fact.version for alias, fact in self.settings.aliases.items()},
            "pending": [
                {"run_id": run_id, "awaits": fact.awaits, "reason": fact.reason}
                for run_id, fact in self.pending.items()
            ],
        }


def fold_models(events: Iterable[StoredEvent]) -> dict[str, ModelRecord]:
    """Fold facts, in the order of the log."""
    found: dict[str, ModelRecord] = {}
    for stored in events:
        event = stored.event
        if not isinstance(event, ModelFact | RunPromotionPending | RunPromoted | RunNotPromoted):
            continue
        record = found.setdefault(event.model, ModelRecord(event.model))
        match event:
            case ModelPromoted():
                names = ("version", "run_id", "checkpoint_uri", "dataset_id", "metrics", "reason", "rollback")
                fields = {name: getattr(event, name) for name in names}
                record.versions.append(ModelVersion(**fields, promoted_at=stored.time))
                record.pending.pop(event.run_id, None)
            case RunPromotionPending():
                record.pending[event.run_id] = event
            case RunPromoted() | RunNotPromoted():
                record.pending.pop(event.run_id, None)
            case ModelDeployed():
                record.served_version, record.serving_problem = event.version, ""
            case ModelDeployFailed():
                record.served_version = event.serving_version
                record.serving_problem = f"version {event.version} is not served ({event.stage}): {event.reason}"
            case ModelFact():
                record.settings.apply(event)
    return found


async def read_models(connection: Connection) -> dict[str, ModelRecord]:
    """Return the registered models by their names; also those that have gates or candidates alone."""
    found = fold_models(await connection.read(*FACTS))
    return {
        name: record
        for name, record in sorted(found.items())
        if record.versions or record.pending or record.settings.configuration
    }


async def find_model(connection: Connection, name: str) -> ModelRecord:
    """Return one model.

    Raises:
        NotFoundError: there is none of this name.
    """
    known = await read_models(connection)
    if name not in known:
        raise NotFoundError(f"there is no model {name!r}; there are {', '.join(known) or 'none'}")
    return known[name]


def change_gates(gates: ModelGates, changes: Iterable[str], removals: Iterable[str] = ()) -> ModelGates:
    """Return gates with changes: ``key=value`` (dots lead into tables, a value is JSON or text), or a TOML file.

    A file replaces all gates that came before it.

    Raises:
        UsageError: a change is none of these, or the gates that it makes are not valid.
    """
    plain: dict[str, Any] = gates.model_dump(mode="json", exclude_defaults=True)
    for change in changes:
        path, sign, text = change.partition("=")
        if not sign:
            plain = _read_gates(Path(change))
            continue
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        _put(plain, path, value)
    for path in removals:
        _put(plain, path, None)
    try:
        return ModelGates.model_validate(plain)
    except ValidationError as error:
        raise UsageError(f"gates: {join_problems(describe_problems(error, plain))}") from error


def _read_gates(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; give a TOML file, or key=value") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no TOML: {error}") from error


def _put(plain: dict[str, Any], path: str, value: Any) -> None:
    """Set a value at a dotted path; None removes it."""
    *tables, name = path.split(".")
    place: Any = plain
    for table in tables:
        place = place.setdefault(table, {})
        if not isinstance(place, dict):
            raise UsageError(f"gates: {table!r} in {path!r} is no table")
    if value is None:
        place.pop(name, None)
        # A table without content would be a gate without a limit.
        if tables and not place:
            _put(plain, ".".join(tables), None)
    else:
        place[name] = value
