"""The split of a record. It depends on what the record shares with others, never on the number of records.

A record has a split key: its content, what its near-duplicates have in common, its group, its file, its own key or its
time. The hash of seed and split key is its *unit*: 16 bytes, of which the first 8 are its place between 0 and 2**64,
which is cut at the shares. So new records move no others, and records of one split key stay together. With
``stratify`` each class is cut by its own counts.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from itertools import groupby, pairwise
from operator import itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple

from PIL import Image as pillow
from PIL.Image import Image

from contracts.datasets import SPLITS, canonical_json
from contracts.spec.data import DataSource, Split
from services.ingestion.core.checks import member
from services.ingestion.core.records import RecordFault
from services.ingestion.core.times import parse_instant

UNIT_BYTES = 16
_PLACE_BYTES = 8
_TWO_TO_64 = 2**64
#: Times are stored so that their bytes sort as they do.
_TIME_OFFSET = 2**63
_MICROSECONDS = 1_000_000
#: Columns that a perceptual hash compares with their neighbours, and its rows; the smallest difference that counts (of
#: 255). Finer hashes distinguish more images and miss more near-duplicates: see docs/datasets.md.
_HASH_CELLS, _HASH_THRESHOLD = 5, 4
_BOX = pillow.Resampling.BOX


# -- split keys: what records that stay together have in common -----------------------


class SplitKeys:
    """Reads a record's split key from its content: its group, its time, or what its near-duplicates share.

    The key is '' where the record's name and hash are enough (``content``, ``file``, ``key``).
    """

    def __init__(self, data: DataSource) -> None:
        self._split = data.split
        checks = data.checks
        #: Fields that do not show how similar two records are.
        self._unrelated_fields = {checks.id_field, checks.time_field, data.label_field} - {None}

    def row(self, fields: Mapping[str, Any]) -> str:
        """Return the split key of a record of fields.

        Raises:
            RecordFault: it has no group or no time.
        """
        if self._split.by == "near":
            related = {name: value for name, value in fields.items() if name not in self._unrelated_fields}
            return hash_normalized(related)
        return self.value(fields)

    def image(self, image: Image, fields: Mapping[str, Any] | None = None) -> str:
        """Return the split key of a decoded image; ``fields`` is its row of labels.csv.

        Raises:
            RecordFault: it has no group or no time.
        """
        return perceptual_hash(image) if self._split.by == "near" else self.value(fields or {})

    def text(self, content: bytes) -> str:
        """Return the split key of a text: near-duplicates differ only in case and white space."""
        near = self._split.by == "near"
        return hash_normalized(content.decode(errors="backslashreplace")) if near else self.value()

    def value(self, fields: Mapping[str, Any] = MappingProxyType({})) -> str:
        """Return the split key of opaque content with these fields.

        Raises:
            RecordFault: it should have a group or a time.
        """
        if self._split.by == "group":
            name = self._split.group_field or ""
            value = member(fields, name)
            if value is None or value == "":
                raise RecordFault("null_group", f"no field {name!r} (split.group_field): its group is not known")
            return group_text(value)
        if self._split.by == "time":
            name = self._split.time_field or ""
            value = member(fields, name)
            if value is None:
                raise RecordFault("null_time", f"no field {name!r} (split.time_field)")
            try:
                return str(parse_instant(value))
            except ValueError as error:
                raise RecordFault("invalid_time", f"field {name!r}: {error}") from error
        return ""


def group_text(value: Any) -> str:
    """Return the name of a group: 7, 7.0 and "7" are equal, because files write numbers differently."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value) if isinstance(value, str | int | float) else canonical_json(value).decode()


def hash_normalized(value: Any) -> str:
    """Return a hash of ``value`` that ignores case, white space and the Unicode form."""
    return hashlib.sha256(json.dumps(_fold_text(value), sort_keys=True).encode()).hexdigest()


def _fold_text(value: Any) -> Any:
    if isinstance(value, str):
        return " ".join(unicodedata.normalize("NFKC", value).casefold().split())
    if isinstance(value, Mapping):
        return {name: _fold_text(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_fold_text(inner) for inner in value]
    return value


def perceptual_hash(image: Image) -> str:
    """Return the difference hash (dHash) of an image: where brightness rises from left to right.

    Made of integers alone, so it is the same on every machine. Copies in another size or compression mostly share it.
    """
    cells = grey(image).resize((_HASH_CELLS + 1, _HASH_CELLS), _BOX).tobytes()
    bits = 0
    for at in range(0, len(cells), _HASH_CELLS + 1):
        for left, right in pairwise(cells[at : at + _HASH_CELLS + 1]):
            bits = bits << 1 | (right - left > _HASH_THRESHOLD)
    return f"{bits:07x}"


def grey(image: Image) -> Image:
    """Return the image in 8-bit grey."""
    if image.mode.startswith("I"):  # 16 bits, which Pillow would cut off at 255
        return image.convert("I").point(lambda value: value * (1 / 257)).convert("L")
    return image.convert("L")


# -- units and splits -----------------------------------------------------------------


class SplitAssigner:
    """Maps split keys to units and units to splits. Each result depends on its argument and the settings alone."""

    def __init__(self, split: Split) -> None:
        self._split = split
        self._seed = f"{split.seed}\0"
        # The last split with a share takes what rounding leaves over, so that a share of 0 stays empty.
        self._train_below = _TWO_TO_64 if split.validation == 0 and split.test == 0 else round(split.train * _TWO_TO_64)
        self._validation_below = _TWO_TO_64 if split.test == 0 else round((split.train + split.validation) * _TWO_TO_64)
        self._borders = tuple(_borders(split))

    def unit(self, split_key: str, *, sha256: str, key: str, path: str) -> bytes:
        """Return the unit of a record. Records of one unit are in the same split.

        Args:
            split_key: the result of ``SplitKeys``; '' for a content whose near-duplicates are unknown.
            sha256: of the content.
            key: the record's own.
            path: of the object that it was read from, under the source's prefix.
        """
        by = self._split.by
        if by == "time":
            return (int(split_key) + _TIME_OFFSET).to_bytes(_PLACE_BYTES, "big")
        text = key if by == "key" else path if by == "file" else split_key or sha256
        return hashlib.sha256((self._seed + text).encode(errors="surrogateescape")).digest()[:UNIT_BYTES]

    def split_of(self, unit: bytes) -> str | None:
        """Return the split of a unit, without ``stratify``; None if it is in an embargo."""
        place = int.from_bytes(unit[:_PLACE_BYTES], "big")
        if self._split.by == "time":
            return self._split_at(place)
        if place < self._train_below:
            return "train"
        return "validation" if place < self._validation_below else "test"

    def _split_at(self, place: int) -> str | None:
        found = "train"
        for split, embargo_from, begins in self._borders:
            if place < embargo_from:
                return found
            if place < begins:
                return None
            found = split
        return found


def _borders(split: Split) -> Iterator[tuple[str, int, int]]:
    """Yield each split, the start of its embargo and its own start, in the order of time."""
    for name, begins in (("validation", split.validation_from), ("test", split.test_from)):
        if begins is not None:
            at = parse_instant(begins) + _TIME_OFFSET
            yield name, at - round(split.embargo_s * _MICROSECONDS), at


# -- stratified: counted, class by class ------------------------------------------------


class Stratum(NamedTuple):
    """A unit with the class that most of its records have."""

    unit: bytes
    label: str
    size: int


def strata(counts: Iterable[tuple[bytes, str | None, int]]) -> Iterator[Stratum]:
    """Give each unit one class: that of most of its records, of equals the first by name.

    Args:
        counts: unit, label, number of records; all of one unit side by side.
    """
    for unit, group in groupby(counts, key=itemgetter(0)):
        labels = [(-size, label or "") for _, label, size in group]
        yield Stratum(unit, min(labels)[1], -sum(size for size, _ in labels))


def stratify(split: Split, label: str, units: Iterable[tuple[bytes, int]], total: int) -> Iterator[tuple[bytes, str]]:
    """Yield the split of each unit of one class, so that each split has its share of records to the nearest unit.

    Args:
        units: with their sizes, in the order of units.
        total: the sum of their sizes.
    """
    targets = apportion(split, label, total)
    train_until = targets["train"]
    validation_until = train_until + targets["validation"]
    done = 0
    for unit, size in units:
        # A unit belongs where its middle lies; of units of one record exactly the targets come out.
        middle = 2 * done + size
        done += size
        if middle < 2 * train_until:
            yield unit, "train"
        else:
            yield unit, "validation" if middle < 2 * validation_until else "test"


def apportion(split: Split, label: str, total: int) -> dict[str, int]:
    """Return the size of each split, by the largest remainder; the sizes add up to ``total``.

    Among equal remainders a hash of the class decides, or else many small classes would all leave out one split.
    """
    shares = {name: Fraction(str(getattr(split, name))) for name in SPLITS}
    whole = sum(shares.values())
    quotas = {name: total * share / whole for name, share in shares.items()}
    counts = {name: int(quota) for name, quota in quotas.items()}

    def rank(name: str) -> tuple[Fraction, bytes]:
        tie = hashlib.sha256(f"{split.seed}\0{label}\0{name}".encode(errors="surrogateescape")).digest()
        return counts[name] - quotas[name], tie

    left = total - sum(counts.values())
    for name in sorted((name for name in SPLITS if shares[name]), key=rank)[:left]:
        counts[name] += 1
    return counts
