"""One ingestion: list, fingerprint and, unless the result exists already, validate every record and commit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import structlog
from pydantic import ValidationError

from contracts.data_formats import FORMAT_BY_SUFFIX, cannot_be_image, find_format_mismatch, recognize_format
from contracts.datasets import canonical_json, ingestion_uri
from contracts.problems import describe_problems, join_problems
from contracts.spec.data import DataSource
from services.ingestion.blob_packs import KEEP_BELOW_BYTES, PackWriter, choose_group_count
from services.ingestion.catalog import Catalog
from services.ingestion.commit import INDEX, STATISTICS, commit_records
from services.ingestion.core.checks import find_impossible_check
from services.ingestion.core.keys import UnsafePath, check_path, is_data, rows_key
from services.ingestion.core.records import InvalidRecord
from services.ingestion.core.validation import Fingerprint, Outcome, Tally
from services.ingestion.decoders import DecoderPool
from services.ingestion.features.source import FeatureSource
from services.ingestion.file_tables import LABELS, MANIFEST, FileTable, read_file_table, reject_missing_files
from services.ingestion.record_files import RecordFiles
from services.ingestion.record_intake import FoundRecord, RecordConsumer, RecordIntake
from services.ingestion.sources import Source, SourceObject
from services.ingestion.whole_files import BinaryFiles, ImageFiles, WholeFiles
from services.kit.bus import PoisonMessage
from services.kit.concurrency import run_in_thread
from services.kit.progress import Progress
from services.kit.store.errors import ObjectChanged, ObjectExists, ObjectNotFound
from services.kit.store.objects import ObjectStore

log = structlog.get_logger(__name__)

QUARANTINE, DONE = "quarantine.jsonl", "done.json"
#: The formats that names speak for, in words.
KNOWN = ", ".join(dict.fromkeys(FORMAT_BY_SUFFIX.values()))
#: What compressed formats become, about.
EXPANSION = {"parquet": 8, "mds": 4, "webdataset": 1}


@dataclass(frozen=True, slots=True)
class IngestionResult:
    """Where the result of an ingestion is, and its counts."""

    #: The request, with the format that was found.
    data: DataSource
    fingerprint: str
    folder_uri: str
    outcome: Outcome
    reused: bool

    @property
    def index_uri(self) -> str:
        return f"{self.folder_uri}/{INDEX}"

    @property
    def quarantine_uri(self) -> str:
        return f"{self.folder_uri}/{QUARANTINE}"

    @property
    def statistics_uri(self) -> str | None:
        return f"{self.folder_uri}/{STATISTICS}" if self.outcome.statistics else None


class IngestionJob:
    """One job's work. The result depends on the source and the settings alone, never on timing."""

    def __init__(
        self,
        bucket: str,
        objects: ObjectStore,
        source: Source,
        decoders: DecoderPool,
        folder: Path,
        data: DataSource,
        *,
        concurrency: int = 16,
        features: FeatureSource | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._bucket, self._objects, self._source, self._decoders = bucket, objects, source, decoders
        self._folder, self._data, self._features = folder, data, features
        self._progress = progress or Progress("listing")
        #: Single reads at a time; batches of files, or files of records, that are under way at a time.
        self._concurrency = concurrency
        self._ahead = min(concurrency, 3)
        self._tally = Tally()
        self._catalog: Catalog
        self._intake: RecordIntake
        self._packs: PackWriter

    async def run(self) -> IngestionResult:
        """List the source and return its index, made now or earlier.

        Raises:
            PoisonMessage: the source is missing or empty, or the request makes no sense.
            ObjectChanged, ObjectNotFound: an object is no longer what was listed.
        """
        self._check_request()
        with closing(Catalog(self._folder / "catalog.sqlite")) as self._catalog:
            fingerprint = await self._list()
            folder_uri = ingestion_uri(self._bucket, fingerprint)
            await self._objects.ensure_bucket(self._bucket)
            outcome = await self._reuse(f"{folder_uri}/{DONE}")
            if outcome is not None:
                return IngestionResult(self._data, fingerprint, folder_uri, outcome, reused=True)
            expected_bytes = self._catalog.size_of_listing()[1] * EXPANSION.get(self._data.format, 1)
            self._packs = PackWriter(self._folder, self._data.split.seed, choose_group_count(expected_bytes))
            try:
                await self._build(fingerprint, folder_uri)
            finally:
                self._packs.discard_open()
            return IngestionResult(self._data, fingerprint, folder_uri, self._tally.outcome(), reused=False)

    async def _reuse(self, done_uri: str) -> Outcome | None:
        """Return the outcome of an earlier ingestion, renewed: garbage collection removes what is old and unused.

        None: there is none, it is being removed, or it has counts that are made anew. The records are the same then.
        """
        with suppress(ObjectNotFound):
            content = await self._objects.get(done_uri)
            outcome = Outcome.model_validate_json(content)
            if self._data.format == "images" and outcome.counts_other_files:
                await self._objects.delete(done_uri)
                return None
            there = await self._objects.head(done_uri)
            with suppress(ObjectChanged):  # another job has just renewed it
                if not await self._objects.renew(there):
                    await self._objects.put(done_uri, content)
            return outcome
        return None

    def _check_request(self) -> None:
        if self._data.format != "auto" and (problem := find_impossible_check(self._data)) is not None:
            raise PoisonMessage(problem)

    def _recognize_format(self) -> None:
        """Replace ``auto`` by the format that the names of the files speak for."""
        where, names = self._data.source, (listed.path for listed in self._catalog.objects())
        try:
            found = recognize_format(names)
            if found is None:
                raise ValueError(
                    f"no file has a name with the ending of a format: give data.format (--format), {KNOWN}"
                )
            self._data = DataSource.model_validate({**self._data.model_dump(), "format": found})
        except ValidationError as error:
            raise PoisonMessage(
                f"{where} holds {found}: {join_problems(describe_problems(error, self._data.model_dump()))}"
            ) from error
        except ValueError as error:
            raise PoisonMessage(f"{where}: {error}") from error
        log.info("recognised the format", source=where, format=found)
        self._check_request()

    def _check_format(self) -> None:
        """Check that the format which was asked for can be that of the files, before they are read."""
        names = (listed.path for listed in self._catalog.objects())
        if problem := find_format_mismatch(self._data.format, names):
            raise PoisonMessage(f"{self._data.source}: {problem}")

    async def _build(self, fingerprint: str, folder_uri: str) -> None:
        await run_in_thread(self._check_format)
        with (self._folder / QUARANTINE).open("wb") as quarantine:
            await self._validate(quarantine, folder_uri)
            await run_in_thread(commit_records, self._data, self._catalog, self._intake, self._tally, self._folder)
        await self._store(folder_uri, {"fingerprint": fingerprint, **self._tally.outcome().model_dump(mode="json")})

    # -- listing --------------------------------------------------------------

    async def _list(self) -> str:
        async for page in self._source.list_objects():
            self._catalog.list_objects(one for one in page if is_data(one.path))
            self._progress.done += len(page)
        if self._catalog.size_of_listing()[0] == 0:
            where = self._data.source
            raise PoisonMessage(f"there is no object under {where}: check data.source, or upload the data first")
        if self._data.format == "auto":
            await run_in_thread(self._recognize_format)
        joined = await self._features.list() if self._features is not None else []
        return await run_in_thread(self._fingerprint, joined)

    def _fingerprint(self, joined: list[SourceObject]) -> str:
        fingerprint = Fingerprint(self._data)
        for listed in chain(self._catalog.objects(), joined):
            fingerprint.add(*listed)
        return fingerprint.hexdigest()

    # -- validation --------------------------------------------------------------

    async def _validate(self, quarantine: BinaryIO, folder_uri: str) -> None:
        """Run the first pass: validate every record once."""
        intake = RecordIntake(self._data, self._source, self._catalog, self._packs, self._tally, quarantine)
        self._intake = intake

        async def consume(found: list[FoundRecord]) -> None:
            await run_in_thread(intake.add, found)
            await self._upload_packs(folder_uri)
            self._progress.done = intake.seen

        if self._data.format in ("images", "binary"):
            await self._validate_files(consume)
        else:
            await self._validate_records(consume)

    async def _validate_files(self, consume: RecordConsumer) -> None:
        """Validate objects that are one record each."""
        is_images = self._data.format == "images"
        names = LABELS if is_images else MANIFEST
        table = await read_file_table(names, self._source, self._catalog, self._intake, self._folder, is_images)
        if table is None and not is_images:
            raise PoisonMessage(
                f"there is no {' or '.join(MANIFEST)} in {self._data.source}: data.format 'binary' needs one that "
                "names the files (file, label, more fields)"
            )
        # Copy every file, of any size, from a source that sharding cannot read.
        keep_below = KEEP_BELOW_BYTES if self._source.shared else None
        validator = (
            ImageFiles(self._data, table, self._decoders, keep_below)
            if table is None or is_images
            else BinaryFiles(self._data, table)
        )
        files = (
            listed
            for listed in self._files()
            if (table is None or listed.path != table.listed.path) and not (is_images and self._skip(listed, table))
        )
        await WholeFiles(self._data, self._source, validator, self._concurrency, self._ahead).run(files, consume)
        if table is not None:
            await run_in_thread(reject_missing_files, table, self._intake)

    def _skip(self, listed: SourceObject, table: FileTable | None) -> bool:
        """Return whether a file among images is none, by its name, and count it. A table that names it means it."""
        is_skipped = cannot_be_image(listed.path) and (table is None or table.of(listed.path) is None)
        if is_skipped:
            self._tally.skip(listed.path)
        return is_skipped

    async def _validate_records(self, consume: RecordConsumer) -> None:
        """Validate objects that hold many records."""
        reader = RecordFiles(self._data, self._source, self._catalog, self._decoders, self._folder, self._ahead)
        if self._features is not None:
            reader.joined = await self._join(reader, self._features)
        if self._data.format == "mds":
            indexes = [listed for listed in self._catalog.objects() if reader.is_auxiliary(listed)]
            await consume(await reader.read_indexes(indexes, self._catalog.find))
        files = (listed for listed in self._files() if not reader.is_auxiliary(listed))
        await reader.run(files, consume)
        for path, broken in reader.find_drifted_files():
            listed = self._catalog.find(path)
            assert listed is not None
            self._catalog.forget_records(rows_key(path))
            self._intake.reject(listed, broken)

    async def _join(self, reader: RecordFiles, features: FeatureSource) -> dict[str, Path | InvalidRecord]:
        """Return the source's files with features joined to their rows."""
        self._progress.enter_phase("joining")

        def report(done: int, total: int) -> None:
            self._progress.done, self._progress.total = done, total

        files = [
            listed
            for listed in self._catalog.objects()
            if self._objection(listed) is None and reader.reject_unread(listed) is None
        ]
        return await features.join(self._source, files, self._folder, report)

    def _objection(self, listed: SourceObject) -> str | None:
        try:
            check_path(listed.path)
        except UnsafePath as error:
            return f"the object's key {error}: rename it"
        return self._source.find_objection(listed)

    def _files(self) -> Iterator[SourceObject]:
        """Yield the objects in the order of paths. Reject those that must not be read."""
        self._progress.enter_phase("validating")
        _, self._progress.total_bytes = self._catalog.size_of_listing()
        for listed in self._catalog.objects():
            self._tally.objects += 1
            self._progress.done_bytes += listed.size
            if (problem := self._objection(listed)) is not None:
                self._intake.reject(listed, InvalidRecord("unsafe_key", problem, whole_object=True))
                continue
            yield listed

    # -- storing --------------------------------------------------------------

    async def _upload_packs(self, folder_uri: str) -> None:
        while self._packs.closed:
            path = self._packs.closed.pop(0)
            await self._objects.upload(path, f"{folder_uri}/{path.name}")
            path.unlink()

    async def _store(self, folder_uri: str, done: dict[str, object]) -> None:
        """Upload everything; upload ``done.json``, which marks it complete, last."""
        self._packs.close()
        await self._upload_packs(folder_uri)
        for name in (INDEX, QUARANTINE, *((STATISTICS,) if self._tally.statistics else ())):
            await self._objects.upload(self._folder / name, f"{folder_uri}/{name}")
        try:
            await self._objects.put(f"{folder_uri}/{DONE}", canonical_json(done), if_absent=True)
        except ObjectExists:
            log.info("another instance was faster with the same result", folder=folder_uri)
