"""The ingestion service: runs and requests that bring raw data, to indexes of validated records."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from botocore.exceptions import ClientError

from contracts import subjects, topology
from contracts.base import Fact, ingestion_id_for, run_ingestion_id
from contracts.events.dataset import DatasetIngested, DatasetIngestFailed
from contracts.events.run import RunAccepted, RunPrepareFailed
from contracts.events.train import IngestRequested
from contracts.spec.data import DataSource
from services.ingestion import metrics
from services.ingestion.core.validation import find_objection
from services.ingestion.decoders import DecoderPool
from services.ingestion.features.source import FeatureSource
from services.ingestion.job import IngestionJob, IngestionResult
from services.ingestion.settings import IngestionSettings
from services.ingestion.sources import open_source
from services.kit.bus import Conflict, ExpectedSequence, Message, PoisonMessage
from services.kit.jobs import JobQueue
from services.kit.progress import Progress
from services.kit.service import Service
from services.kit.settings import Settings
from services.kit.store.errors import ObjectChanged, ObjectNotFound, StoreRefused
from services.kit.store.objects import ObjectStore
from services.kit.workdir import Workdir

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SourceWork:
    """One source to ingest, and the run that waits for it."""

    ingestion_id: str
    data: DataSource
    run_id: str | None = None
    #: What the run calls it, where it has several.
    name: str | None = None

    @property
    def prefix(self) -> str:
        """What reasons begin with."""
        return "" if self.name is None else f"dataset {self.name!r}: "


class Ingestion:
    """The handlers. Each must be idempotent, because a message may be delivered twice."""

    def __init__(
        self,
        service: Service,
        settings: IngestionSettings,
        objects: ObjectStore,
        decoders: DecoderPool,
        workdir: Workdir,
    ) -> None:
        self._bus, self._settings = service.bus, settings
        self._objects, self._decoders, self._workdir = objects, decoders, workdir
        # Two jobs at a time, so that a long one does not block a short one. Decoding can block the event loop for a
        # moment, so the lease lasts twice as long as usual.
        ttl_s = 2 * self._settings.lease_ttl_s
        self.jobs = JobQueue(self._bus, "ingestion", self.work, self.give_up, concurrency=2, ttl_s=ttl_s)

    async def on_run_accepted(self, received: Message[RunAccepted]) -> None:
        if _list_work(received):
            await self.jobs.submit(received.event.run_id, received)

    async def on_ingest_requested(self, received: Message[IngestRequested]) -> None:
        await self.jobs.submit(_list_work(received)[0].ingestion_id, received)

    async def work(self, received: Message[Any]) -> None:
        """Ingest and publish the results. ``PoisonMessage`` means that an ingestion cannot succeed."""
        for ingestion in _list_work(received):
            if await self._find_published(ingestion.ingestion_id) is not None:
                # A second delivery, or a job whose result was out when its instance died.
                await self._republish(ingestion, received)
                continue
            try:
                await self._ingest_and_publish(ingestion, received)
            except PoisonMessage as error:
                raise PoisonMessage(f"{ingestion.prefix}{error}") from error

    async def _ingest_and_publish(self, ingestion: SourceWork, received: Message[Any]) -> None:
        ingestion_id = ingestion.ingestion_id
        started = self._bus.clock.monotonic()
        with self._workdir.temporary(f"{ingestion_id}-") as folder:
            progress = Progress("listing")
            async with progress.publish_periodically(self._bus, ingestion_id, received.envelope):
                result = await self._ingest(ingestion.data, Path(folder), progress)
        if (problem := find_objection(result.outcome, result.data, result.quarantine_uri)) is not None:
            raise PoisonMessage(problem)
        await self._publish(ingested_fact(ingestion, result), received)
        took_s = self._bus.clock.monotonic() - started
        metrics.JOB_SECONDS.labels("reused" if result.reused else "ingested").observe(took_s)
        outcome = result.outcome
        log.info(
            "ingested",
            ingestion_id=ingestion_id,
            reused=result.reused,
            accepted=outcome.accepted,
            quarantined=outcome.broken,
            left_out=outcome.left_out,
            splits=outcome.splits,
            seconds=round(took_s, 2),
        )

    async def give_up(self, received: Message[Any], reason: str) -> None:
        """Publish that a source cannot be used, for the first ingestion without a result and for the run that waits."""
        for ingestion in _list_work(received):
            if isinstance(await self._find_published(ingestion.ingestion_id), DatasetIngested):
                continue
            metrics.JOB_SECONDS.labels("failed").observe(0)
            log.warning("ingestion failed", ingestion_id=ingestion.ingestion_id, reason=reason)
            failed = DatasetIngestFailed(ingestion_id=ingestion.ingestion_id, run_id=ingestion.run_id, reason=reason)
            await self._publish(failed, received)
            return await self._republish(ingestion, received)

    async def _ingest(self, data: DataSource, folder: Path, progress: Progress) -> IngestionResult:
        """Run the ingestion; raise ``PoisonMessage`` where the store refuses a request or the source changed."""
        try:
            opened = partial(open_source, objects=self._objects, folders=self._settings.source_folders)
            features = FeatureSource(opened, data.features) if data.features is not None else None
            bucket, source = self._settings.bucket_datasets, opened(data.source)
            job = IngestionJob(
                bucket, self._objects, source, self._decoders, folder, data, features=features, progress=progress
            )
            return await job.run()
        except ObjectChanged as error:
            raise PoisonMessage(f"{error}: it was overwritten while it was read; send the request again") from error
        except ObjectNotFound as error:
            raise PoisonMessage(f"{error} was deleted while it was read; send the request again") from error
        except StoreRefused as error:
            raise PoisonMessage(f"{error}; give the ingestion service read access, or check data.source") from error
        except ClientError as error:
            if error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 500) >= 500:
                raise
            raise PoisonMessage(
                f"the object store refuses {data.source}: {error}; check data.source and access"
            ) from error

    async def _find_published(self, ingestion_id: str) -> DatasetIngested | DatasetIngestFailed | None:
        last = await self._bus.get_last_message(subjects.fact("dataset", ingestion_id, subjects.WILDCARD))
        return last.event if last else None

    async def _republish(self, ingestion: SourceWork, received: Message[Any]) -> None:
        """Publish what follows from the first result. The first result is final."""
        result = await self._find_published(ingestion.ingestion_id)
        if isinstance(result, DatasetIngestFailed) and ingestion.run_id is not None:
            await self._publish(RunPrepareFailed(run_id=ingestion.run_id, reason=result.reason), received)

    async def _publish(self, fact: Fact, received: Message[Any]) -> None:
        """Publish a fact unless the ingestion has a result: it succeeds or fails once."""
        both = subjects.fact("dataset", fact.aggregate_id, subjects.WILDCARD) if fact.aggregate == "dataset" else ""
        try:
            await self._bus.publish(fact, received.envelope, expected=ExpectedSequence(0, both))
        except Conflict:
            log.info("already published", subject=fact.subject)


def _list_work(received: Message[Any]) -> list[SourceWork]:
    """Return what a request or a run wants to have ingested."""
    event = received.event
    if isinstance(event, IngestRequested):
        return [SourceWork(ingestion_id_for(received.envelope.source, received.envelope.id), event.data)]
    assert isinstance(event, RunAccepted)
    return [
        SourceWork(run_ingestion_id(event.run_id, name), data, event.run_id, name)
        for name, data in [(None, event.spec.data), *sorted(event.spec.datasets.items())]
        if isinstance(data, DataSource)
    ]


def ingested_fact(ingestion: SourceWork, result: IngestionResult) -> DatasetIngested:
    """Return the fact of a finished ingestion."""
    outcome = result.outcome
    return DatasetIngested(
        ingestion_id=ingestion.ingestion_id,
        run_id=ingestion.run_id,
        name=ingestion.name,
        data=result.data,
        fingerprint=result.fingerprint,
        index_uri=result.index_uri,
        accepted=outcome.accepted,
        quarantined=outcome.quarantined,
        quarantine_uri=result.quarantine_uri if outcome.broken else None,
        split_counts=outcome.splits,
        classes=outcome.classes,
        left_out=outcome.left_out,
        statistics_uri=result.statistics_uri,
        skipped_files=outcome.skipped,
        skipped_example=outcome.skipped_example,
    )


def build(settings: Settings) -> Service:
    own = IngestionSettings.of(settings)
    service = Service("ingestion", own)
    objects = service.add_object_store(ObjectStore(own))
    decoders = service.add_resource(DecoderPool(own.decoders))
    workdir = service.add_resource(Workdir(own.data_dir / "ingestion"))
    ingestion = Ingestion(service, own, objects, decoders, workdir)
    service.bus.subscriber(topology.INGESTION, RunAccepted)(ingestion.on_run_accepted)
    service.bus.subscriber(topology.INGESTION_REQUESTS, IngestRequested)(ingestion.on_ingest_requested)
    service.add_background_task(ingestion.jobs.run)
    return service
