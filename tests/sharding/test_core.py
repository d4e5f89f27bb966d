"""The bytes of a shard, its index and the order of samples: pure, or on the local disk."""

from __future__ import annotations

import hashlib
import io
import os
import random
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from contracts import shard_index
from contracts.datasets import canonical_json, link_name
from contracts.events.dataset import ShardFile
from services.kit.bus import PoisonMessage
from services.kit.sample_order import group, place
from services.sharding.core import index, tar
from services.sharding.core.rows import fill
from services.sharding.shard_plan import ShardPlan
from services.sharding.writer import (
    BATCH_ROWS,
    BUFFER_BYTES,
    ContentMismatch,
    Contents,
    ShardWriter,
    batches,
    short_key,
)

NAMES = st.from_regex(r"[A-Za-z0-9_/-]{1,90}\.[a-z]{1,4}", fullmatch=True).filter(lambda n: not n.startswith("/"))


@given(NAMES, st.integers(0, tar.MAX_MEMBER_BYTES))
def test_a_header_is_what_tarfile_writes(name: str, size: int) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    read = tarfile.TarInfo.frombuf(tar.header(name, size), "utf-8", "strict")
    for field in ("name", "size", "mode", "uid", "gid", "mtime", "type", "uname", "gname"):
        assert getattr(read, field) == getattr(info, field)


@pytest.mark.parametrize(("name", "size"), [("", 0), ("x" * 101, 0), ("ü" * 60, 0), ("a", tar.MAX_MEMBER_BYTES + 1)])
def test_entries_beyond_ustar_are_refused(name: str, size: int) -> None:
    with pytest.raises(ValueError, match="ustar"):
        tar.header(name, size)


@given(
    st.lists(st.tuples(st.text(max_size=9), st.integers(0, 9), st.integers(-1, 3)), min_size=1, max_size=9),
    st.booleans(),
)
def test_the_index_is_what_the_contract_writes(samples: list[tuple[str, int, int]], strided: bool) -> None:
    keys = [key.encode() for key, _, _ in samples]
    offsets = [(512 * i if strided else o) for i, (_, o, _) in enumerate(samples)]
    sizes = [(7 if strided else size) for _, _, size in samples]
    fields = {"png": (offsets, sizes), "cls": (offsets[::-1], sizes[::-1])}
    arrays = {name: (np.array(o, dtype=np.int64), np.array(s, dtype=np.int64)) for name, (o, s) in fields.items()}
    lengths = np.array([len(key) for key in keys], dtype=np.int64)
    expected = shard_index.encode([key for key, _, _ in samples], fields)
    assert index.encode(b"".join(keys), lengths, arrays) == expected


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.lists(st.integers(1, 9), max_size=20))
def test_samples_are_cut_into_shards_as_one_by_one(sizes: list[int], portions: list[int]) -> None:
    """The portions and the sizes of samples do not matter."""
    expected: list[list[int]] = []
    for size in sizes:
        if not expected or sum(expected[-1]) + size > 30:
            expected.append([])
        expected[-1].append(size)
    found: list[list[int]] = [[]]
    left = list(sizes)
    for portion in [*portions, len(sizes)]:
        part, left = left[:portion], left[portion:]
        if part:
            starts = fill(np.array(part, dtype=np.int64), 30, sum(found[-1]))
            for begin, end in zip([0, *starts], [*starts, len(part)], strict=True):
                found[-1] += part[begin:end]
                if end < len(part):
                    found.append([])
    assert found == expected


# -- one shard ------------------------------------------------------------------------


class Samples:
    """Samples in one pack on the disk, with their index."""

    def __init__(self, folder: Path, *, fast: bool = True) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.fast = fast
        self.folder, self.pack, self.lines = folder, bytearray(), list[bytes]()

    def add(self, key: str, files: Sequence[tuple[str, bytes]], label: str | None = None, split: str = "train") -> None:
        content = b"".join(content for _, content in files)
        record: dict[str, Any] = {
            "key": key,
            "split": split,
            "uri": f"s3://lake/{key}",
            "etag": "e",
            "offset": None,
            "label": label,
            "ext": files[0][0],
            "size": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
            "pack": 0,
            "pack_offset": len(self.pack),
            "fields": [(ext, len(part)) for ext, part in files] if len(files) > 1 else None,
        }
        if self.fast:
            record["xxh3"] = xxhash.xxh3_128_hexdigest(content)
        self.pack += content
        self.lines.append(canonical_json(record) + b"\n")

    def plan(self, shard_bytes: int, *, flat: bool = False, seed: int = 0) -> ShardPlan:
        path = self.folder / "index.jsonl"
        path.write_bytes(b"".join(sorted(self.lines)))
        (self.folder / "pack").write_bytes(self.pack)
        plan = ShardPlan(self.folder / "plan", ("0", "1", "2"), seed, shard_bytes, flat=flat)
        plan.build(path)
        return plan

    def write(self, plan: ShardPlan) -> dict[str, ShardFile]:
        """Write all shards; by name, with the file beside the pack."""
        handle, made = os.open(self.folder / "pack", os.O_RDONLY), {}
        for shard in plan.shards:
            path = self.folder / shard.name.replace("/", "-")
            encoder = plan.encoder
            writer = ShardWriter(path, shard.name, encoder.extensions, encoder.class_contents, flat=plan.flat)
            for rows in plan.rows(shard, BATCH_ROWS):
                for batch in batches(rows):
                    contents = Contents([handle] * len(batch), batch["offset"].tolist())
                    writer.add(batch, plan.extras(batch), contents)
            made[shard.name] = writer.finish(path.with_suffix(".idx"))
        os.close(handle)
        return made


def a_hundred(folder: Path) -> Samples:
    samples = Samples(folder)
    for i in range(100):
        samples.add(f"{i % 3}/k{i:03d}", [("png", bytes([i]) * (i * 37))], str(i % 3))
    return samples


def read(folder: Path, shard: ShardFile) -> dict[str, dict[str, bytes]]:
    """Key -> field -> content of an archive; the index, tarfile and GNU tar agree."""
    path = folder / shard.index_path.replace("/", "-")
    content, found = path.with_suffix("").read_bytes(), shard_index.decode(path.read_bytes())
    assert (hashlib.sha256(content).hexdigest(), len(content)) == (shard.sha256, shard.size_bytes)
    with tarfile.open(fileobj=io.BytesIO(content), format=tarfile.USTAR_FORMAT) as archive:
        members = {m.name: archive.extractfile(m).read() for m in archive}  # type: ignore[union-attr]
    samples = {
        found.key(row): {ext: content[at : at + size] for ext, (at, size) in found.places(row).items()}
        for row in range(found.samples)
    }
    assert {f"{key}.{ext}": part for key, files in samples.items() for ext, part in files.items()} == members
    listed = subprocess.run(["tar", "-tf", path.with_suffix("")], capture_output=True, text=True, check=True)
    assert (listed.stdout.split(), listed.stderr) == (list(members), "")
    # The files of a sample lie beside each other, sorted.
    assert list(members) == [f"{key}.{ext}" for key, files in samples.items() for ext in sorted(files)]
    return samples


def test_tar_programs_read_the_shards_and_the_offsets_agree(tmp_path: Path) -> None:
    samples = a_hundred(tmp_path)
    made = samples.write(samples.plan(2**16))
    assert len(made) > 2
    found: dict[str, dict[str, bytes]] = {}
    for shard in made.values():
        assert shard.size_bytes <= 2**16
        found |= read(tmp_path, shard)
    expected = {f"{i % 3}/k{i:03d}": {"cls": str(i % 3).encode(), "png": bytes([i]) * (i * 37)} for i in range(100)}
    assert found == expected
    assert list(found) == sorted(expected, key=lambda key: place(0, key))


def test_webdataset_reads_the_shards(tmp_path: Path) -> None:
    import webdataset

    samples = a_hundred(tmp_path)
    made = samples.write(samples.plan(2**16))
    for shard in made.values():
        archive = (tmp_path / shard.index_path.replace("/", "-")).with_suffix("")
        theirs = {
            sample["__key__"]: {name: content for name, content in sample.items() if not name.startswith("__")}
            for sample in webdataset.WebDataset(str(archive), shardshuffle=False)
        }
        assert theirs == read(tmp_path, shard)


def test_samples_of_several_files_some_missing(tmp_path: Path) -> None:
    samples, expected = Samples(tmp_path), {}
    for i in range(50):
        files = [("jpg", random.Random(i).randbytes(i * 100)), ("json", b'{"a":%d}' % i), ("txt", b"t" * (i % 3))]
        files = files[: 1 + i % 3]
        samples.add(f"k{i}", files, "2" if i % 2 else None)
        expected[f"k{i}"] = dict(files) | ({"cls": b"2"} if i % 2 else {})
    (shard,) = samples.write(samples.plan(2**20)).values()
    assert read(tmp_path, shard) == expected


def test_the_bytes_are_independent_of_the_order_of_packing(tmp_path: Path) -> None:
    first = a_hundred(tmp_path / "a")
    second, keys = Samples(tmp_path / "b", fast=False), list(range(100))
    random.Random(1).shuffle(keys)
    for i in keys:
        second.add(f"{i % 3}/k{i:03d}", [("png", bytes([i]) * (i * 37))], str(i % 3))
    assert first.write(first.plan(2**16)) == second.write(second.plan(2**16))


def test_a_sample_larger_than_a_shard_has_one_of_its_own(tmp_path: Path) -> None:
    samples = Samples(tmp_path)
    for i, size in enumerate((10, 2**17, 10, 3 * BUFFER_BYTES + 5)):
        samples.add(f"k{i}", [("bin", random.Random(i).randbytes(size))])
    made = samples.write(samples.plan(2**16))
    assert sum(shard.samples for shard in made.values()) == 4
    assert {2**17, 3 * BUFFER_BYTES + 5} <= {
        len(files["bin"]) for shard in made.values() if shard.samples == 1 for files in read(tmp_path, shard).values()
    }


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("fast", [False, True])
def test_a_flipped_bit_is_found(tmp_path: Path, flat: bool, fast: bool) -> None:
    for trial in range(20):
        samples = Samples(tmp_path / str(trial), fast=fast)
        for i in range(20):
            samples.add(f"f/{i:09d}", [("bin", random.Random(i).randbytes(64))])
        plan = samples.plan(2**16, flat=flat)
        bit = random.Random(trial).randrange(8 * len(samples.pack))
        samples.pack[bit // 8] ^= 1 << bit % 8
        (samples.folder / "pack").write_bytes(samples.pack)
        with pytest.raises(ContentMismatch):
            samples.write(plan)


def test_a_pack_that_ends_early_is_found(tmp_path: Path) -> None:
    samples = a_hundred(tmp_path)
    plan = samples.plan(2**16)
    (tmp_path / "pack").write_bytes(samples.pack[:-1])
    with pytest.raises(ContentMismatch):
        samples.write(plan)


def test_windows_lie_in_flat_files_without_anything_between(tmp_path: Path) -> None:
    samples, windows = Samples(tmp_path), {}
    for i in range(1500):
        windows[f"text-0a1b/{i:09d}"] = random.Random(i).randbytes(129)
        samples.add(f"text-0a1b/{i:09d}", [("bin", windows[f"text-0a1b/{i:09d}"])])
    made = samples.write(samples.plan(2**16, flat=True))
    assert [shard.samples for shard in made.values()] == [2**16 // 129] * 2 + [1500 - 2 * (2**16 // 129)]
    sort_rows = sorted(windows, key=lambda key: place(0, key))
    content = b"".join((tmp_path / name.replace("/", "-")).read_bytes() for name in made)
    assert content == b"".join(windows[key] for key in sort_rows)
    for name, shard in made.items():
        assert shard.path == f"{name}.bin"
        found = shard_index.decode((tmp_path / f"{name.replace('/', '-')}.idx").read_bytes())
        assert found.fields == {"bin": shard_index.StridedField(0, 129, 129)}
    keys = [short_key(key.encode()) for key in windows]
    assert len(set(keys)) == 1500
    assert max(map(len, keys)) == 14


# -- the order ------------------------------------------------------------------------


def order(folder: Path, seed: int, numbers: Sequence[int]) -> list[int]:
    samples = Samples(folder)
    for i in numbers:
        samples.add(f"k{i}", [("bin", b"")])
    plan = samples.plan(2**20, seed=seed)
    return [int(key[1:]) for shard in plan.shards for rows in plan.rows(shard, 100) for key in rows["key"].tolist()]


def test_the_order_is_mixed_and_depends_on_keys_and_seed_alone(tmp_path: Path) -> None:
    forward = order(tmp_path / "a", 0, range(1000))
    assert forward == order(tmp_path / "b", 0, range(999, -1, -1))
    assert sorted(forward) == list(range(1000))
    assert forward != order(tmp_path / "c", 1, range(1000))
    # A window of a shard is a fair sample: its mean is near the middle.
    assert abs(sum(forward[:200]) / 200 - 500) < 80


def test_an_order_that_does_not_fit_memory_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = order(tmp_path / "a", 0, range(1000))
    monkeypatch.setattr("services.sharding.shard_plan.PART_BYTES", 10_000)
    monkeypatch.setattr("services.sharding.shard_plan.BUFFERED_BYTES", 5_000)
    assert order(tmp_path / "b", 0, range(1000)) == whole


def test_groups_are_equal_runs_of_the_order() -> None:
    keys = sorted((f"k{i}" for i in range(1000)), key=lambda key: place(7, key))
    groups = [group(7, key, 8) for key in keys]
    assert groups == sorted(groups)
    assert all(90 < groups.count(number) < 160 for number in range(8))


def test_a_key_that_no_archive_can_hold_is_refused(tmp_path: Path) -> None:
    samples = Samples(tmp_path)
    samples.add("k" * 101, [("bin", b"")])
    with pytest.raises(PoisonMessage, match="longer than 100 bytes"):
        samples.plan(2**20)


def test_a_link_is_one_for_each_input_and_layout() -> None:
    assert len({link_name("a", 1), link_name("a", 2), link_name("b", 1)}) == 3
