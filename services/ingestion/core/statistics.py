"""Mean, deviation and range of the numeric fields and image channels of the train split, in float64.

A record's numbers are stored when it is validated (``measure_row``, ``measure_image``) and added up when the splits are
known, in the order of their keys. Channels are added up in integers, exactly. Fields
are added up in blocks of ``BLOCK`` records: within a block sums are correctly rounded (``math.fsum``), in any
order; blocks are merged one after the other (Chan, Golub, LeVeque: Updating Formulae and a Pairwise Algorithm for
Computing Sample Variances, 1979). So the result is the same to the bit on every machine, for any number of workers and
any order of the listing.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy
from numpy.typing import NDArray
from PIL.Image import Image

from contracts.datasets import FieldStatistics

#: Records whose numbers are held at a time.
BLOCK = 4096
#: Fields beyond this number are left out: names that are made of data would fill the manifest.
MAX_FIELDS = 1000
#: Channels are counted in 65535ths, in which 8 bits and 16 bits are whole numbers.
_FULL = 65_535
_Ints = NDArray[numpy.int64]
_LEVELS_8: _Ints = numpy.arange(256, dtype=numpy.int64) * (_FULL // 255)
_LEVELS_16: _Ints = numpy.arange(_FULL + 1, dtype=numpy.int64)
#: What a histogram is multiplied with for the number, the sum and the sum of squares of its pixels.
_POWERS_8: _Ints = numpy.stack([_LEVELS_8**power for power in range(3)], axis=1)
_POWERS_16: _Ints = numpy.stack([_LEVELS_16**power for power in range(3)], axis=1)
_PIXELS_PER_BLOCK = 2**20
#: Numbers of a record: kind, length of the names, how many; then the names and as many float64.
_FIELDS = struct.Struct("<cII")
#: A channel of a record: kind, name, pixels, sum, sum of squares, least, greatest.
_CHANNEL = struct.Struct("<cc5q")


# -- of one record --------------------------------------------------------------


def measure_row(fields: Mapping[str, Any]) -> bytes:
    """Encode the numbers of a record: top-level ones, and ``a.b`` for b in object a. Booleans do not count."""
    found: dict[str, float] = {}
    for name, value in fields.items():
        kind = type(value)
        if kind is float or kind is int:
            found[name] = _float(value)
        elif kind is dict:
            for inner, number in value.items():
                if type(number) is float or type(number) is int:
                    found.setdefault(f"{name}.{inner}", _float(number))
    if not found:
        return b""
    names = _names(tuple(found))
    return _FIELDS.pack(b"F", len(names), len(found)) + names + struct.pack(f"<{len(found)}d", *found.values())


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer beyond 1e308
        return math.inf


@lru_cache(maxsize=4096)
def _names(names: tuple[str, ...]) -> bytes:
    return json.dumps(names).encode()


def measure_image(image: Image) -> bytes:
    """Encode the sums of a decoded image's channels: r, g, b, or l of a grey one. No alpha; nothing for floats."""
    if image.mode.startswith("I"):
        levels = numpy.asarray(image.convert("I")).ravel()
        if levels.min() < 0 or levels.max() > _FULL:
            return b""
        histogram = numpy.zeros((1, _FULL + 1), dtype=numpy.int64)
        for at in range(0, levels.size, _PIXELS_PER_BLOCK):
            histogram[0] += numpy.bincount(levels[at : at + _PIXELS_PER_BLOCK], minlength=_FULL + 1)
        return _channels("l", histogram, _LEVELS_16, _POWERS_16)
    if image.mode == "F":
        return b""
    if image.mode not in ("L", "RGB"):
        try:
            image = image.convert("L" if image.mode in ("1", "LA", "La") else "RGB")
        except ValueError:  # a colour space that Pillow does not convert
            return b""
    histograms = numpy.array(image.histogram(), dtype=numpy.int64).reshape(-1, 256)
    return _channels("l" if image.mode == "L" else "rgb", histograms, _LEVELS_8, _POWERS_8)


def _channels(names: str, histograms: _Ints, levels: _Ints, powers: _Ints) -> bytes:
    sums = (histograms @ powers).tolist()
    there = histograms > 0
    least = levels[there.argmax(axis=1)].tolist()
    greatest = levels[len(levels) - 1 - there[:, ::-1].argmax(axis=1)].tolist()
    return b"".join(
        _CHANNEL.pack(b"C", name.encode(), *sums[number], least[number], greatest[number])
        for number, name in enumerate(names)
    )


# -- of all ---------------------------------------------------------------------


@dataclass(slots=True)
class _Channel:
    """Sums in 65535ths; Python's integers do not overflow."""

    pixels: int = 0
    total: int = 0
    squares: int = 0
    least: int = _FULL
    greatest: int = 0

    def add(self, pixels: int, total: int, squares: int, least: int, greatest: int) -> None:
        self.pixels += pixels
        self.total += total
        self.squares += squares
        self.least, self.greatest = min(self.least, least), max(self.greatest, greatest)

    def result(self) -> FieldStatistics:
        variance = Fraction(self.pixels * self.squares - self.total**2, self.pixels**2 * _FULL**2)
        return FieldStatistics(
            count=self.pixels,
            mean=float(Fraction(self.total, self.pixels * _FULL)),
            std=math.sqrt(float(variance)),
            min=self.least / _FULL,
            max=self.greatest / _FULL,
        )


@dataclass(slots=True)
class _Field:
    """Count, mean and sum of squared deviations; NaN once something is no float64 any more."""

    count: int = 0
    mean: float = 0.0
    deviations: float = 0.0
    least: float = math.inf
    greatest: float = -math.inf

    def add(self, values: NDArray[numpy.float64]) -> None:
        """Merge one block."""
        count = len(values)
        with numpy.errstate(over="ignore", invalid="ignore"):
            mean = _sum(values) / count
            deviations = _sum((values - mean) ** 2)
        # Adding zero makes one zero of the two.
        self.least = min(self.least, float(values.min()) + 0.0)
        self.greatest = max(self.greatest, float(values.max()) + 0.0)
        total = self.count + count
        delta = mean - self.mean
        self.mean += delta * count / total
        self.deviations += deviations + delta * delta * (self.count * count / total)
        self.count = total

    def result(self, records: int) -> FieldStatistics | None:
        """Return the statistics; None if squares overflow."""
        if not math.isfinite(self.mean) or not math.isfinite(self.deviations):
            return None
        return FieldStatistics(
            count=self.count,
            nulls=records - self.count,
            mean=self.mean + 0.0,
            std=math.sqrt(self.deviations / self.count),
            min=self.least,
            max=self.greatest,
        )


def _sum(values: NDArray[numpy.float64]) -> float:
    try:
        return math.fsum(values.tolist())
    except (OverflowError, ValueError):  # beyond float64, or two infinities
        return math.nan


class Statistics:
    """Adds up the records of the train split. They must come in the order of their keys."""

    def __init__(self) -> None:
        self._records = 0
        self._channels: dict[str, _Channel] = {}
        self._fields: dict[str, _Field] = {}
        #: Of this block: names -> the numbers of the records with these names.
        self._block: dict[bytes, list[bytes]] = {}

    def add(self, measures: bytes) -> None:
        """Add one record: what ``measure_row`` and ``measure_image`` gave, joined."""
        at = 0
        while at < len(measures):
            if measures[at : at + 1] == b"C":
                _, name, *sums = _CHANNEL.unpack_from(measures, at)
                self._channels.setdefault(name.decode(), _Channel()).add(*sums)
                at += _CHANNEL.size
            else:
                _, names_bytes, count = _FIELDS.unpack_from(measures, at)
                begin = at + _FIELDS.size
                at = begin + names_bytes + 8 * count
                names = measures[begin : begin + names_bytes]
                self._block.setdefault(names, []).append(measures[begin + names_bytes : at])
        self._records += 1
        if self._records % BLOCK == 0:
            self._merge()

    def result(self) -> dict[str, FieldStatistics]:
        """Return the statistics by name of field or channel, sorted."""
        self._merge()
        found = {name: field.result(self._records) for name, field in self._fields.items()}
        found |= {name: channel.result() for name, channel in self._channels.items()}
        return {name: found[name] for name in sorted(found) if found[name] is not None}  # type: ignore[misc]

    def _merge(self) -> None:
        columns: dict[str, list[NDArray[numpy.float64]]] = {}
        for names, rows in self._block.items():
            table = numpy.frombuffer(b"".join(rows), dtype="<f8").reshape(len(rows), -1)
            for name, column in zip(_decode_names(names), table.T, strict=True):
                columns.setdefault(name, []).append(column)
        self._block.clear()
        for name, parts in columns.items():
            field = self._fields.get(name)
            if field is None:
                if len(self._fields) >= MAX_FIELDS:
                    continue
                field = self._fields[name] = _Field()
            field.add(numpy.concatenate(parts))


@lru_cache(maxsize=4096)
def _decode_names(names: bytes) -> tuple[str, ...]:
    return tuple(json.loads(names))
