"""Which fields the records of a file have, and of what type; and which files are unlike most of the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

#: A field belongs to a file when at least this share of its records has it.
USUAL_SHARE = 0.9
#: A file of fewer records has no shape.
MIN_RECORDS = 5
#: Files of more fields than this are not compared: their fields are rather data than names.
MAX_FIELDS = 1000
#: Types of JSON. Null goes with any of them.
TYPES = {bool: "a boolean", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
#: In place of a type: values are null, or no type has most of them; and the field is not in most records, or in none.
ANY, SOMETIMES, MISSING = "any", "sometimes", "missing"

#: By field (``a.b`` is the field b of the object a) its type, ``ANY`` or ``SOMETIMES``; by column, its type in Arrow.
Shape = Mapping[str, str]
#: Iterates over all shapes, in the order of their first files, with the number of files. It is called again instead of
#: stored: there may be as many shapes as files.
Shapes = Callable[[], Iterable[tuple[Shape, int]]]


class FieldProfile:
    """Counts the fields of one file's records, at the top and one below; memory is bounded."""

    def __init__(self) -> None:
        self._records = 0
        self._fields: dict[str, Counter[type]] = {}
        self._too_many = False

    def add(self, record: Mapping[str, Any]) -> None:
        self._records += 1
        self._count("", record)
        for name, value in record.items():
            if type(value) is dict:
                self._count(f"{name}.", value)

    def _count(self, prefix: str, record: Mapping[str, Any]) -> None:
        for name, value in record.items():
            counts = self._fields.get(prefix + name)
            if counts is None:
                if len(self._fields) == MAX_FIELDS:
                    self._too_many = True
                    continue
                counts = self._fields[prefix + name] = Counter()
            counts[type(value)] += 1

    def shape(self) -> Shape | None:
        """Return the fields that most records have; None if there are too few records."""
        if self._records < MIN_RECORDS or self._too_many:
            return None
        return {name: self._kind(self._fields[name]) for name in sorted(self._fields)}

    def _kind(self, counts: Counter[type]) -> str:
        if counts.total() < USUAL_SHARE * self._records:
            return SOMETIMES
        kinds: Counter[str] = Counter()
        for found, count in counts.items():
            if found in TYPES:
                kinds[TYPES[found]] += count
        most = max(kinds, key=lambda kind: kinds[kind], default=ANY)
        return most if 2 * kinds[most] > kinds.total() else ANY


def find_deviating_fields(shapes: Shapes) -> Iterator[tuple[Shape, str]]:
    """Yield each shape that deviates from most files, and how.

    A file is unlike the others when it lacks a field that most files have, or has it in another type. What comes on
    top in some files is no matter. Where as many files have one as have another, the first counts.
    """
    names: dict[str, Counter[str]] = {}
    for shape, _ in shapes():
        names |= {name: Counter() for name in shape if name not in names and len(names) < MAX_FIELDS}
    for shape, files in shapes():
        for name, kinds in names.items():
            kinds[shape.get(name, MISSING)] += files
    usual = {name: kinds.most_common(1)[0][0] for name, kinds in sorted(names.items())}
    for shape, _ in shapes():
        texts = (_describe_deviation(name, kind, shape) for name, kind in usual.items())
        if (text := next(filter(None, texts), None)) is not None:
            yield shape, text


def _describe_deviation(name: str, usual: str, shape: Shape) -> str | None:
    found = shape.get(name, MISSING)
    if usual in (SOMETIMES, MISSING) or found == SOMETIMES:
        return None
    if found == MISSING:
        if shape.get(name.rpartition(".")[0]) in (ANY, SOMETIMES):  # no object, in which it could be
            return None
        there = "is there" if usual == ANY else f"is {usual}"
        return f"field {name!r} is missing here and {there} in most files: write it in all of them, if need be as null"
    if ANY in (found, usual) or found == usual:
        return None
    return f"field {name!r} is {found} here and {usual} in most files: write all files with one schema"


def find_deviating_columns(shapes: Shapes) -> Iterator[tuple[Shape, str]]:
    """Yield each shape whose columns differ from those of most files, and how. Of equally many, the first counts."""
    usual = max(shapes(), key=lambda each: each[1], default=({}, 0))[0]
    for shape, _ in shapes():
        if list(shape.items()) != list(usual.items()):
            yield shape, _describe_column_deviation(usual, shape)


def _describe_column_deviation(usual: Shape, shape: Shape) -> str:
    for name in sorted(usual.keys() | shape.keys()):
        if usual.get(name) != shape.get(name):
            return (
                f"column {name!r} is {shape.get(name, MISSING)} here and {usual.get(name, MISSING)} in most files: "
                "write all files with one schema"
            )
    return "the columns' order differs from most files: write all files with one schema"
