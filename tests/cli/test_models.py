"""Models on the client's side: changes of gates."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from contracts.spec.gates import ModelGates, SliceGate
from trainbus.client.errors import UsageError
from trainbus.client.models import ModelRecord, ModelVersion, change_gates, find_unmeasured
from trainbus.commands.models import print_models, print_served

CHANGES: dict[str, tuple[ModelGates, list[str], list[str], ModelGates | str]] = {
    "set": (ModelGates(), ["confidence=0.95", "approval=true"], [], ModelGates(confidence=0.95, approval=True)),
    "a slice": (
        ModelGates(exact=True),
        ["slices.class.max_regression=0.02"],
        [],
        ModelGates(exact=True, slices={"class": SliceGate(max_regression=0.02)}),
    ),
    "off": (ModelGates(), ["confidence=0"], [], ModelGates(confidence=0)),
    "unset": (ModelGates(exact=True, confidence=0.9), [], ["confidence"], ModelGates(exact=True)),
    "unset the last of a table": (
        ModelGates(slices={"class": SliceGate(max_regression=0.02)}),
        [],
        ["slices.class.max_regression"],
        ModelGates(),
    ),
    "unknown": (ModelGates(), ["confidense=0.9"], [], "confidense"),
    "out of range": (ModelGates(), ["confidence=1.5"], [], "confidence"),
    "below chance": (ModelGates(), ["confidence=0.3"], [], "above 0.5, or 0 for none"),
    "no limit": (ModelGates(), ["slices.class.min_samples=5"], [], "max_regression or min_score"),
    "through a number": (ModelGates(threshold=1), ["threshold.x=1"], [], "no table"),
    "no file": (ModelGates(), ["none.toml"], [], "none.toml: No such file"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_changes_of_gates(case: str) -> None:
    before, changes, removals, expected = CHANGES[case]
    if isinstance(expected, str):
        with pytest.raises(UsageError, match=expected):
            change_gates(before, changes, removals)
    else:
        assert change_gates(before, changes, removals) == expected


def test_a_bound_on_a_metric_that_the_champion_lacks_is_told() -> None:
    gates = ModelGates.model_validate({"bounds": {"los": {"max": 1}, "test/accuracy": {"min": 0.5}}})
    [text] = find_unmeasured(gates, {"test/loss": 0.1, "test/accuracy": 0.9})
    assert "bounds.los: the champion's evaluation has no such metric: did you mean 'test/loss'?" in text
    assert find_unmeasured(gates, {}) == []


def version(number: int, **fields: Any) -> ModelVersion:
    defaults: dict[str, Any] = {"metrics": {}, "training_metrics": {}, "reason": "", "rollback": False}
    named = {"run_id": f"r{number}", "checkpoint_uri": "s3://models/c", "dataset_id": None}
    return ModelVersion(version=number, promoted_at=datetime.now(UTC), **named, **defaults | fields)


def test_the_champion_is_among_the_aliases_and_has_the_metrics_that_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    promoted_by_hand = version(2, training_metrics={"validation/accuracy": 0.9}, reason="promoted by request")
    print_models([ModelRecord("digits", [version(1), promoted_by_hand], aliases={"staging": 1})])
    shown = " ".join(capsys.readouterr().out.split())
    assert "champion=v2, staging=v1" in shown
    assert "validation/accuracy 0.9 (training)" in shown


def test_show_says_which_version_answers_and_why_it_is_not_the_champion(capsys: pytest.CaptureFixture[str]) -> None:
    problem = "version 2 is not served (watch): 3 of 9 requests failed"
    print_served(ModelRecord("digits", [version(1), version(2)], served_version=1, serving_problem=problem))
    print_served(ModelRecord("digits", [version(1)]))
    assert capsys.readouterr().out == f"version 1 answers; {problem}\n"


#: Whether a version is a rollback, and the reason of its fact -> what is printed.
REASONS = [
    (True, "rolled back by request", "rolled back"),
    (True, "it was worse", "rolled back: it was worse"),
    (False, "better", "better"),
]


@pytest.mark.parametrize(("rollback", "reason", "text"), REASONS)
def test_the_reason_of_a_version(rollback: bool, reason: str, text: str) -> None:
    assert version(3, rollback=rollback, reason=reason).describe_reason() == text


def test_a_file_of_gates_replaces_what_was_set(tmp_path: Path) -> None:
    path = tmp_path / "gates.toml"
    path.write_text("confidence = 0.9\n[bounds.loss]\nmax = 0.3\n")
    made = change_gates(ModelGates(approval=True), [str(path), "exact=true"])
    assert made.model_dump(exclude_defaults=True) == {
        "confidence": 0.9,
        "bounds": {"loss": {"max": 0.3}},
        "exact": True,
    }
    path.write_text("no toml")
    with pytest.raises(UsageError, match="is no TOML"):
        change_gates(ModelGates(), [str(path)])
