"""The committed schemas, examples and asyncapi.yaml match the code."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import ValidationError

from contracts.earlier_events import EARLIER_EVENTS, model_of
from contracts.events import BY_TYPE, REQUESTS
from contracts.events.train import TrainRequested
from tests.contracts.compatibility import breaking_changes
from tests.contracts.documents import GENERATED, every_document, insert_generated, schema_for
from tests.contracts.generate import CONTRACTS, asyncapi_text, breaks, released_schemas

REGENERATE = "run: python -m tests.contracts.generate"
EXAMPLES = CONTRACTS / "examples"


def cases(kind: str) -> list[Any]:
    return [
        pytest.param(path.parent.name, json.loads(path.read_text()), id=f"{path.parent.name}/{path.stem}")
        for path in sorted((EXAMPLES / kind).glob("*/*.json"))
    ]


def test_schemas_are_compatible_with_the_committed_and_the_released_ones() -> None:
    assert [change for folder in [CONTRACTS / "schemas", *released_schemas()] for change in breaks(folder)] == []


@pytest.mark.parametrize("name", sorted(every_document()))
def test_committed_schema_is_current(name: str) -> None:
    assert (CONTRACTS / name).read_text() == every_document()[name], REGENERATE


def test_committed_asyncapi_is_current() -> None:
    assert (CONTRACTS / "asyncapi.yaml").read_text() == asyncapi_text(), REGENERATE


@pytest.mark.parametrize("page", sorted(GENERATED))
def test_generated_part_of_a_page_is_current(page: str) -> None:
    text = (CONTRACTS.parent / page).read_text()
    assert text == insert_generated(text, GENERATED[page]), REGENERATE


def test_every_event_has_a_valid_example_and_every_request_an_invalid_one() -> None:
    assert {path.name for path in (EXAMPLES / "valid").iterdir()} == {*BY_TYPE, *EARLIER_EVENTS}
    assert {path.name for path in (EXAMPLES / "invalid").iterdir()} >= {request.type for request in REQUESTS}


@pytest.mark.parametrize(("kind", "data"), cases("valid"))
def test_valid_example(kind: str, data: dict[str, Any]) -> None:
    model = model_of(kind)
    assert model is not None
    jsonschema.validate(data, schema_for(model), cls=jsonschema.Draft202012Validator)
    event = model.model_validate(data)
    assert model.model_validate_json(event.model_dump_json(exclude_defaults=True)) == event


@pytest.mark.parametrize(("kind", "example"), cases("invalid"))
def test_invalid_example_says_why(kind: str, example: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as raised:
        BY_TYPE[kind].model_validate(example["data"])
    assert example["why"] in str(raised.value)


def changed(**changes: Any) -> dict[str, Any]:
    """The schema of train.requested with properties replaced (None: removed)."""
    schema = copy.deepcopy(schema_for(TrainRequested))
    for name, value in changes.items():
        if value is None:
            del schema["properties"][name]
        else:
            schema["properties"][name] = value
    return schema


def test_an_optional_field_may_be_added() -> None:
    assert breaking_changes(schema_for(TrainRequested), changed(colour={"type": "string", "default": "red"})) == []


@pytest.mark.parametrize(
    ("new", "complaint"),
    [
        pytest.param(changed(priority=None), "priority: field removed", id="field removed"),
        pytest.param(changed(priority={"type": "string"}), "type changed", id="type changed"),
        pytest.param(changed(name={"type": "string", "maxLength": 5}), "maxLength tightened", id="limit tightened"),
        pytest.param(changed(kind={"enum": ["train"], "type": "string"}), "'evaluate' removed", id="choice removed"),
        pytest.param(
            {**schema_for(TrainRequested), "required": ["name", "team"]}, "team: made required", id="made required"
        ),
    ],
)
def test_breaking_change_is_found(new: dict[str, Any], complaint: str) -> None:
    assert complaint in "\n".join(breaking_changes(schema_for(TrainRequested), new))


def test_subjects_are_spelled_in_one_file_only() -> None:
    root = CONTRACTS.parent
    words = [f'"{aggregate}.' for aggregate in ("run", "dataset", "node", "model", "progress", "log", "dead")]
    offenders = [
        f"{path.relative_to(root)}: {line.strip()}"
        for folder in ("contracts", "services", "trainbus")
        for path in Path(root / folder).rglob("*.py")
        if path.name not in ("subjects.py",)
        for line in path.read_text().splitlines()
        if any(word in line and ("*" in line or "{" in line) for word in words)
        and ".json" not in line
        and ".log" not in line
    ]
    assert offenders == []
