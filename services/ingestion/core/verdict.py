"""What an ingestion amounts to, and whether a run can use it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from contracts.datasets import SPLITS, canonical_json
from contracts.events.dataset import Quarantined
from contracts.events.train import DataSource

#: Changes whenever the same input would give another index.
INDEX_VERSION = 1
#: The class names travel in an event, of 1 MiB at most.
MAX_CLASSES = 10_000
MAX_CLASSES_BYTES = 500_000


class Fingerprint:
    """The hash of the settings that matter and of the listing, in the order of keys."""

    def __init__(self, data: DataSource) -> None:
        matters = data.model_dump(mode="json", include={"source", "format", "split", "window_bytes", "label_field"})
        self._hash = hashlib.sha256(canonical_json([INDEX_VERSION, matters]) + b"\n")

    def add(self, key: str, etag: str, size: int) -> None:
        self._hash.update(canonical_json([key, etag, size]) + b"\n")

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


@dataclass(slots=True)
class Tally:
    """Counts kept while records go by; ``to_dict`` is what ``done.json`` holds."""

    splits: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    size_bytes: int = 0
    labels: set[str] = field(default_factory=set)
    continuous: bool = False
    faults: dict[str, Quarantined] = field(default_factory=dict)
    objects: int = 0
    broken_objects: int = 0

    @property
    def accepted(self) -> int:
        return sum(self.splits.values())

    @property
    def broken(self) -> int:
        return sum(fault.count for fault in self.faults.values())

    def accept(self, split: str, size: int, label: str | None, continuous: bool) -> None:
        self.splits[split] += 1
        self.size_bytes += size
        self.continuous |= continuous
        # One more than allowed is kept, to know that there are too many.
        if label is not None and len(self.labels) <= MAX_CLASSES:
            self.labels.add(label)

    def set_aside(self, code: str, example: str, whole_object: bool) -> None:
        known = self.faults.get(code)
        first = known.example if known else example
        self.faults[code] = Quarantined(code=code, count=(known.count if known else 0) + 1, example=first)
        self.broken_objects += whole_object

    @property
    def too_many_classes(self) -> bool:
        return len(self.labels) > MAX_CLASSES or sum(len(label.encode()) for label in self.labels) > MAX_CLASSES_BYTES

    def classes(self) -> tuple[str, ...]:
        """The class names, sorted. None for labels that are measured values, or too many to be classes."""
        if self.continuous or self.too_many_classes:
            return ()
        return tuple(sorted(self.labels))

    def quarantined(self) -> tuple[Quarantined, ...]:
        """The most frequent first."""
        return tuple(sorted(self.faults.values(), key=lambda fault: (-fault.count, fault.code)))

    def to_dict(self) -> dict[str, Any]:
        return {
            "accepted": self.accepted,
            "splits": self.splits,
            "size_bytes": self.size_bytes,
            "classes": list(self.classes()),
            "too_many_classes": self.too_many_classes,
            "broken": self.broken,
            "objects": self.objects,
            "broken_objects": self.broken_objects,
            "quarantined": [fault.model_dump() for fault in self.quarantined()],
        }


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished ingestion, as ``done.json`` tells it."""

    accepted: int
    splits: dict[str, int]
    size_bytes: int
    classes: tuple[str, ...]
    too_many_classes: bool
    broken: int
    objects: int
    broken_objects: int
    quarantined: tuple[Quarantined, ...]

    @classmethod
    def of(cls, done: dict[str, Any]) -> Outcome:
        return cls(
            **{
                **{name: done[name] for name in cls.__dataclass_fields__},
                "classes": tuple(done["classes"]),
                "quarantined": tuple(Quarantined.model_validate(fault) for fault in done["quarantined"]),
            }
        )


def objection(outcome: Outcome, data: DataSource, quarantine_uri: str) -> str | None:
    """Why this cannot be used and what to change; None if it can."""
    total = outcome.accepted + outcome.broken
    share = outcome.broken / total if total else 0.0
    # One unreadable file may have held most of the rows: files count as well as records.
    file_share = outcome.broken_objects / outcome.objects if outcome.objects else 0.0
    reasons = _reasons(outcome.quarantined)
    if outcome.accepted == 0:
        found = f"all {total:,} records are broken: {reasons}" if total else "there is no record in it"
        return f"{data.source} has no usable {data.format} data: {found}. Check data.source and data.format."
    if max(share, file_share) > data.max_bad_fraction:
        what, bad, of, worst = (
            ("records", outcome.broken, total, share)
            if share >= file_share
            else ("files", outcome.broken_objects, outcome.objects, file_share)
        )
        return (
            f"{bad:,} of {of:,} {what} in {data.source} are broken ({worst:.1%}), more than data.max_bad_fraction "
            f"allows ({data.max_bad_fraction:.1%}): {reasons}. Repair or remove them (all are listed in "
            f"{quarantine_uri}), or raise data.max_bad_fraction."
        )
    if data.format == "images" and outcome.too_many_classes:
        return (
            f"{data.source} has more than {MAX_CLASSES:,} classes, or {MAX_CLASSES_BYTES:,} bytes of class names: "
            "check that its folders are classes."
        )
    if outcome.splits["train"] == 0:
        return (
            f"none of the {outcome.accepted:,} records falls into the train split: "
            "add data, raise data.split.train, or change data.split.seed."
        )
    return None


def _reasons(faults: Iterable[Quarantined], most: int = 3) -> str:
    faults = list(faults)
    shown = "; ".join(f"{fault.count:,} {fault.code} (such as {fault.example})" for fault in faults[:most])
    return shown + (f"; and {len(faults) - most} other kinds" if len(faults) > most else "")
