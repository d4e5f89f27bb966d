"""Formats whose objects are one record each: images, and arbitrary files with a manifest."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from typing import Protocol

from contracts.spec.data import DataSource
from services.ingestion import metrics
from services.ingestion.core.keys import extension, file_key
from services.ingestion.core.records import (
    MAX_LABEL_CHARS,
    InvalidRecord,
    RecordFault,
    ValidRecord,
    encode_json,
    find_label,
    record_of_files,
)
from services.ingestion.decoders import DecoderPool, with_content
from services.ingestion.file_tables import FileEntry, FileTable
from services.ingestion.formats import images
from services.ingestion.record_intake import FoundRecord, RecordConsumer
from services.ingestion.sources import Source, SourceObject
from services.kit.concurrency import gather_limited, run_ahead

#: The most files of a batch to read and validate, and about its most bytes.
BATCH_FILES, BATCH_BYTES = 128, 8 * 2**20
#: The extension of a file that has none, and of the JSON with a file's columns in the manifest.
NO_EXTENSION, DETAILS = "bin", "json"


class FileValidator(Protocol):
    """How one format's files are validated."""

    def reject_unread(self, listed: SourceObject) -> InvalidRecord | None:
        """Reject a file that cannot be used, by the listing and the file table; None if it has to be read."""
        ...

    async def validate(self, batch: list[tuple[SourceObject, bytes]]) -> list[ValidRecord | InvalidRecord]:
        """Return the result of each file."""
        ...


class WholeFiles:
    """Reads and validates files, some batches ahead; hands out results in the order of the listing."""

    def __init__(
        self,
        data: DataSource,
        source: Source,
        validator: FileValidator,
        concurrency: int,
        ahead: int,
    ) -> None:
        self._data, self._source, self._validator = data, source, validator
        self._concurrency, self._ahead = concurrency, ahead
        self._reads = asyncio.Semaphore(concurrency)
        self._read_bytes = metrics.READ_BYTES.labels(data.format)

    async def run(self, files: Iterator[SourceObject], consume: RecordConsumer) -> None:
        """Validate ``files`` and await ``consume`` for each batch."""
        async with aclosing(run_ahead(map(self._validate, self._batches(files)), limit=self._ahead)) as validated:
            async for found in validated:
                await consume(found)

    def _batches(self, files: Iterator[SourceObject]) -> Iterator[list[tuple[SourceObject, InvalidRecord | None]]]:
        batch: list[tuple[SourceObject, InvalidRecord | None]] = []
        size = 0
        for listed in files:
            broken = self._validator.reject_unread(listed)
            wanted = 0 if broken else listed.size
            if batch and (len(batch) >= BATCH_FILES or size + wanted > BATCH_BYTES):
                yield batch
                batch, size = [], 0
            batch.append((listed, broken))
            size += wanted
        if batch:
            yield batch

    async def _validate(self, batch: list[tuple[SourceObject, InvalidRecord | None]]) -> list[FoundRecord]:
        wanted = [listed for listed, broken in batch if broken is None]
        contents = await gather_limited((self._read(listed) for listed in wanted), limit=self._concurrency)
        results = iter(await self._validator.validate(list(zip(wanted, contents, strict=True))))
        return [(listed, broken or next(results)) for listed, broken in batch]

    async def _read(self, listed: SourceObject) -> bytes:
        async with self._reads:
            content = await self._source.read(listed)
        self._read_bytes.inc(len(content))
        return content


class ImageFiles:
    """Images in folders that are classes, or with a table of labels."""

    def __init__(
        self,
        data: DataSource,
        table: FileTable | None,
        decoders: DecoderPool,
        keep_below: int | None,
    ) -> None:
        self._table, self._decoders, self._keep_below = table, decoders, keep_below
        self._max_bytes = data.checks.max_record_bytes
        self._image_validator = images.ImageValidator(data)

    def reject_unread(self, listed: SourceObject) -> InvalidRecord | None:
        broken = images.reject_unread(listed.path, listed.size, self._max_bytes)
        if broken is not None:
            return broken
        named = self._find_entry(listed.path)
        if named is None or not named.label:
            return InvalidRecord("no_label", self._no_label(named), whole_object=True)
        if len(named.label) > MAX_LABEL_CHARS:
            return InvalidRecord("invalid_label", f"a label of {len(named.label)} characters", whole_object=True)
        return None

    async def validate(self, batch: list[tuple[SourceObject, bytes]]) -> list[ValidRecord | InvalidRecord]:
        asked = []
        for listed, content in batch:
            named = self._find_entry(listed.path)
            assert named is not None
            asked.append((images.LabelledImage(listed.path, named.label, named.value), content))
        results = await self._decoders.validate(self._image_validator, asked)
        return [
            with_content(result, content, self._keep_below) for result, (_, content) in zip(results, batch, strict=True)
        ]

    def _find_entry(self, path: str) -> FileEntry | None:
        if self._table is not None:
            return self._table.of(path)
        folder, slash, _ = path.partition("/")
        return FileEntry(folder) if slash else None

    def _no_label(self, named: FileEntry | None) -> str:
        if self._table is None:
            return "the image is in no folder: put it into one named after its class, or add a labels.csv"
        if named is None:
            return f"{self._table.listed.path} does not name this file"
        return f"{self._table.listed.path} gives this file an empty label, or two that differ"


class BinaryFiles:
    """Arbitrary files that a manifest names, each with its columns in the manifest."""

    def __init__(self, data: DataSource, table: FileTable) -> None:
        self._table, self._data = table, data
        self._label_field = data.label_field

    def reject_unread(self, listed: SourceObject) -> InvalidRecord | None:
        named = self._table.of(listed.path)
        if named is None:
            return InvalidRecord(
                "not_in_manifest", f"{self._table.listed.path} does not name this file", whole_object=True
            )
        if listed.size == 0:
            return InvalidRecord("empty", "the file has no bytes", whole_object=True)
        if listed.size > self._data.checks.max_record_bytes:
            most = self._data.checks.max_record_bytes
            return InvalidRecord("oversized", f"{listed.size:,} bytes, more than {most:,}", whole_object=True)
        return None

    async def validate(self, batch: list[tuple[SourceObject, bytes]]) -> list[ValidRecord | InvalidRecord]:
        return [self._sample(listed, content) for listed, content in batch]

    def _sample(self, listed: SourceObject, content: bytes) -> ValidRecord | InvalidRecord:
        named = self._table.of(listed.path)
        assert named is not None
        value = dict(named.value or {})
        try:
            label: str | None = named.label or None
            continuous = False
            if self._label_field is not None:
                label, continuous = find_label(value, self._label_field)
            ext = extension(listed.path) or NO_EXTENSION
            # A file that is JSON itself keeps its name, and the details get another.
            details = DETAILS if ext != DETAILS else f"details.{DETAILS}"
            files = {ext: content, details: encode_json(value)} if value else {ext: content}
            return record_of_files(file_key(listed.path), files, label, None, value, continuous)
        except RecordFault as fault:
            return InvalidRecord(fault.code, fault.detail, whole_object=True, label=named.label or None)
