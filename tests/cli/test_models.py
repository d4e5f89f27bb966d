"""Models on the client's side: changes of gates."""

from __future__ import annotations

from pathlib import Path

import pytest

from contracts.spec.gates import ModelGates, SliceGate
from trainbus.client.errors import UsageError
from trainbus.client.models import change_gates

CHANGES: dict[str, tuple[ModelGates, list[str], list[str], ModelGates | str]] = {
    "set": (ModelGates(), ["confidence=0.95", "approval=true"], [], ModelGates(confidence=0.95, approval=True)),
    "a slice": (
        ModelGates(exact=True),
        ["slices.class.max_regression=0.02"],
        [],
        ModelGates(exact=True, slices={"class": SliceGate(max_regression=0.02)}),
    ),
    "unset": (ModelGates(exact=True, confidence=0.9), [], ["confidence"], ModelGates(exact=True)),
    "unset the last of a table": (
        ModelGates(slices={"class": SliceGate(max_regression=0.02)}),
        [],
        ["slices.class.max_regression"],
        ModelGates(),
    ),
    "unknown": (ModelGates(), ["confidense=0.9"], [], "confidense"),
    "out of range": (ModelGates(), ["confidence=1.5"], [], "confidence"),
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
