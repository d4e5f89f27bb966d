"""What requests can ask of records, and what no record of a format could be."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

import pytest

from contracts.spec.data import DataSource
from services.ingestion.core.checks import RecordChecker, find_impossible_check
from services.ingestion.core.records import RecordFault, ValidRecord

WRITTEN_US = 1_760_000_000_000_000  # October 2025


def source(format: str = "jsonl", **settings: Any) -> DataSource:
    return DataSource.model_validate({"source": "s3://lake/x", "format": format, **settings})


def sound(value: dict[str, Any] | None, label: str | None = None, size: int = 10) -> ValidRecord:
    return ValidRecord("k", "json", b"", size, "00" * 32, label, value=value)


@pytest.mark.parametrize(
    ("checks", "value", "code"),
    [
        ({"required": ["x"]}, {"x": 0}, None),
        ({"required": ["x"]}, {"x": None}, "missing_field"),
        ({"required": ["x"]}, {"x": ""}, "missing_field"),
        ({"required": ["x"]}, {}, "missing_field"),
        ({"required": ["a.b"]}, {"a": {"b": 1}}, None),
        ({"required": ["a.b"]}, {"a.b": 1}, None),
        ({"required": ["a.b"]}, {"a": 3}, "missing_field"),
        ({"required": ["x"]}, None, "missing_field"),
        ({"ranges": {"x": {"min": 0, "max": 1}}}, {"x": 1}, None),
        ({"ranges": {"x": {"min": 0, "max": 1}}}, {"x": -0.001}, "out_of_range"),
        ({"ranges": {"x": {"min": 0, "max": 1}}}, {"x": 10**400}, "out_of_range"),
        ({"ranges": {"x": {"min": 0}}}, {}, None),
        ({"ranges": {"x": {"min": 0}}}, {"x": "0.5"}, None),
        ({"ranges": {"x": {"min": 0}}}, {"x": "nan"}, "nan"),
        ({"ranges": {"x": {"min": 0}}}, {"x": "much"}, "not_a_number"),
        ({"ranges": {"x": {"min": 0}}}, {"x": True}, "not_a_number"),
        ({"ranges": {"x": {"min": 0}}}, {"x": [1]}, "not_a_number"),
        ({"time_field": "t"}, {"t": "2025-01-01"}, None),
        ({"time_field": "t"}, {"t": 1_700_000_000}, None),
        ({"time_field": "t"}, {"t": "2026-01-01T00:00:00Z"}, "future_time"),
        ({"time_field": "t", "not_after": "2030-01-01T00:00:00Z"}, {"t": "2026-01-01"}, None),
        ({"time_field": "t", "not_after": "2024-01-01T00:00:00Z"}, {"t": "2024-01-01T00:00:00+00:00"}, None),
        ({"time_field": "t", "not_after": "2024-01-01T00:00:00Z"}, {"t": "2024-01-01T00:00:01Z"}, "future_time"),
        ({"time_field": "t"}, {"t": None}, "null_time"),
        ({"time_field": "t"}, {"t": "soon"}, "invalid_time"),
        ({"time_field": "t"}, {"t": 1_700_000_000_000}, "invalid_time"),
        ({"id_field": "i"}, {"i": 7}, None),
        ({"id_field": "i"}, {"i": None}, "missing_field"),
        ({"max_record_bytes": 9}, {}, "oversized"),
    ],
)
def test_checks(checks: dict[str, Any], value: dict[str, Any] | None, code: str | None) -> None:
    checker = RecordChecker(source(checks=checks))
    try:
        checker.check(sound(value), WRITTEN_US)
        found = None
    except RecordFault as fault:
        found = fault.code
    assert found == code


@pytest.mark.parametrize(("label", "code"), [("a", None), ("c", "unknown_label"), (None, "unknown_label")])
def test_labels_are_checked_against_the_allowed_ones(label: str | None, code: str | None) -> None:
    checker = RecordChecker(source(label_field="y", checks={"labels": ["a", "b"]}))
    if code is None:
        assert checker.check(sound({}, label), WRITTEN_US) is None
    else:
        with pytest.raises(RecordFault) as raised:
            checker.check(sound({}, label), WRITTEN_US)
        assert raised.value.code == code


def test_an_id_is_its_value_not_its_spelling() -> None:
    checker = RecordChecker(source(checks={"id_field": "i"}))
    ids = [checker.check(sound({"i": value}), WRITTEN_US) for value in (1, 1, "1", {"b": 1, "a": 2}, {"a": 2, "b": 1})]
    assert ids[0] == ids[1] != ids[2]
    assert ids[3] == ids[4]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (source(), None),
        (source("text", checks={"required": ["x"]}), "'text' has no fields.*leave out checks.required"),
        (source("tokens", label_field="y"), "leave out data.label_field"),
        (source("text", split={"by": "group", "group_field": "g"}), "leave out split.group_field"),
        (source(checks={"labels": ["a"]}), "needs data.label_field"),
        (source("images", checks={"labels": ["a"]}), None),
        (source(split={"stratify": True}), "needs data.label_field"),
    ],
)
def test_impossible_checks_are_refused(data: DataSource, expected: str | None) -> None:
    problem = find_impossible_check(data)
    assert problem is None if expected is None else problem is not None and re.search(expected, problem)


def test_times_of_all_kinds_are_one() -> None:
    checker = RecordChecker(source(checks={"time_field": "t"}))
    at = datetime.fromtimestamp(WRITTEN_US / 1e6, UTC)
    for value in (at, at.isoformat(), at.timestamp()):
        checker.check(sound({"t": value}), WRITTEN_US)
        with pytest.raises(RecordFault, match="after its object was written"):
            checker.check(sound({"t": value}), WRITTEN_US - 1)
