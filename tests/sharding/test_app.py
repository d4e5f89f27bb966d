"""From a published fact to shards that tarfile reads: both services, a real bus, a real store."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import io
import itertools
import json
import os
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest

from contracts import shard_index, topology
from contracts.base import short_hash
from contracts.datasets import SPLITS, Manifest, shard_uri
from contracts.envelope import Envelope
from contracts.events.dataset import DatasetIngested, DatasetIngestFailed, DatasetSharded
from contracts.events.run import RunPrepared, RunPrepareFailed
from contracts.events.train import IngestRequested
from contracts.spec.data import DatasetRef, DataSource, Split
from loadtest.data.proxy import FaultProxy
from services.ingestion import app as ingestion_app
from services.ingestion import blob_packs
from services.ingestion import job as ingest_module
from services.ingestion.decoders import DecoderPool
from services.ingestion.job import IngestionJob
from services.ingestion.sources import open_source
from services.kit.bus import Bus
from services.kit.clock import SystemClock
from services.kit.settings import Settings
from services.kit.store.objects import ObjectStore
from services.sharding import app as sharding_app
from services.sharding.job import ShardingJob
from tests.kit.support import until as eventually
from tests.sharding.conftest import Until, running
from tests.support_data import accepted, digits_lake, fill, image_bytes
from trainbus.embedded.servers import S3Server

PREPARED = ("run.{0}.prepared", "run.{0}.prepare_failed")


def verdict(run_id: str) -> tuple[str, ...]:
    return tuple(subject.format(run_id) for subject in PREPARED)


#: Split -> key -> extension -> content.
Samples = dict[str, dict[str, dict[str, bytes]]]


async def samples(objects: ObjectStore, settings: Settings, prepared: RunPrepared) -> Samples:
    """What a dataset holds, read with tarfile; every hash and offset is checked."""
    content = await objects.get(prepared.manifest_uri)
    assert hashlib.sha256(content).hexdigest() == prepared.dataset_id
    manifest = Manifest.model_validate_json(content)
    assert manifest.to_bytes() == content
    found: Samples = {split: {} for split in SPLITS}
    for split in SPLITS:
        for shard in manifest.splits[split].shards:
            archive, index = [
                await objects.get(shard_uri(settings.bucket_datasets, sha256))
                for sha256 in (shard.sha256, shard.index_sha256)
            ]
            assert hashlib.sha256(archive).hexdigest() == shard.sha256
            assert hashlib.sha256(index).hexdigest() == shard.index_sha256
            with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
                members = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
            samples = shard_index.decode(index)
            for row in range(samples.samples):
                key = samples.key(row)
                files = {e: archive[at : at + size] for e, (at, size) in samples.places(row).items()}
                assert files == {extension: members[f"{key}.{extension}"] for extension in files}
                found[split][key] = files
    return found


async def test_a_run_s_images_become_its_dataset(
    data_services: None, bus: Bus, objects: ObjectStore, s3_settings: Settings, until: Until
) -> None:
    files = digits_lake(60)
    await fill(objects, f"s3://{s3_settings.bucket_lake}/digits", files | {"2/cut.png": image_bytes(1, size=64)[:99]})
    data = DataSource(source=f"s3://{s3_settings.bucket_lake}/digits", format="images", max_invalid_fraction=0.05)
    await bus.publish(accepted("r1", data))
    prepared = (await until(*verdict("r1"))).event
    assert isinstance(prepared, RunPrepared)

    found = await samples(objects, s3_settings, prepared)
    counts = {split: len(found[split]) for split in SPLITS}
    named = (prepared.train_samples, prepared.validation_samples, prepared.test_samples)
    assert tuple(counts.values()) == named
    everything = found["train"] | found["validation"] | found["test"]
    assert everything == {
        path.removesuffix(".png"): {"png": content, "cls": path[0].encode()} for path, content in files.items()
    }
    sharded = (await until(f"dataset.{prepared.dataset_id}.sharded")).event
    assert isinstance(sharded, DatasetSharded)
    assert (sharded.row_count, sharded.classes, sharded.split_counts) == (60, ("0", "1", "2"), counts)
    ingested = (await until("dataset.r1.ingested")).event
    assert isinstance(ingested, DatasetIngested)
    assert [fault.code for fault in ingested.quarantined] == ["truncated"]

    # A second run on the same data, the same run's facts delivered again, and a run that names the dataset.
    again = accepted("r1", data)
    envelope = Envelope(id="another", source="test", type=again.type, time=SystemClock().now())
    await bus.publish_event(again, again.subject, envelope)
    await bus.publish_event(ingested, ingested.subject, dataclasses.replace(envelope, id="third", type=ingested.type))
    await bus.publish(accepted("r2", data))
    await bus.publish(accepted("r3", DatasetRef(dataset_id=prepared.dataset_id)))
    for run_id in ("r2", "r3"):
        other = (await until(*verdict(run_id))).event
        assert isinstance(other, RunPrepared)
        assert other.dataset_id == prepared.dataset_id
    await no_open_jobs(bus)
    facts = await bus.read_history("dataset.*.*", "run.*.prepared", "run.*.prepare_failed")
    published = [fact.envelope.id for fact in facts if fact.envelope.id != "third"]
    assert len(published) == len(set(published)) == 6


async def no_open_jobs(bus: Bus) -> None:
    """Wait until every job that was submitted is done."""

    async def none() -> bool:
        jobs: dict[str, bytes | None] = {}
        # Not by nats-py's ``keys``: it takes a bucket for empty when the server's answers come in another order.
        async for batch in bus.follow_bucket(topology.JOBS, ">", idle_s=1.0, until_caught_up=True):
            jobs.update({entry.key: entry.value for entry in batch})
        return not any(value is not None for value in jobs.values())

    await eventually(none, "the jobs to be done")


async def test_an_ingestion_without_a_run(
    data_services: None, bus: Bus, objects: ObjectStore, s3_settings: Settings, until: Until
) -> None:
    text = {"a.py": b"import os\n" * 300, "b.py": b"def f():\n    return 1\n" * 200}
    await fill(objects, f"s3://{s3_settings.bucket_lake}/text", text)
    source = f"s3://{s3_settings.bucket_lake}/text"
    request = IngestRequested(data=DataSource(source=source, format="text", window_length=64))
    await bus.nc.publish(request.subject, request.model_dump_json().encode(), headers={"Nats-Msg-Id": "one"})
    sharded = (await until("dataset.*.sharded")).event
    assert isinstance(sharded, DatasetSharded)
    assert sharded.row_count == sum(len(content) // 64 for content in text.values())
    ingested = (await until(f"dataset.i{short_hash('nats', 'one')}.ingested")).event
    assert isinstance(ingested, DatasetIngested)
    assert ingested.run_id is None


async def test_an_unusable_source_fails_within_seconds_and_affects_no_other(
    data_services: None, bus: Bus, objects: ObjectStore, s3_settings: Settings, until: Until
) -> None:
    lake = f"s3://{s3_settings.bucket_lake}"
    await fill(objects, f"{lake}/bad", digits_lake(6) | {"0/x.png": b"no", "1/y.png": b"image"})
    await fill(objects, f"{lake}/good", {"rows.jsonl": b"".join(b'{"a":%d}\n' % i for i in range(20))})
    cases: dict[str, tuple[DataSource | DatasetRef, str]] = {
        "missing-bucket": (DataSource(source="s3://no-such-bucket-here/x", format="images"), "no bucket"),
        "missing-prefix": (DataSource(source=f"{lake}/nowhere", format="images"), "no object under"),
        "too-many-bad": (DataSource(source=f"{lake}/bad", format="images"), "2 of 8 .* max_invalid_fraction|2 of 8"),
        "wrong-format": (DataSource(source=f"{lake}/bad", format="jsonl"), "but the files are images"),
        "unknown-dataset": (DatasetRef(dataset_id="0" * 64), "no dataset 000"),
    }
    for run_id, (data, _) in cases.items():
        await bus.publish(accepted(run_id, data))
    await bus.publish(accepted("fine", DataSource(source=f"{lake}/good", format="jsonl")))
    for run_id, (data, says) in cases.items():
        failed = (await until(*verdict(run_id))).event
        assert isinstance(failed, RunPrepareFailed)
        assert says.split("|")[-1] in failed.reason
        if isinstance(data, DataSource):
            reported = (await until(f"dataset.{run_id}.ingest_failed")).event
            assert isinstance(reported, DatasetIngestFailed)
            assert reported.reason == failed.reason
    assert isinstance((await until(*verdict("fine"))).event, RunPrepared)


async def test_content_that_changed_after_ingestion_is_refused(
    bus: Bus, objects: ObjectStore, s3_settings: Settings, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records too large for a pack are read from the source again, and must be what they were."""
    lake = f"s3://{s3_settings.bucket_lake}/big"
    monkeypatch.setattr(ingest_module, "KEEP_BELOW_BYTES", 100)
    large = {f"a/{i}.bmp": image_bytes(i, "BMP") for i in range(3)}
    data = DataSource(source=lake, format="images", split=Split(train=1, validation=0, test=0))
    await fill(objects, lake, large)
    async with running(ingestion_app.build(s3_settings)):
        await bus.publish(accepted("r1", data))
        await until("dataset.r1.ingested")
        await objects.put(f"{lake}/a/1.bmp", image_bytes(99, "BMP"))
        await bus.publish(accepted("r2", data))
        await until("dataset.r2.ingested")
    async with running(sharding_app.build(s3_settings)):
        failed, fine = (await until(*verdict("r1"))).event, (await until(*verdict("r2"))).event
    assert isinstance(failed, RunPrepareFailed)
    assert "a/1.bmp" in failed.reason
    assert isinstance(fine, RunPrepared)
    found = await samples(objects, s3_settings, fine)
    assert sum(len(found[split]) for split in SPLITS) == 3


async def test_another_instance_finishes_the_job_of_a_killed_one(
    bus: Bus, objects: ObjectStore, s3_settings: Settings, s3_server: S3Server, until: Until
) -> None:
    """SIGKILL while the job is claimed; nothing is left of the first but its claim."""
    s3_settings = s3_settings.model_copy(update={"lease_ttl_s": 1.0})  # how long it is waited for
    lake = f"s3://{s3_settings.bucket_lake}/digits"
    await fill(objects, lake, digits_lake(150))
    secret = s3_settings.s3_secret_key
    assert secret is not None
    # Through a line on which the images take seconds: it is killed in the middle, however late that is.
    async with FaultProxy(s3_server.port, bytes_per_s=5_000) as line:
        given = s3_settings.model_dump(mode="json", exclude_none=True)
        given |= {"s3_secret_key": secret.get_secret_value(), "s3_endpoint": line.endpoint}
        environment = {**os.environ, **{f"TRAINBUS_{name.upper()}": str(value) for name, value in given.items()}}
        victim = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.ingestion", env=environment, stderr=asyncio.subprocess.DEVNULL
        )
        try:
            await bus.publish(accepted("r1", DataSource(source=lake, format="images")))
            async with asyncio.timeout(90):
                async for batch in bus.follow_bucket(topology.JOBS, "ingestion.r1", idle_s=1.0):
                    if any(json.loads(entry.value or b"{}").get("holder") for entry in batch):
                        break
        finally:
            victim.kill()
            await victim.wait()
    left_behind = list((s3_settings.data_dir / "ingestion").iterdir())
    assert await bus.get_last_message("dataset.r1.*") is None, "the victim was done before it was killed"
    async with running(ingestion_app.build(s3_settings)), running(sharding_app.build(s3_settings)):
        prepared = (await until(*verdict("r1"))).event
        assert isinstance(prepared, RunPrepared)
        assert prepared.train_samples + prepared.validation_samples + prepared.test_samples == 150
        assert not any(folder.exists() for folder in left_behind if folder.is_dir())


class Crash(BaseException):
    """The process ends here."""


class Crashing:
    """The store, until the n-th write: that one is not made, or made and not answered."""

    def __init__(self, objects: ObjectStore, at_write: int, *, made: bool) -> None:
        self._objects, self._left, self._made = objects, at_write, made

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._objects, name)
        if name not in ("put", "upload", "put_file"):
            return method

        async def write(*args: Any, **kwargs: Any) -> None:
            self._left -= 1
            if self._left >= 0 or self._made:
                await method(*args, **kwargs)
            if self._left < 0:
                raise Crash

        return write


async def test_a_crash_at_any_write_changes_nothing(
    objects: ObjectStore, s3_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An instance may die at any write. The next one finishes with the same dataset."""
    monkeypatch.setattr(blob_packs, "PACK_BYTES", 4096)
    source = f"s3://{s3_settings.bucket_lake}/digits"
    await fill(objects, source, digits_lake(40))
    data = DataSource(source=source, format="images")
    made_in: dict[str, set[str]] = {}

    async def work(store: Any, bucket: str) -> str:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        source = open_source(data.source, store)
        result = await IngestionJob(bucket, store, source, decoders, folder, data).run()
        ingested = ingestion_app.ingested_fact(ingestion_app.SourceWork("r1", result.data, "r1"), result)
        return (await ShardingJob(store, folder, ingested, bucket).run()).dataset_id

    async with DecoderPool(1) as decoders:
        for at_write in itertools.count():
            bucket = f"crash-{s3_settings.bucket_datasets}-{at_write}"
            crashed = False
            try:
                await work(Crashing(objects, at_write, made=at_write % 2 == 0), bucket)
            except Crash:
                crashed = True
            dataset_id = await work(objects, bucket)
            there = {info.key async for info in objects.list(f"s3://{bucket}/datasets/")}
            made_in.setdefault(dataset_id, there)
            assert made_in == {dataset_id: there}
            if not crashed:
                break
    assert at_write > 8
