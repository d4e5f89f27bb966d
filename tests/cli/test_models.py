"""Models on the client's side: the fold of their facts, and changes of gates."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from contracts.base import Event
from contracts.envelope import Envelope
from contracts.events.model import ModelApproved, ModelConfigured, ModelPromoted, ModelStaged
from contracts.events.run import RunNotPromoted, RunPromotionPending
from contracts.spec.gates import ModelGates, SliceGate
from trainbus.client.errors import NotFoundError, UsageError
from trainbus.client.models import change_gates, fold_models
from trainbus.client.stored_event import StoredEvent

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def stored(*events: Event) -> list[StoredEvent]:
    return [
        StoredEvent(number, event.subject, Envelope(str(number), "test", event.type, NOW), event)
        for number, event in enumerate(events, start=1)
    ]


def promoted(version: int, run_id: str, rollback: bool = False) -> ModelPromoted:
    uri = f"s3://models/{run_id}"
    return ModelPromoted(model="m", version=version, run_id=run_id, checkpoint_uri=uri, rollback=rollback)


def pending(run_id: str) -> RunPromotionPending:
    return RunPromotionPending(run_id=run_id, model="m", awaits="approval", reason="approve it")


def test_a_model_is_what_its_facts_add_up_to() -> None:
    [record] = fold_models(
        stored(
            promoted(1, "ra"),
            promoted(2, "rb"),
            ModelStaged(model="m", alias="staging", version=2, run_id="rb", request_id="1"),
            ModelStaged(model="m", alias="old", version=1, run_id="ra", request_id="2"),
            ModelStaged(model="m", alias="old", request_id="3"),
            ModelConfigured(model="m", version=1, gates=ModelGates(approval=True)),
            ModelConfigured(model="m", version=2, gates=ModelGates(approval=True, confidence=0.9)),
            pending("rc"),
            pending("rd"),
            ModelApproved(model="m", run_id="rd", approved=False),
            RunNotPromoted(run_id="rd", model="m", reason="declined"),
        )
    ).values()
    assert record.champion is not None
    assert (record.champion.version, record.find("staging").run_id, record.find("1").run_id) == (2, "rb", "ra")
    assert (record.find("").version, record.find("v2").version) == (2, 2)
    assert (record.settings.configuration, record.settings.gates.confidence) == (2, 0.9)
    assert list(record.pending) == ["rc"]
    assert record.to_plain()["aliases"] == {"staging": 2}
    with pytest.raises(NotFoundError, match="no version 'old'; there is: 1, 2, staging"):
        record.find("old")


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
