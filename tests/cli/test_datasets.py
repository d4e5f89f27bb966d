"""``trainbus datasets`` over a real bus and a real store; and its parts, which are pure."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import io
import json
import random
import tarfile
from collections import Counter
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from fastapi import HTTPException
from hypothesis import given
from hypothesis import strategies as st

from contracts import shard_index, topology
from contracts.base import Fact, short_hash
from contracts.datasets import (
    SPLITS,
    FieldStatistics,
    IndexRecord,
    Manifest,
    SplitFiles,
    canonical_json,
    dataset_uri,
    ingestion_uri,
    link_name,
    shard_uri,
    split_config_hash,
)
from contracts.events.dataset import (
    DatasetIngested,
    DatasetIngestFailed,
    DatasetSharded,
    QuarantineCount,
    ShardFile,
)
from contracts.events.model import ModelPromoted
from contracts.events.run import RunAccepted, RunCancelled, RunPrepared
from contracts.spec.data import DataSource, Split
from contracts.spec.run import RunSpec
from services.gateway.dataset_verification import verify_datasets
from services.gateway.index_check import find_index_mismatch
from services.gateway.stored_dataset import StoredDataset
from services.kit.bus import Bus
from services.kit.messages import TransientError
from services.kit.settings import Settings
from services.kit.store.objects import ObjectStore
from tests.client_address import serve_clients
from trainbus.client import sampled_data
from trainbus.client.address import StackAddress
from trainbus.client.client import AsyncClient
from trainbus.client.datasets import list_datasets, list_unfinished
from trainbus.client.errors import NotFoundError, TrainbusError
from trainbus.client.gateway import open_gateway
from trainbus.client.sampled_data import fetch_stored
from trainbus.commands import datasets
from trainbus.data.dataset import Dataset as LocalDataset
from trainbus.datasets.diff import KINDS, UnsortedIndex, compare

T0 = datetime(2026, 5, 1, 12, tzinfo=UTC)


# -- diff, pure -------------------------------------------------------------------


def sha(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()


def record(key: str, split: str = "train", label: str | None = "a", content: str | None = None) -> IndexRecord:
    return {
        "key": key, "split": split, "uri": f"s3://lake/{key}", "etag": "e", "offset": None, "label": label,
        "ext": "png", "size": 1, "sha256": sha(content or key), "pack": None, "pack_offset": None,
    }  # fmt: skip


def test_every_kind_of_change_is_counted_by_split_and_class() -> None:
    before = [record("a"), record("b"), record("c"), record("d"), record("e", "test"), record("g", label=None)]
    after = [
        record("a"),
        record("b", label="z"),
        record("c", "validation"),
        record("d", "test", "z", "other"),
        record("f", "validation", "z"),
        record("g", label=None),
    ]
    found = compare(before, after)
    assert found.same == 2
    assert {kind: found.count(kind) for kind in KINDS} == {
        "added": 1, "removed": 1, "renamed": 0, "relabelled": 2, "moved": 2, "changed": 1
    }  # fmt: skip
    assert found.by_class["removed"] == {("test", "a"): 1}
    assert found.by_class["added"] == {("validation", "z"): 1}
    assert found.relabels == {("a", "z"): 2}
    assert found.moves == {("train", "validation"): 1, ("train", "test"): 1}
    assert found.examples["moved"] == ["c", "d"]


def test_an_image_that_was_put_into_another_folder_was_relabelled() -> None:
    found = compare([record("3/x", label="3", content="x")], [record("9/x", label="9", content="x")])
    assert (found.count("renamed"), found.count("relabelled"), found.total) == (1, 1, 2)
    assert found.relabels == {("3", "9"): 1}
    assert found.examples["renamed"] == ["3/x -> 9/x"]


def test_a_row_before_the_others_changes_none_of_them() -> None:
    before = [record(f"f/{i:03d}", content=f"row {i}") for i in range(100)]
    after = [record("f/000", content="new")] + [record(f"f/{i + 1:03d}", content=f"row {i}") for i in range(100)]
    found = compare(before, after)
    assert {kind: found.count(kind) for kind in KINDS if found.count(kind)} == {"added": 1, "renamed": 100}


rows = st.dictionaries(
    st.text("ab/_1", min_size=1, max_size=3),
    st.tuples(st.sampled_from(SPLITS), st.sampled_from(["x", "y", None]), st.sampled_from("abcde")),
    max_size=12,
)


@given(rows, rows)
def test_a_diff_agrees_with_sets(before: dict[str, Any], after: dict[str, Any]) -> None:
    old, new = ([record(key, *each[key]) for key in sorted(each)] for each in (before, after))
    found = compare(old, new)
    exact = {key for key in before.keys() & after.keys() if before[key][2] == after[key][2]}
    assert found.same == sum(before[key] == after[key] for key in exact)
    left = [Counter(each[key][2] for key in each.keys() - exact) for each in (before, after)]
    assert found.count("renamed") == (left[0] & left[1]).total()
    assert found.count("removed") + found.count("changed") == (left[0] - left[1]).total()
    assert found.count("added") + found.count("changed") == (left[1] - left[0]).total()
    # No record is lost: each version's records are all accounted for.
    both = len(exact) + found.count("renamed") + found.count("changed")
    assert (len(before), len(after)) == (both + found.count("removed"), both + found.count("added"))


@pytest.mark.parametrize("keys", ["ba", "aa"])
def test_an_index_out_of_order_is_refused(keys: str) -> None:
    with pytest.raises(UnsortedIndex):
        compare([record(key) for key in keys], [])


# -- shard and index, pure ----------------------------------------------------------


def archive(samples: dict[str, dict[str, bytes]]) -> tuple[bytes, bytes]:
    """A shard written by tarfile, and its index."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for key, files in samples.items():
            for ext, content in files.items():
                member = tarfile.TarInfo(f"{key}.{ext}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    content = packed.getvalue()
    fields: dict[str, tuple[list[int], list[int]]] = {
        ext: ([0] * len(samples), [shard_index.ABSENT] * len(samples)) for files in samples.values() for ext in files
    }
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        for member in tar:
            key, _, ext = member.name.partition(".")
            row = list(samples).index(key)
            fields[ext][0][row], fields[ext][1][row] = member.offset_data, member.size
    return content, shard_index.encode(list(samples), fields)


SAMPLES = {
    "a/1": {"png": b"p" * 700, "cls": b"0"},
    "a/2": {"png": b"", "cls": b"1"},
    "b/1": {"png": b"q" * 512},
    "b/2": {"json": b"{}", "seg.png": b"mask"},
}


def test_a_shard_and_its_index_agree(tmp_path: Path) -> None:
    content, index = archive(SAMPLES)
    (tmp_path / "shard").write_bytes(content)
    assert find_index_mismatch(tmp_path / "shard", index, 4) is None
    assert "manifest 5" in str(find_index_mismatch(tmp_path / "shard", index, 5))


def without(samples: dict[str, dict[str, bytes]], key: str) -> dict[str, dict[str, bytes]]:
    return {name: files for name, files in samples.items() if name != key}


@pytest.mark.parametrize(
    "other",
    [
        {**without(SAMPLES, "b/2"), "b/3": SAMPLES["b/2"]},
        {**SAMPLES, "a/1": {"png": b"p" * 700, "txt": b"0"}},
        {**SAMPLES, "a/1": {"png": b"p" * 701, "cls": b"0"}},
        {**SAMPLES, "a/1": {"png": b"p" * 700}},
        {**SAMPLES, "b/1": {"png": b"q" * 512, "cls": b"0"}},
        dict(reversed(SAMPLES.items())),
    ],
)
def test_an_index_of_another_shard_is_found(tmp_path: Path, other: dict[str, dict[str, bytes]]) -> None:
    (tmp_path / "shard").write_bytes(archive(other)[0])
    assert find_index_mismatch(tmp_path / "shard", archive(SAMPLES)[1], 4) is not None


def test_flat_shards(tmp_path: Path) -> None:
    (tmp_path / "shard").write_bytes(bytes(range(60)))
    sizes = [20, 20, 20]
    index = shard_index.encode(["0", "1", "2"], {"bin": ([0, 20, 40], sizes)})
    assert find_index_mismatch(tmp_path / "shard", index, 3) is None
    off = shard_index.encode(["0", "1", "2"], {"bin": ([1, 21, 41], sizes)})
    assert "its index has" in str(find_index_mismatch(tmp_path / "shard", off, 3))
    ragged = shard_index.encode(["0", "1", "2"], {"bin": ([0, 20, 40], [20, 20, 19])})
    assert find_index_mismatch(tmp_path / "shard", ragged, 3) is not None


def test_no_damage_makes_it_crash(tmp_path: Path) -> None:
    content, index = archive(SAMPLES)
    rng = random.Random(0)
    for _ in range(100):
        damaged, at = bytearray(content), rng.randrange(len(content))
        damaged[at] ^= 1 << rng.randrange(8)
        (tmp_path / "shard").write_bytes(damaged[: rng.choice((len(content), rng.randrange(1, len(content))))])
        find_index_mismatch(tmp_path / "shard", index, 4)
        bent = bytearray(index)
        bent[rng.randrange(len(bent))] ^= 1 << rng.randrange(8)
        (tmp_path / "shard").write_bytes(content)
        find_index_mismatch(tmp_path / "shard", bytes(bent), 4)


# -- a dataset in the store -----------------------------------------------------------


class Made:
    """A small dataset, put into the store as ingestion and sharding leave it."""

    def __init__(
        self, bucket: str, records: list[IndexRecord], *, seed: int = 0, source: str = "s3://lake/digits"
    ) -> None:
        self.bucket = bucket
        self.data = DataSource(source=source, format="images", split=Split(seed=seed))
        self.index = b"".join(canonical_json(each) + b"\n" for each in records)
        self.fingerprint = hashlib.sha256(self.index + bytes([seed])).hexdigest()
        self.files: dict[str, bytes] = {}
        splits = {name: self._split(name, [each for each in records if each["split"] == name]) for name in SPLITS}
        self.classes = tuple(sorted({each["label"] for each in records if each["label"]}))
        self.manifest = Manifest(
            format="images",
            source=self.data.source,
            fingerprint=self.fingerprint,
            split=self.data.split,
            split_config_hash=split_config_hash(self.data.split),
            classes=self.classes,
            statistics={"l": FieldStatistics(count=64, mean=0.5, std=0.25, min=0.0, max=1.0)},
            splits=splits,
        )
        self.dataset_id = hashlib.sha256(self.manifest.to_bytes()).hexdigest()

    def _split(self, name: str, records: list[IndexRecord]) -> SplitFiles:
        shards = []
        for number in range(0, len(records), 2):
            held = records[number : number + 2]
            content, index = archive({each["key"]: {"png": each["key"].encode()} for each in held})
            sha256, index_sha256 = (hashlib.sha256(each).hexdigest() for each in (content, index))
            self.files |= {sha256: content, index_sha256: index}
            path = f"{name}/shard-{number // 2:05d}"
            shards.append(
                ShardFile(
                    path=f"{path}.tar", sha256=sha256, size_bytes=len(content), samples=len(held),
                    index_path=f"{path}.idx", index_sha256=index_sha256, index_bytes=len(index),
                )
            )  # fmt: skip
        return SplitFiles(samples=len(records), shards=tuple(shards))

    async def store(self, objects: ObjectStore) -> None:
        for sha256, content in self.files.items():
            await objects.put(shard_uri(self.bucket, sha256), content)
        await objects.put(ingestion_uri(self.bucket, self.fingerprint, "index.jsonl"), self.index)
        await objects.put(dataset_uri(self.bucket, self.dataset_id), self.manifest.to_bytes())

    def ingested(self, ingestion_id: str) -> DatasetIngested:
        return DatasetIngested(
            ingestion_id=ingestion_id,
            data=self.data,
            fingerprint=self.fingerprint,
            index_uri=ingestion_uri(self.bucket, self.fingerprint, "index.jsonl"),
            accepted=sum(split.samples for split in self.manifest.splits.values()),
            quarantined=(QuarantineCount(code="truncated", count=2, example="s3://lake/digits/x.png"),),
            quarantine_uri=ingestion_uri(self.bucket, self.fingerprint, "quarantine.jsonl"),
            split_counts={name: self.manifest.splits[name].samples for name in SPLITS},
            classes=self.classes,
        )

    def sharded(self, ingestion_id: str | None) -> DatasetSharded:
        counts = {name: self.manifest.splits[name].samples for name in SPLITS}
        return DatasetSharded(
            dataset_id=self.dataset_id,
            ingestion_id=ingestion_id,
            manifest_uri=dataset_uri(self.bucket, self.dataset_id),
            feature_store_version=self.fingerprint,
            split_config_hash=self.manifest.split_config_hash,
            row_count=sum(counts.values()),
            split_counts=counts,
            shard_count=sum(len(split.shards) for split in self.manifest.splits.values()),
            size_bytes=self.manifest.size_bytes,
            classes=self.classes,
            created_at=T0,
        )

    def prepared(self, run_id: str) -> RunPrepared:
        uri = dataset_uri(self.bucket, self.dataset_id)
        return RunPrepared(run_id=run_id, dataset_id=self.dataset_id, manifest_uri=uri, train_samples=4)


FIRST = [
    record("0/a"),
    record("0/b"),
    record("0/c", "test"),
    record("1/a", label="b"),
    record("1/b", "validation", "b"),
]
SECOND = [
    record("0/a"),
    record("0/b", "test"),
    record("1/a"),
    record("1/b", "validation", "b"),
    record("1/c", label="b"),
]


def accepted(run_id: str, name: str) -> RunAccepted:
    task = {"task": "t:T", "code": {"uri": "s3://code/c", "sha256": "0" * 64}, "training": {"epochs": 1}}
    spec = RunSpec.model_validate({"name": name, **task, "init_from": "s3://models/base.json"})
    return RunAccepted(run_id=run_id, spec=spec, request_id=run_id, request_source="test")


def promoted(run_id: str, version: int) -> ModelPromoted:
    return ModelPromoted(
        model="digits", version=version, run_id=run_id, checkpoint_uri="s3://models/c.json", metrics={"accuracy": 0.9}
    )


@pytest_asyncio.fixture
async def address(s3_settings: Settings, bus: Bus) -> AsyncIterator[StackAddress]:
    """The gateway's alone: neither the bus nor the store."""
    async with serve_clients(s3_settings) as served:
        yield StackAddress(gateway_url=served.gateway_url)


@pytest_asyncio.fixture
async def client(address: StackAddress, bus: Bus) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(address=address) as connected:
        yield connected


# -- what the gateway relates to a dataset ---------------------------------------------


async def test_the_same_source_asked_for_again_is_the_same_dataset(client: AsyncClient, bus: Bus) -> None:
    made, other = Made("datasets", FIRST), Made("datasets", SECOND)
    for fact in (made.ingested("i1"), made.sharded("i1"), made.ingested("i2")):
        await bus.publish(fact)
    assert [each.ingestion_id for each in (await client.dataset("i2")).ingestions] == ["i1", "i2"]
    for fact in (other.ingested("i3"), other.ingested("i4"), other.sharded("i3")):
        await bus.publish(fact)
    known = await client.dataset("i4")
    assert (known.dataset_id, known.source) == (other.dataset_id, other.data.source)
    assert [each.ingestion_id for each in known.ingestions] == ["i3", "i4"]


async def test_a_log_from_before_ingestions_were_named(client: AsyncClient, bus: Bus) -> None:
    made = Made("datasets", FIRST)
    await bus.publish(made.ingested("i1"))
    await bus.publish(made.sharded(None))
    known = await client.dataset(made.dataset_id)
    assert (known.ingestions[0].ingestion_id, known.source) == ("i1", made.data.source)


async def test_one_source_in_shards_of_two_sizes_is_two_datasets(client: AsyncClient, bus: Bus) -> None:
    made, other = Made("datasets", FIRST), Made("datasets", FIRST)
    other.dataset_id = "f" * 64
    larger = other.ingested("i2").model_copy(update={"data": made.data.model_copy(update={"shard_bytes": 2**20})})
    for fact in (made.ingested("i1"), larger, made.sharded("i1"), other.sharded("i2")):
        await bus.publish(fact)
    found = {each: (await client.dataset(each)).dataset_id for each in ("i1", "i2")}
    assert found == {"i1": made.dataset_id, "i2": other.dataset_id}


async def test_who_is_champion(client: AsyncClient, bus: Bus) -> None:
    made = Made("datasets", FIRST)
    ended = [RunCancelled(run_id="r1", reason="enough")]
    facts: list[Fact] = [made.ingested("r1"), made.sharded("r1"), accepted("r1", "one"), made.prepared("r1"), *ended]
    for fact in (*facts, promoted("r1", 1), accepted("r2", "two"), made.prepared("r2"), promoted("r2", 2)):
        await bus.publish(fact)
    known = await client.dataset(made.dataset_id)
    assert [(use.name, use.state, use.champions[0].reigns) for use in known.runs] == [
        ("one", "cancelled", False),
        ("two", "accepted", True),
    ]
    assert known.run_count == 2
    assert [use.init_from for use in known.runs] == ["s3://models/base.json"] * 2


async def test_names_of_datasets(client: AsyncClient, bus: Bus) -> None:
    first, second = Made("datasets", FIRST), Made("datasets", SECOND)
    for fact in (
        first.ingested("i1"), first.sharded("i1"), second.ingested("i2"), second.sharded("i2"),
        accepted("r1", "one"), first.prepared("r1"), accepted("r2", "two"), first.ingested("j1"),
        DatasetIngestFailed(ingestion_id="i3", reason="empty"),
    ):  # fmt: skip
        await bus.publish(fact)
    for name in ("i1", "j", "one", "r1", first.dataset_id[:8]):
        assert (await client.dataset(name)).dataset_id == first.dataset_id, name
    problems = {
        "i3": "ingestion i3 has no dataset: empty",
        "two": "run r2 has no dataset",
        "nothing": "there is no dataset 'nothing'",
    }
    for name, problem in problems.items():
        with pytest.raises(NotFoundError, match=problem):
            await client.dataset(name)
    assert [known.dataset_id for known in await list_datasets(client.connection)] == sorted(
        [first.dataset_id, second.dataset_id]
    )
    assert [each.ingestion_id for each in await list_unfinished(client.connection)] == ["i3"]


# -- the commands ---------------------------------------------------------------------


@pytest.fixture
async def two(bus: Bus, objects: ObjectStore, s3_settings: Settings) -> tuple[Made, Made]:
    """Two versions of one source, the first of which a run has used."""
    first, second = (Made(s3_settings.bucket_datasets, each) for each in (FIRST, SECOND))
    for made in (first, second):
        await made.store(objects)
    for fact in (
        first.ingested("i1"), first.sharded("i1"), second.ingested("i2"), second.sharded("i2"),
        accepted("r1", "digits"), first.prepared("r1"), promoted("r1", 3),
        DatasetIngestFailed(ingestion_id="i3", reason="s3://lake/none has no usable images data"),
    ):  # fmt: skip
        await bus.publish(fact)
    return first, second


async def _ls(two: tuple[Made, Made], client: AsyncClient, capsys: pytest.CaptureFixture[str]) -> None:
    await datasets.ls(client, as_json=False)
    printed = capsys.readouterr().out
    for made in two:
        assert made.dataset_id[:12] in printed
    assert "s3://lake/digits" in printed
    assert "3/1/1" in printed
    assert "failed i3: s3://lake/none has no usable images data" in printed
    await datasets.ls(client, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert [each["state"] for each in found] == ["sharded", "sharded", "failed"]
    first, second = (next(each for each in found if each["dataset_id"] == made.dataset_id) for made in two)
    assert first["quarantined"] == {"truncated": 2}
    assert (first["run_count"], second["run_count"]) == (1, 0)


async def _show(two: tuple[Made, Made], client: AsyncClient, capsys: pytest.CaptureFixture[str]) -> None:
    first, _ = two
    await datasets.show(client, first.dataset_id[:10], classes=True, as_json=False)
    printed = capsys.readouterr().out
    for text in (first.dataset_id, "by content, 0.8/0.1/0.1, seed 0", "2: a, b", "60.0%", "0.25", "2 truncated"):
        assert text in printed
    await datasets.show(client, "digits", classes=True, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["runs"], found["run_count"]) == (["r1"], 1)
    assert found["class_counts"] == {"train": {"a": 2, "b": 1}, "validation": {"b": 1}, "test": {"a": 1}}
    assert Manifest.model_validate(found["manifest"]) == first.manifest


async def _urls_are_of_objects(
    two: tuple[Made, Made], client: AsyncClient, objects: ObjectStore, capsys: pytest.CaptureFixture[str]
) -> None:
    first, _ = two
    await datasets.show(client, first.dataset_id, urls=True, split="train")
    found = capsys.readouterr().out.split()
    names = []
    for uri in found:
        with tarfile.open(fileobj=io.BytesIO(await objects.get(uri))) as tar:
            names += tar.getnames()
    assert sorted(names) == ["0/a.png", "0/b.png", "1/a.png"]
    with pytest.raises(TrainbusError, match="there are train, validation, test"):
        await datasets.show(client, first.dataset_id, urls=True, split="holdout")


async def _diff(two: tuple[Made, Made], client: AsyncClient, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (made.dataset_id[:12] for made in two)
    await datasets.diff(client, first, first, examples=3, as_json=False)
    assert "5 records are the same" in capsys.readouterr().out
    with pytest.raises(TrainbusError, match="1 added, 1 removed, 1 relabelled, 1 moved"):
        await datasets.diff(client, first, second, examples=3, as_json=False)
    printed = capsys.readouterr().out
    assert "moved train -> test: 1" in printed
    assert "relabelled b -> a: 1" in printed
    with pytest.raises(TrainbusError):
        await datasets.diff(client, first, second, examples=3, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["added"] == {
        "records": 1, "by_class": [{"split": "train", "class": "b", "records": 1}], "examples": ["1/c"]
    }  # fmt: skip
    assert found["removed"]["by_class"] == [{"split": "test", "class": "a", "records": 1}]


async def _diff_without_the_index(two: tuple[Made, Made], client: AsyncClient, objects: ObjectStore) -> None:
    first, second = two
    await objects.delete(ingestion_uri(first.bucket, first.fingerprint, "index.jsonl"))
    with pytest.raises(TrainbusError, match="ingest s3://lake/digits again"):
        await datasets.diff(client, first.dataset_id, second.dataset_id, examples=3, as_json=False)


async def _lineage(two: tuple[Made, Made], client: AsyncClient, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = two
    await datasets.lineage(client, "i1", as_json=False)
    printed = capsys.readouterr().out
    for text in (
        "s3://lake/digits",
        "i1, 5 records",
        "2 truncated",
        first.dataset_id[:12],
        "r1 digits",
        "weights from s3://models/base.json",
        "digits version 3",
    ):
        assert text in printed
    await datasets.lineage(client, second.dataset_id, as_json=False)
    assert "no run has used it" in capsys.readouterr().out
    await datasets.lineage(client, first.dataset_id, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["ingestions"][0]["fingerprint"] == first.fingerprint
    assert found["runs"][0]["champions"][0]["version"] == 3


async def _names_that_mean_no_dataset(two: tuple[Made, Made], client: AsyncClient) -> None:
    for name, says in {
        "zzz": "there is no dataset 'zzz'",
        "": "name a dataset",
        "i3": "has no usable images data",
        "e" * 64: "not in the object store",
    }.items():
        with pytest.raises(TrainbusError, match=says):
            await datasets.show(client, name, classes=False, as_json=False)


async def test_a_log_without_datasets(
    bus: Bus, objects: ObjectStore, s3_settings: Settings, client: AsyncClient, capsys: pytest.CaptureFixture[str]
) -> None:
    await datasets.ls(client, as_json=False)
    assert "no datasets yet" in capsys.readouterr().out
    made = Made(s3_settings.bucket_datasets, FIRST)
    await made.store(objects)
    await datasets.show(client, made.dataset_id, classes=False, as_json=False)
    assert made.dataset_id in capsys.readouterr().out


async def test_looking(
    two: tuple[Made, Made], client: AsyncClient, objects: ObjectStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """All on one bus: none of them writes anything."""
    await _ls(two, client, capsys)
    await _show(two, client, capsys)
    await _urls_are_of_objects(two, client, objects, capsys)
    await _lineage(two, client, capsys)
    await _names_that_mean_no_dataset(two, client)
    await _diff(two, client, capsys)
    await _diff_without_the_index(two, client, objects)


# -- verify -----------------------------------------------------------------------------


async def test_every_damage_is_found(
    two: tuple[Made, Made], client: AsyncClient, objects: ObjectStore, capsys: pytest.CaptureFixture[str]
) -> None:
    first, _ = two
    shard = first.manifest.splits["test"].shards[0]
    for uri in (
        shard_uri(first.bucket, shard.sha256),
        shard_uri(first.bucket, shard.index_sha256),
        dataset_uri(first.bucket, first.dataset_id),
    ):
        content = await objects.get(uri)
        at = len(content) // 2
        for damaged in (content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :], content[:-1], None):
            if damaged is None:
                await objects.delete(uri)
            else:
                await objects.put(uri, damaged)
            with pytest.raises(TrainbusError, match="1 of 2 datasets damaged"):
                await datasets.verify(client, None, repair=False, as_json=False)
            printed = capsys.readouterr().out
            assert uri in printed
            assert first.dataset_id in printed
        await objects.put(uri, content)
    await datasets.verify(client, None, repair=False, as_json=False)
    assert "2 datasets are whole: 10 samples" in capsys.readouterr().out
    await datasets.verify(client, first.dataset_id, repair=False, as_json=True)
    assert json.loads(capsys.readouterr().out)["damaged"] == {}


async def test_a_dataset_as_a_folder(
    two: tuple[Made, Made],
    client: AsyncClient,
    objects: ObjectStore,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, second = two
    folder = tmp_path / "mine"
    await datasets.fetch(client, first.dataset_id, folder, [], as_json=True)
    files = json.loads(capsys.readouterr().out)["files"]
    readable = LocalDataset(folder, first.dataset_id)
    assert [len(readable.split(name)) for name in SPLITS] == [first.manifest.splits[name].samples for name in SPLITS]
    assert readable.split("train")[0].fields
    shard = first.manifest.splits["train"].shards[0]
    (folder / shard.path).write_bytes(b"cut")
    await datasets.fetch(client, first.dataset_id, folder, [], as_json=True)
    again = json.loads(capsys.readouterr().out)
    assert (again["files"], again["fetched"]) == (files, 1), "what is there and right stays"
    with pytest.raises(TrainbusError, match="another dataset"):
        await datasets.fetch(client, second.dataset_id, folder, [], as_json=False)
    with pytest.raises(TrainbusError, match="no split 'tran'"):
        await datasets.fetch(client, first.dataset_id, tmp_path / "other", ["tran"], as_json=False)
    await objects.delete(shard_uri(first.bucket, shard.sha256))
    with pytest.raises(TrainbusError, match=r"cannot be had.*verify --repair"):
        await datasets.fetch(client, first.dataset_id, tmp_path / "other", ["train"], as_json=False)
    assert not (tmp_path / "other/manifest.json").exists(), "a folder with a manifest is whole"


async def test_the_check_of_a_submission_gets_a_sample_of_a_dataset(
    two: tuple[Made, Made], address: StackAddress, objects: ObjectStore
) -> None:
    first, _ = two
    found = await fetch_stored(address, first.dataset_id)
    assert (found.samples, found.absence, found.classes) == (({"png": b"0/a"},), "", ("a", "b"))
    assert found.statistics == first.manifest.statistics
    await objects.delete(shard_uri(first.bucket, first.manifest.splits["train"].shards[0].sha256))
    for asked, dataset_id in ((address, first.dataset_id), (address, "0" * 64), (None, first.dataset_id)):
        absent = await fetch_stored(asked, dataset_id)
        assert (absent.samples, absent.classes) == ((), None)
        assert absent.absence == f"the gateway gave no sample of dataset {dataset_id[:12]}"


async def test_a_gateway_that_does_not_answer_gives_no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled_data, "FETCH_TIMEOUT_S", 0.1)
    answered = asyncio.Event()

    async def hold(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answered.wait()
        writer.close()

    async with await asyncio.start_server(hold, "127.0.0.1") as server:
        port = server.sockets[0].getsockname()[1]
        found = await fetch_stored(StackAddress(gateway_url=f"http://127.0.0.1:{port}"), "0" * 64)
        answered.set()
    assert "no sample of dataset 000000000000" in found.absence


async def test_what_cannot_be_verified_for_a_full_disk_is_not_damaged(
    two: tuple[Made, Made], objects: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any, **__: Any) -> str:
        raise TransientError("/here cannot be written") from OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(objects, "download", fail)
    stored = StoredDataset(two[0].dataset_id, dataset_uri(two[0].bucket, two[0].dataset_id))
    with pytest.raises(HTTPException) as refused:
        await verify_datasets(objects, [stored], tmp_path, lambda done, total: None)
    assert refused.value.status_code == 507


async def test_an_index_with_wrong_offsets_is_damage(
    objects: ObjectStore, s3_settings: Settings, tmp_path: Path
) -> None:
    made = Made(s3_settings.bucket_datasets, FIRST)
    shard = made.manifest.splits["test"].shards[0]
    _, wrong = archive({"0/d": {"png": b"0/d"}})
    forged = shard.model_copy(update={"index_sha256": hashlib.sha256(wrong).hexdigest(), "index_bytes": len(wrong)})
    made.files[forged.index_sha256] = wrong
    splits = {**made.manifest.splits, "test": SplitFiles(samples=1, shards=(forged,))}
    made.manifest = made.manifest.model_copy(update={"splits": splits})
    made.dataset_id = hashlib.sha256(made.manifest.to_bytes()).hexdigest()
    await made.store(objects)
    stored = StoredDataset(made.dataset_id, dataset_uri(made.bucket, made.dataset_id))
    found = await verify_datasets(objects, [stored], tmp_path, lambda done, total: None)
    assert "the archive has '0/c.png'" in found.damaged[made.dataset_id][0].problem


# -- ingest and repair --------------------------------------------------------------------


async def serve(client: AsyncClient, bus: Bus, objects: ObjectStore, made: Made, requests: int) -> list[DataSource]:
    """Stand in for ingestion and sharding: publish what they publish for a known input."""
    asked: list[DataSource] = []
    async for batch in client.connection.follow(topology.REQUESTS, "ingest.requested"):
        for stored in batch:
            asked.append(stored.event.data)
            ingestion_id = "i" + short_hash(stored.envelope.source, stored.envelope.id)
            await bus.publish(made.ingested(ingestion_id))
            await made.store(objects)
            link_uri = ingestion_uri(made.bucket, made.fingerprint, link_name(made.fingerprint, 128 * 2**20))
            await objects.put(link_uri, canonical_json({"dataset_id": made.dataset_id}))
        if len(asked) == requests:
            return asked
    raise AssertionError("the stream ended")


async def test_invalid_results_are_made_again(
    two: tuple[Made, Made], client: AsyncClient, bus: Bus, objects: ObjectStore, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = two
    shard = first.manifest.splits["test"].shards[0]
    rotten = shard_uri(first.bucket, shard.sha256)
    await objects.put(rotten, b"rotten")
    await objects.delete(dataset_uri(first.bucket, first.dataset_id))
    serving = asyncio.create_task(serve(client, bus, objects, first, 2))
    await datasets.verify(client, first.dataset_id, repair=True, as_json=False)
    assert "1 dataset is whole: 5 samples" in capsys.readouterr().out
    # The same settings again are the same dataset, for which the bus carries no further event.
    await datasets.ingest(client, again=first.dataset_id, as_json=True)
    assert json.loads(capsys.readouterr().out)["dataset_id"] == first.dataset_id
    assert await serving == [first.data, first.data]
    # A source that has changed since gives another dataset.
    await objects.delete(shard_uri(second.bucket, second.manifest.splits["test"].shards[0].sha256))
    serving = asyncio.create_task(serve(client, bus, objects, first, 3))
    with pytest.raises(TrainbusError, match="is no longer what dataset"):
        await datasets.verify(client, second.dataset_id, repair=True, as_json=False)
    await serving


async def test_an_invalid_ingestion_is_refused(two: tuple[Made, Made], client: AsyncClient, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "split.toml").write_text('[split]\nby = "time"\n')

    async def refused(source: str | None, says: str, **given: Any) -> None:
        with pytest.raises(TrainbusError, match=says):
            await datasets.ingest(client, source, **given, follow=False)

    await refused(None, "say what to ingest")
    await refused("s3://lake/x", "data.format", data_format="photos")
    await refused("s3://lake/x", "bad.json", data_format="images", settings=tmp_path / "bad.json")
    await refused("s3://lake/x", "needs split.time_field", data_format="images", settings=tmp_path / "split.toml")


# -- the routes of the gateway ---------------------------------------------------------------


async def test_the_gateway_serves_what_a_manifest_names_and_nothing_else(
    two: tuple[Made, Made], address: StackAddress, objects: ObjectStore
) -> None:
    first, second = two
    shard, other = first.manifest.splits["train"].shards[0], second.manifest.splits["test"].shards[0]
    async with open_gateway(address) as http:
        manifest = await http.get(f"/datasets/{first.dataset_id[:12]}/manifest")
        assert manifest.content == first.manifest.to_bytes()
        assert manifest.headers["ETag"] == f'"{first.dataset_id}"'
        assert manifest.headers["Content-Location"] == dataset_uri(first.bucket, first.dataset_id)
        path = f"/datasets/{first.dataset_id}/files"
        part = await http.get(f"{path}/{shard.path}", headers={"Range": "bytes=10-19"})
        assert (part.status_code, part.content) == (206, first.files[shard.sha256][10:20])
        assert part.headers["ETag"] == f'"{shard.sha256}"'
        assert (await http.get(f"{path}/{shard.index_path}")).content == first.files[shard.index_sha256]
        assert (await http.get(f"/datasets/{first.dataset_id}/index")).content == first.index
        for missing in ("..%2F..%2Fmanifest.json", other.sha256, shard_uri(first.bucket, shard.sha256), "train"):
            assert (await http.get(f"{path}/{missing}")).status_code == 404
        assert (await http.get("/datasets/zzz/manifest")).status_code == 404
        both = await http.get("/datasets/%20/manifest")
        assert both.json()["detail"] == "there is no dataset ' ': `trainbus datasets` lists them"
        # What was put in the place of a manifest names nothing.
        await objects.put(dataset_uri(second.bucket, second.dataset_id), first.manifest.to_bytes())
        assert (await http.get(f"/datasets/{second.dataset_id}/files/{shard.path}")).status_code == 502


async def test_a_repair_deletes_nothing_that_is_intact(
    two: tuple[Made, Made], client: AsyncClient, objects: ObjectStore
) -> None:
    first, second = two
    shards = first.manifest.splits["train"].shards
    await objects.put(shard_uri(first.bucket, shards[0].sha256), b"rotten")
    path = f"/datasets/{first.dataset_id}/repair"
    with pytest.raises(TrainbusError, match="is no ingestion that dataset"):
        await client.connection.await_result(path, lambda *_: None, json={"ingestion_id": "i2"})
    body = {"ingestion_id": "i1", "files": [shard.path for shard in shards]}
    found = await client.connection.await_result(path, lambda *_: None, json=body)
    assert found["deleted"] == [shard_uri(first.bucket, shards[0].sha256)]
    assert await objects.exists(shard_uri(first.bucket, shards[1].sha256))
    requests = await client.connection.read("ingest.requested", stream=topology.REQUESTS)
    assert [each.event.data for each in requests] == [first.data]
    assert await client.connection.get("/ingestions/i2") == {
        "ingestion_id": "i2",
        "fingerprint": second.fingerprint,
        "dataset_id": None,
    }


async def test_sources_that_have_changed_are_named(
    client: AsyncClient, objects: ObjectStore, s3_settings: Settings
) -> None:
    bucket = s3_settings.bucket_lake
    uris = [f"s3://{bucket}/digits/{name}" for name in "abc"]
    for uri in uris:
        await objects.put(uri, b"1")
    etags = [(await objects.head(uri)).etag for uri in uris]
    records = [{**record(uri), "uri": uri, "etag": etag} for uri, etag in zip(uris, etags, strict=True)]
    made = Made(s3_settings.bucket_datasets, records, source=f"s3://{bucket}/digits")  # type: ignore[arg-type]
    await made.store(objects)
    path = f"/datasets/{made.dataset_id}/sources/verify"
    whole = await client.connection.await_result(path, lambda *_: None)
    assert (whole["objects"], whole["is_compared"], whole["changed"]) == (3, True, [])
    await objects.put(uris[0], b"2")
    await objects.delete(uris[2])
    found = await client.connection.await_result(path, lambda *_: None)
    assert (found["changed_count"], found["changed"]) == (2, [uris[0], uris[2]])
