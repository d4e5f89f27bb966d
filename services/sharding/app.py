"""The sharding service: ingested data to datasets, and runs that name a dataset to its manifest."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import structlog

from contracts import subjects, topology
from contracts.base import Fact, run_ingestion_id
from contracts.datasets import SPLITS
from contracts.events.dataset import DatasetIngested, DatasetSharded, DatasetShardFailed
from contracts.events.run import PreparedDataset, RunAccepted, RunPrepared, RunPrepareFailed
from contracts.spec.data import DatasetRef, DataSource
from contracts.spec.run import RunSpec
from services.kit.bus import Conflict, ExpectedSequence, Message, PoisonMessage
from services.kit.jobs import JobQueue
from services.kit.progress import Progress
from services.kit.service import Service
from services.kit.settings import Settings
from services.kit.store.errors import ObjectChanged, ObjectNotFound, StoreRefused
from services.kit.store.objects import ObjectStore
from services.kit.workdir import Workdir
from services.sharding import metrics
from services.sharding.garbage_collection import GARBAGE
from services.sharding.job import Dataset, ShardingJob, find_dataset, find_made
from services.sharding.settings import ShardingSettings

log = structlog.get_logger(__name__)


class Sharding:
    """The handlers. Each must be idempotent, because a message may be delivered twice."""

    def __init__(self, service: Service, settings: ShardingSettings, objects: ObjectStore, workdir: Workdir) -> None:
        self._bus, self._settings = service.bus, settings
        #: Shards that are written at a time, of all jobs together.
        self._room = asyncio.Semaphore(settings.sharding_workers)
        self._objects, self._workdir = objects, workdir
        # Two jobs at a time, so that a long one does not block a short one. Writing can block the event loop for a
        # moment, so the lease lasts twice as long as usual.
        ttl_s = 2 * self._settings.lease_ttl_s
        self.jobs = JobQueue(self._bus, "sharding", self.work, self.give_up, concurrency=2, ttl_s=ttl_s)

    async def on_dataset_ingested(self, received: Message[DatasetIngested]) -> None:
        await self.jobs.submit(received.event.ingestion_id, received)

    async def on_run_accepted(self, received: Message[RunAccepted]) -> None:
        """Look up the datasets that a run names."""
        if any(isinstance(data, DatasetRef) for _, data in _list_data(received.event.spec)):
            await self._prepare_run(received.event, received)

    async def work(self, received: Message[DatasetIngested]) -> None:
        """Make the dataset and publish it. ``PoisonMessage`` means that this index cannot become a dataset."""
        event, started = received.event, self._bus.clock.monotonic()
        with self._workdir.temporary(f"{event.ingestion_id}-") as folder:
            progress = Progress("sharding")
            async with progress.publish_periodically(self._bus, event.ingestion_id, received.envelope):
                dataset = await self._shard(event, Path(folder), progress)
        await self._publish(self._dataset_sharded(event, dataset), received)
        if event.run_id is not None and event.name is None:
            await self._publish(_run_prepared(event.run_id, {"": _describe(dataset)}), received)
        elif event.run_id is not None:
            accepted = await self._bus.get_last_message(subjects.fact("run", event.run_id, RunAccepted.fact))
            if accepted is not None:  # else anybody published that it was ingested for a run
                await self._prepare_run(accepted.event, received)
        took_s = self._bus.clock.monotonic() - started
        metrics.JOB_SECONDS.labels("reused" if dataset.reused else "sharded").observe(took_s)
        log.info(
            "sharded",
            ingestion_id=event.ingestion_id,
            dataset_id=dataset.dataset_id,
            reused=dataset.reused,
            size_bytes=dataset.manifest.size_bytes,
            seconds=round(took_s, 2),
        )

    async def give_up(self, received: Message[DatasetIngested], reason: str) -> None:
        metrics.JOB_SECONDS.labels("failed").observe(0)
        log.warning("sharding failed", ingestion_id=received.event.ingestion_id, reason=reason)
        ingestion_id, run_id = received.event.ingestion_id, received.event.run_id
        await self._publish(DatasetShardFailed(ingestion_id=ingestion_id, run_id=run_id, reason=reason), received)
        if run_id is not None:
            await self._publish(RunPrepareFailed(run_id=run_id, reason=reason), received)

    async def _prepare_run(
        self, accepted: RunAccepted, received: Message[DatasetIngested] | Message[RunAccepted]
    ) -> None:
        """Publish that a run's data is prepared, once all of it is: with the last of it the others are found."""
        found: dict[str, PreparedDataset] = {}
        for name, data in _list_data(accepted.spec):
            dataset: Dataset | None
            try:
                if isinstance(data, DatasetRef):
                    dataset = await find_dataset(self._objects, self._settings.bucket_datasets, data.dataset_id)
                else:
                    dataset = await self._find_made(run_ingestion_id(accepted.run_id, name or None))
            except ObjectNotFound:
                field, data_id = (f"datasets.{name}" if name else "data"), getattr(data, "dataset_id", "")
                reason = f"there is no dataset {data_id}: check {field}.dataset_id, or give the source to ingest"
                return await self._publish(RunPrepareFailed(run_id=accepted.run_id, reason=reason), received)
            except ValueError as error:
                return await self._publish(RunPrepareFailed(run_id=accepted.run_id, reason=str(error)), received)
            if dataset is None:
                return None
            found[name] = _describe(dataset)
        return await self._publish(_run_prepared(accepted.run_id, found), received)

    async def _find_made(self, ingestion_id: str) -> Dataset | None:
        """Return the dataset that an ingestion came to; None: it is not made yet."""
        last = await self._bus.get_last_message(subjects.fact("dataset", ingestion_id, DatasetIngested.fact))
        return await find_made(self._objects, self._settings.bucket_datasets, last.event) if last else None

    async def _shard(self, event: DatasetIngested, folder: Path, progress: Progress) -> Dataset:
        """Run the job; raise ``PoisonMessage`` where another attempt cannot succeed."""
        shard = ShardingJob(
            self._objects,
            folder,
            event,
            self._settings.bucket_datasets,
            workers=self._settings.sharding_workers,
            room=self._room,
            disk_bytes=self._settings.sharding_disk_bytes,
            progress=progress,
        )
        try:
            return await shard.run()
        except (ObjectChanged, ObjectNotFound) as error:
            raise PoisonMessage(f"{error}: changed or deleted after it was ingested; send the request again") from error
        except StoreRefused as error:
            raise PoisonMessage(f"{error}; give the sharding service read access") from error

    def _dataset_sharded(self, event: DatasetIngested, dataset: Dataset) -> DatasetSharded:
        manifest = dataset.manifest
        return DatasetSharded(
            dataset_id=dataset.dataset_id,
            ingestion_id=event.ingestion_id,
            manifest_uri=dataset.manifest_uri,
            feature_store_version=event.fingerprint,
            split_config_hash=manifest.split_config_hash,
            row_count=sum(manifest.splits[split].samples for split in SPLITS),
            split_counts={split: manifest.splits[split].samples for split in SPLITS},
            shard_count=sum(len(manifest.splits[split].shards) for split in SPLITS),
            size_bytes=manifest.size_bytes,
            classes=manifest.classes,
            created_at=self._bus.clock.now(),
        )

    async def _publish(self, fact: Fact, received: Message[DatasetIngested] | Message[RunAccepted]) -> None:
        """Publish a fact unless it is published: a dataset is made once, a run is prepared once."""
        try:
            await self._bus.publish(fact, received.envelope, expected=ExpectedSequence(0))
        except Conflict:
            log.info("already published", subject=fact.subject)


def _list_data(spec: RunSpec) -> list[tuple[str, DataSource | DatasetRef]]:
    """Return the data of a run with its names; '' is that of its only dataset."""
    only = [] if spec.data is None else [("", spec.data)]
    return [*only, *sorted(spec.datasets.items())]


def _describe(dataset: Dataset) -> PreparedDataset:
    samples = {split: dataset.manifest.splits[split].samples for split in SPLITS}
    return PreparedDataset(
        dataset_id=dataset.dataset_id,
        manifest_uri=dataset.manifest_uri,
        train_samples=samples["train"],
        validation_samples=samples["validation"],
        test_samples=samples["test"],
    )


def _run_prepared(run_id: str, datasets: Mapping[str, PreparedDataset]) -> RunPrepared:
    """Return the fact of a run's datasets by name; '' is the name of an only one."""
    first = next(iter(datasets.values()))
    named = {name: each for name, each in datasets.items() if name}
    return RunPrepared(run_id=run_id, **dict(first), datasets=named)


def build(settings: Settings) -> Service:
    own = ShardingSettings.of(settings)
    service = Service("sharding", own)
    objects = service.add_object_store(ObjectStore(own))
    workdir = service.add_resource(Workdir(own.data_dir / "sharding"))
    sharding = Sharding(service, own, objects, workdir)
    service.bus.subscriber(topology.SHARDING, DatasetIngested)(sharding.on_dataset_ingested)
    service.bus.subscriber(topology.SHARDING, RunAccepted)(sharding.on_run_accepted)

    async def collect() -> None:
        await GARBAGE.run_periodically(own.dataset_gc_every_s, service.bus, objects, own)

    service.add_background_task(sharding.jobs.run)
    service.add_background_task(collect)
    return service
