"""Counts of an ingestion's records, and whether a run can use the result."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict

from contracts.datasets import SPLITS, canonical_json
from contracts.events.dataset import QuarantineCount
from contracts.spec.data import DataSource

#: Changes whenever the same input would give another index.
INDEX_VERSION = 3
#: The class names travel in an event, of 1 MiB at most.
MAX_CLASSES = 10_000
MAX_CLASSES_BYTES = 500_000
WHOLE_NUMBER = re.compile(r"[0-9]{1,18}")


class Fingerprint:
    """The hash of the settings that matter and of the listing, in the order of keys."""

    def __init__(self, data: DataSource) -> None:
        matters = data.model_dump(mode="json", exclude={"max_invalid_fraction", "shard_bytes"})
        #: Without ``not_after``, the times of records are compared with the times their objects were written.
        self._times = data.checks.time_field is not None and data.checks.not_after is None
        self._hash = hashlib.sha256(canonical_json([INDEX_VERSION, matters]) + b"\n")

    def add(self, path: str, etag: str, size: int, written_us: int) -> None:
        """Add one object of the source, or of a joined table."""
        listed = [path, etag, size, written_us] if self._times else [path, etag, size]
        self._hash.update(canonical_json(listed) + b"\n")

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


@dataclass(slots=True)
class Tally:
    """Counts of the records seen so far; ``done.json`` holds its ``outcome``."""

    splits: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    #: Valid records that are in no split.
    left_out: int = 0
    size_bytes: int = 0
    labels: Counter[str] = field(default_factory=Counter)
    continuous: bool = False
    faults: dict[str, QuarantineCount] = field(default_factory=dict)
    broken_labels: Counter[str] = field(default_factory=Counter)
    objects: int = 0
    broken_objects: int = 0
    #: Files among images that are none, and the first of them.
    skipped: int = 0
    skipped_example: str = ""
    #: Two records of one content in different splits: key and split of each.
    leak: tuple[str, str, str, str] | None = None
    statistics: bool = False

    @property
    def accepted(self) -> int:
        return sum(self.splits.values())

    @property
    def broken(self) -> int:
        return sum(fault.count for fault in self.faults.values())

    def accept(self, split: str | None, size: int, label: str | None) -> None:
        """Count a valid record; ``split`` is None where it is in no split."""
        if split is None:
            self.left_out += 1
            return
        self.splits[split] += 1
        self.size_bytes += size
        if label is not None:
            _count(self.labels, label)

    def reject(self, code: str, example: str, whole_object: bool, label: str | None = None) -> None:
        known = self.faults.get(code)
        first = known.example if known else example
        self.faults[code] = QuarantineCount(code=code, count=(known.count if known else 0) + 1, example=first)
        self.broken_objects += whole_object
        if label is not None:
            _count(self.broken_labels, label)

    def skip(self, path: str) -> None:
        """Count a file that is no record, and no object that may be broken."""
        self.objects -= 1
        self.skipped += 1
        self.skipped_example = self.skipped_example or path

    @property
    def too_many_classes(self) -> bool:
        return len(self.labels) > MAX_CLASSES or sum(len(label.encode()) for label in self.labels) > MAX_CLASSES_BYTES

    @property
    def classes(self) -> tuple[str, ...]:
        """Return the class names, sorted (numbers as numbers); empty if labels are measured values, or too many."""
        if self.continuous or self.too_many_classes:
            return ()
        if all(WHOLE_NUMBER.fullmatch(label) for label in self.labels):
            return tuple(sorted(self.labels, key=lambda label: (int(label), label)))
        return tuple(sorted(self.labels))

    @property
    def worst_class(self) -> tuple[str, int, int] | None:
        """Return the class with the largest share of invalid records, of those with at least two: name, invalid, all.

        A class with a single invalid record is not considered.
        """
        if self.continuous or self.too_many_classes:
            return None
        found = [
            (label, broken, broken + self.labels[label]) for label, broken in self.broken_labels.items() if broken > 1
        ]
        return max(found, key=lambda one: (one[1] / one[2], one[0]), default=None)

    @property
    def quarantined(self) -> tuple[QuarantineCount, ...]:
        """Return the counts by reason, the most frequent first."""
        return tuple(sorted(self.faults.values(), key=lambda fault: (-fault.count, fault.code)))

    def outcome(self) -> Outcome:
        """Return the totals."""
        return Outcome.model_validate(self, from_attributes=True)


def _count(counter: Counter[str], label: str) -> None:
    # One label above the limit is counted, so that ``too_many_classes`` is true.
    if label in counter or len(counter) <= MAX_CLASSES:
        counter[label] += 1


class Outcome(BaseModel):
    """A finished ingestion, as in ``done.json``."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    #: Of done.json. Before version 3 files that are no images counted as broken ones.
    version: int = 3
    accepted: int
    left_out: int
    splits: dict[str, int]
    size_bytes: int
    classes: tuple[str, ...]
    too_many_classes: bool
    broken: int
    objects: int
    broken_objects: int
    skipped: int = 0
    skipped_example: str = ""
    quarantined: tuple[QuarantineCount, ...]
    worst_class: tuple[str, int, int] | None
    leak: tuple[str, str, str, str] | None
    #: Whether ``statistics.json`` is beside the index.
    statistics: bool

    @property
    def counts_other_files(self) -> bool:
        """Whether an earlier version may have counted files beside images as broken ones."""
        return self.version < 3 and any(fault.code == "unknown_extension" for fault in self.quarantined)


def find_objection(outcome: Outcome, data: DataSource, quarantine_uri: str) -> str | None:
    """Return why the data cannot be used and what to change; None if it can."""
    total = outcome.accepted + outcome.left_out + outcome.broken
    if outcome.accepted + outcome.left_out == 0:
        reasons = _describe_reasons(outcome.quarantined)
        found = f"all {total:,} records are broken: {reasons}" if total else "there is no record in it"
        return f"{data.source} has no usable {data.format} data: {found}. Check data.source and data.format."
    if (problem := _describe_excess(outcome, data, total)) is not None:
        advice = f"Repair or remove them (all are listed in {quarantine_uri}), or raise data.max_invalid_fraction."
        return f"{problem}: {_describe_reasons(outcome.quarantined)}. {advice}"
    if data.format == "images" and outcome.too_many_classes:
        return (
            f"{data.source} has more than {MAX_CLASSES:,} classes, or {MAX_CLASSES_BYTES:,} bytes of class names: "
            "check that its folders are classes."
        )
    if outcome.leak is not None:
        key, split, other, its = outcome.leak
        return (
            f"the {its} split leaks into the {split} split: {key} ({split}) and {other} ({its}) have the same content. "
            "Remove the copies, or set data.split.by to 'content', which keeps copies together."
        )
    return _empty_split(outcome, data)


def _describe_excess(outcome: Outcome, data: DataSource, total: int) -> str | None:
    """Return which limit the invalid records exceed; None if none."""
    most = f"more than data.max_invalid_fraction allows ({data.max_invalid_fraction:.1%})"
    drifted = next((fault.count for fault in outcome.quarantined if fault.code == "schema_drift"), 0)
    if drifted and drifted / outcome.objects > data.max_invalid_fraction:
        return (
            f"the schema of {data.source} changed: {drifted:,} of {outcome.objects:,} files have other columns "
            f"or fields than most, {most}"
        )
    # One unreadable file may have held most of the rows: files count as well as records.
    shares = [
        ("records", outcome.broken, total),
        ("files", outcome.broken_objects, outcome.objects),
    ]
    what, bad, of = max(shares, key=lambda share: share[1] / share[2] if share[2] else 0.0)
    if of and bad / of > data.max_invalid_fraction:
        return f"{bad:,} of {of:,} {what} in {data.source} are broken ({bad / of:.1%}), {most}"
    if outcome.worst_class is not None:
        label, bad, of = outcome.worst_class
        if bad / of > data.max_invalid_fraction:
            return (
                f"{bad:,} of {of:,} records of the class {label!r} in {data.source} are broken ({bad / of:.1%}), {most}"
            )
    return None


def _empty_split(outcome: Outcome, data: DataSource) -> str | None:
    split = data.split
    if split.by == "time":
        borders = {"train": True, "validation": split.validation_from, "test": split.test_from}
        wanted = [name for name in SPLITS if borders[name]]
        change = "move data.split.validation_from and test_from to where there is data, or leave one out"
    else:
        wanted = [name for name in SPLITS if getattr(split, name) > 0]
        change = "add data, set its share in data.split to 0, raise it, or change data.split.seed"
    if empty := [name for name in wanted if outcome.splits[name] == 0]:
        return (
            f"none of the {outcome.accepted:,} records of {data.source} falls into the {' or the '.join(empty)} split: "
            f"{change}."
        )
    return None


def _describe_reasons(faults: Iterable[QuarantineCount], most: int = 3) -> str:
    faults = list(faults)
    shown = "; ".join(f"{fault.count:,} {fault.code} (such as {fault.example})" for fault in faults[:most])
    return shown + (f"; and {len(faults) - most} other kinds" if len(faults) > most else "")
