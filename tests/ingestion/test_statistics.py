"""Statistics of the train split: right, and the same to the bit however they are come by. Pure."""

from __future__ import annotations

import math
import random
import statistics as reference
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from contracts.datasets import FieldStatistics, canonical_json
from services.ingestion.core import statistics
from services.ingestion.core.statistics import MAX_FIELDS, Statistics, measure_image, measure_row


def of(rows: list[dict[str, Any]]) -> dict[str, FieldStatistics]:
    added = Statistics()
    for row in rows:
        added.add(measure_row(row))
    return added.result()


@given(st.lists(st.floats(-1e100, 1e100), min_size=1, max_size=60))
def test_results_match_the_standard_library(values: list[float]) -> None:
    found = of([{"x": value} for value in values])["x"]
    assert (found.count, found.nulls, found.min, found.max) == (len(values), 0, min(values), max(values))
    scale = max(map(abs, values))
    assert found.mean == pytest.approx(reference.fmean(values), rel=1e-12, abs=1e-12 * scale + 1e-300)
    # The square of less than 1e-154 is nothing in float64.
    assert found.std == pytest.approx(reference.pstdev(values), rel=1e-9, abs=1e-12 * scale + 1e-153)


def test_deviations_whose_squares_underflow_are_zero() -> None:
    found = of([{"x": value} for value in (0.0, 1.748026815157166e-252)])["x"]
    assert (found.count, found.std) == (2, 0.0)


@pytest.mark.parametrize("block", [1, 7, 4096])
def test_far_from_zero_nothing_cancels(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "BLOCK", block)
    found = of([{"x": 1e9 + i % 2} for i in range(1000)])["x"]
    assert found.mean == pytest.approx(1e9 + 0.5, rel=1e-15)
    assert found.std == pytest.approx(0.5, rel=1e-6)


def test_order_within_a_block_changes_no_bit() -> None:
    rng = random.Random(3)
    rows = [{"x": rng.gauss(0, 1) * 10 ** rng.randrange(12), "y": rng.random()} for _ in range(3000)]
    mixed = [dict(reversed(row.items())) if rng.random() < 0.5 else row for row in rows]
    rng.shuffle(mixed)
    assert canonical(of(rows)) == canonical(of(mixed))


def canonical(found: dict[str, FieldStatistics]) -> bytes:
    return canonical_json({name: field.model_dump() for name, field in found.items()})


def test_what_is_a_number_and_what_is_null() -> None:
    found = of(
        [
            {"a": 1, "b": True, "c": "1", "d": {"e": 2.5, "f": {"g": 1}}, "h": [1]},
            {"a": None, "d": {"e": None}},
            {"a": 3.0, "d": 4},
            {},
        ]
    )
    assert {name: (field.count, field.nulls, field.mean) for name, field in found.items()} == {
        "a": (2, 2, 2.0),
        "d": (1, 3, 4.0),
        "d.e": (1, 3, 2.5),
    }


def test_a_field_may_have_any_name() -> None:
    names = ["", "\0", "é\udc80", 'q"', "a.b.c"]
    assert set(of([dict.fromkeys(names, 1)])) == set(names)


@pytest.mark.parametrize("values", [[1e200, -1e200], [10**400], [1e308, 1e308, -1e308], [10**400, -(10**400)]])
def test_what_has_no_float64_is_left_out(values: list[float]) -> None:
    found = of([{"x": value, "y": 1.0} for value in values])
    assert set(found) == {"y"}
    canonical(found)


def test_zero_has_one_sign() -> None:
    assert canonical(of([{"x": -0.0}])) == canonical(of([{"x": 0.0}])) == canonical(of([{"x": 0}]))
    assert canonical(of([{"x": -0.0}, {"x": 0.0}])) == canonical(of([{"x": 0.0}, {"x": -0.0}]))


def test_names_made_of_data_do_not_fill_the_manifest() -> None:
    assert len(of([{f"user{i}": i} for i in range(3 * MAX_FIELDS)])) == MAX_FIELDS


# -- images -------------------------------------------------------------------


def channels(*images: Image.Image) -> dict[str, FieldStatistics]:
    added = Statistics()
    for image in images:
        added.add(measure_image(image))
    return added.result()


def noise(seed: int, mode: str, size: tuple[int, int]) -> Image.Image:
    bands = len(Image.new(mode, (1, 1)).getbands())
    return Image.frombytes(mode, size, random.Random(seed).randbytes(size[0] * size[1] * bands))


def test_channels_match_numpy() -> None:
    images = [noise(seed, "RGB", (20 + seed, 30)) for seed in range(5)]
    pixels = numpy.concatenate([numpy.asarray(image, dtype=numpy.float64).reshape(-1, 3) / 255 for image in images])
    found = channels(*images)
    assert list(found) == ["b", "g", "r"]
    for number, name in enumerate("rgb"):
        field, values = found[name], pixels[:, number]
        assert field.count == len(values)
        assert field.mean == pytest.approx(values.mean(), rel=1e-13)
        assert field.std == pytest.approx(values.std(), rel=1e-12)
        assert (field.min, field.max) == (values.min(), values.max())
    assert channels(*images[::-1]) == found


def test_grey_in_8_and_16_bits_is_one_channel() -> None:
    grey = noise(1, "L", (50, 40))
    wide = Image.frombytes("I;16", grey.size, b"".join(bytes((value, value)) for value in grey.tobytes()))
    assert channels(grey) == channels(wide)
    assert channels(grey, wide)["l"].count == 4000


def test_every_mode_has_channels_or_none() -> None:
    found = {}
    for mode in ("1", "L", "LA", "I", "I;16", "F", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LAB"):
        found[mode] = "".join(channels(Image.new(mode, (9, 9))))
    grey = {"1": "l", "L": "l", "LA": "l", "I": "l", "I;16": "l", "F": ""}
    assert found == grey | dict.fromkeys(("P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LAB"), "bgr")


def test_an_image_with_fields_is_one_record() -> None:
    added = Statistics()
    for number in range(3):
        added.add(measure_image(noise(number, "L", (4, 4))) + measure_row({"age": number}))
    found = added.result()
    assert (found["l"].count, found["age"].count, found["age"].mean) == (48, 3, 1.0)
    assert math.isfinite(found["l"].std)


def test_no_records_have_no_statistics() -> None:
    assert of([]) == of([{}, {"a": "text"}]) == {}
