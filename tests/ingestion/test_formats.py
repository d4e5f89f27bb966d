"""Every format from a folder to its index, whole; and the faults that only the whole shows."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import random
import re
import tarfile
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet
import pytest
import webdataset
import zstandard
from PIL import Image

from contracts.datasets import pack_name
from loadtest.data import fuzzed
from loadtest.data.quarantine import Findings, MemoryStore, ingest, try_one
from services.ingestion.core.validation import find_objection
from services.ingestion.decoders import DecoderPool
from services.ingestion.job import IngestionResult
from services.kit.bus import PoisonMessage
from tests.support_data import image_bytes

TRAIN = {"train": 1, "validation": 0, "test": 0}


class Result:
    """What an ingestion found, at hand."""

    def __init__(self, ingested: IngestionResult, store: MemoryStore) -> None:
        self.outcome, self.folder_uri, self._store = ingested.outcome, ingested.folder_uri, store
        self.index = [json.loads(line) for line in store.objects[ingested.index_uri].splitlines()]
        self.quarantine = [json.loads(line) for line in store.objects[ingested.quarantine_uri].splitlines()]
        self.codes = {fault.code: fault.count for fault in ingested.outcome.quarantined}

    def content(self, record: dict[str, Any]) -> bytes:
        pack = self._store.objects[f"{self.folder_uri}/{pack_name(record['pack'])}"]
        return pack[record["pack_offset"] : record["pack_offset"] + record["size"]]

    def files(self, record: dict[str, Any]) -> dict[str, bytes]:
        content, at, files = self.content(record), 0, {}
        for ext, size in record["fields"] or [(record["ext"], record["size"])]:
            files[ext] = content[at : at + size]
            at += size
        return files


Ingesting = Callable[..., Awaitable[Result]]


@pytest.fixture
def run(decoders: DecoderPool, tmp_path: Path) -> Ingesting:
    """Ingest these files of a format; ``settings`` are those of the request."""

    async def run(format: str, files: dict[str, bytes], **settings: Any) -> Result:
        case = fuzzed.Case(format, files, settings=settings)
        return Result(*await ingest(case, decoders, Path(tempfile.mkdtemp(dir=tmp_path))))

    return run


# -- formats --------------------------------------------------------------------------


async def test_tokens(run: Ingesting) -> None:
    tokens = numpy.arange(100, dtype="<u2").tobytes()
    files = {"a.bin": tokens, "odd.bin": tokens[:-1], "empty.bin": b""}
    found = await run("tokens", files, window_length=30, token_bytes=2)
    assert [found.content(record) for record in found.index] == [tokens[i : i + 60] for i in (0, 60, 120)]
    assert found.codes == {"wrong_size": 1}


async def test_binary(run: Ingesting) -> None:
    manifest = [
        {"file": "a.dat", "label": "x", "n": 1},
        {"file": "d/b.json", "label": "y", "n": 2},
        {"file": "gone.dat", "label": "y"},
        {"label": "y"},
        {"file": "twice.dat", "label": "x"},
        {"file": "twice.dat", "label": "y"},
    ]
    files = {"a.dat": b"\0" * 2_000_000, "d/b.json": b"not json", "more.dat": b"?", "twice.dat": b"2"}
    files["manifest.jsonl"] = b"\n".join(json.dumps(row).encode() for row in manifest)
    found = await run("binary", files, split=TRAIN)
    assert {r["key"]: (r["label"], found.files(r)) for r in found.index} == {
        "a": ("x", {"dat": files["a.dat"], "json": b'{"label":"x","n":1}'}),
        "d/b": ("y", {"json": b"not json", "details.json": b'{"label":"y","n":2}'}),
        "twice": (None, {"dat": b"2", "json": b'{"label":"x"}'}),
    }
    assert found.codes == {"not_in_manifest": 1, "missing_file": 2, "duplicate_file": 1}
    assert found.outcome.classes == ("x", "y")


async def test_binary_needs_a_manifest(run: Ingesting) -> None:
    with pytest.raises(PoisonMessage, match=r"there is no manifest.jsonl or manifest.csv"):
        await run("binary", {"a.dat": b"1"})


async def test_images_by_labels_parquet(run: Ingesting) -> None:
    sink = io.BytesIO()
    rows = {"file": [f"{i}.png" for i in range(6)], "label": ["a", "b"] * 3, "patient": [0, 0, 1, 1, 2, 2]}
    pyarrow.parquet.write_table(pyarrow.table(rows), sink)
    files = {f"{i}.png": image_bytes(i) for i in range(6)} | {"labels.parquet": sink.getvalue()}
    checks = {"ranges": {"patient": {"max": 1}}}
    found = await run("images", files, checks=checks, split={"by": "group", "group_field": "patient"})
    assert {record["key"]: record["label"] for record in found.index} == {"0": "a", "1": "b", "2": "a", "3": "b"}
    assert found.codes == {"out_of_range": 2}
    splits = {record["key"]: record["split"] for record in found.index}
    assert splits["0"] == splits["1"]
    assert splits["2"] == splits["3"]


@pytest.mark.parametrize(("columns", "lacks"), [(["name", "label"], "file"), (["file", "class"], "label")])
async def test_an_invalid_table_of_labels_is_refused(run: Ingesting, columns: list[str], lacks: str) -> None:
    files = {"0.png": image_bytes(0), "labels.csv": ",".join(columns).encode() + b"\n0.png,a\n"}
    with pytest.raises(PoisonMessage, match=f"needs the column '{lacks}'; it has {re.escape(str(columns))}"):
        await run("images", files)
    files |= {"labels.parquet": b"PAR1"}
    with pytest.raises(PoisonMessage, match=r"both labels.csv and labels.parquet"):
        await run("images", files)


async def test_archives_of_webdataset_are_read(run: Ingesting, tmp_path: Path) -> None:
    contents = {}
    with webdataset.TarWriter(str(tmp_path / "w.tar"), mtime=0) as writer:
        for number in range(12):
            sample = {"png": image_bytes(number), "json": {"n": number}, "cls": number, "seg.npy": numpy.arange(3)}
            writer.write({"__key__": f"dir/x{number:02d}", **sample})
    with tarfile.open(tmp_path / "w.tar") as archive:
        for member in archive:
            content = archive.extractfile(member)
            assert content is not None
            contents[member.name] = content.read()
    found = await run("webdataset", {"w.tar": (tmp_path / "w.tar").read_bytes()}, split=TRAIN)
    assert found.codes == {}
    for number, record in enumerate(found.index):
        assert record["label"] == str(number)
        name = f"dir/x{number:02d}"
        assert found.files(record) == {ext: contents[f"{name}.{ext}"] for ext in ("json", "png", "seg.npy")}
        assert hashlib.sha256(found.content(record)).hexdigest() == record["sha256"]
    assert found.outcome.classes == tuple(map(str, range(12))), "classes that are numbers are in their order"


def tar(members: list[tuple[str, bytes]]) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return target.getvalue()


@pytest.mark.parametrize(
    ("archive", "accepted", "codes"),
    [
        (tar([("a.txt", b"1"), ("a.txt", b"2"), ("b.txt", b"3")]), 1, {"duplicate_file": 1}),
        (tar([("../a.txt", b"1"), ("b.txt", b"3")]), 1, {"unsafe_key": 1}),
        (tar([("a.cls", b"1"), ("b.txt", b"3")]), 1, {"empty": 1}),
        (tar([("a", b"1"), ("b.txt", b"3")]), 1, {"unknown_extension": 1}),
        (tar([("a.json", b"{"), ("b.txt", b"3")]), 1, {"invalid_json": 1}),
        (tar([("a.cls", b"\xff"), ("a.txt", b"1"), ("b.txt", b"3")]), 1, {"invalid_utf8": 1}),
        (tar([("a.bin", bytes(3000)), ("b.txt", b"3")]), 1, {"oversized": 1}),
        (tar([("a.png", image_bytes(1)[:60]), ("b.txt", b"3")]), 1, {"truncated": 1}),
        (tar([("a.png", image_bytes(1, "JPEG")), ("b.txt", b"3")]), 1, {"wrong_extension": 1}),
        # Whether more of b was to come is not known; of a nothing is missing.
        (tar([("a.txt", b"1"), ("b.txt", b"3")])[:1536], 1, {"broken_tar": 1}),
        (tar([("a.txt", b"1"), ("b.txt", b"3")])[:1024], 0, {"broken_tar": 1}),
        (tar([("a.txt", b"1"), ("b.txt", b"3")]) + tar([("c.txt", b"1")]), 2, {"broken_tar": 1}),
        (tar([]), 0, {"empty": 1}),
        (gzip.compress(tar([("b.txt", b"3")]), mtime=0), 0, {"broken_tar": 1}),
    ],
)
async def test_faults_in_archives(run: Ingesting, archive: bytes, accepted: int, codes: dict[str, int]) -> None:
    found = await run("webdataset", {"x.tar": archive}, checks={"max_record_bytes": 2000}, split=TRAIN)
    assert (found.outcome.accepted, found.codes) == (accepted, codes)


async def test_a_decompression_bomb_is_refused(run: Ingesting) -> None:
    found = await run("webdataset", {"x.tgz": gzip.compress(bytes(80 * 2**20)), "y.tar": tar([("b.txt", b"3")])})
    assert (found.outcome.accepted, found.codes) == (1, {"bomb": 1})


COLUMNS: dict[str, tuple[str, int | None]] = {
    "raw": ("bytes", None),
    "photo": ("pil", None),
    "vector": ("ndarray", None),
    "text": ("str", None),
    "y": ("uint8", 1),
}


def mds_sample(number: int) -> bytes:
    photo = numpy.array([2, 2, 1], "<u4").tobytes() + b"L" + bytes([number] * 4)
    vector = bytes([34, 1 << 2, 3]) + numpy.arange(3, dtype="<f4").tobytes()
    parts = [b"\0\1", photo, vector, "grüß".encode()]
    return numpy.array([len(part) for part in parts], "<u4").tobytes() + b"".join(parts) + bytes([number])


@pytest.mark.parametrize("packed", [False, True])
async def test_mds(run: Ingesting, packed: bool) -> None:
    raw = fuzzed.mds_shard([mds_sample(i) for i in range(3)], COLUMNS)
    entry = fuzzed.mds_entry("shard.00000.mds", raw, 3, COLUMNS)
    entry["raw_data"]["hashes"] = {"sha1": hashlib.sha1(raw, usedforsecurity=False).hexdigest(), "xxh64": "?"}
    files = {"train/shard.00000.mds": raw}
    if packed:
        entry |= {"zip_data": {"basename": "s.zstd", "bytes": 0, "hashes": {}}, "compression": "zstd:3"}
        files = {"train/s.zstd": zstandard.compress(raw)}
        entry["zip_data"]["bytes"] = len(files["train/s.zstd"])
    gone = fuzzed.mds_entry("shard.00001.mds", raw, 3, COLUMNS)
    files["train/index.json"] = json.dumps({"version": 2, "shards": [entry, gone]}).encode()
    files["train/other.mds"] = raw
    found = await run("mds", files, label_field="y", split=TRAIN)
    assert found.codes == {"missing_file": 1, "not_in_manifest": 1}
    assert [record["label"] for record in found.index] == ["0", "1", "2"]
    sample = found.files(found.index[2])
    assert set(sample) == {"json", "photo.png", "raw.bin", "vector.npy"}
    assert json.loads(sample["json"]) == {"text": "grüß", "y": 2}
    assert numpy.load(io.BytesIO(sample["vector.npy"])).tolist() == [0, 1, 2]
    assert Image.open(io.BytesIO(sample["photo.png"])).tobytes() == bytes([2] * 4)
    assert sample["raw.bin"] == b"\0\1"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"column_encodings": ["pkl", "pil", "ndarray", "str", "uint8"]}, "unsupported_type"),
        ({"samples": 4}, "broken_mds"),
        ({"raw_data": {"basename": "shard.00000.mds", "bytes": 5}}, "broken_mds"),
        ({"column_sizes": [None, None, None, None, 2]}, "broken_mds"),
        ({"column_sizes": [None, None, None, None, -1]}, "broken_mds"),
    ],
)
async def test_an_mds_shard_that_does_not_fit_its_index(run: Ingesting, change: dict[str, Any], code: str) -> None:
    raw = fuzzed.mds_shard([mds_sample(i) for i in range(3)], COLUMNS)
    entry = fuzzed.mds_entry("shard.00000.mds", raw, 3, COLUMNS) | change
    index = json.dumps({"version": 2, "shards": [entry]}).encode()
    found = await run("mds", {"shard.00000.mds": raw, "index.json": index})
    assert found.outcome.accepted == 0
    assert set(found.codes) == {code}


async def test_an_mds_shard_that_unpacks_beyond_its_index_is_refused(run: Ingesting) -> None:
    bomb = zstandard.compress(bytes(50_000_000))
    entry = fuzzed.mds_entry("s", bytes(1000), 3, COLUMNS) | {"compression": "zstd"}
    entry["zip_data"] = {"basename": "s.zstd", "bytes": len(bomb), "hashes": {}}
    index = json.dumps({"version": 2, "shards": [entry]}).encode()
    found = await run("mds", {"s.zstd": bomb, "index.json": index})
    assert found.codes == {"bomb": 1}


async def test_jsonl_with_a_byte_order_mark_and_a_huge_line(run: Ingesting) -> None:
    content = b'\xef\xbb\xbf{"n":1}\n{"n":"' + b"x" * 5000 + b'"}\r\n\n{"n":2}'
    found = await run("jsonl", {"a.jsonl": content}, checks={"max_record_bytes": 1000})
    assert (found.outcome.accepted, found.codes) == (2, {"oversized": 1})
    offset = max(record["offset"] for record in found.index)
    assert content[offset:] == b'{"n":2}'


async def test_csv_has_types_and_puts_bad_rows_aside(run: Ingesting) -> None:
    header = "id;ratio;on;code;text\r\n"
    rows = [
        '1;0.5;true;007;"a; ""b""\nc"',
        "2;;FALSE;12;",
        "3;1e3;true;x",
        '4;2;true;"x"y;z',
        "5;7;false;" + "x" * 3000 + ";z",
        "6;8;true;08;last",
    ]
    content = b"\xef\xbb\xbf" + (header + "\r\n".join(rows)).encode() + b"\r\n7;1;true;1;\xff\r\n"
    checks = {"max_record_bytes": 2000}
    found = await run("csv", {"a.csv": content}, checks=checks, split=TRAIN, max_invalid_fraction=1)
    assert found.codes == {"broken_csv": 1, "invalid_utf8": 1, "oversized": 1, "ragged": 1}
    assert sorted((json.loads(found.content(each)) for each in found.index), key=lambda row: row["id"]) == [
        {"id": 1, "ratio": 0.5, "on": True, "code": "007", "text": 'a; "b"\nc'},
        {"id": 2, "ratio": None, "on": False, "code": "12", "text": None},
        {"id": 6, "ratio": 8.0, "on": True, "code": "08", "text": "last"},
    ]


@pytest.mark.parametrize(
    ("content", "detail"),
    [(b"a,,b\n1,2,3\n", "a column has no name"), (b"a,b,a\n1,2,3\n", "two columns are named 'a'")],
)
async def test_a_csv_file_needs_a_header(run: Ingesting, content: bytes, detail: str) -> None:
    files = {"bad.csv": content, "good.csv": b"a,b\n" + b"1,2\n" * 20}
    found = await run("csv", files, split={**TRAIN, "by": "key"}, max_invalid_fraction=1)
    assert (found.codes, found.outcome.accepted) == ({"broken_csv": 1}, 20)
    assert detail in found.quarantine[0]["detail"]


# -- faults that only the whole shows ---------------------------------------------------


def jsonl(*rows: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


async def test_ids(run: Ingesting) -> None:
    """Equal copies count once; copies that differ are all quarantined, in any file."""
    files = {
        "a.jsonl": jsonl({"i": 1, "x": 1}, {"i": 2, "x": 1}, {"i": 3, "x": 1}, {"x": 1}),
        "b.jsonl": jsonl({"x": 1, "i": 1}, {"i": 2, "x": 2}, {"i": 2, "x": 1}, {"i": None}),
    }
    found = await run("jsonl", files, checks={"id_field": "i"}, split=TRAIN)
    contents = sorted(found.content(record) for record in found.index)
    assert contents == [b'{"i":1,"x":1}', b'{"i":3,"x":1}']
    assert found.outcome.left_out == 1
    assert found.codes == {"conflicting_id": 3, "missing_field": 2}
    assert {entry["offset"] is not None for entry in found.quarantine} == {True}


async def test_one_image_under_two_labels(run: Ingesting) -> None:
    files = {f"{'ab'[i % 2]}/{i}.png": image_bytes(i) for i in range(4)}
    files |= {"a/x.png": image_bytes(9), "b/y.png": image_bytes(9), "a/copy.png": image_bytes(0)}
    found = await run("images", files, split=TRAIN)
    assert found.codes == {"conflicting_label": 2}
    assert {record["key"] for record in found.index} == {"a/0", "a/2", "a/copy", "b/1", "b/3"}


async def test_copies_in_two_splits_are_a_leak_unless_they_are_kept_together(run: Ingesting, tmp_path: Path) -> None:
    files = {f"{i}.jsonl": jsonl(*({"n": n} for n in range(20))) for i in range(8)}
    found = await run("jsonl", files, split={"by": "file", "seed": 1})
    problem = find_objection(found.outcome, fuzzed_source("jsonl"), "q")
    assert problem is not None
    assert "leaks into" in problem
    assert "data.split.by to 'content'" in problem


async def test_copies_are_kept_together(run: Ingesting) -> None:
    files = {f"{i}.jsonl": jsonl(*({"n": n} for n in range(20))) for i in range(8)}
    found = await run("jsonl", files)
    assert found.outcome.leak is None
    assert find_objection(found.outcome, fuzzed_source("jsonl"), "q") is None


def fuzzed_source(format: str) -> Any:
    from contracts.spec.data import DataSource

    return DataSource.model_validate({"source": "s3://lake/x", "format": format})


async def test_columns_are_what_most_files_have(run: Ingesting) -> None:
    def table(**columns: list[Any]) -> bytes:
        sink = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.table(columns), sink)
        return sink.getvalue()

    files = {"a.parquet": table(x=["odd"], y=[1])} | {f"{n}.parquet": table(x=[n], y=[n]) for n in range(3)}
    found = await run("parquet", files, split=TRAIN)
    assert (found.outcome.accepted, found.codes) == (3, {"schema_drift": 1})
    assert found.quarantine[0]["uri"].endswith("/a.parquet")
    assert "'x' is string here and int64 in most files" in found.quarantine[0]["detail"]


@pytest.mark.parametrize(
    ("odd", "expected"),
    [
        ([{"x": str(n), "y": 1} for n in range(9)], "field 'x' is text here and a number in most files"),
        ([{"y": n} for n in range(9)], "field 'x' is missing here and is a number in most files"),
        # They lack the label, and the reason covers the file as a whole.
        ([{"x": n} for n in range(9)], "field 'y' is missing here and is a number in most files"),
        ([{"x": n, "y": 1, "more": n} for n in range(9)], None),
        ([{"x": n, "y": 1} for n in range(9)] + [{"x": "odd", "y": 1}], None),
    ],
)
async def test_fields_are_what_most_files_have(run: Ingesting, odd: list[dict[str, Any]], expected: str | None) -> None:
    files = {f"{i}.jsonl": jsonl(*({"x": n, "y": i} for n in range(10))) for i in range(3)} | {"9.jsonl": jsonl(*odd)}
    found = await run("jsonl", files, split=TRAIN, label_field="y")
    problem = find_objection(found.outcome, fuzzed_source("jsonl"), "q")
    if expected is None:
        assert (found.outcome.accepted, found.codes) == (30 + len(odd), {})
        return
    assert problem is not None
    assert found.outcome.accepted == 30
    assert "the schema of s3://lake/x changed: 1 of 4 files" in problem
    drifted = [entry for entry in found.quarantine if entry["code"] == "schema_drift"]
    assert [entry["uri"].rpartition("/")[2] for entry in drifted] == ["9.jsonl"]
    assert expected in drifted[0]["detail"]
    assert "9.jsonl" in problem
    assert expected in problem


async def test_values_without_a_form_in_json(run: Ingesting) -> None:
    """Times in nanoseconds, dates beyond Python's range and invalid text are handled row by row."""
    sink = io.BytesIO()
    far = pyarrow.array([0, 10**15, 5], pyarrow.timestamp("s"))
    fine = pyarrow.array([1, 1_700_000_000_123_456_789, None], pyarrow.timestamp("ns", "UTC"))
    text = pyarrow.array([b"a", b"b", b"\xff"], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"far": far, "fine": fine, "text": text}), sink)
    found = await run("parquet", {"a.parquet": sink.getvalue()}, split=TRAIN)
    assert [json.loads(found.content(record)) for record in found.index] == [
        {"far": "1970-01-01T00:00:00", "fine": "1970-01-01T00:00:00+00:00", "text": "a"}
    ]
    assert found.codes == {"unsupported_type": 1, "invalid_utf8": 1}


async def test_damaged_sources(decoders: DecoderPool) -> None:
    """A small part of ``python -m loadtest.data.quarantine``: each format some times."""
    findings = Findings()
    for seed in random.Random(5).sample(range(10_000), 6) + list(range(7)):
        await try_one(seed, decoders, findings)
    assert (findings.crashes, findings.lost, findings.unaccounted) == ([], [], [])
    assert findings.inputs > 100
