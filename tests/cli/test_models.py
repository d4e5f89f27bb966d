"""Models on the client's side: changes of gates, and the chain that a trace verifies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from contracts.spec.gates import ModelGates, SliceGate
from services.kit.store.objects import ObjectStore
from trainbus.client.errors import UsageError
from trainbus.client.models import change_gates
from trainbus.client.trace import _trace_code, _trace_sources

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


async def test_sources_that_changed_or_went_are_named(objects: ObjectStore) -> None:
    folder = "s3://models/lake"
    for name in "abc":
        await objects.put(f"{folder}/{name}", name.encode())
    versions = {(f"s3://{each.bucket}/{each.key}", each.etag) async for each in objects.list(f"{folder}/")}
    assert (await _trace_sources(objects, f"{folder}/", versions)).verified is True
    await objects.put(f"{folder}/b", b"other")
    await objects.delete(f"{folder}/c")
    link = await _trace_sources(objects, f"{folder}/", versions)
    assert link.verified is False
    assert "2 objects are gone or changed since (s3://models/lake/b, s3://models/lake/c)" in link.detail
    assert (await _trace_sources(objects, "file:///data/x", versions)).verified is None


async def test_code_that_is_not_the_package_is_not_verified(objects: ObjectStore) -> None:
    from contracts.spec.run import Code

    await objects.put("s3://models/code.tar.gz", b"code")
    good = "5694d08a2e53ffcae0c3103e5ad6f6076abd960eb1f8a56577040bc1028f702b"
    found: dict[str, Any] = {}
    for name, sha256 in (("good", good), ("other", "0" * 64)):
        found[name] = (await _trace_code(objects, Code(uri="s3://models/code.tar.gz", sha256=sha256))).verified
    assert found == {"good": True, "other": False}
