"""Keys, splits, single records and the result: pure."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.spec.data import DataSource, RecordChecks, Split
from services.ingestion.core.keys import (
    MAX_KEY_CHARS,
    SAFE_KEY,
    UnsafePath,
    check_path,
    extension,
    file_key,
    is_data,
    row_key,
    rows_key,
)
from services.ingestion.core.reasons import REASONS, Code
from services.ingestion.core.records import InvalidRecord, RecordFault, ValidRecord, parse_json_line, plain, record
from services.ingestion.core.validation import Fingerprint, Outcome, Tally, find_objection

PATHS = st.text(min_size=1, max_size=120).filter(lambda path: not re.search("[\ud800-\udfff]", path))


@given(PATHS)
def test_every_key_is_safe_in_a_tar(path: str) -> None:
    for key in (file_key(path), row_key(rows_key(path), 7)):
        assert SAFE_KEY.fullmatch(key)
        assert len(key) <= MAX_KEY_CHARS + 10


@given(PATHS, PATHS)
def test_two_paths_share_a_key_only_if_they_differ_in_the_extension_alone(one: str, other: str) -> None:
    def stem(path: str) -> str:
        end = extension(path)
        return path[: -len(end) - 1] if end else path

    assert (file_key(one) == file_key(other)) == (stem(one) == stem(other))
    assert (rows_key(one) == rows_key(other)) == (one == other)


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("3/0001.png", "3/0001"),
        ("deep/er/a_b-c.JPG", "deep/er/a_b-c"),
        ("noext", "noext"),
    ],
)
def test_a_plain_path_keeps_its_name(path: str, key: str) -> None:
    assert file_key(path) == key


@pytest.mark.parametrize("path", ["../a.png", "a//b.png", "/a.png", "a/./b.png", "a\nb.png", "a\\b.png", "x" * 1100])
def test_unsafe_paths_are_refused(path: str) -> None:
    with pytest.raises(UnsafePath):
        check_path(path)


@pytest.mark.parametrize(
    ("path", "expected"),
    [("a.png", True), ("d/", False), (".DS_Store", False), ("d/._a.png", False), ("_SUCCESS", False), ("_1.png", True)],
)
def test_tool_files_are_not_data(path: str, expected: bool) -> None:
    assert is_data(path) is expected


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"{", "invalid_json"),
        (b"[1]", "not_an_object"),
        (b"\xff{}", "invalid_utf8"),
        (b'{"y": 1, "x": "\\ud800"}', "invalid_utf8"),
        (b'{"x": 1}', "missing_label"),
        (b'{"y": null}', "missing_label"),
        (b'{"y": [1]}', "missing_label"),
        (b'{"y": 1, "x": NaN}', "nan"),
        (b'{"y": 1, "x": 1e999}', "nan"),
        (b"[" * 100_000, "invalid_json"),
    ],
)
def test_broken_lines(line: bytes, code: str) -> None:
    found = parse_json_line(line, "k", 0, "y")
    assert isinstance(found, InvalidRecord)
    assert found.code == code


def test_a_valid_line_becomes_canonical() -> None:
    found = parse_json_line(b'{"y": "ja", "a": "\xc3\xbc"}', "k", 12, "y")
    assert isinstance(found, ValidRecord)
    assert found.content == '{"a":"ü","y":"ja"}'.encode()
    assert (found.label, found.offset, found.size) == ("ja", 12, 19)


def test_a_table_row_takes_jsons_types() -> None:
    row = {"t": datetime(2026, 1, 2, tzinfo=UTC), "d": Decimal("1.50"), "b": b"\x00", "n": None, "l": [1, {"x": 2.5}]}
    found = record(plain(row), "k", 3, None)
    assert found.content == b'{"b":"AA==","d":"1.50","l":[1,{"x":2.5}],"n":null,"t":"2026-01-02T00:00:00+00:00"}'
    with pytest.raises(RecordFault) as raised:
        record(plain({"x": math.nan}), "k", 3, None)
    assert raised.value.code == "nan"


SOURCE = DataSource(source="s3://lake/digits", format="images")


def outcome(
    accepted: int,
    broken: int,
    *,
    test: int = 1,
    files: tuple[int, int] = (1000, 0),
    code: str = "truncated",
    of_class_b: tuple[int, int] = (0, 0),
    leak: tuple[str, str, str, str] | None = None,
) -> Outcome:
    """One record in validation, ``test`` in test, the others in train; ``of_class_b`` sound and broken ones of b."""
    tally = Tally(objects=files[0], leak=leak)
    for i in range(accepted):
        split = "test" if i < test else "validation" if i == test else "train"
        tally.accept(split, 1, "b" if i < of_class_b[0] else "a")
    for i in range(broken):
        label = "b" if i < of_class_b[1] else "a"
        tally.reject(code, f"s3://lake/digits/{i}.png: cut", whole_object=False, label=label)
    tally.broken_objects = files[1]
    return Outcome.model_validate(tally.outcome().model_dump(mode="json"))


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (outcome(1797, 2), None),
        (outcome(99, 1), None),
        (outcome(98, 2), "2 of 100 records .* 2 truncated .*such as s3://lake/digits/0.png: cut"),
        (outcome(990, 1, files=(10, 1)), "1 of 10 files"),
        (outcome(0, 3), "all 3 records are broken"),
        (outcome(0, 0), "there is no record in it"),
        (outcome(5, 0, test=4), "falls into the train split: add data"),
        (outcome(5, 0, test=0), "falls into the test split: add data"),
        (outcome(998, 2, of_class_b=(98, 2)), "2 of 100 records of the class 'b' .*2.0%"),
        (outcome(999, 1, of_class_b=(9, 1)), None),
        (outcome(900, 30, code="schema_drift", files=(100, 30)), "schema of .* changed: 30 of 100 files"),
        (outcome(9, 0, leak=("a", "train", "b", "test")), "test split leaks into the train split: a .* and b "),
    ],
)
def test_an_objection_names_the_change(found: Outcome, expected: str | None) -> None:
    problem = find_objection(found, SOURCE, "s3://datasets/q.jsonl")
    if expected is None:
        assert problem is None
    else:
        assert problem is not None
        assert re.search(expected, problem)


def test_the_fingerprint_covers_what_the_index_depends_on() -> None:
    def of(data: DataSource, etag: str = "e", written_us: int = 5) -> str:
        fingerprint = Fingerprint(data)
        fingerprint.add("digits/a.png", etag, 3, written_us)
        return fingerprint.hexdigest()

    same = SOURCE.model_copy(update={"shard_bytes": 2**20, "max_invalid_fraction": 0.5})
    assert of(SOURCE) == of(same) == of(SOURCE, written_us=6)
    others = [
        SOURCE.model_copy(update={"split": Split(seed=1)}),
        SOURCE.model_copy(update={"source": "s3://lake/x"}),
        SOURCE.model_copy(update={"checks": RecordChecks(required=("x",))}),
        SOURCE.model_copy(update={"statistics": False}),
    ]
    assert len({of(SOURCE), of(SOURCE, "f"), *map(of, others)}) == 6
    timed = SOURCE.model_copy(update={"checks": RecordChecks(time_field="t")})
    assert of(timed) != of(timed, written_us=6), "a time may not lie after its object was written"


@pytest.mark.parametrize(
    ("labels", "classes"), [(("10", "2", "1"), ("1", "2", "10")), (("10", "2", "b"), ("10", "2", "b")), ((), ())]
)
def test_classes_that_are_numbers_are_sorted_as_such(labels: tuple[str, ...], classes: tuple[str, ...]) -> None:
    tally = Tally()
    for label in labels:
        tally.accept("train", 1, label)
    assert tally.classes == classes


def test_every_reason_is_reported() -> None:
    assert set(REASONS) == set(get_args(Code))
    documented = Path("docs/datasets.md").read_text()
    assert [code for code, text in REASONS.items() if f"| `{code}` | {text} |" not in documented] == []
