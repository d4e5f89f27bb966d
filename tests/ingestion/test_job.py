"""Each format with planted faults, on a real S3; and that timing never shows in the result."""

from __future__ import annotations

import io
import json
import uuid
from itertools import pairwise
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from contracts.spec.data import DataSource, Split
from services.ingestion import blob_packs, whole_files
from services.ingestion.core.validation import find_objection
from services.kit.bus import PoisonMessage
from services.kit.settings import Settings
from services.kit.store.errors import ObjectChanged
from services.kit.store.objects import ObjectStore
from tests.ingestion.conftest import Ingesting
from tests.support_data import digits_lake, fill, image_bytes

FEATURES = {"tables": [{"name": "t", "source": "s3://lake/t", "keys": ["k"]}]}


@pytest.fixture
def lake(s3_settings: Settings) -> str:
    return f"s3://{s3_settings.bucket_lake}"


async def lines(objects: ObjectStore, uri: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (await objects.get(uri)).splitlines()]


async def test_the_format_is_recognised_by_what_lies_there(ingest: Ingesting, objects: ObjectStore, lake: str) -> None:
    rows = "".join(json.dumps({"n": i}) + "\n" for i in range(50)).encode()
    await fill(objects, f"{lake}/rows", {"part/a.jsonl": rows, "README.txt": b"", "_SUCCESS": b""})
    found = await ingest(DataSource(source=f"{lake}/rows", max_invalid_fraction=1))
    assert (found.data.format, found.outcome.accepted) == ("jsonl", 50)
    # As if it had been named: the same dataset.
    named = await ingest(DataSource(source=f"{lake}/rows", format="jsonl", max_invalid_fraction=1))
    assert (named.fingerprint, named.reused) == (found.fingerprint, True)


@pytest.mark.parametrize(
    ("names", "asked", "problem"),
    [
        (("a.jsonl", "b.parquet"), {}, r"both jsonl \(a.jsonl\) and parquet \(b.parquet\) are there: keep one kind"),
        (
            ("a.md", "b"),
            {},
            r"no file has a name with the ending of a format: give data.format \(--format\), jsonl, csv",
        ),
        (("a.png",), {"features": FEATURES}, "holds images: .*needs data.format 'parquet'"),
        (("a.txt",), {"label_field": "y"}, "has no fields and no labels"),
    ],
)
async def test_what_is_not_recognised_is_refused_in_words(
    ingest: Ingesting, objects: ObjectStore, lake: str, names: tuple[str, ...], asked: dict[str, Any], problem: str
) -> None:
    await fill(objects, f"{lake}/mixed", dict.fromkeys(names, b"something"))
    data = DataSource.model_validate({"source": f"{lake}/mixed", **asked})
    with pytest.raises(PoisonMessage, match=problem):
        await ingest(data)


async def test_images_by_folder(ingest: Ingesting, objects: ObjectStore, lake: str) -> None:
    files = digits_lake(40)
    faults = {
        "0/cut.png": image_bytes(1, size=64)[:90],
        "1/lies.png": image_bytes(2, "JPEG"),
        "1/empty.png": b"",
        "2/phone.heic": b"hello",
        "0/LICENSE": b"hello",
        "2/notes.txt": b"hello",
        "tables/labels.csv": b"hello",
        "top.png": image_bytes(3),
        "0/scan_0000.jpg": image_bytes(4, "JPEG"),
        "1/.hidden": b"ignored",
    }
    await fill(objects, f"{lake}/digits", {**files, **faults})
    await fill(objects, f"{lake}/digits2", {"9/other.png": image_bytes(9)})
    found = await ingest(DataSource(source=f"{lake}/digits", format="images"))

    assert found.outcome.accepted == 40
    assert found.outcome.classes == ("0", "1", "2")
    codes = {fault.code: fault.count for fault in found.outcome.quarantined}
    # Of two files that differ in the extension alone the first in the order of keys is kept.
    expected = ("truncated", "wrong_extension", "empty", "unknown_extension", "no_label", "duplicate_key")
    assert codes == dict.fromkeys(expected, 1)
    assert (found.outcome.skipped, found.outcome.skipped_example) == (3, "0/LICENSE")
    quarantine = await lines(objects, found.quarantine_uri)
    assert {entry["code"] for entry in quarantine} == set(codes)
    assert all(entry["uri"].startswith(f"{lake}/digits/") and entry["etag"] for entry in quarantine)
    index = await lines(objects, found.index_uri)
    assert [record["key"] for record in index] == sorted(record["key"] for record in index)
    pack = await objects.get(f"{found.folder_uri}/pack-00000")
    for record in index:
        content = pack[record["pack_offset"] : record["pack_offset"] + record["size"]]
        assert content == await objects.get(record["uri"])


async def test_counts_of_an_earlier_version_are_made_anew(ingest: Ingesting, objects: ObjectStore, lake: str) -> None:
    await fill(objects, f"{lake}/digits", {**digits_lake(40), "0/notes.txt": b"hello"})
    data = DataSource(source=f"{lake}/digits", format="images")
    first = await ingest(data)
    done_uri = f"{first.folder_uri}/done.json"
    done = json.loads(await objects.get(done_uri))
    broken = {"code": "unknown_extension", "count": 1, "example": "0/notes.txt"}
    earlier = {**done, "version": 2, "broken": 1, "broken_objects": 1, "objects": 41, "quarantined": [broken]}
    await objects.put(done_uri, json.dumps({key: earlier[key] for key in earlier if "skipped" not in key}).encode())
    index = await objects.get(first.index_uri)
    again = await ingest(data)
    assert (again.reused, again.fingerprint, again.outcome) == (False, first.fingerprint, first.outcome)
    assert find_objection(again.outcome, data, again.quarantine_uri) is None
    assert await objects.get(first.index_uri) == index
    assert (await ingest(data)).reused


async def test_images_by_labels_csv(ingest: Ingesting, objects: ObjectStore, lake: str) -> None:
    rows = ["file,label", *(f"{i}.png,{'even' if i % 2 == 0 else 'odd'}" for i in range(8))]
    rows += ["gone.png,odd", "0.png,even", "1.png,even"]
    files = {f"{i}.png": image_bytes(i) for i in range(9)}
    await fill(objects, f"{lake}/flat", {**files, "labels.csv": "\r\n".join(rows).encode()})
    found = await ingest(DataSource(source=f"{lake}/flat/", format="images"))
    labels = {record["key"]: record["label"] for record in await lines(objects, found.index_uri)}
    assert labels == {str(i): "even" if i % 2 == 0 else "odd" for i in range(8) if i != 1}
    # 1.png is labelled twice, differently; 8.png not at all.
    codes = {fault.code: fault.count for fault in found.outcome.quarantined}
    assert codes == {"missing_file": 1, "duplicate_label": 2, "no_label": 2}


async def test_jsonl(ingest: Ingesting, objects: ObjectStore, lake: str) -> None:
    rows = [json.dumps({"n": i, "y": "ab"[i % 2]}).encode() for i in range(50)]
    rows[7:7] = [b"{broken", b"", b'{"n": NaN, "y": "a"}']
    await fill(objects, f"{lake}/rows", {"one.jsonl": b"\n".join(rows), "two.ndjson": b'{"n":-1,"y":"c"}\r\n'})
    found = await ingest(DataSource(source=f"{lake}/rows", format="jsonl", label_field="y"))
    assert (found.outcome.accepted, found.outcome.classes) == (51, ("a", "b", "c"))
    quarantine = await lines(objects, found.quarantine_uri)
    assert [entry["code"] for entry in quarantine] == ["invalid_json", "nan"]
    source = b"\n".join(rows)
    assert source[quarantine[0]["offset"] :].startswith(b"{broken")


def parquet(columns: dict[str, list[Any]]) -> bytes:
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), sink, row_group_size=10)
    return sink.getvalue()


async def test_parquet(ingest: Ingesting, objects: ObjectStore, lake: str) -> None:
    sound = parquet({"x": [float(i) for i in range(30)], "y": list(range(30))})
    files = {
        "a.parquet": sound,
        "b.parquet": parquet({"x": [float("nan"), 1.0], "y": [1, None]}),
        "c.parquet": sound[:-20],
        "d.parquet": parquet({"x": ["text"], "y": [1]}),
    }
    await fill(objects, f"{lake}/table", files)
    found = await ingest(DataSource(source=f"{lake}/table", format="parquet", label_field="y"))
    assert found.outcome.accepted == 30
    assert found.outcome.broken_objects == 2
    codes = {fault.code: fault.count for fault in found.outcome.quarantined}
    assert codes == {"nan": 1, "missing_label": 1, "broken_parquet": 1, "schema_drift": 1}


async def test_text_is_cut_into_whole_windows(ingest: Ingesting, objects: ObjectStore, lake: str) -> None:
    await fill(objects, f"{lake}/text", {"a.py": bytes(range(256)) * 2, "a.txt": b"short", "empty.py": b""})
    found = await ingest(DataSource(source=f"{lake}/text", format="text", window_length=100))
    assert (found.outcome.accepted, found.outcome.size_bytes, found.outcome.broken) == (5, 500, 0)
    index = await lines(objects, found.index_uri)
    assert [record["offset"] for record in index] == [0, 100, 200, 300, 400]


async def test_the_result_is_independent_of_timing(
    ingest: Ingesting, objects: ObjectStore, lake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Concurrency 1 and 8, an ordered and a shuffled listing: the same bytes."""
    monkeypatch.setattr(whole_files, "BATCH_FILES", 7)
    monkeypatch.setattr(blob_packs, "PACK_BYTES", 2000)
    await fill(objects, f"{lake}/digits", {**digits_lake(50), "0/broken.png": b"no"})
    data = DataSource(source=f"{lake}/digits", format="images")
    results = []
    for concurrency, shuffled in ((1, False), (8, True)):
        found = await ingest(data, concurrency=concurrency, shuffled=shuffled, bucket=f"out-{uuid.uuid4().hex[:8]}")
        assert not found.reused
        names = ("index.jsonl", "quarantine.jsonl", "done.json", "pack-00000", "pack-00001")
        results.append([await objects.get(f"{found.folder_uri}/{name}") for name in names])
    assert results[0] == results[1]


async def test_the_same_input_is_not_read_again(ingest: Ingesting, objects: ObjectStore, lake: str) -> None:
    class NoReads:
        list, head = objects.list, objects.head

        async def get(self, uri: str, **_: Any) -> bytes:
            raise AssertionError("an object was read again")

    await fill(objects, f"{lake}/digits", digits_lake(12))
    data = DataSource(source=f"{lake}/digits", format="images")
    first = await ingest(data)
    done_uri = f"{first.index_uri.rpartition('/')[0]}/done.json"
    etags = [(await objects.head(done_uri)).etag]
    for _ in range(2):
        again = await ingest(data, read_from=NoReads())
        etags.append((await objects.head(done_uri)).etag)
    assert (first.reused, again.reused) == (False, True)
    # A deletion that garbage collection decided on before does not take it away.
    assert all(before != after for before, after in pairwise(etags))
    assert (again.outcome, again.index_uri) == (first.outcome, first.index_uri)
    other = await ingest(data.model_copy(update={"split": Split(seed=5)}))
    assert not other.reused


async def test_growing_data_keeps_every_split(ingest: Ingesting, objects: ObjectStore, lake: str) -> None:
    files = digits_lake(40)
    data = DataSource(source=f"{lake}/digits", format="images")
    await fill(objects, f"{lake}/digits", dict(list(files.items())[:25]))
    before = {r["key"]: r["split"] for r in await lines(objects, (await ingest(data)).index_uri)}
    await fill(objects, f"{lake}/digits", dict(list(files.items())[25:]))
    after = {r["key"]: r["split"] for r in await lines(objects, (await ingest(data)).index_uri)}
    assert len(after) == 40
    assert before.items() <= after.items()


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("s3://no-such-bucket-here/digits", "no bucket 'no-such-bucket-here'"),
        ("{lake}/nothing/here", "no object under"),
    ],
)
async def test_a_missing_source(ingest: Ingesting, objects: ObjectStore, lake: str, path: str, expected: str) -> None:
    with pytest.raises(PoisonMessage, match=expected):
        await ingest(DataSource(source=path.format(lake=lake), format="images"))


async def test_one_file_can_be_the_source(ingest: Ingesting, objects: ObjectStore, lake: str) -> None:
    await fill(objects, lake, {"deep/rows.jsonl": b'{"a":1}\n{"a":2}\n'})
    found = await ingest(DataSource(source=f"{lake}/deep/rows.jsonl", format="jsonl"))
    assert found.outcome.accepted == 2


async def test_an_object_that_changes_while_it_is_read_is_refused(
    ingest: Ingesting, objects: ObjectStore, lake: str
) -> None:
    class Meddling:
        """Overwrites each object just before it is read."""

        list, head = objects.list, objects.head

        async def get(self, uri: str, **expected: Any) -> bytes:
            await objects.put(uri, image_bytes(99))
            return await objects.get(uri, **expected)

    await fill(objects, f"{lake}/digits", digits_lake(5))
    with pytest.raises(ObjectChanged, match="expected"):
        await ingest(DataSource(source=f"{lake}/digits", format="images"), read_from=Meddling())
