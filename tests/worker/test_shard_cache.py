"""The node's shard cache against a real store: prefetched, shared, verified, bounded."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import xxhash

from contracts.datasets import SPLITS, shard_uri
from contracts.ranks import ShardPlanLine, ShardRequestLine
from loadtest.data.proxy import FaultProxy
from loadtest.data.stored import Stored, node, store
from services.kit.bus import TransientError
from services.kit.settings import Settings
from services.kit.store.errors import ObjectCorrupted, ObjectNotFound
from services.kit.store.objects import ObjectStore
from services.kit.store.ranged_download import RangedDownloader
from services.worker.cache import shard_cache as shards_module
from services.worker.cache.dataset_view import DatasetView
from services.worker.cache.node_cache import CacheError, NodeCache
from tests.kit.support import until
from trainbus.embedded.servers import S3Server


def want(stored: Stored, number: int, rank: int = 0) -> ShardRequestLine:
    return ShardRequestLine(rank=rank, generation=1, shard=stored.shards()[number].path)


def sequence(stored: Stored, order: list[int], *, at: int = 0, rank: int = 0, per_s: float = 1.0) -> ShardPlanLine:
    """A plan that reads these shards one after the other."""
    samples = stored.shards()[0].samples
    needs = tuple((number, place * samples, (place + 1) * samples - 1) for place, number in enumerate(order))
    return ShardPlanLine(rank=rank, split="train", at=at, per_s=per_s, needs=needs)


def is_whole(view: DatasetView, stored: Stored, number: int) -> bool:
    """Whether a shard and its index are in the folder; that they are right, too."""
    shard = stored.shards()[number]
    path, index = view.folder / shard.path, view.folder / shard.index_path
    if not path.exists():
        return False
    assert path.read_bytes() == stored.contents[shard.path]
    assert index.read_bytes() == stored.contents[shard.index_path]
    return True


def here(view: DatasetView, stored: Stored) -> set[int]:
    return {number for number in range(len(stored.shards())) if is_whole(view, stored, number)}


async def begin(cache: NodeCache, stored: Stored, folder: Path, pins: Any, **how: Any) -> DatasetView:
    return await cache.dataset(stored.manifest_uri, stored.dataset_id, folder, pins, **how)


# -- ranges ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size_bytes", [1, 999, 2**16, 5 * 2**16 + 17])
async def test_ranged_download_survives_a_bad_network(
    objects: ObjectStore, s3_settings: Settings, s3_server: S3Server, tmp_path: Path, size_bytes: int
) -> None:
    content = os.urandom(size_bytes)
    uri = f"s3://{s3_settings.bucket_datasets}/x"
    await objects.put(uri, content)
    sha256 = hashlib.sha256(content).hexdigest()
    async with FaultProxy(s3_server.port, error_share=0.5, seed=size_bytes) as proxy:
        through = s3_settings.model_copy(update={"s3_endpoint": proxy.endpoint})
        async with ObjectStore(through) as proxied:
            downloader = RangedDownloader(proxied.reader, range_bytes=2**14, stall_s=5.0)
            fast = await downloader.download(uri, tmp_path / "x", size_bytes=size_bytes, sha256=sha256)
    assert (tmp_path / "x").read_bytes() == content
    assert fast == xxhash.xxh3_128(content).hexdigest()
    assert proxy.egress_bytes < 1.05 * size_bytes + proxy.answers * 300  # what came is not asked for again


async def test_stalled_connection_is_replaced(
    objects: ObjectStore, s3_settings: Settings, s3_server: S3Server, tmp_path: Path
) -> None:
    stored = await store(objects, s3_settings.bucket_datasets, shards=1, sample_bytes=20_000)
    shard = stored.shards()[0]
    async with FaultProxy(s3_server.port) as proxy:
        through = s3_settings.model_copy(update={"s3_endpoint": proxy.endpoint})
        async with ObjectStore(through) as proxied:
            downloader = RangedDownloader(proxied.reader, stall_s=0.5)
            proxy.freeze(1.5)
            await downloader.download(
                shard_uri(stored.bucket, shard.sha256), tmp_path / "x", size_bytes=shard.size_bytes, sha256=shard.sha256
            )
            assert proxy.answers >= 2
            proxy.freeze(60)
            impatient = RangedDownloader(proxied.reader, stall_s=0.1, patience_s=0.3)
            with pytest.raises(TransientError):
                await impatient.download(
                    shard_uri(stored.bucket, shard.sha256), tmp_path / "y", size_bytes=1, sha256=shard.sha256
                )


async def test_object_with_wrong_size_or_hash_is_refused(
    objects: ObjectStore, s3_settings: Settings, tmp_path: Path
) -> None:
    stored = await store(objects, s3_settings.bucket_datasets, shards=1)
    shard = stored.shards()[0]
    uri, size_bytes = shard_uri(stored.bucket, shard.sha256), shard.size_bytes
    downloader = RangedDownloader(objects.reader, range_bytes=1000)
    for size, sha256 in ((size_bytes, "0" * 64), (size_bytes - 1, shard.sha256), (size_bytes + 2000, shard.sha256)):
        with pytest.raises(ObjectCorrupted):
            await downloader.download(uri, tmp_path / "x", size_bytes=size, sha256=sha256)
    with pytest.raises(ObjectNotFound):
        await downloader.download(uri + "0", tmp_path / "x", size_bytes=size_bytes, sha256=shard.sha256)


# -- ahead of need -----------------------------------------------------------------------------------


async def test_shards_are_fetched_in_the_order_of_need(
    objects: ObjectStore, s3_settings: Settings, tmp_path: Path
) -> None:
    stored = await store(objects, s3_settings.bucket_datasets, shards=12)
    async with node(s3_settings, tmp_path / "cache", objects=objects) as (cache, _), cache.pin_files() as pins:
        view = await begin(cache, stored, tmp_path / "view", pins)
        assert here(view, stored) == set()
        view.apply_plan(sequence(stored, [7, 3, 11]))
        await until(lambda: here(view, stored) == {3, 7, 11}, "the planned shards")
        assert await view.request(want(stored, 5)) == ""
        assert is_whole(view, stored, 5)
        assert "no shard train/none" in await view.request(ShardRequestLine(rank=0, generation=1, shard="train/none"))
    assert await view.request(want(stored, 6)) == "the run is over on this node"


async def test_rank_without_a_plan_is_read_ahead_for(
    objects: ObjectStore, s3_settings: Settings, tmp_path: Path
) -> None:
    stored = await store(objects, s3_settings.bucket_datasets, shards=12)
    async with node(s3_settings, tmp_path / "cache", objects=objects) as (cache, _), cache.pin_files() as pins:
        view = await begin(cache, stored, tmp_path / "view", pins)
        assert await view.request(want(stored, 2)) == ""
        await until(lambda: here(view, stored) == {2, 3, 4, 5, 6}, "the next four")


async def test_command_has_all_shards_before_it_starts(
    objects: ObjectStore, s3_settings: Settings, tmp_path: Path
) -> None:
    stored = await store(objects, s3_settings.bucket_datasets, shards=6, validation=2)
    other = await store(objects, s3_settings.bucket_datasets, shards=6, seed=1)
    async with (
        node(s3_settings, tmp_path / "cache", max_bytes=60_000, objects=objects) as (cache, _),
        cache.pin_files() as pins,
    ):
        view = await begin(cache, stored, tmp_path / "view", pins, whole=SPLITS)
        assert here(view, stored) == set(range(6))
        assert all((view.folder / shard.path).exists() for shard in stored.shards("validation"))
        second = await begin(cache, other, tmp_path / "other", pins)
        for number in range(6):
            assert await second.request(want(other, number)) == ""
        assert here(view, stored) == set(range(6))
        assert cache.datasets()[0] == min(stored.dataset_id, cache.datasets()[0])
        assert stored.dataset_id in cache.datasets()


async def test_two_runs_share_each_download(
    objects: ObjectStore, s3_settings: Settings, s3_server: S3Server, tmp_path: Path
) -> None:
    stored = await store(objects, s3_settings.bucket_datasets, shards=8)
    async with FaultProxy(s3_server.port, latency_s=0.02) as proxy:
        through = s3_settings.model_copy(update={"s3_endpoint": proxy.endpoint})
        async with node(through, tmp_path / "cache", stall_s=30.0) as (cache, _), cache.pin_files() as pins:
            first = await begin(cache, stored, tmp_path / "one", pins)
            second = await begin(cache, stored, tmp_path / "two", pins)
            first.apply_plan(sequence(stored, list(range(8))))
            second.apply_plan(sequence(stored, list(range(7, -1, -1))))
            answers = await asyncio.gather(*(second.request(want(stored, number)) for number in range(8)))
            assert answers == [""] * 8
            assert here(first, stored) == here(second, stored) == set(range(8))
    assert proxy.egress_bytes < 1.05 * stored.size_bytes + 10_000  # and the manifest


# -- room --------------------------------------------------------------------------------------------


async def test_shard_needed_last_is_evicted_first(
    objects: ObjectStore, s3_settings: Settings, s3_server: S3Server, tmp_path: Path
) -> None:
    """Room for five of eight shards, which are read twice: only what cannot be kept is fetched again."""
    stored = await store(objects, s3_settings.bucket_datasets, shards=8)
    each = stored.size_bytes // 8
    order = [*range(8), *range(8)]
    async with FaultProxy(s3_server.port) as proxy:
        through = s3_settings.model_copy(update={"s3_endpoint": proxy.endpoint})
        async with (
            node(through, tmp_path / "cache", max_bytes=5 * each, stall_s=30.0) as (cache, shards),
            cache.pin_files() as pins,
        ):
            view = await begin(cache, stored, tmp_path / "view", pins)
            for place, number in enumerate(order):
                view.apply_plan(sequence(stored, order, at=8 * place, per_s=0.1))
                await until(lambda number=number: is_whole(view, stored, number), "the next shard")  # type: ignore[misc]
                assert shards.size_bytes <= 5 * each
    # Belady with room for five keeps at least three of them over the turn; LRU would fetch all sixteen.
    assert proxy.egress_bytes < 13.5 * each + 10_000


async def test_run_that_exceeds_the_cache_makes_progress(
    objects: ObjectStore, s3_settings: Settings, tmp_path: Path
) -> None:
    stored = await store(objects, s3_settings.bucket_datasets, shards=6)
    async with (
        node(s3_settings, tmp_path / "cache", max_bytes=1, objects=objects) as (cache, shards),
        cache.pin_files() as pins,
    ):
        view = await begin(cache, stored, tmp_path / "view", pins)
        needs = tuple((number, 0, 1000) for number in range(6))  # all of them all the time
        view.apply_plan(ShardPlanLine(rank=0, split="train", at=0, needs=needs))
        for number in [0, 1, 2, 3, 4, 5, 0, 1]:
            assert await view.request(want(stored, number)) == ""
            with (view.folder / stored.shards()[number].path).open("rb") as opened:
                shards.evict(stored.shards()[number].sha256)  # what is open outlives that
                assert opened.read() == stored.contents[stored.shards()[number].path]
            assert not is_whole(view, stored, number)


async def test_other_files_are_evicted_before_planned_shards(
    objects: ObjectStore, s3_settings: Settings, tmp_path: Path
) -> None:
    stored = await store(objects, s3_settings.bucket_datasets, shards=4)
    each = stored.size_bytes // 4
    async with (
        node(s3_settings, tmp_path / "cache", max_bytes=5 * each, objects=objects) as (cache, _),
        cache.pin_files() as pins,
    ):
        old = cache.files.blob("ab" * 32)
        old.parent.mkdir(parents=True)
        old.write_bytes(bytes(4 * each))
        cache.evict()
        assert old.exists()
        view = await begin(cache, stored, tmp_path / "view", pins)
        view.apply_plan(sequence(stored, [0, 1, 2, 3]))
        assert await view.request(want(stored, 0)) == ""
        await until(lambda: here(view, stored) == {0, 1, 2, 3}, "all of them")
        assert not old.exists()


async def test_two_datasets_beyond_the_limit_do_not_evict_each_other(
    objects: ObjectStore, s3_settings: Settings, s3_server: S3Server, tmp_path: Path
) -> None:
    """No rank plans to read these shards: fetched ones stay, and none is fetched needlessly."""
    stored = [await store(objects, s3_settings.bucket_datasets, shards=4, seed=seed) for seed in range(2)]
    each = stored[0].size_bytes // 4
    async with FaultProxy(s3_server.port) as proxy:
        through = s3_settings.model_copy(update={"s3_endpoint": proxy.endpoint})
        async with (
            node(through, tmp_path / "cache", max_bytes=8 * each, stall_s=30.0) as (cache, shards),
            cache.pin_files() as pins,
        ):
            checkpoint = cache.files.blob("ab" * 32)
            cache.files.add_pins([checkpoint], pins.files)
            checkpoint.parent.mkdir(parents=True)
            checkpoint.write_bytes(bytes(2 * each))
            cache.evict()
            readings = [
                await begin(cache, one, tmp_path / f"view{number}", pins, guess=("train",))
                for number, one in enumerate(stored)
            ]
            await until(lambda: shards.files.size_bytes >= 6 * each, "as many as fit")
            fetched = proxy.egress_bytes
            for _ in range(20):
                shards.wake()
                await asyncio.sleep(0.02)
            assert proxy.egress_bytes == fetched
            assert len(here(readings[0], stored[0])) + len(here(readings[1], stored[1])) == 6


async def test_full_disk_shrinks_the_cache(
    objects: ObjectStore, s3_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk has room for three shards, fewer than the setting: ranks get theirs one after the other."""
    stored = await store(objects, s3_settings.bucket_datasets, shards=6)
    each = stored.size_bytes // 6
    monkeypatch.setattr(shards_module, "OPEN_GRACE_S", 0.0)
    monkeypatch.setattr(shards_module, "RETRY_S", 0.01)
    async with node(s3_settings, tmp_path / "cache", objects=objects) as (cache, shards), cache.pin_files() as pins:
        fetch = shards.files.fetch

        async def fetch_if_there_is_room(*given: Any) -> None:
            if shards.files.size_bytes + each > 3 * each:
                raise OSError(errno.ENOSPC, "No space left on device")
            await fetch(*given)

        monkeypatch.setattr(shards.files, "fetch", fetch_if_there_is_room)
        view = await begin(cache, stored, tmp_path / "view", pins)
        for number in (0, 1, 2, 3, 4, 5, 0):
            assert await asyncio.wait_for(view.request(want(stored, number)), 90) == ""
            assert is_whole(view, stored, number)


async def test_removed_cache_is_filled_again(objects: ObjectStore, s3_settings: Settings, tmp_path: Path) -> None:
    stored = await store(objects, s3_settings.bucket_datasets, shards=3)
    async with node(s3_settings, tmp_path / "cache", objects=objects) as (cache, shards), cache.pin_files() as pins:
        view = await begin(cache, stored, tmp_path / "view", pins)
        view.apply_plan(sequence(stored, [0, 1]))
        await until(lambda: here(view, stored) == {0, 1}, "the planned shards")
        shutil.rmtree(shards.files.folder)
        for number in (0, 1, 2):
            assert await asyncio.wait_for(view.request(want(stored, number)), 90) == ""
            assert is_whole(view, stored, number)
        assert shards.files.size_bytes == stored.size_bytes


async def test_ranks_wait_while_the_cache_is_not_writable(
    objects: ObjectStore, s3_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = await store(objects, s3_settings.bucket_datasets, shards=2)
    monkeypatch.setattr(shards_module, "RETRY_S", 0.01)
    async with node(s3_settings, tmp_path / "cache", objects=objects) as (cache, shards), cache.pin_files() as pins:
        view = await begin(cache, stored, tmp_path / "view", pins)
        assert await view.request(want(stored, 0)) == ""
        folder = shards.files.folder
        folder.rename(folder.with_name("aside"))
        folder.write_text("what is in the way of a folder")
        waiting = [asyncio.create_task(view.request(want(stored, number))) for number in (0, 1)]
        done, _ = await asyncio.wait(waiting, timeout=0.2)
        assert not done
        folder.unlink()
        assert await asyncio.wait_for(asyncio.gather(*waiting), 90) == ["", ""]
        assert here(view, stored) == {0, 1}


# -- what is broken ----------------------------------------------------------------------------------


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8 % len(content)] ^= 1 << bit % 8
    path.chmod(0o644)
    path.write_bytes(content)


@pytest.mark.parametrize("suffix", ["", ".idx", ".json"])
async def test_next_run_detects_a_flipped_bit_on_disk(
    objects: ObjectStore, s3_settings: Settings, tmp_path: Path, suffix: str
) -> None:
    stored = await store(objects, s3_settings.bucket_datasets, shards=1)
    for trial in range(4):
        async with node(s3_settings, tmp_path / "cache", objects=objects) as (cache, shards), cache.pin_files() as pins:
            view = await begin(cache, stored, tmp_path / f"view{trial}", pins)
            assert await view.request(want(stored, 0)) == ""
            assert is_whole(view, stored, 0)
            path = shards.files.path(stored.shards()[0].sha256)
        flip(path.with_name(path.name + suffix), 7919 * trial)


@pytest.mark.parametrize("which", ["shard", "index"])
async def test_corrupted_or_missing_shard_is_named(
    objects: ObjectStore, s3_settings: Settings, tmp_path: Path, which: str
) -> None:
    stored = await store(objects, s3_settings.bucket_datasets, shards=2)
    shard = stored.shards()[0]
    sha256, path = (shard.sha256, shard.path) if which == "shard" else (shard.index_sha256, shard.index_path)
    uri, right = shard_uri(stored.bucket, sha256), stored.contents[path]
    async with node(s3_settings, tmp_path / "cache", objects=objects) as (cache, shards), cache.pin_files() as pins:
        await objects.put(uri, right[:-1] + bytes([right[-1] ^ 1]))
        view = await begin(cache, stored, tmp_path / "view", pins)
        view.apply_plan(sequence(stored, [0, 1]))
        problem = await view.request(want(stored, 0))
        assert shard.path in problem
        assert "damaged in the store" in problem
        assert here(view, stored) <= {1}
        await objects.delete(uri)
        assert "is not in the store" in await view.request(want(stored, 0))
        with pytest.raises(CacheError, match=shard.path):
            await begin(cache, stored, tmp_path / "whole", pins, whole=("train",))
        await objects.put(uri, right)
        assert await view.request(want(stored, 0)) == ""  # mended meanwhile
        assert list(shards.files.folder.rglob(".*")) == []


async def test_corrupted_manifest_is_not_read(objects: ObjectStore, s3_settings: Settings, tmp_path: Path) -> None:
    stored = await store(objects, s3_settings.bucket_datasets, shards=1)
    kept = tmp_path / "cache" / "datasets" / stored.dataset_id / "manifest.json"
    async with node(s3_settings, tmp_path / "cache", objects=objects) as (cache, _), cache.pin_files() as pins:
        await begin(cache, stored, tmp_path / "one", pins)
        flip(kept, 1000)
        view = await begin(cache, stored, tmp_path / "two", pins)
        assert (view.folder / "manifest.json").read_bytes() == stored.manifest.to_bytes()
        kept.unlink()
        await objects.put(stored.manifest_uri, stored.manifest.to_bytes().replace(b"made", b"mode"))
        with pytest.raises(CacheError, match="damaged in the store"):
            await begin(cache, stored, tmp_path / "three", pins)
        await objects.delete(stored.manifest_uri)
        with pytest.raises(CacheError, match="not in the store"):
            await begin(cache, stored, tmp_path / "four", pins)


async def test_shared_folder_is_read_first_and_filled(
    objects: ObjectStore, s3_settings: Settings, s3_server: S3Server, tmp_path: Path
) -> None:
    stored = await store(objects, s3_settings.bucket_datasets, shards=3)
    warm = tmp_path / "warm"
    async with FaultProxy(s3_server.port) as proxy:
        through = s3_settings.model_copy(update={"s3_endpoint": proxy.endpoint})
        for number in range(3):
            async with (
                node(through, tmp_path / f"cache{number}", warm=warm, stall_s=30.0) as (cache, _),
                cache.pin_files() as pins,
            ):
                before = proxy.egress_bytes
                await begin(cache, stored, tmp_path / f"view{number}", pins, whole=("train",))
                fetched = proxy.egress_bytes - before - len(stored.manifest.to_bytes())
                one = stored.size_bytes // 3
                assert fetched // one == (3, 0, 1)[number], "all; none; the one that was damaged there"
            if number == 1:
                sha256 = stored.shards()[1].sha256
                flip(warm / sha256[:2] / sha256, 12345)


# -- lives -------------------------------------------------------------------------------------------

DOWNLOADS = """
import asyncio, sys
from pathlib import Path
from loadtest.data.stored import node
from services.kit.settings import Settings

async def main():
    settings = Settings.model_validate_json(sys.argv[1])
    settings = settings.model_copy(update={"s3_secret_key": Settings(s3_secret_key=sys.argv[2]).s3_secret_key})
    async with node(settings, Path(sys.argv[3]), range_bytes=4096) as (cache, shards), cache.pin_files() as pins:
        await cache.dataset(sys.argv[4], sys.argv[5], Path(sys.argv[6]), pins, whole=("train",))

asyncio.run(main())
"""


def begun(folder: Path) -> bool:
    """Whether a download is on its way, with some bytes here."""
    for path in folder.glob("shards/*/.*.part"):
        with suppress(FileNotFoundError):  # it has just come
            if path.stat().st_size:
                return True
    return False


def whole_shards(folder: Path) -> int:
    return sum(not path.suffix and path.name[0] != "." for path in folder.glob("shards/*/*"))


async def test_kill_during_downloads_leaves_no_partial_files(
    objects: ObjectStore, s3_settings: Settings, s3_server: S3Server, tmp_path: Path
) -> None:
    stored = await store(objects, s3_settings.bucket_datasets, shards=6, sample_bytes=20_000)
    folder, view = tmp_path / "cache", tmp_path / "view"

    async def killed_when(condition: Callable[[], bool]) -> None:
        secret = s3_settings.s3_secret_key.get_secret_value()  # type: ignore[union-attr]
        arguments = [through.model_dump_json(), secret, str(folder), stored.manifest_uri, stored.dataset_id, str(view)]
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", DOWNLOADS, *arguments)
        try:
            await until(condition, "the moment to kill it", timeout_s=90)
        finally:
            process.kill()
            await process.wait()

    async with FaultProxy(s3_server.port, bytes_per_s=1_000_000) as proxy:
        through = s3_settings.model_copy(update={"s3_endpoint": proxy.endpoint})
        await killed_when(lambda: begun(folder))
        await killed_when(lambda: whole_shards(folder) >= 2 and begun(folder))
        before = proxy.egress_bytes
        proxy.bytes_per_s = None
        async with node(through, folder) as (cache, shards), cache.pin_files() as pins:
            assert not begun(folder)
            view = await begin(cache, stored, view, pins, whole=("train",))
            assert here(view, stored) == set(range(6))
            assert shards.files.size_bytes == stored.size_bytes
        # What was whole, two shards of six, is not fetched again. (What was on its way to the killed one counts, too.)
        assert proxy.egress_bytes - before < 5 * stored.size_bytes // 6
