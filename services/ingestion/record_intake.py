"""Intake of validated records, in order: runs checks, detects duplicates, keeps the valid and quarantines the rest."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, BinaryIO

import xxhash

from contracts.datasets import IndexRecord, canonical_json
from contracts.spec.data import DataSource
from services.ingestion import metrics
from services.ingestion.blob_packs import PackWriter
from services.ingestion.catalog import Catalog, Record
from services.ingestion.core import statistics
from services.ingestion.core.checks import RecordChecker
from services.ingestion.core.records import MAX_DETAIL_CHARS, InvalidRecord, RecordFault, ValidRecord
from services.ingestion.core.splits import SplitAssigner, SplitKeys
from services.ingestion.core.validation import Tally
from services.ingestion.sources import Source, SourceObject

#: ``commit_records`` replaces this by the split. No text in JSON contains it: its quotes would be escaped.
NO_SPLIT = b'"split":""'

FoundRecord = tuple[SourceObject, ValidRecord | InvalidRecord]
RecordConsumer = Callable[[list[FoundRecord]], Awaitable[None]]


class RecordIntake:
    """One job's records on their way into the catalog, the packs and the quarantine."""

    def __init__(
        self, data: DataSource, source: Source, catalog: Catalog, packs: PackWriter, tally: Tally, quarantine: BinaryIO
    ) -> None:
        self._data, self._source, self._catalog, self._packs = data, source, catalog, packs
        self._tally, self._quarantine = tally, quarantine
        self._checker = RecordChecker(data)
        self._split_keys = SplitKeys(data)
        self._assigner = SplitAssigner(data.split)
        self._last: tuple[SourceObject, str] | None = None
        #: Records that were examined.
        self.seen = 0
        self._accepted = metrics.RECORDS.labels(data.format, "accepted")
        self._set_aside = metrics.RECORDS.labels(data.format, "quarantined")

    def add(self, found: list[FoundRecord]) -> None:
        """Add a batch, in order."""
        for listed, record in found:
            self.seen += 1
            if isinstance(record, InvalidRecord):
                self.reject(listed, record)
                continue
            try:
                self._add_valid(listed, record)
            except RecordFault as fault:
                whole = record.offset is None
                broken = InvalidRecord(fault.code, fault.detail, record.offset, record.sha256, whole, record.label)
                self.reject(listed, broken)

    def _add_valid(self, listed: SourceObject, record: ValidRecord) -> None:
        identity = self._checker.check(record, listed.written_us)
        unit = self._assigner.unit(self._split_key(record), sha256=record.sha256, key=record.key, path=listed.path)
        pack = self._packs.next_location(record.key) if record.content is not None else None
        kept = Record(
            record.key,
            unit,
            record.label,
            bytes.fromhex(record.sha256),
            identity,
            record.size,
            self._measures(record),
            self._line(listed, record, pack),
        )
        if not self._catalog.add_record(kept):
            detail = f"another file has the key {record.key!r}: names must differ in more than the extension"
            raise RecordFault("duplicate_key", detail)
        if record.content is not None:
            self._packs.write(record.key, record.content)
        self._tally.continuous |= record.continuous
        self._accepted.inc()

    def _split_key(self, record: ValidRecord) -> str:
        """Return the record's split key; an image's was computed when it was decoded."""
        if record.split_key:
            return record.split_key
        if record.value is not None and (record.ext == "json" or self._data.split.by != "near"):
            return self._split_keys.row(record.value)
        if self._data.format == "text":
            return self._split_keys.text(record.content or b"")
        return self._split_keys.value()

    def _measures(self, record: ValidRecord) -> bytes:
        if record.measures or not self._data.statistics or record.value is None:
            return record.measures
        return statistics.measure_row(record.value)

    def _uri(self, listed: SourceObject) -> str:
        """Return the object's uri. Records of one object are consecutive."""
        if self._last is None or self._last[0] is not listed:
            self._last = listed, self._source.uri(listed)
        return self._last[1]

    def _line(self, listed: SourceObject, record: ValidRecord, pack: tuple[int, int] | None) -> bytes:
        line: IndexRecord = {
            "key": record.key,
            "split": "",
            "uri": self._uri(listed),
            "etag": listed.etag,
            "offset": record.offset,
            "label": record.label,
            "ext": record.ext,
            "fields": list(record.fields) if record.fields is not None else None,
            "size": record.size,
            "sha256": record.sha256,
            "pack": pack[0] if pack is not None else None,
            "pack_offset": pack[1] if pack is not None else None,
        }
        if pack is not None and record.content is not None:
            line["xxh3"] = xxhash.xxh3_128_hexdigest(record.content)
        return canonical_json(line) + b"\n"

    def reject(self, listed: SourceObject, broken: InvalidRecord) -> None:
        """Quarantine a record or an object."""
        self.quarantine(self._source.uri(listed), listed.etag, broken)

    def quarantine(self, uri: str, etag: str, broken: InvalidRecord) -> None:
        entry: dict[str, Any] = {
            "uri": uri,
            "etag": etag,
            "offset": broken.offset,
            "code": broken.code,
            "detail": _printable(broken.detail)[:MAX_DETAIL_CHARS],
            "sha256": broken.sha256,
            "label": broken.label,
        }
        self._quarantine.write(canonical_json(entry) + b"\n")
        place = uri if broken.offset is None else f"{uri} at {broken.offset}"
        example = f"{place}: {_printable(broken.detail)}"[: 2 * MAX_DETAIL_CHARS]
        self._tally.reject(broken.code, example, broken.whole_object, broken.label)
        self._set_aside.inc()


def _printable(text: str) -> str:
    """Escape what is not Unicode, because details quote the data."""
    return text.encode(errors="backslashreplace").decode()
