"""Garbage collection: what goes, what stays, and what happens beside datasets that are being made."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from contracts import topology
from contracts.datasets import SPLITS, Manifest, SplitFiles, canonical_json, ingestion_uri, shard_uri, split_config_hash
from contracts.envelope import Envelope
from contracts.events.dataset import DatasetIngested, DatasetProgress, ShardFile
from contracts.spec.data import DataSource, Split
from loadtest.data.ingested import FolderStore, ingest
from services.kit.bus import Bus, TransientError
from services.kit.progress import Progress
from services.kit.settings import Settings
from services.kit.store.errors import ObjectExists, ObjectNotFound
from services.kit.store.objects import ObjectInfo, ObjectStore
from services.sharding import job as job_module
from services.sharding.core import garbage
from services.sharding.core.garbage import NamedIngestions, StoredObject
from services.sharding.core.manifest import journal_name
from services.sharding.garbage_collection import GARBAGE, GarbageSummary, collect_garbage
from services.sharding.job import Dataset, ShardingJob
from services.sharding.settings import ShardingSettings
from tests.kit.support import until
from tests.manual_clock import ManualClock
from tests.sharding.test_job import images

NOW = datetime(2026, 6, 1, tzinfo=UTC)
GRACE, KEEP = timedelta(hours=48), timedelta(days=7)
A, B = "a" * 64, "b" * 64


def stored(key: str, age: timedelta) -> StoredObject:
    return StoredObject(f"s3://d/{key}", key, 10, NOW - age)


# -- the core --------------------------------------------------------------------------


def file(sha256: str, index_sha256: str) -> ShardFile:
    return ShardFile(
        path="train/shard-00000.tar",
        sha256=sha256,
        size_bytes=1,
        samples=1,
        index_path="train/shard-00000.idx",
        index_sha256=index_sha256,
    )


def manifest(*files: ShardFile, fingerprint: str = A) -> Manifest:
    return Manifest(
        format="images",
        source="s3://lake/x",
        fingerprint=fingerprint,
        split=Split(),
        split_config_hash=split_config_hash(Split()),
        splits={split: SplitFiles(samples=len(files), shards=files if split == "test" else ()) for split in SPLITS},
    )


def test_manifests_and_journals_name_shards_and_their_indexes() -> None:
    assert list(garbage.hashes_of_manifest(manifest(file(A, B), file(B, A)))) == [A, B, B, A]
    assert list(garbage.hashes_of_journal({"train/0": file(A, B)})) == [A, B]


INGESTION = ("done.json", "index.jsonl", "pack-00000", "quarantine.jsonl", "statistics.json", f"dataset-{A[:16]}.json")


@pytest.mark.parametrize(
    ("age", "named", "gone"),
    [
        (timedelta(hours=47), False, ()),
        # done.json goes first.
        (timedelta(hours=49), False, ("done.json", f"dataset-{A[:16]}.json", *INGESTION[1:5])),
        (timedelta(days=6), True, ()),
        (timedelta(days=8), True, ("pack-00000",)),
    ],
)
def test_the_garbage_of_an_ingestion(age: timedelta, named: bool, gone: tuple[str, ...]) -> None:
    there = [stored(f"ingestions/{A}/{name}", age) for name in INGESTION]
    needed = NamedIngestions(frozenset({A} if named else {B}))
    found = garbage.garbage_of_ingestion(there, needed, NOW, GRACE, KEEP)
    assert tuple(s.key.rpartition("/")[2] for s in found) == gone


def test_the_packs_that_a_job_needs_stay() -> None:
    there = [stored(f"ingestions/{A}/{name}", timedelta(days=99)) for name in INGESTION]
    needed = NamedIngestions(frozenset({A}), frozenset({A}))
    assert garbage.garbage_of_ingestion(there, needed, NOW, GRACE, KEEP) == []


def test_an_ingestion_that_is_continued_or_reused_stays() -> None:
    there = [stored(f"ingestions/{A}/{name}", timedelta(days=99)) for name in INGESTION[1:]]
    young = stored(f"ingestions/{A}/pack-00001", timedelta(hours=1))
    nothing = NamedIngestions(frozenset())
    assert garbage.garbage_of_ingestion([*there, young], nothing, NOW, GRACE, KEEP) == []
    assert len(garbage.garbage_of_ingestion(there, nothing, NOW, GRACE, KEEP)) == len(there)


def test_an_old_journal_is_garbage_and_a_young_one_is_a_reference() -> None:
    key = f"ingestions/{A}/shards-{B[:16]}.json"
    old, young = stored(key, timedelta(hours=49)), stored(key, timedelta(hours=1))
    assert not garbage.is_young_journal(old, NOW, GRACE)
    assert garbage.is_young_journal(young, NOW, GRACE)
    done = stored(f"ingestions/{A}/done.json", timedelta(hours=49))
    needed = NamedIngestions(frozenset({A}))
    assert garbage.garbage_of_ingestion([done, old], needed, NOW, GRACE, KEEP) == [old]
    assert garbage.garbage_of_ingestion([done, young], needed, NOW, GRACE, KEEP) == []


# -- the store ---------------------------------------------------------------------------


class World:
    """A real store and bus, with a clock that is put forward: everything in the store is then as old as we like."""

    def __init__(self, bus: Bus, objects: ObjectStore, settings: Settings, folder: Path) -> None:
        self.clock = ManualClock(datetime.now(UTC))
        self.bus, self.objects, self.folder = bus, objects, folder
        self.settings = ShardingSettings.of(settings)
        self.bucket = settings.bucket_datasets
        bus.clock = self.clock

    def days(self, count: float) -> None:
        self.clock.advance(count * 86_400)

    async def ingest(self, count: int, fingerprint: str = A) -> DatasetIngested:
        """A finished ingestion in the real store."""
        local = FolderStore(Path(tempfile.mkdtemp(dir=self.folder)))
        data = DataSource(source="s3://lake/images", format="images", shard_bytes=2**16)
        made = ingest(local, images(count), data, fingerprint=fingerprint)
        for path in local.path(ingestion_uri("datasets", fingerprint)).iterdir():
            await self.objects.put(ingestion_uri(self.bucket, fingerprint, path.name), path.read_bytes())
        await self.objects.put(ingestion_uri(self.bucket, fingerprint, "done.json"), b"{}")
        return made.model_copy(update={"index_uri": ingestion_uri(self.bucket, fingerprint, "index.jsonl")})

    async def shard(self, ingested: DatasetIngested, objects: Any = None) -> Dataset:
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        return await ShardingJob(objects or self.objects, folder, ingested, self.bucket).run()

    async def keys(self, prefix: str) -> set[str]:
        return {info.key async for info in self.objects.list(f"s3://{self.bucket}/{prefix}")}

    async def check(self, dataset: Dataset) -> None:
        """Check that every object in the manifest exists and matches its hash."""
        for files in dataset.manifest.splits.values():
            for shard in files.shards:
                for sha256 in (shard.sha256, shard.index_sha256):
                    assert await self.objects.hash(shard_uri(self.bucket, sha256)) == sha256


@pytest.fixture
def world(bus: Bus, objects: ObjectStore, s3_settings: Settings, tmp_path: Path) -> World:
    return World(bus, objects, s3_settings, tmp_path)


async def test_unreferenced_objects_are_removed_and_the_rest_stays(world: World) -> None:
    kept = await world.shard(await world.ingest(300, A))
    removed = await world.shard(await world.ingest(200, B))
    only_removed = await world.keys("shards/")
    await world.objects.delete(removed.manifest_uri)
    # Young: nothing goes.
    assert (await collect_garbage(world.bus, world.objects, world.settings)).shards == 0
    world.days(3)
    found = await collect_garbage(world.bus, world.objects, world.settings)
    named = {s for f in kept.manifest.splits.values() for x in f.shards for s in (x.sha256, x.index_sha256)}
    assert {key[-64:] for key in await world.keys("shards/")} == named
    assert found.shards == len(only_removed) - len(named) > 0
    assert await world.keys(f"ingestions/{B}/") == set()
    assert {key.rpartition("/")[2] for key in await world.keys(f"ingestions/{A}/")} >= {"index.jsonl", "pack-00000"}
    # After a week the packs are removed; the index, which compares two versions, stays.
    world.days(5)
    await collect_garbage(world.bus, world.objects, world.settings)
    left = {key.rpartition("/")[2] for key in await world.keys(f"ingestions/{A}/")}
    assert {"index.jsonl", "done.json"} <= left
    assert "pack-00000" not in left
    await world.check(kept)


async def test_a_manifest_that_cannot_be_read_stops_the_collection(world: World) -> None:
    dataset = await world.shard(await world.ingest(50))
    await world.objects.put(dataset.manifest_uri, b"{")
    world.days(30)
    before = await world.keys("")
    with pytest.raises(ValueError, match="nothing was collected"):
        await collect_garbage(world.bus, world.objects, world.settings)
    assert await world.keys("") == before


async def test_ingestions_that_wait_for_sharding_stay(world: World) -> None:
    ingested = await world.ingest(50)
    bucket = await world.bus.open_bucket(topology.JOBS)
    job = {"subject": "x", "headers": {}, "body": ingested.model_dump_json(), "attempt": 0, "holder": ""}
    await bucket.put("sharding.i1", json.dumps(job).encode())
    world.days(30)
    await collect_garbage(world.bus, world.objects, world.settings)
    assert f"ingestions/{A}/index.jsonl" in await world.keys("ingestions/")
    await bucket.delete("sharding.i1")
    await collect_garbage(world.bus, world.objects, world.settings)
    assert await world.keys("ingestions/") == set()


async def test_a_stack_without_a_dataset_has_nothing_to_collect(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = world.objects.probe_conditional_deletes

    async def probe_bucket(bucket: str) -> None:
        await world.objects.list_page(f"s3://{bucket}/")  # not every store makes a bucket for the first object
        await probe(bucket)

    monkeypatch.setattr(world.objects, "probe_conditional_deletes", probe_bucket)
    nothing = world.settings.model_copy(update={"bucket_datasets": f"none-{uuid.uuid4().hex[:8]}"})
    found = await GARBAGE.run_exclusive(world.bus, world.objects, nothing)
    assert found == GarbageSummary(0, 0, 0, 0)


async def test_only_one_collection_runs_at_a_time(world: World) -> None:
    both = await asyncio.gather(
        *(GARBAGE.run_exclusive(world.bus, world.objects, world.settings) for _ in range(2)), return_exceptions=False
    )
    assert sum(found is None for found in both) <= 1
    assert any(found is not None for found in both)


class Watched:
    """A store, with a collection of garbage just before the n-th call that sharding makes of it."""

    def __init__(self, store: FolderStore, collect: Callable[[], Awaitable[object]], at_call: int) -> None:
        self._store, self._collect, self.left = store, collect, at_call

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if name in ("list", "path", "root"):
            return method

        async def call(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                await self._collect()
            return await method(*args, **kwargs)

        return call


@pytest.mark.parametrize("collect_names", ["nothing", "journal"])
async def test_a_collection_during_a_job_damages_no_dataset(
    bus: Bus, s3_settings: Settings, tmp_path: Path, collect_names: str
) -> None:
    """Old shards without a reference (or in the journal of a killed attempt) exist when the job starts."""
    store = FolderStore(tmp_path / "store")
    data = DataSource(source="s3://lake/images", format="images", shard_bytes=2**16)
    ingested = ingest(store, images(100), data)
    jobs = await bus.open_bucket(topology.JOBS)
    job = {"subject": "x", "headers": {}, "body": ingested.model_dump_json(), "attempt": 0, "holder": ""}
    await jobs.put("sharding.i1", json.dumps(job).encode())
    settings = ShardingSettings.of(s3_settings.model_copy(update={"bucket_datasets": "datasets"}))
    journal = store.path(ingestion_uri("datasets", ingested.fingerprint, journal_name(ingested.fingerprint, 2**16)))
    journal_content = b""

    async def work(objects: Any) -> Dataset:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        return await ShardingJob(objects, folder, ingested, "datasets", workers=1).run()

    async def collect() -> object:
        return await collect_garbage(bus, store, settings)  # type: ignore[arg-type]

    whole = await work(store)
    shards = [(p, p.read_bytes()) for p in (store.root / "datasets" / "shards").rglob("*") if p.is_file()]
    if collect_names == "journal":
        made = [(split, shard) for split, files in whole.manifest.splits.items() for shard in files.shards]
        journal_content = canonical_json({s.path.rpartition(".")[0]: s.model_dump(mode="json") for _, s in made})
    removed = 0
    for at_call in range(1, 1000):
        for path, content in shards:
            path.write_bytes(content)
        if journal_content:
            journal.write_bytes(journal_content)
        for gone in (store.path(whole.manifest_uri), *journal.parent.glob("dataset-*.json")):
            gone.unlink(missing_ok=True)
        for path in (store.root / "datasets").rglob("*"):
            os.utime(path, (1.7e9, 1.7e9))
        watched = Watched(store, collect, at_call)
        try:
            dataset = await work(watched)
        except TransientError:
            dataset = await work(store)  # as the queue of jobs does it
        assert dataset.dataset_id == whole.dataset_id
        for path, content in shards:
            assert path.read_bytes() == content
        removed += watched.left <= 0
        if watched.left > 0:
            break
    assert removed > 20


async def test_the_store_accepts_a_blob_only_under_its_hash(world: World, tmp_path: Path) -> None:
    """The store verifies the hash, keeps an existing object, and a renewed object is unchanged."""
    path, content = tmp_path / "shard", b"abc" * 100_000
    path.write_bytes(content)
    sha256 = hashlib.sha256(content).hexdigest()
    uri = shard_uri(world.bucket, sha256)
    await world.objects.put_file(path, uri, sha256=sha256, if_absent=True)
    before = await world.objects.head(uri)
    with pytest.raises(ObjectExists):
        await world.objects.put_file(path, uri, sha256=sha256, if_absent=True)
    path.write_bytes(content[:-1] + b"x")
    async with ObjectStore(world.settings, patience_s=0) as impatient:
        with pytest.raises((TransientError, ObjectExists)):
            await impatient.put_file(path, shard_uri(world.bucket, A), sha256=A)
    with pytest.raises(ObjectNotFound):
        await world.objects.head(shard_uri(world.bucket, A))
    while int(before.modified_at.timestamp()) == int(time.time()):  # noqa: ASYNC110 - the store reports whole seconds
        await asyncio.sleep(0.05)
    assert await world.objects.renew(before)
    assert (await world.objects.head(uri)).modified_at > before.modified_at
    assert await world.objects.get(uri) == content


async def make_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have jobs take for old what the store has now, and nothing that is written from here on."""
    now = int(time.time()) + 1
    await until(lambda: time.time() >= now, "the store's next second")
    monkeypatch.setattr(job_module, "is_young", lambda written_at: written_at.timestamp() >= now)


@pytest.mark.parametrize("renewed_before", [False, True])
async def test_a_shard_that_is_renewed_between_the_look_and_the_delete_stays(
    world: World, monkeypatch: pytest.MonkeyPatch, renewed_before: bool
) -> None:
    ingested = await world.ingest(300)
    removed = await world.shard(ingested)
    await world.objects.delete(removed.manifest_uri)
    await make_old(monkeypatch)
    if renewed_before:
        removed = await world.shard(ingested)
        await world.objects.delete(removed.manifest_uri)
        await make_old(monkeypatch)
    world.days(3)
    head = world.objects.head
    looked_at: list[str] = []

    async def interrupted(uri: str) -> ObjectInfo:
        found = await head(uri)
        if "/shards/" in uri and not looked_at:
            looked_at.append(uri)
            monkeypatch.setattr(world.objects, "head", head)
            await world.shard(ingested)
        return found

    monkeypatch.setattr(world.objects, "head", interrupted)
    found = await collect_garbage(world.bus, world.objects, world.settings)
    # What is listed later is three days old by the collection's clock, and goes.
    assert await world.objects.hash(looked_at[0]) == looked_at[0][-64:]
    assert found.kept_shards == 1


async def test_progress_is_published_during_the_work(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.kit.progress.EVERY_S", 0.01)
    progress = Progress("sharding")
    progress.total, progress.done, progress.done_bytes = 100, 40, 4000
    cause = Envelope(id="c", source="test", type="dataset.ingested.v1", time=datetime.now(UTC))
    async with progress.publish_periodically(bus, "i1", cause):
        async with asyncio.timeout(90):
            while (last := await bus.get_last_message("progress.dataset.i1", topology.PROGRESS.name)) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    fact = last.event
    assert isinstance(fact, DatasetProgress)
    assert (fact.phase, fact.done, fact.total, fact.done_bytes) == ("sharding", 40, 100, 4000)
