"""Splits and statistics as an ingestion writes them, on a real store."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from typing import Any

import numpy
import pytest

from contracts.datasets import FieldStatistics
from contracts.spec.data import DataSource
from services.ingestion.job import IngestionResult
from services.kit.settings import Settings
from services.kit.store.objects import ObjectStore
from tests.ingestion.conftest import Ingesting
from tests.support_data import fill, image_bytes


@pytest.fixture
def lake(s3_settings: Settings) -> str:
    return f"s3://{s3_settings.bucket_lake}"


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


async def index_of(objects: ObjectStore, found: IngestionResult) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (await objects.get(found.index_uri)).splitlines()]


async def statistics_of(objects: ObjectStore, found: IngestionResult) -> dict[str, FieldStatistics]:
    assert found.statistics_uri is not None
    fields = json.loads(await objects.get(found.statistics_uri))
    return {name: FieldStatistics.model_validate(field) for name, field in fields.items()}


def rows(seed: int, groups: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [
        {"patient": group, "y": rng.choice("ab"), "x": rng.gauss(5, 2), "z": rng.choice([1, None])}
        for group in range(groups)
        for _ in range(rng.randrange(1, 5))
    ]


@pytest.mark.parametrize("stratify", [False, True])
async def test_groups_stay_together_over_files(
    ingest: Ingesting, objects: ObjectStore, lake: str, stratify: bool
) -> None:
    records = rows(0, 300)
    random.Random(1).shuffle(records)
    await fill(objects, f"{lake}/p", {f"{part}.jsonl": jsonl(records[part::3]) for part in range(3)})
    split = {"by": "group", "group_field": "patient", "stratify": stratify}
    data = DataSource(source=f"{lake}/p", format="jsonl", label_field="y", split=split)
    found = await ingest(data)
    index = await index_of(objects, found)
    assert found.outcome.splits == Counter(record["split"] for record in index)
    assert len(index) == len(records)
    # Back from the index to the rows, by the file and the byte they were read from.
    contents = {f"{lake}/p/{part}.jsonl": jsonl(records[part::3]) for part in range(3)}
    splits = defaultdict(set)
    for record in index:
        row = json.loads(contents[record["uri"]][record["offset"] :].split(b"\n")[0])
        splits[row["patient"]].add(record["split"])
    assert {len(found) for found in splits.values()} == {1}
    if stratify:
        for label in "ab":
            n = Counter(record["split"] for record in index if record["label"] == label)
            assert abs(n["train"] / n.total() - 0.8) < 0.05  # a patient has rows of both classes


async def test_each_class_is_divided_alike_and_only_the_train_split_is_measured(
    ingest: Ingesting, objects: ObjectStore, lake: str
) -> None:
    records = rows(3, 400)
    await fill(objects, f"{lake}/r", {f"{part}.jsonl": jsonl(records[part::4]) for part in range(4)})
    data = DataSource(source=f"{lake}/r", format="jsonl", label_field="y", split={"stratify": True})
    found = await ingest(data)
    index = await index_of(objects, found)
    for label in "ab":
        n = Counter(record["split"] for record in index if record["label"] == label)
        for name, share in (("train", 0.8), ("validation", 0.1), ("test", 0.1)):
            assert abs(n[name] - share * n.total()) < 1
    contents = {f"{lake}/r/{part}.jsonl": jsonl(records[part::4]) for part in range(4)}
    train = [
        json.loads(contents[record["uri"]][record["offset"] :].split(b"\n")[0])
        for record in index
        if record["split"] == "train"
    ]
    measured = await statistics_of(objects, found)
    assert set(measured) == {"patient", "x", "z"}
    x = numpy.array([row["x"] for row in train])
    assert (measured["x"].count, measured["x"].nulls) == (len(train), 0)
    assert measured["x"].mean == pytest.approx(x.mean(), rel=1e-12)
    assert measured["x"].std == pytest.approx(x.std(), rel=1e-12)
    assert measured["z"].nulls == sum(row["z"] is None for row in train)
    # Another order of the listing and other concurrency, into another bucket: the same bytes.
    again = await ingest(data, concurrency=1, bucket=lake[5:], shuffled=True)
    assert again.statistics_uri is not None
    assert found.statistics_uri is not None
    assert await objects.get(again.statistics_uri) == await objects.get(found.statistics_uri)
    without = await ingest(data.model_copy(update={"statistics": False}))
    assert without.statistics_uri is None


async def test_the_embargo_is_left_out_and_counted(ingest: Ingesting, objects: ObjectStore, lake: str) -> None:
    records = [{"at": f"2026-01-{day:02d}T06:00:00Z", "n": day} for day in range(1, 31)]
    records += [{"at": None}, {"at": "soon"}]
    await fill(objects, f"{lake}/t", {"all.jsonl": jsonl(records)})
    split = {
        "by": "time", "time_field": "at", "embargo_s": 2 * 86_400,
        "validation_from": "2026-01-21T00:00:00Z", "test_from": "2026-01-26T00:00:00Z",
    }  # fmt: skip
    found = await ingest(DataSource(source=f"{lake}/t", format="jsonl", split=split, max_invalid_fraction=0.1))
    assert found.outcome.splits == {"train": 18, "validation": 3, "test": 5}
    assert found.outcome.left_out == 4
    assert {fault.code: fault.count for fault in found.outcome.quarantined} == {"null_time": 1, "invalid_time": 1}
    assert (await statistics_of(objects, found))["n"].max == 18


async def test_images_have_channels_and_near_duplicates_stay_together(
    ingest: Ingesting, objects: ObjectStore, lake: str
) -> None:
    files = {f"a/{number}.png": image_bytes(number, size=16) for number in range(60)}
    files |= {f"a/{number}_copy.bmp": image_bytes(number, "BMP", size=16) for number in range(60)}
    await fill(objects, f"{lake}/i", files)
    found = await ingest(DataSource(source=f"{lake}/i", format="images", split={"by": "near"}))
    splits = {record["key"]: record["split"] for record in await index_of(objects, found)}
    assert all(splits[f"a/{number}"] == splits[f"a/{number}_copy"] for number in range(60))
    assert len(set(splits.values())) > 1
    measured = await statistics_of(objects, found)
    assert measured
    for channel in measured.values():
        assert channel.count == 16 * 16 * found.outcome.splits["train"]
        assert 0 <= channel.min <= channel.mean <= channel.max <= 1
