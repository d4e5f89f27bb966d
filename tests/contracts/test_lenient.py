"""Facts are read for ever: a rule of admission that is stricter today does not make a fact of yesterday unreadable."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from contracts.base import Event
from contracts.envelope import InvalidData, RawMessage, decode
from contracts.events.capacity import PolicyAdopted
from contracts.events.dataset import DatasetIngested
from contracts.events.run import RunAccepted, RunPlaced
from contracts.events.train import TrainRequested
from contracts.lenient import Lenient
from contracts.spec.base import SpecPart
from contracts.spec.run import RunSpec
from services.scheduler.core.fold import apply
from services.scheduler.core.state.cluster import Cluster

TIME = datetime(2026, 1, 2, tzinfo=UTC)
VALID = {"name": "a", "command": ["true"]}
SHA = "ab" * 32
#: Specs that a rule of admission refuses, and the rule.
REFUSED: dict[str, dict[str, Any]] = {
    "a limit": {**VALID, "max_attempts": 0},
    "a length": {**VALID, "name": ""},
    "a pattern": {**VALID, "experiment": "not a token"},
    "a limit of a part": {**VALID, "slots": {"min": 0, "max": 4}},
    "a check of a part": {**VALID, "slots": {"min": 4, "max": 1}},
    "a check across parts": {**VALID, "slots": {"min": 3, "max": 3}, "gang": {"bundle": 2}},
    "a check of a field": {**VALID, "env": {"not-a-name": "x"}},
    "two ways to run": {**VALID, "task": "m:T"},
    "no way to run": {"name": "a"},
    "training without an end": {**VALID, "training": {"global_batch": 8}},
    "a limit deep inside": {**VALID, "training": {"epochs": 1, "loading": {"workers": -1}}},
    "splits of data": {**VALID, "data": {"source": "elsewhere", "format": "jsonl", "split": {"train": 0.1}}},
    "an unknown field": {**VALID, "colour": "red"},
    "an unknown field of a part": {**VALID, "slots": {"min": 1, "max": 1, "colour": "red"}},
}
each_rule = pytest.mark.parametrize("spec", [pytest.param(spec, id=rule) for rule, spec in REFUSED.items()])


def read(subject: str, body: dict[str, Any]) -> Event:
    return decode(RawMessage(subject, json.dumps(body).encode(), {"ce-id": "1"}))[1]


@each_rule
def test_admission_refuses_what_breaks_a_rule(spec: dict[str, Any]) -> None:
    with pytest.raises(InvalidData):
        read("train.requested", spec)


@each_rule
def test_a_recorded_run_that_breaks_a_rule_is_read_and_folded(spec: dict[str, Any]) -> None:
    accepted = read("run.r1.accepted", {"run_id": "r1", "request_id": "q", "request_source": "s", "spec": spec})
    placement = {"members": [], "world_size": 1, "decided_at_sequence": 1, "decided_at": TIME.isoformat()}
    placed = read("run.r1.placed", {"run_id": "r1", "generation": 1, "spec": spec, **placement})
    assert isinstance(accepted, RunAccepted)
    assert isinstance(placed, RunPlaced)
    assert accepted.spec.name == spec["name"]
    cluster = Cluster()
    apply(cluster, accepted, 1, TIME)
    assert cluster.runs["r1"].spec == accepted.spec


def test_a_recorded_dataset_that_breaks_a_rule_is_read() -> None:
    data = {"source": "elsewhere", "format": "text", "window_length": 0, "colour": "red"}
    counts = {"accepted": 1, "split_counts": {"train": 1}}
    body = {"ingestion_id": "i1", "data": data, "fingerprint": SHA, "index_uri": "s3://bucket/x", **counts}
    ingested = read("dataset.i1.ingested", body)
    assert isinstance(ingested, DatasetIngested)
    assert ingested.data.window_length == 0


def test_a_recorded_policy_that_breaks_a_rule_is_read() -> None:
    order = {"attained": {"levels_slot_s": [2, 1]}}
    policy = {"name": "", "faults": {"start_deadline_s": -1, "colour": "red"}, "order": order}
    adopted = read("policy.abc.adopted", {"digest": "abc", "policy": policy})
    assert isinstance(adopted, PolicyAdopted)
    assert adopted.policy.faults.start_deadline_s == -1


def test_what_is_no_value_of_its_type_is_refused_in_a_fact_too() -> None:
    for spec in ({**VALID, "max_attempts": "many"}, {**VALID, "kind": "dance"}, {"command": ["true"]}):
        with pytest.raises(ValidationError):
            RunSpec.model_validate(spec)


def parts(cls: type[BaseModel] = SpecPart) -> list[type[BaseModel]]:
    own = [] if cls is SpecPart else [cls]
    return own + [part for sub in cls.__subclasses__() for part in parts(sub)]


@pytest.mark.parametrize("part", parts())
def test_every_part_has_a_lenient_reading(part: type[BaseModel]) -> None:
    """An unknown field stands for any rule: pydantic takes the strict validator as a whole, or not at all."""

    class Fact(BaseModel):
        value: Lenient[part]  # type: ignore[valid-type]

    required = {name: field for name, field in part.model_fields.items() if field.is_required()}
    if required:
        found = TypeAdapter(Lenient[part]).validate_python
        with pytest.raises(ValidationError) as raised:
            found({"colour": "red"})
        assert {error["type"] for error in raised.value.errors()} == {"missing"}
    else:
        assert not hasattr(Fact.model_validate({"value": {"colour": "red"}}).value, "colour")


def test_a_request_becomes_the_spec_of_its_facts() -> None:
    request = TrainRequested.model_validate({**VALID, "slots": 4, "tags": {"a": "b"}})
    spec = request.run_spec
    assert spec == RunSpec.model_validate(request.model_dump())
    assert spec.model_dump_json(exclude_defaults=True) == request.model_dump_json(exclude_defaults=True)
