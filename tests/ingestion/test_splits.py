"""Split keys, units and splits: pure."""

from __future__ import annotations

import io
import random
from collections import Counter, defaultdict
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw

from contracts.datasets import SPLITS
from contracts.spec.data import DataSource, Split
from services.ingestion.core.records import RecordFault
from services.ingestion.core.splits import (
    SplitAssigner,
    SplitKeys,
    apportion,
    group_text,
    hash_normalized,
    perceptual_hash,
    strata,
    stratify,
)
from services.ingestion.core.times import parse_instant

BY_TIME = Split(
    by="time",
    time_field="at",
    validation_from=datetime(2026, 3, 1, tzinfo=UTC),
    test_from=datetime(2026, 4, 1, tzinfo=UTC),
    embargo_s=86_400,
)


def source(split: Split, **more: Any) -> DataSource:
    return DataSource(source="s3://lake/x", format="jsonl", split=split, **more)


def unit(assigner: SplitAssigner, split_key: str = "", *, content: str = "c", key: str = "k", path: str = "p") -> bytes:
    return assigner.unit(split_key, sha256=content, key=key, path=path)


# -- shares -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        (Split(), (0.8, 0.1, 0.1)),
        (Split(seed=7), (0.8, 0.1, 0.1)),
        (Split(train=0.5, validation=0.0, test=0.5), (0.5, 0.0, 0.5)),
        (Split(train=0.7, validation=0.3, test=0.0), (0.7, 0.3, 0.0)),
        (Split(train=1.0, validation=0.0, test=0.0), (1.0, 0.0, 0.0)),
    ],
)
def test_shares_are_met_within_4_sigma_and_a_share_of_zero_stays_empty(
    split: Split, expected: tuple[float, ...]
) -> None:
    assigner, n = SplitAssigner(split), 20_000
    found = Counter(assigner.split_of(unit(assigner, content=f"{i}")) for i in range(n))
    for name, share in zip(SPLITS, expected, strict=True):
        assert abs(found[name] - n * share) <= 4 * (n * share * (1 - share)) ** 0.5


@given(st.lists(st.text(), unique=True, max_size=50), st.integers(), st.sampled_from(["content", "key", "file"]))
def test_new_records_move_no_others(names: list[str], seed: int, by: Any) -> None:
    def divide(names: list[str]) -> dict[str, str | None]:
        assigner = SplitAssigner(Split(seed=seed, by=by))
        return {name: assigner.split_of(unit(assigner, content=name, key=name, path=name)) for name in names}

    few = divide(names)
    many = divide([f"more{i}" for i in range(9 * len(names))] + names[::-1])
    assert few.items() <= many.items()


@pytest.mark.parametrize(
    ("by", "same", "other"),
    [
        ("content", {"content": "c"}, {"key": "k2", "path": "p2"}),
        ("key", {"key": "k"}, {"content": "c2", "path": "p2"}),
        ("file", {"path": "p"}, {"content": "c2", "key": "k2"}),
    ],
)
def test_records_of_one_unit_stay_together(by: Any, same: dict[str, str], other: dict[str, str]) -> None:
    assigner = SplitAssigner(Split(by=by))
    assert unit(assigner, **same) == unit(assigner, **same, **other)
    changed = {name: f"{value}!" for name, value in same.items()}
    assert unit(assigner, **same) != unit(assigner, **changed)


# -- groups -------------------------------------------------------------------


def test_a_group_is_in_one_split_however_files_write_its_name() -> None:
    keys = SplitKeys(source(Split(by="group", group_field="patient")))
    assert keys.row({"patient": 7, "x": 1}) == keys.row({"patient": "7", "x": 2}) == keys.row({"patient": 7.0})
    assert keys.row({"patient": 7}) != keys.row({"patient": 8})
    assert group_text({"b": 1, "a": 2}) == group_text({"a": 2, "b": 1})
    assert keys.image(Image.new("L", (2, 2)), {"patient": "7"}) == keys.row({"patient": 7})


def test_a_group_may_lie_deeper() -> None:
    keys = SplitKeys(source(Split(by="group", group_field="meta.site")))
    assert keys.row({"meta": {"site": "a"}}) == "a"
    assert keys.row({"meta.site": "b", "meta": {"site": "a"}}) == "b"


@pytest.mark.parametrize("row", [{}, {"patient": None}, {"patient": ""}])
def test_a_record_without_group_is_quarantined(row: dict[str, Any]) -> None:
    keys = SplitKeys(source(Split(by="group", group_field="patient")))
    with pytest.raises(RecordFault) as refused:
        keys.row(row)
    assert refused.value.code == "null_group"


# -- time ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        ("2026-02-27T23:59:59.999999Z", "train"),
        ("2026-02-28T00:00:00Z", None),
        ("2026-02-28T23:59:59.999999Z", None),
        ("2026-03-01T00:00:00Z", "validation"),
        ("2026-03-01T01:00:00+02:00", None),
        ("2026-03-01", "validation"),
        ("2026-03-30T23:59:59Z", "validation"),
        ("2026-03-31T00:00:00Z", None),
        ("2026-04-01T00:00:00", "test"),
        ("1901-01-01", "train"),
        (1775001600, "test"),
        (1775001599.5, None),
    ],
)
def test_dates_divide_and_the_embargo_is_left_out(at: Any, expected: str | None) -> None:
    assigner = SplitAssigner(BY_TIME)
    key = SplitKeys(source(BY_TIME)).row({"at": at})
    assert assigner.split_of(unit(assigner, key)) == expected


def test_one_border_alone() -> None:
    split = Split(by="time", time_field="at", test_from=datetime(2026, 4, 1, tzinfo=UTC))
    assigner, keys = SplitAssigner(split), SplitKeys(source(split))
    assert [assigner.split_of(unit(assigner, keys.row({"at": at}))) for at in ("2026-03-31", "2026-04-01")] == [
        "train",
        "test",
    ]


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (None, "null_time"),
        ("yesterday", "invalid_time"),
        ("", "invalid_time"),
        (True, "invalid_time"),
        ([], "invalid_time"),
        (1775001600000, "invalid_time"),
        (float("nan"), "invalid_time"),
    ],
)
def test_a_record_without_time_is_quarantined(value: Any, code: str) -> None:
    with pytest.raises(RecordFault) as refused:
        SplitKeys(source(BY_TIME)).row({"at": value})
    assert refused.value.code == code


@given(st.datetimes(timezones=st.timezones()))
def test_an_instant_is_the_same_however_it_is_written(at: datetime) -> None:
    assert parse_instant(at) == parse_instant(at.isoformat()) == parse_instant(at.astimezone(UTC))
    assert datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=parse_instant(at)) == at.astimezone(UTC)


def test_a_date_begins_at_midnight_utc() -> None:
    assert parse_instant(date(2026, 1, 2)) == parse_instant("2026-01-02") == parse_instant(datetime(2026, 1, 2))


# -- near-duplicates ------------------------------------------------------------


def scene(seed: int) -> Image.Image:
    """Something with large bright and dark places."""
    rng = random.Random(seed)
    image = Image.new("RGB", (120, 90), (rng.randrange(256),) * 3)
    draw = ImageDraw.Draw(image)
    for _ in range(12):
        x, y = rng.randrange(120), rng.randrange(90)
        color = tuple(rng.randrange(256) for _ in range(3))
        draw.ellipse((x - 25, y - 20, x + 25, y + 20), fill=color)
    return image


def recompressed(image: Image.Image) -> Image.Image:
    packed = io.BytesIO()
    image.save(packed, "JPEG", quality=75)
    return Image.open(packed)


def test_copies_of_an_image_mostly_share_a_hash_and_others_do_not() -> None:
    scenes = [scene(seed) for seed in range(100)]
    hashes = [perceptual_hash(image) for image in scenes]
    assert len(set(hashes)) >= 98
    for change in (recompressed, lambda image: image.resize((240, 180))):
        assert sum(perceptual_hash(change(image)) == found for image, found in zip(scenes, hashes, strict=True)) >= 80


def test_every_mode_of_image_has_a_hash() -> None:
    grey = scene(1).convert("L")
    wide = Image.frombytes("I;16", grey.size, b"".join(bytes((value, value)) for value in grey.tobytes()))
    assert perceptual_hash(wide) == perceptual_hash(grey)
    for mode in ("1", "P", "RGBA", "CMYK", "LA", "YCbCr", "F", "I"):
        assert len(perceptual_hash(grey.convert(mode))) == 7
    assert len(perceptual_hash(Image.new("L", (1, 1)))) == 7


@pytest.mark.parametrize(
    ("one", "other", "near"),
    [
        ({"text": "Hello  World"}, {"text": "hello\nworld "}, True),
        ({"text": "Straße", "more": ["A"]}, {"more": ["a"], "text": "STRASSE"}, True),
        ({"text": "hello", "id": 1, "y": "a"}, {"text": "hello", "id": 2, "y": "b"}, True),
        ({"text": "hello"}, {"text": "help"}, False),
        ({"text": "hello", "n": 1}, {"text": "hello", "n": 2}, False),
        ({"text": "\ud800"}, {"text": "\ud801"}, False),
    ],
)
def test_near_duplicates_of_a_row(one: dict[str, Any], other: dict[str, Any], near: bool) -> None:
    keys = SplitKeys(source(Split(by="near"), label_field="y", checks={"id_field": "id"}))
    assert (keys.row(one) == keys.row(other)) == near


def test_near_duplicates_of_a_text() -> None:
    keys = SplitKeys(source(Split(by="near")))
    assert keys.text(b"To be  or\tnot") == keys.text(b"TO BE OR NOT") != keys.text(b"to be and not")
    assert keys.text(b"\xff\x00") != keys.text(b"\xfe\x00")
    assert hash_normalized("a") != hash_normalized(["a"])


def test_opaque_content_is_split_by_its_hash() -> None:
    data = source(Split(by="near"))
    assigner, key = SplitAssigner(data.split), SplitKeys(data).value()
    assert unit(assigner, key, content="c") != unit(assigner, key, content="d")
    assert unit(assigner, key, content="c") == unit(assigner, key, content="c", key="k2", path="p2")


# -- stratified -----------------------------------------------------------------


def divided(split: Split, records: list[tuple[str, str]]) -> dict[str, str]:
    """Split key -> split of (split key, label) records, as the catalog does it."""
    assigner = SplitAssigner(split)
    units = {key: unit(assigner, content=key) for key, _ in records}
    counts = sorted((units[key], label, n) for (key, label), n in Counter(records).items())
    by_class = defaultdict(list)
    for stratum in strata(counts):
        by_class[stratum.label].append((stratum.unit, stratum.size))
    found: dict[bytes, str] = {}
    for label, members in by_class.items():
        found |= dict(stratify(split, label, sorted(members), sum(size for _, size in members)))
    return {key: found[units[key]] for key in units}


@given(st.integers(0, 5000), st.text(max_size=3), st.integers(0, 99))
def test_shares_are_apportioned_exactly(total: int, label: str, seed: int) -> None:
    split = Split(train=0.7, validation=0.3, test=0.0, seed=seed)
    counts = apportion(split, label, total)
    assert sum(counts.values()) == total
    assert counts["test"] == 0
    for name in SPLITS:
        assert abs(counts[name] - total * getattr(split, name)) < 1


def test_each_class_has_the_shares() -> None:
    records = [(f"{label}{i}", label) for label, n in (("a", 1000), ("b", 50), ("c", 10)) for i in range(n)]
    found = divided(Split(stratify=True), records)
    for label, n in (("a", 1000), ("b", 50), ("c", 10)):
        counts = Counter(found[key] for key, other in records if other == label)
        assert counts == {"train": n * 8 // 10, "validation": n // 10, "test": n // 10}


def test_many_small_classes_leave_no_split_empty() -> None:
    records = [(f"{label}/{i}", f"{label}") for label in range(400) for i in range(5)]
    counts = Counter(divided(Split(stratify=True), records).values())
    assert counts["train"] == 1600
    assert min(counts["validation"], counts["test"]) > 140  # 200 each would be even; 4 sigma is 40


def test_groups_stay_together_and_shares_are_met_to_a_group() -> None:
    rng = random.Random(0)
    records = [(f"g{group}", rng.choice("ab")) for group in range(300) for _ in range(rng.randrange(1, 9))]
    found = divided(Split(stratify=True), records)
    assert found.keys() == {key for key, _ in records}
    counts = Counter(found[key] for key, _ in records)
    for name, share in zip(SPLITS, (0.8, 0.1, 0.1), strict=True):
        # One group at each of two borders in each of two classes.
        assert abs(counts[name] - share * len(records)) <= 4 * 8


def test_a_group_has_the_class_of_most_of_its_records() -> None:
    counts = [(b"u1", "b", 2), (b"u1", "a", 2), (b"u2", "a", 1), (b"u2", "b", 3), (b"u3", None, 1)]
    assert [tuple(each) for each in strata(counts)] == [(b"u1", "a", 4), (b"u2", "b", 4), (b"u3", "", 1)]
