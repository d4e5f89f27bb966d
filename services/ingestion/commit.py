"""The second pass, when every record is known: conflicts, splits, statistics, the index."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from contracts.datasets import IndexRecord, canonical_json
from contracts.spec.data import DataSource
from services.ingestion.catalog import Catalog, Record
from services.ingestion.core.reasons import Code
from services.ingestion.core.records import InvalidRecord
from services.ingestion.core.splits import SplitAssigner, strata, stratify
from services.ingestion.core.statistics import Statistics
from services.ingestion.core.validation import Tally
from services.ingestion.record_intake import NO_SPLIT, RecordIntake

INDEX, STATISTICS = "index.jsonl", "statistics.json"
#: Formats whose content holds its label: equal contents have equal labels.
LABEL_WITHIN = ("jsonl", "csv", "parquet", "text", "tokens")


def commit_records(data: DataSource, catalog: Catalog, intake: RecordIntake, tally: Tally, folder: Path) -> None:
    """Write ``index.jsonl`` and ``statistics.json`` into ``folder``, always in the order of keys."""
    # 1. Records that contradict each other.
    if data.checks.id_field is not None:
        _reject(intake, catalog.take_conflicting_ids(), "conflicting_id", "another record of this id is different")
        for _ in catalog.take_second_copies():
            tally.left_out += 1
    if data.format not in LABEL_WITHIN:
        detail = "the same content has another label elsewhere"
        _reject(intake, catalog.take_conflicting_labels(), "conflicting_label", detail)
    # 2. Splits. Quarantined records do not influence them.
    split_of = _splits(data, catalog)
    # 3. The remaining records, in the order of keys.
    measured = Statistics()
    leaks_possible = data.split.by not in ("content", "near")
    with (folder / INDEX).open("wb") as file:
        for record in catalog.records():
            split = split_of(record.unit)
            tally.accept(split, record.size, record.label)
            if split is None:
                continue
            file.write(record.line.replace(NO_SPLIT, f'"split":"{split}"'.encode(), 1))
            if split == "train" and data.statistics:
                measured.add(record.measures)
            if leaks_possible:
                catalog.place(record.sha256, split, record.key)
    # 4. Whether the splits overlap.
    tally.leak = catalog.leak()
    if data.statistics and (found := measured.result()):
        fields = {name: field.model_dump(mode="json") for name, field in found.items()}
        (folder / STATISTICS).write_bytes(canonical_json(fields))
        tally.statistics = True


def _reject(intake: RecordIntake, records: Iterator[Record], code: Code, detail: str) -> None:
    for record in records:
        line: IndexRecord = json.loads(record.line)
        whole = line["offset"] is None
        broken = InvalidRecord(code, detail, line["offset"], line["sha256"], whole_object=whole, label=record.label)
        intake.quarantine(line["uri"], line["etag"], broken)


def _splits(data: DataSource, catalog: Catalog) -> Callable[[bytes], str | None]:
    """Return the function from unit to split: by hash or, stratified, by the counts in the catalog."""
    if not data.split.stratify:
        return SplitAssigner(data.split).split_of
    catalog.add_strata(strata(catalog.unit_sizes()))
    for label, total in catalog.class_sizes():
        catalog.assign(stratify(data.split, label, catalog.units_of(label), total))
    return catalog.assigned
