"""Registered models: their versions, gates, aliases and candidates, read from the gateway; and requests about them."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from contracts.base import TOKEN_PATTERN
from contracts.formats import format_reason
from contracts.lenient import Lenient
from contracts.metric_names import strip_split, suggest_metric
from contracts.problems import describe_problems, join_problems
from contracts.spec.gates import ModelGates
from trainbus.client.connection import Connection
from trainbus.client.errors import NotFoundError, UsageError
from trainbus.client.run_list import read_metrics, read_time

#: Gates as facts have them: they may break rules that are younger than they are.
RECORDED_GATES: TypeAdapter[ModelGates] = TypeAdapter(Lenient[ModelGates])


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """One champion that a model has had."""

    version: int
    run_id: str
    checkpoint_uri: str
    dataset_id: str | None
    #: Of its evaluation; empty for a run that was promoted without one.
    metrics: dict[str, float]
    #: What its training reported of its checkpoint.
    training_metrics: dict[str, float]
    reason: str
    rollback: bool
    promoted_at: datetime

    def describe_reason(self) -> str:
        """Return why it became the champion."""
        return f"rolled back{format_reason(self.reason)}" if self.rollback else self.reason


@dataclass(frozen=True, slots=True)
class PendingPromotion:
    """A run that passed every other gate, and what its promotion waits for: approval or reproduction."""

    run_id: str
    awaits: str
    reason: str


@dataclass(slots=True)
class ModelRecord:
    """A registered model as it stands."""

    model: str
    #: The oldest first; in a list of models, the champion alone.
    versions: list[ModelVersion] = field(default_factory=list)
    gates: ModelGates = field(default_factory=ModelGates)
    #: Version of the gates; 0: none were ever set.
    configuration: int = 0
    #: Alias -> version.
    aliases: dict[str, int] = field(default_factory=dict)
    pending: list[PendingPromotion] = field(default_factory=list)
    #: The version that answers requests, and why it is not a newer one.
    served_version: int | None = None
    serving_problem: str = ""

    @property
    def champion(self) -> ModelVersion | None:
        return self.versions[-1] if self.versions else None

    def find(self, name: str) -> ModelVersion:
        """Return the version that a number or an alias names; ``champion`` and '' are the present one.

        Raises:
            NotFoundError: there is no such version.
        """
        if name in ("", "champion"):
            if self.champion is None:
                raise NotFoundError(f"model {self.model} has no champion yet: `trainbus models show {self.model}`")
            return self.champion
        number = str(self.aliases[name]) if name in self.aliases else name.removeprefix("v")
        found = next((each for each in self.versions if str(each.version) == number), None)
        if found is None:
            there = ", ".join([*(str(each.version) for each in self.versions[-20:]), *self.aliases])
            raise NotFoundError(f"model {self.model} has no version {name!r}; there is: {there or 'none'}")
        return found

    def to_plain(self) -> dict[str, Any]:
        """Return the model as JSON."""
        gates = self.gates.model_dump(mode="json", exclude_defaults=True)
        champion = self.champion.version if self.champion is not None else None
        return {**{name.name: getattr(self, name.name) for name in fields(self)}, "gates": gates, "champion": champion}


async def list_models(connection: Connection) -> list[ModelRecord]:
    """Return the registered models by their names, each with its champion; also those that have candidates alone."""
    pages = connection.read_pages("/registered-models")
    return [_read_model(each) async for page in pages for each in page["models"]]


async def find_model(connection: Connection, name: str) -> ModelRecord:
    """Return one model with all its versions.

    Raises:
        NotFoundError: there is none of this name.
    """
    check_model(name)
    try:
        record = _read_model(await connection.get(f"/models/{name}"))
    except NotFoundError as error:
        known = ", ".join(each.model for each in await list_models(connection))
        raise NotFoundError(f"there is no model {name!r}; there are {known or 'none'}") from error
    record.versions = await _list_versions(connection, name)
    return record


async def _list_versions(connection: Connection, name: str) -> list[ModelVersion]:
    """Return the versions of a model, the oldest first."""
    pages = connection.read_pages(f"/models/{name}/versions")
    return [_read_version(each) async for page in pages for each in page["models"]][::-1]


def check_model(name: str) -> str:
    """Return a model's name.

    Raises:
        UsageError: it cannot be one.
    """
    if not re.match(TOKEN_PATTERN, name):
        raise UsageError(f"{name!r} is no name of a model: letters, digits, - and _, at most 128")
    return name


def _read_model(found: Mapping[str, Any]) -> ModelRecord:
    champion = found["champion"]
    return ModelRecord(
        found["model"],
        [_read_version(champion)] if champion is not None else [],
        RECORDED_GATES.validate_python(found["gates"]),
        found["configuration"],
        found["aliases"],
        [PendingPromotion(each["run_id"], each["awaits"], each["reason"] or "") for each in found["pending"]],
        found["served_version"],
        found["serving_problem"],
    )


def _read_version(found: Mapping[str, Any]) -> ModelVersion:
    taken = {each.name: found[each.name] for each in fields(ModelVersion)}
    measured = {name: read_metrics(found[name]) for name in ("metrics", "training_metrics")}
    return ModelVersion(**taken | measured | {"promoted_at": read_time(found["promoted_at"])})


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


def find_unmeasured(gates: ModelGates, metrics: Mapping[str, float]) -> list[str]:
    """Return what is said of the bounds on metrics that the champion's evaluation did not have; it may be mistaken."""
    measured = set(map(strip_split, metrics))
    return [
        f"gates: bounds.{name}: the champion's evaluation has no such metric: {suggest_metric(name, metrics)}"
        for name in (gates.bounds if metrics else ())
        if strip_split(name) not in measured
    ]


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
