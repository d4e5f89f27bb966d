"""What is wrong with a request is told in plain words, each problem once, by its field."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from contracts.events.train import TrainRequested
from contracts.problems import describe_problems
from contracts.spec.run import RunSpec

BODY: dict[str, Any] = {"name": "a", "command": ["x"]}
SOURCE: dict[str, Any] = {"source": "s3://lake/x/", "format": "jsonl"}

CASES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "a choice": (
        {"data": {**SOURCE, "format": "csvv"}},
        {"data.format": "must be 'images', "},
    ),
    "a part that is missing": ({"model": "m", "evaluation": {"mode": "min"}}, {"evaluation.metric": "is missing"}),
    "a rule of a part": ({"data": {**SOURCE, "split": {"train": 0.5}}}, {"data.split": "split.train + split.valid"}),
    "deep in a part": (
        {"data": {**SOURCE, "checks": {"ranges": {"age": {"min": "low"}}}}},
        {"data.checks.ranges.age.min": "must be a number, not 'low'"},
    ),
    "a typo": ({"slotz": {"min": 1}}, {"slotz": "unknown field: did you mean slots?"}),
    "a typo in a part": (
        {"training": {"epochz": 1, "max_steps": 1}},
        {"training.epochz": "unknown field: did you mean training.epochs?"},
    ),
    "a field of a part": ({"epochs": 1}, {"epochs": "unknown field: did you mean training.epochs?"}),
    "a number": ({"priority": 5000}, {"priority": "must be at most 1000, not 5000"}),
    "a text": ({"slots": {"min": "many"}}, {"slots.min": "must be a whole number, not 'many'"}),
    "an address": ({"resume_from": "models"}, {"resume_from": "must be an address: s3://bucket/key, not 'models'"}),
    "one of two": (
        {"training": {"max_steps": 1, "checkpoint_every_s": "often"}},
        {"training.checkpoint_every_s": "must be a number, not 'often'; or must be 'auto'"},
    ),
    "a short form": ({"slots": -1}, {"slots.min": "must be at least 1, not -1", "slots.max": "must be"}),
    "the whole": ({"task": "t:A"}, {"": "give exactly one of 'task'"}),
    "an item": ({"command": ["x", 3]}, {"command.1": "must be text, not 3"}),
    "no object": ({"data": 3}, {"data": "must be an object with names and values, not 3"}),
}


@pytest.mark.parametrize("name", CASES)
def test_each_problem_is_told_once_by_its_field(name: str) -> None:
    change, expected = CASES[name]
    body = {**BODY, **change}
    with pytest.raises(ValidationError) as raised:
        TrainRequested.model_validate(body)
    found = {each.field: each.message for each in describe_problems(raised.value, body, TrainRequested)}
    assert found.keys() == expected.keys()
    for field, text in expected.items():
        assert found[field].startswith(text), found
    assert not re.search(r"function-|DataSource|DatasetRef|[Ii]nput|literal\[|constrained", str(found))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"command": ["true", "x" * 131_072]}, "131,072 bytes, and a process takes at most 131,071"),
        ({"command": ["true", "ü" * 65_536]}, "131,072 bytes"),
        ({"command": ["true", "a\0b"]}, "NUL"),
        ({"command": ["true"], "env": {"A": "x" * 131_070}}, "env variable 'A' has 131,072 bytes"),
        ({"command": ["true"], "env": {"A": "a\0b"}}, "env variable 'A' holds a NUL"),
    ],
)
def test_what_no_process_can_be_given_is_refused_with_the_limit(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        TrainRequested.model_validate({"name": "a", **fields})
    # A fact that has it already is read as ever.
    assert RunSpec.model_validate({"name": "a", **fields}).command == fields["command"]


def test_the_longest_argument_is_accepted() -> None:
    assert TrainRequested.model_validate({"name": "a", "command": ["true", "x" * 131_071]}).command is not None
