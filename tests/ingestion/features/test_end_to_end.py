"""From tables in the store to samples in shards: both data services, a real bus, a real store."""

from __future__ import annotations

import io
import json
import tarfile
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow
import pyarrow.parquet as parquet
import pytest

from contracts.datasets import SPLITS, Manifest, shard_uri
from contracts.events.dataset import DatasetSharded
from contracts.events.run import RunPrepared, RunPrepareFailed
from contracts.spec.data import DataSource, FeatureJoin, FeatureTable, Split
from services.kit.bus import Bus, PoisonMessage
from services.kit.settings import Settings
from services.kit.store.errors import ObjectChanged
from services.kit.store.objects import ObjectStore
from tests.ingestion.conftest import Ingesting
from tests.sharding.conftest import Until, data_services, until
from tests.support_data import accepted, fill

__all__ = ["data_services", "until"]

START = datetime(2026, 3, 1, tzinfo=UTC)
ALL_TRAIN = Split(train=1, validation=0, test=0)


def days(*numbers: float | None) -> Any:
    return pyarrow.array([None if n is None else START + timedelta(days=n) for n in numbers])


def file(**columns: Any) -> bytes:
    sink = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), sink)
    return sink.getvalue()


#: Sales by user and shop, as of when, and whether they were returned.
SALES = {
    "2026-03.parquet": {
        "user": [1, 2, 1, None, 3],
        "shop": ["a", "a", "b", "a", "a"],
        "event_timestamp": days(5, 5, 9, 5, 5),
        "returned": ["no", "yes", "no", "no", "yes"],
    },
    "2026-04.parquet": {
        "user": [1, 2],
        "shop": ["a", "b"],
        "event_timestamp": days(40, None),
        "returned": ["yes", "no"],
    },
}
#: Spending was corrected on the seventh day; of user 3 nothing was known on the fifth.
SPENDING = {
    "part-0.parquet": {
        "user_id": pyarrow.array([1, 1, 2], pyarrow.int32()),
        "event_timestamp": days(1, 4, 4),
        "created": days(1, 4, 4),
        "euros": [10.5, 20.25, 30.0],
    },
    "part-1.parquet": {
        "user_id": pyarrow.array([1, 3], pyarrow.int32()),
        "event_timestamp": days(4, 4),
        "created": days(7, 6),
        "euros": [21.0, 99.0],
    },
}
#: Kept for thirty days.
VISITS = {
    "all.parquet": {
        "shop": ["a", "b", "a"],
        "user": [1, 1, 2],
        "at": days(0, 8, 5),
        "count": [7, 8, 9],
        "last": ["x", "y", "z"],
    }
}
#: What each sale's features must be: euros, count.
EXPECTED = {
    ("2026-03", 0): (20.25, 7),
    ("2026-03", 1): (30.0, 9),
    ("2026-03", 2): (21.0, 8),
    ("2026-03", 3): (None, None),
    ("2026-03", 4): (None, None),
    ("2026-04", 0): (21.0, None),
    ("2026-04", 1): (None, None),
}


async def tables(objects: ObjectStore, lake: str) -> DataSource:
    for name, files in (("sales", SALES), ("spending", SPENDING), ("visits", VISITS)):
        await fill(objects, f"{lake}/{name}", {path: file(**columns) for path, columns in files.items()})
    spending = FeatureTable(name="spending", source=f"{lake}/spending", keys=("user_id",), entity_keys=("user",))
    visits = FeatureTable(
        name="visits",
        source=f"{lake}/visits/all.parquet",
        keys=("user", "shop"),
        event_time="at",
        created_time=None,
        features=("count",),
        ttl_s=30 * 86_400,
    )
    return DataSource(
        source=f"{lake}/sales",
        format="parquet",
        features=FeatureJoin(tables=(spending, visits)),
        split=ALL_TRAIN,
        label_field="returned",
    )


@pytest.fixture
def lake(s3_settings: Settings) -> str:
    return f"s3://{s3_settings.bucket_lake}"


async def samples(objects: ObjectStore, settings: Settings, prepared: RunPrepared) -> list[dict[str, Any]]:
    manifest = Manifest.model_validate_json(await objects.get(prepared.manifest_uri))
    found = []
    for shard in (shard for split in SPLITS for shard in manifest.splits[split].shards):
        content = await objects.get(shard_uri(settings.bucket_datasets, shard.sha256))
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            members = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
        found += [json.loads(content) for name, content in members.items() if name.endswith(".json")]
    return found


async def test_samples_have_the_features_of_their_time(
    data_services: None, bus: Bus, objects: ObjectStore, s3_settings: Settings, until: Until, lake: str
) -> None:
    data = await tables(objects, lake)
    await bus.publish(accepted("r1", data))
    prepared = (await until("run.r1.prepared", "run.r1.prepare_failed")).event
    assert isinstance(prepared, RunPrepared), prepared
    found = await samples(objects, s3_settings, prepared)
    names = {"user", "shop", "event_timestamp", "returned", "spending__euros", "visits__count"}
    assert all(set(sample) == names for sample in found)
    expected = []
    for path, columns in SALES.items():
        rows = pyarrow.table(columns).to_pylist()
        for number, row in enumerate(rows):
            at = row["event_timestamp"]
            euros, count = EXPECTED[path.removesuffix(".parquet"), number]
            joined = {"spending__euros": euros, "visits__count": count}
            expected.append(row | {"event_timestamp": at and at.isoformat()} | joined)
    assert sorted(found, key=repr) == sorted((dict(sorted(row.items())) for row in expected), key=repr)

    # Again: the same dataset. Another version of a feature table, with the same names: another one.
    await bus.publish(accepted("r2", data))
    again = (await until("run.r2.prepared", "run.r2.prepare_failed")).event
    assert isinstance(again, RunPrepared)
    assert again.dataset_id == prepared.dataset_id
    late = SPENDING["part-1.parquet"] | {"euros": [22.0, 99.0]}
    await fill(objects, f"{lake}/spending", {"part-1.parquet": file(**late)})
    await bus.publish(accepted("r3", data))
    other = (await until("run.r3.prepared", "run.r3.prepare_failed")).event
    assert isinstance(other, RunPrepared)
    assert other.dataset_id != prepared.dataset_id
    assert 22.0 in {sample["spending__euros"] for sample in await samples(objects, s3_settings, other)}
    versions = []
    for one in (prepared, other):
        sharded = (await until(f"dataset.{one.dataset_id}.sharded")).event
        assert isinstance(sharded, DatasetSharded)
        versions.append(sharded.feature_store_version)
    assert versions[0] != versions[1]


async def test_a_table_that_cannot_be_joined_fails_the_run(
    data_services: None, bus: Bus, objects: ObjectStore, until: Until, lake: str
) -> None:
    data = await tables(objects, lake)
    whole = file(**SPENDING["part-1.parquet"])
    await fill(objects, f"{lake}/spending", {"part-1.parquet": whole[:-30]})
    await bus.publish(accepted("r1", data))
    failed = (await until("run.r1.prepared", "run.r1.prepare_failed")).event
    assert isinstance(failed, RunPrepareFailed)
    assert f"{lake}/spending/part-1.parquet of feature table 'spending' cannot be read" in failed.reason


async def test_the_result_is_independent_of_listing_order_and_concurrency(
    ingest: Ingesting, objects: ObjectStore, lake: str
) -> None:
    data = await tables(objects, lake)
    results = []
    for number, (concurrency, shuffled) in enumerate(((1, False), (8, True), (3, True))):
        found = await ingest(data, concurrency=concurrency, shuffled=shuffled, bucket=f"out-features-{number}")
        assert not found.reused
        results.append((found.fingerprint, await objects.get(found.index_uri)))
    assert results[0] == results[1] == results[2]
    assert (await ingest(data, bucket="out-features-0")).reused


async def test_rows_without_features_can_be_quarantined(ingest: Ingesting, objects: ObjectStore, lake: str) -> None:
    data = await tables(objects, lake)
    required = {"required": ["user", "event_timestamp", "spending__euros"]}
    checked = data.model_validate({**data.model_dump(), "checks": required, "max_invalid_fraction": 0.9})
    found = await ingest(checked)
    assert (found.outcome.accepted, found.outcome.broken) == (4, 3)


async def test_a_damaged_entity_file_is_quarantined_whole(ingest: Ingesting, objects: ObjectStore, lake: str) -> None:
    data = (await tables(objects, lake)).model_copy(update={"max_invalid_fraction": 0.9})
    await fill(objects, f"{lake}/sales", {"2026-02.parquet": file(**SALES["2026-04.parquet"])[:-9], "notes.txt": b"?"})
    found = await ingest(data)
    assert found.outcome.accepted == 7
    assert {fault.code: fault.count for fault in found.outcome.quarantined} == {
        "broken_parquet": 1,
        "unknown_extension": 1,
    }


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("part-2.parquet", b"", "part-2.parquet of feature table 'spending' cannot be used: it is empty"),
        ("part-2.csv", b"user,euros", "part-2.csv of feature table 'spending' cannot be used: it is not named as"),
    ],
)
async def test_a_foreign_file_in_a_feature_table_is_refused(
    ingest: Ingesting, objects: ObjectStore, lake: str, name: str, content: bytes, reason: str
) -> None:
    data = await tables(objects, lake)
    await fill(objects, f"{lake}/spending", {name: content, "_SUCCESS": b"", ".hidden": b"?"})
    with pytest.raises(PoisonMessage, match=reason):
        await ingest(data)


async def test_a_missing_table_is_refused(ingest: Ingesting, objects: ObjectStore, lake: str) -> None:
    data = await tables(objects, lake)
    assert data.features is not None
    gone = data.features.tables[0].model_copy(update={"source": f"{lake}/nowhere"})
    with pytest.raises(PoisonMessage, match=r"feature table 'spending' has no file under s3://.*/nowhere"):
        await ingest(data.model_copy(update={"features": FeatureJoin(tables=(gone,))}))


async def test_a_feature_table_that_changes_during_the_join_fails(
    ingest: Ingesting, objects: ObjectStore, lake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is overwritten after it was listed."""
    from services.ingestion.features.source import FeatureSource

    data = await tables(objects, lake)
    listing = FeatureSource.list

    async def list_then_overwrite(self: FeatureSource) -> Any:
        found = await listing(self)
        late = SPENDING["part-1.parquet"] | {"euros": [0.0, 0.0]}
        await fill(objects, f"{lake}/spending", {"part-1.parquet": file(**late)})
        return found

    monkeypatch.setattr(FeatureSource, "list", list_then_overwrite)
    with pytest.raises(ObjectChanged):
        await ingest(data)
