"""Keys, splits, single records and the verdict: pure."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.datasets import SPLITS
from contracts.events.train import DataSource, Split
from services.ingestion.core.keys import (
    MAX_KEY_CHARS,
    SAFE_KEY,
    Splitter,
    UnsafePath,
    check_path,
    extension,
    file_key,
    is_data,
    row_key,
    rows_key,
)
from services.ingestion.core.records import Broken, Sound, json_line, table_row
from services.ingestion.core.verdict import Fingerprint, Outcome, Tally, objection

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
def test_litter_is_no_data(path: str, expected: bool) -> None:
    assert is_data(path) is expected


@given(st.lists(st.text(max_size=20), max_size=50), st.integers(0, 5))
def test_a_split_depends_on_the_key_alone(keys: list[str], seed: int) -> None:
    splitter = Splitter.of(Split(seed=seed))
    alone = {key: splitter.split_of(key) for key in keys}
    assert set(alone.values()) <= set(SPLITS)
    assert alone == {key: Splitter.of(Split(seed=seed)).split_of(key) for key in reversed(keys)}


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        (Split(), (0.8, 0.1, 0.1)),
        (Split(train=0.5, validation=0.0, test=0.5), (0.5, 0.0, 0.5)),
        (Split(train=0.7, validation=0.3, test=0.0), (0.7, 0.3, 0.0)),
        (Split(train=1.0, validation=0.0, test=0.0), (1.0, 0.0, 0.0)),
    ],
)
def test_shares_are_met_and_a_share_of_zero_stays_empty(split: Split, expected: tuple[float, ...]) -> None:
    splitter = Splitter.of(split)
    found = [splitter.split_of(f"key{i}") for i in range(5000)]
    for name, share in zip(SPLITS, expected, strict=True):
        part = found.count(name) / len(found)
        assert part == 0 if share == 0 else abs(part - share) < 0.03


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
    found = json_line(line, "k", 0, "y")
    assert isinstance(found, Broken)
    assert found.code == code


def test_a_sound_line_becomes_canonical() -> None:
    found = json_line(b'{"y": "ja", "a": "\xc3\xbc"}', "k", 12, "y")
    assert isinstance(found, Sound)
    assert found.content == '{"a":"ü","y":"ja"}'.encode()
    assert (found.label, found.offset, found.size) == ("ja", 12, 19)


def test_a_table_row_takes_jsons_types() -> None:
    row = {"t": datetime(2026, 1, 2, tzinfo=UTC), "d": Decimal("1.50"), "b": b"\x00", "n": None, "l": [1, {"x": 2.5}]}
    found = table_row(row, "k", 3, None)
    assert isinstance(found, Sound)
    assert found.content == b'{"b":"AA==","d":"1.50","l":[1,{"x":2.5}],"n":null,"t":"2026-01-02T00:00:00+00:00"}'
    broken = table_row({"x": math.nan}, "k", 3, None)
    assert isinstance(broken, Broken)
    assert broken.code == "nan"


SOURCE = DataSource(source="s3://lake/digits", format="images")


def outcome(accepted: int, broken: int, *, train: int | None = None, files: tuple[int, int] = (1000, 0)) -> Outcome:
    tally = Tally(objects=files[0])
    train = accepted if train is None else train
    for i in range(accepted):
        tally.accept("train" if i < train else "test", 1, "a", False)
    for i in range(broken):
        tally.set_aside("truncated", f"s3://lake/digits/{i}.png: cut", whole_object=False)
    tally.broken_objects = files[1]
    return Outcome.of(tally.to_dict())


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (outcome(1797, 2), None),
        (outcome(99, 1), None),
        (outcome(98, 2), "2 of 100 records .* 2 truncated .*such as s3://lake/digits/0.png: cut"),
        (outcome(990, 1, files=(10, 1)), "1 of 10 files"),
        (outcome(0, 3), "all 3 records are broken"),
        (outcome(0, 0), "there is no record in it"),
        (outcome(5, 0, train=0), "train split"),
    ],
)
def test_the_verdict_says_what_to_change(found: Outcome, says: str | None) -> None:
    problem = objection(found, SOURCE, "s3://datasets/q.jsonl")
    if says is None:
        assert problem is None
    else:
        assert problem is not None
        assert re.search(says, problem)


def test_the_fingerprint_covers_what_the_index_depends_on() -> None:
    def of(data: DataSource, etag: str = "e") -> str:
        fingerprint = Fingerprint(data)
        fingerprint.add("digits/a.png", etag, 3)
        return fingerprint.hexdigest()

    same = SOURCE.model_copy(update={"shard_bytes": 2**20, "max_bad_fraction": 0.5})
    assert of(SOURCE) == of(same)
    others = [SOURCE.model_copy(update={"split": Split(seed=1)}), SOURCE.model_copy(update={"source": "s3://lake/x"})]
    assert len({of(SOURCE), of(SOURCE, "f"), *map(of, others)}) == 4
