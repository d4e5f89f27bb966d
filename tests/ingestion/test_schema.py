"""What the records of a file are like, and which files are unlike most."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.ingestion.core import schema
from services.ingestion.core.schema import (
    ANY,
    MAX_FIELDS,
    SOMETIMES,
    FieldProfile,
    Shape,
    find_deviating_columns,
    find_deviating_fields,
)


def shape(*records: dict[str, Any]) -> Shape | None:
    profile = FieldProfile()
    for record in records:
        profile.add(record)
    return profile.shape()


def many(record: dict[str, Any], count: int = 10) -> list[dict[str, Any]]:
    return [record] * count


TABLE: list[tuple[str, list[dict[str, Any]], Shape | None]] = [
    (
        "types are JSON's",
        many({"b": True, "n": 1, "t": "", "l": [], "z": None}),
        {"b": "a boolean", "l": "a list", "n": "a number", "t": "text", "z": ANY},
    ),
    ("a whole number and a fraction are one type", [*many({"x": 1}), *many({"x": 1.5}, 9)], {"x": "a number"}),
    ("an object's fields are listed", many({"o": {"x": 1}}), {"o": "an object", "o.x": "a number"}),
    ("and those within them not", many({"o": {"p": {"x": 1}}}), {"o": "an object", "o.p": "an object"}),
    ("null has no type", [*many({"x": 1}, 1), *many({"x": None}, 9)], {"x": "a number"}),
    ("an odd record is no matter", [*many({"x": 1}, 9), {"x": "1"}], {"x": "a number"}),
    ("nor is one without the field", [*many({"x": 1}, 9), {}], {"x": "a number"}),
    ("two are", [*many({"x": 1}, 8), {}, {}], {"x": SOMETIMES}),
    ("half this, half that is no type", [*many({"x": 1}, 5), *many({"x": "1"}, 5)], {"x": ANY}),
    ("few records have no shape", many({"x": 1}, 4), None),
    ("fields that are data have no shape", [{str(n): 1} for n in range(MAX_FIELDS + 1)], None),
]


@pytest.mark.parametrize(("records", "expected"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_the_shape_of_a_file(records: list[dict[str, Any]], expected: Shape | None) -> None:
    assert shape(*records) == expected


def unlike(*shapes: Shape) -> dict[int, str]:
    """By number of the file what is unlike the others."""
    distinct = list({tuple(one.items()): one for one in shapes}.values())
    found = list(find_deviating_fields(lambda: [(one, shapes.count(one)) for one in distinct]))
    return {n: text for n, one in enumerate(shapes) for odd, text in found if odd == one}


NUMBER, TEXT = {"x": "a number", "y": "text"}, {"x": "text", "y": "text"}

DRIFT: list[tuple[str, list[Shape], dict[int, str]]] = [
    ("all alike", [NUMBER] * 3, {}),
    ("one type changed", [NUMBER, NUMBER, TEXT], {2: "field 'x' is text here and a number in most files"}),
    ("wherever it is", [TEXT, NUMBER, NUMBER], {0: "field 'x' is text here and a number in most files"}),
    ("of two files the first counts", [NUMBER, TEXT], {1: "field 'x' is text here and a number in most files"}),
    (
        "a field is gone",
        [NUMBER, NUMBER, {"y": "text"}],
        {2: "field 'x' is missing here and is a number in most files"},
    ),
    ("a field was renamed", [NUMBER, {"xx": "a number", "y": "text"}], {1: "field 'x' is missing here"}),
    ("a field came on top", [NUMBER, {**NUMBER, "z": "text"}], {}),
    ("and stays on top", [{"y": "text"}, NUMBER, NUMBER], {0: "field 'x' is missing here"}),
    ("sometimes there is no drift", [NUMBER, {**NUMBER, "x": SOMETIMES}], {}),
    ("nor is what is only sometimes there", [{**NUMBER, "x": SOMETIMES}] * 2 + [{"y": "text"}], {}),
    ("null goes with any type", [NUMBER, {**NUMBER, "x": ANY}], {}),
    ("a field of nulls is a field", [{"x": ANY}] * 2 + [{"y": ANY}], {2: "field 'x' is missing here and is there in"}),
    ("in an object", [{"o": "an object", "o.x": "text"}, {"o": "an object"}], {1: "field 'o.x' is missing here"}),
    ("a null in place of an object", [{"o": "an object", "o.x": "text"}, {"o": ANY}], {}),
    ("the object itself is named", [{"o": "an object", "o.x": "text"}, {}], {1: "field 'o' is missing here"}),
]


@pytest.mark.parametrize(("files", "expected"), [row[1:] for row in DRIFT], ids=[row[0] for row in DRIFT])
def test_deviating_files_are_found(files: list[Shape], expected: dict[int, str]) -> None:
    found = unlike(*files)
    assert found.keys() == expected.keys()
    for number, text in expected.items():
        assert text in found[number]


def test_tables_must_have_equal_columns() -> None:
    wide, narrow, turned = {"x": "int64", "y": "string"}, {"x": "int64"}, {"y": "string", "x": "int64"}
    files = [(wide, 2), (narrow, 1), (turned, 2)]
    assert list(find_deviating_columns(lambda: files)) == [
        (narrow, "column 'y' is missing here and string in most files: write all files with one schema"),
        (turned, "the columns' order differs from most files: write all files with one schema"),
    ]
    assert list(find_deviating_columns(list)) == []


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["a", "b", "a.b"]), st.sampled_from([*schema.TYPES.values(), ANY, SOMETIMES]), max_size=3
        ),
        max_size=8,
    )
)
def test_files_of_one_shape_get_one_result(files: list[Shape]) -> None:
    found = unlike(*files)
    assert not unlike(*files[:1])
    assert unlike(*files, *files).keys() == found.keys() | {n + len(files) for n in found}
