"""The bytes of a shard and the order of samples: pure, or on the local disk."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.datasets import canonical_json
from services.sharding.core import tar
from services.sharding.core.plan import Order, link_name
from services.sharding.shards import ShardWriter

NAMES = st.from_regex(r"[A-Za-z0-9_/-]{1,90}\.[a-z]{1,4}", fullmatch=True).filter(lambda n: not n.startswith("/"))


@given(NAMES, st.integers(0, tar.MAX_MEMBER_BYTES))
def test_a_header_is_what_tarfile_writes(name: str, size: int) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    read = tarfile.TarInfo.frombuf(tar.header(name, size), "utf-8", "strict")
    for field in ("name", "size", "mode", "uid", "gid", "mtime", "type", "uname", "gname"):
        assert getattr(read, field) == getattr(info, field)


@pytest.mark.parametrize(("name", "size"), [("", 0), ("x" * 101, 0), ("ü" * 60, 0), ("a", tar.MAX_MEMBER_BYTES + 1)])
def test_what_ustar_cannot_hold_is_refused(name: str, size: int) -> None:
    with pytest.raises(ValueError, match="ustar"):
        tar.header(name, size)


def write(folder: Path, shard_bytes: int) -> ShardWriter:
    writer = ShardWriter(folder, "train", shard_bytes)
    for i in range(100):
        writer.add(f"{i % 3}/k{i:03d}", [("png", bytes([i]) * (i * 37)), ("cls", str(i % 3).encode())])
    writer.finish()
    return writer


def test_tar_programs_read_the_shards_and_the_offsets_agree(tmp_path: Path) -> None:
    writer = write(tmp_path, 2**16)
    assert len(writer.shards) > 2
    keys: list[str] = []
    for shard in writer.shards:
        content = (tmp_path / shard.path).read_bytes()
        written = (tmp_path / shard.index_path).read_bytes()
        index = json.loads(written)
        assert canonical_json(index) == written
        assert (hashlib.sha256(content).hexdigest(), len(content)) == (shard.sha256, shard.size_bytes)
        assert len(content) <= 2**16
        with tarfile.open(fileobj=io.BytesIO(content), format=tarfile.USTAR_FORMAT) as archive:
            members = {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
        found = {
            f"{sample['key']}.{ext}": content[offset : offset + size]
            for sample in index["samples"]
            for ext, (offset, size) in sample["fields"].items()
        }
        assert found == members
        listed = subprocess.run(["tar", "-tf", tmp_path / shard.path], capture_output=True, text=True, check=True)
        assert listed.stdout.split() == list(members)
        assert listed.stderr == ""
        keys += [sample["key"] for sample in index["samples"]]
    assert keys == [f"{i % 3}/k{i:03d}" for i in range(100)]


def test_the_same_samples_give_the_same_bytes(tmp_path: Path) -> None:
    assert write(tmp_path / "a", 2**16).shards == write(tmp_path / "b", 2**16).shards


def test_a_sample_larger_than_a_shard_has_one_of_its_own(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "train", 2**16)
    for i, size in enumerate((10, 2**17, 10)):
        writer.add(f"k{i}", [("bin", bytes(size))])
    writer.finish()
    assert [shard.samples for shard in writer.shards] == [1, 1, 1]


def test_the_order_is_mixed_and_depends_on_keys_and_seed_alone() -> None:
    def order(seed: int, numbers: list[int]) -> list[int]:
        made = Order(seed)
        for i in numbers:
            made.add(f"k{i}", "train", i)
        return list(made.offsets("train"))

    forward = order(0, list(range(1000)))
    assert forward == order(0, list(reversed(range(1000))))
    assert sorted(forward) == list(range(1000))
    assert forward != order(1, list(range(1000)))
    # A window of a shard is a fair sample: its mean is near the middle.
    assert abs(sum(forward[:200]) / 200 - 500) < 80


def test_a_link_is_one_for_each_input_and_layout() -> None:
    assert len({link_name("a", 1), link_name("a", 2), link_name("b", 1)}) == 3
