"""A snapshot is of a version of its format, which is raised whenever an earlier snapshot would be wrong."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from contracts.base import Fact
from services.scheduler.core import fold
from services.scheduler.core.state.cluster import Node
from tests.scheduler.snapshot_format import (
    RENEW,
    committed_format,
    current_format,
    digest_of,
    fold_result,
    handled_types,
    read_facts,
    renew,
    shape_of,
)


def test_the_version_is_raised_when_a_snapshot_would_be_wrong() -> None:
    current, committed = current_format(), committed_format()
    assert current.check_version(committed) == ""
    assert current == committed, f"run `{RENEW}`"


def test_the_facts_hold_every_type_that_the_fold_handles() -> None:
    there = {type(fact) for fact, _, _ in read_facts()}
    assert [kind.__name__ for kind in handled_types() if kind not in there] == []


@pytest.mark.parametrize("kind", sorted(fold._RUN_FACTS, key=lambda kind: kind.__name__))
def test_another_meaning_of_a_fact_is_noticed(monkeypatch: pytest.MonkeyPatch, kind: type[Fact]) -> None:
    def ignore(*_: Any) -> None:
        """Change nothing."""

    monkeypatch.setitem(fold._RUN_FACTS, kind, ignore)
    assert digest_of(fold_result(read_facts())) != committed_format().fold


def test_a_name_and_a_text_are_no_part_of_the_layout() -> None:
    schema = json.dumps(shape_of(list[Node]))
    assert '"node_id": {"type": "string"}' in schema
    assert not {"title", "description", "$ref", "$defs"} & {word.strip('"') for word in schema.split()}


def test_the_digests_are_not_renewed_before_the_version_is_raised(tmp_path: Path) -> None:
    committed, path = committed_format(), tmp_path / "format.json"
    path.write_text(json.dumps(asdict(committed)))
    for changed in (replace(committed, layout="other"), replace(committed, fold="other")):
        assert "raise FORMAT_VERSION" in renew(changed, path)
        assert committed_format(path) == committed
    raised = replace(committed, version=committed.version + 1, fold="other")
    assert renew(raised, path) == ""
    assert committed_format(path) == raised
