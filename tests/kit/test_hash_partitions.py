"""Names on disk, and the sweep by them."""

from __future__ import annotations

import hashlib
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kit import hash_partitions
from services.kit.hash_partitions import HASH_BYTES, PARTITIONS, HashPartitions, find_missing
from services.kit.store.objects import ObjectInfo
from services.kit.sweep import select_garbage

NOW = datetime(2026, 6, 1, tzinfo=UTC)


def sha(number: int) -> str:
    return hashlib.sha256(b"%d" % number).hexdigest()


#: Hashes that differ only in their last bytes, zeros among them.
SIMILAR = [f"{'ab' * 31}{last:02x}" for last in (0, 1, 255)] + ["ab" * 30 + "0000", "00" * 32, "ff" * 32]
HASHES = st.lists(st.sampled_from(SIMILAR) | st.integers(0, 50).map(sha), max_size=60)


@given(HASHES, HASHES)
def test_what_was_added_is_found_and_nothing_else(added: list[str], asked: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(hash_partitions, "BUFFER_BYTES", 5 * HASH_BYTES)
        patch.setattr(hash_partitions, "COMPACTION_MIN_BYTES", 2 * HASH_BYTES)
        names = HashPartitions(Path(folder))
        names.add(added)
        for sha256 in asked:
            assert find_missing(names.read(int(sha256[:2], 16)), [sha256]) == [sha256 not in added]
        assert sum(len(names.read(number)) for number in range(PARTITIONS)) == len(set(added))


def test_repeated_names_take_no_more_than_twice_the_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hash_partitions, "BUFFER_BYTES", HASH_BYTES)
    monkeypatch.setattr(hash_partitions, "COMPACTION_MIN_BYTES", HASH_BYTES)
    names, hashes = HashPartitions(tmp_path), [f"07{number:062x}" for number in range(50)]
    for _ in range(40):
        names.add(hashes)
    assert names.file_bytes <= 2 * 50 * HASH_BYTES
    assert names.file_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert len(names.read(7)) == 50


def test_full_disk_is_named_with_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hash_partitions, "BUFFER_BYTES", HASH_BYTES)
    (tmp_path / "07").symlink_to("/dev/full")
    names = HashPartitions(tmp_path)
    with pytest.raises(ValueError, match=rf"{tmp_path} has no room .*32 bytes.*TRAINBUS_DATA_DIR"):
        names.add(["07" * 32])


@given(HASHES, st.lists(st.sampled_from(range(-3, 4)), min_size=len(SIMILAR), max_size=len(SIMILAR)))
def test_garbage_is_old_and_unnamed(named: list[str], ages: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        names = HashPartitions(Path(folder))
        names.add(named)
        for sha256, age in zip(SIMILAR, ages, strict=True):
            there = [stored(f"shards/{sha256[:2]}/{sha256}", age)]
            garbage = select_garbage(there, names.read(int(sha256[:2], 16)), NOW)
            assert garbage == (there if age > 0 and sha256 not in named else [])


@pytest.mark.parametrize(
    "key", ["shards/readme.txt", f"shards/ab/{'a' * 64}", f"shards/{'a' * 64}", f"shards/aa/{'a' * 63}g", "shards/aa/"]
)
def test_objects_not_under_their_hash_are_never_garbage(key: str, tmp_path: Path) -> None:
    assert select_garbage([stored(key, 99)], HashPartitions(tmp_path).read(0xAA), NOW) == []


def test_empty_object_is_never_garbage(tmp_path: Path) -> None:
    key = f"blobs/sha256/aa/{'a' * 64}"
    assert select_garbage([stored(key, 99, size_bytes=0)], HashPartitions(tmp_path).read(0xAA), NOW) == []


def stored(key: str, age_days: int, size_bytes: int = 1) -> ObjectInfo:
    return ObjectInfo("b", key, size_bytes, "", NOW - timedelta(days=age_days))
