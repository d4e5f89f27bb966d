"""One dataset made from a finished ingestion: always the same, in bounded space, resumed after a crash."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from contracts import shard_index
from contracts.datasets import Manifest, canonical_json, dataset_uri, ingestion_uri, link_name, pack_name, shard_uri
from contracts.events.dataset import DatasetIngested
from contracts.spec.data import DataSource
from loadtest.data.identity import kill_and_go_on
from loadtest.data.ingested import BUCKET, FolderStore, Record, digest, ingest
from services.kit.bus import PoisonMessage, TransientError
from services.kit.progress import Progress
from services.kit.store.errors import ObjectNotFound
from services.sharding import journal as journal_module
from services.sharding import pack_cache
from services.sharding.core.manifest import journal_name
from services.sharding.job import Dataset, ShardingJob

pytestmark = pytest.mark.shell

SHARD_BYTES = 2**16
IMAGES = DataSource(source="s3://lake/images", format="images", shard_bytes=SHARD_BYTES)
TEXT = DataSource(source="s3://lake/text", format="text", window_length=64, shard_bytes=SHARD_BYTES)


def images(count: int = 400) -> list[Record]:
    drawn = random.Random(5)
    return [
        Record(f"{i % 3}/k{i:05d}", drawn.randbytes(drawn.randrange(3000)), _split(i), str(i % 3)) for i in range(count)
    ]


def _split(i: int) -> str:
    return {8: "validation", 9: "test"}.get(i % 10, "train")


def made(
    root: Path, records: list[Record], data: DataSource = IMAGES, **packed: Any
) -> tuple[FolderStore, DatasetIngested]:
    store = FolderStore(root)
    return store, ingest(store, records, data, **packed)


def work(store: Any, ingested: DatasetIngested, *, workers: int = 2, **given: Any) -> Dataset:
    with tempfile.TemporaryDirectory() as folder:
        job = ShardingJob(store, Path(folder), ingested, BUCKET, workers=workers, **given)
        return asyncio.run(job.run())


def test_the_dataset_is_independent_of_listing_packing_workers_and_disk(tmp_path: Path) -> None:
    """The order of records, their location and the number of writers change neither bytes nor id."""
    records, found = images(), set[tuple[str, str]]()
    for number, (workers, groups, pack_bytes, disk_bytes) in enumerate(
        [(1, 1, 2**26, 2**30), (2, 1, 5000, 2**30), (2, 4, 5000, 20_000), (8, 16, 900, 1)]
    ):
        random.Random(number).shuffle(records)
        store, ingested = made(tmp_path / str(number), records, groups=groups, pack_bytes=pack_bytes)
        found.add((work(store, ingested, workers=workers, disk_bytes=disk_bytes).dataset_id, digest(store)))
    assert len(found) == 1


def test_the_dataset_has_the_ingested_records(tmp_path: Path) -> None:
    records = images()
    store, ingested = made(tmp_path, records)
    dataset = work(store, ingested)
    found: dict[str, dict[str, bytes]] = {"train": {}, "validation": {}, "test": {}}
    for split, files in dataset.manifest.splits.items():
        assert files.samples == sum(shard.samples for shard in files.shards)
        for number, shard in enumerate(files.shards):
            assert shard.path == f"{split}/shard-{number:05d}.tar"
            assert shard.size_bytes <= SHARD_BYTES
            with tarfile.open(store.path(shard_uri(BUCKET, shard.sha256))) as archive:
                for member in archive:
                    key, _, ext = member.name.rpartition(".")
                    assert (member.mtime, member.uid, member.gid, member.mode) == (0, 0, 0, 0o644)
                    content = archive.extractfile(member)
                    assert content is not None
                    if ext == "png":
                        found[split][key] = content.read()
                    else:
                        assert (ext, content.read()) == ("cls", key[:1].encode())
    expected = {split: {r.key: r.content for r in records if r.split == split} for split in found}
    assert found == expected


def test_text_becomes_flat_files_with_token_bytes(tmp_path: Path) -> None:
    records = [
        Record(f"t-0a1b2c3d4e5f/{i:09d}", random.Random(i).randbytes(64), _split(i), None, "bin") for i in range(3000)
    ]
    store, ingested = made(tmp_path, records, TEXT)
    manifest = work(store, ingested).manifest
    assert (manifest.format, manifest.token_bytes, manifest.splits["train"].samples) == ("text", 1, 2400)
    windows = []
    for shard in manifest.splits["train"].shards:
        content = store.path(shard_uri(BUCKET, shard.sha256)).read_bytes()
        assert len(content) == 64 * shard.samples
        windows += [content[at : at + 64] for at in range(0, len(content), 64)]
        index = shard_index.decode(store.path(shard_uri(BUCKET, shard.index_sha256)).read_bytes())
        assert index.fields == {"bin": shard_index.StridedField(0, 64, 64)}
    assert sorted(windows) == sorted(r.content for r in records if r.split == "train")


def test_tokens_larger_than_the_buffer(tmp_path: Path) -> None:
    data = DataSource(source="s3://lake/t", format="tokens", token_bytes=4, window_length=2**20, shard_bytes=2**16)
    records = [Record(f"t-0a/{i:09d}", random.Random(i).randbytes(2**22), "train", None, "bin") for i in range(2)]
    store, ingested = made(tmp_path, records, data)
    manifest = work(store, ingested).manifest
    assert manifest.token_bytes == 4
    shards = manifest.splits["train"].shards
    assert {shard.sha256 for shard in shards} == {hashlib.sha256(r.content).hexdigest() for r in records}


def test_the_manifest_has_the_statistics(tmp_path: Path) -> None:
    store, ingested = made(tmp_path, images(20))
    uri = ingestion_uri(BUCKET, ingested.fingerprint, "statistics.json")
    statistics = {"l": {"count": 5, "nulls": 0, "mean": 0.5, "std": 0.1, "min": 0.0, "max": 1.0}}
    asyncio.run(store.put(uri, canonical_json(statistics)))
    manifest = work(store, ingested.model_copy(update={"statistics_uri": uri})).manifest
    assert {name: found.model_dump() for name, found in manifest.statistics.items()} == statistics


def test_progress_is_counted_in_samples(tmp_path: Path) -> None:
    store, ingested = made(tmp_path, images())
    progress = Progress("sharding")
    work(store, ingested, progress=progress)
    assert (progress.done, progress.total, progress.found) == (400, 400, 0)
    fact = progress.fact("i1", 3, 2.0, 1e9)
    assert (fact.phase, fact.done, fact.total, fact.records_per_s, fact.eta_s) == ("uploading", 400, 400, 200.0, 0.0)
    assert Progress("sharding").fact("i1", 0, 0.0, 1e9).eta_s is None


# -- faults ---------------------------------------------------------------------------


class Killed(BaseException):
    """The process ends here."""


class Dying:
    """A store whose process dies at the n-th write, before or after it."""

    def __init__(self, store: FolderStore, at_write: int, *, after: bool) -> None:
        self._store, self._left, self._after = store, at_write, after
        self.sent: list[str] = []

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if name not in ("put", "put_file", "delete"):
            return method

        async def write(*args: Any, **kwargs: Any) -> None:
            self._left -= 1
            if self._left < 0 and not self._after:
                raise Killed
            if name == "put_file":
                self.sent.append(args[1])
            await method(*args, **kwargs)
            if self._left < 0:
                raise Killed

        return write


def test_a_job_killed_at_any_write_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dataset is the one that would have been; what is finished is not made again; no manifest names a gap."""
    monkeypatch.setattr("services.sharding.job.Journal", lambda objects, uri: journal_module.Journal(objects, uri, 0))
    records = images(150)
    store, ingested = made(tmp_path / "whole", records)
    whole = work(store, ingested).dataset_id, digest(store)
    journal = ingestion_uri(BUCKET, ingested.fingerprint, journal_name(ingested.fingerprint, SHARD_BYTES))
    for at_write in range(1000):
        store, ingested = made(tmp_path / str(at_write), records)
        dying = Dying(store, at_write, after=at_write % 2 == 1)
        try:
            work(dying, ingested, workers=1)
        except Killed:
            _nothing_half_visible(store)
        else:
            break
        second = Dying(store, 10**6, after=False)
        finished = len(set(dying.sent))
        assert (work(second, ingested).dataset_id, digest(store)) == whole
        assert len(second.sent) + finished >= len(set(second.sent) | set(dying.sent))
        assert not set(second.sent) & set(dying.sent[:-1])
        assert not store.path(journal).exists()
    assert at_write > 15


def _nothing_half_visible(store: FolderStore) -> None:
    for path in (store.root / BUCKET / "datasets").rglob("manifest.json"):
        manifest = Manifest.model_validate_json(path.read_bytes())
        for split in manifest.splits.values():
            for shard in split.shards:
                assert store.path(shard_uri(BUCKET, shard.sha256)).stat().st_size == shard.size_bytes


def test_a_killed_process_is_resumed(tmp_path: Path) -> None:
    """SIGKILL from outside, whenever it comes."""
    store, ingested = made(tmp_path / "whole", images())
    whole = work(store, ingested).dataset_id, digest(store)
    for trial in range(2):
        root = tmp_path / str(trial)
        store, ingested = made(root, images())
        (root / "ingested.json").write_text(ingested.model_dump_json())
        dataset_id = kill_and_go_on(root, after_shards=3 * trial + 1, workers=2)
        assert (dataset_id, digest(store)) == whole


Small = tuple[FolderStore, DatasetIngested, Callable[[int], Path]]


@pytest.fixture
def small(tmp_path: Path) -> Small:
    store, ingested = made(tmp_path, images(100), pack_bytes=20_000)
    return store, ingested, lambda pack: store.path(ingestion_uri(BUCKET, ingested.fingerprint, pack_name(pack)))


def test_a_damaged_pack_fails_the_dataset_and_is_named(small: Small) -> None:
    store, ingested, pack = small
    content = bytearray(pack(1).read_bytes())
    content[777] ^= 1
    pack(1).write_bytes(content)
    with pytest.raises(PoisonMessage, match=r"pack-00001 is damaged .*remove .*done\.json"):
        work(store, ingested)
    assert not (store.root / BUCKET / "datasets").exists()


def test_a_damaged_copy_of_a_pack_is_fetched_again(small: Small) -> None:
    store, ingested, _ = small
    reads = []

    class Flipping(FolderStore):
        async def read_into(self, uri: str, path: Path, *args: Any) -> str:
            reads.append(uri)
            content = bytearray(self.path(uri).read_bytes())
            if len(reads) == 1:
                content[100] ^= 1
            path.write_bytes(content)
            return ""

    expected = work(FolderStore(store.root), ingested)
    store.path(ingestion_uri(BUCKET, ingested.fingerprint, link_name(ingested.fingerprint, SHARD_BYTES))).unlink()
    assert work(Flipping(store.root), ingested).dataset_id == expected.dataset_id
    assert len(reads) > len(set(reads))


def test_collected_packs_make_the_next_request_read_the_source(small: Small) -> None:
    store, ingested, pack = small
    pack(0).unlink()
    done = store.path(ingestion_uri(BUCKET, ingested.fingerprint, "done.json"))
    done.write_text("{}")
    with pytest.raises(PoisonMessage, match="send the request again"):
        work(store, ingested)
    assert not done.exists()


def test_a_shard_that_is_removed_before_the_manifest_is_made_again(small: Small) -> None:
    store, ingested, _ = small

    class Losing(FolderStore):
        lost = False

        async def put_file(self, path: Path, uri: str, **given: Any) -> None:
            await super().put_file(path, uri, **given)
            if not Losing.lost:
                Losing.lost = True
                self.path(uri).unlink()

    with pytest.raises(TransientError, match="removed from the store meanwhile"):
        work(Losing(store.root), ingested)
    assert not (store.root / BUCKET / "datasets").exists()
    dataset = work(Losing(store.root), ingested)
    assert store.path(dataset_uri(BUCKET, dataset.dataset_id)).exists()
    _nothing_half_visible(store)


def test_a_reused_old_shard_is_rewritten(small: Small) -> None:
    store, ingested, _ = small
    dataset = work(store, ingested)
    link = ingestion_uri(BUCKET, ingested.fingerprint, link_name(ingested.fingerprint, SHARD_BYTES))
    store.path(link).unlink()
    store.path(dataset_uri(BUCKET, dataset.dataset_id)).unlink()
    for path in (store.root / BUCKET / "shards").rglob("*"):
        os.utime(path, (1e9, 1e9))
    dying = Dying(store, 10**6, after=False)
    assert work(dying, ingested).dataset_id == dataset.dataset_id
    assert dying.sent == [], "what is in the store is not sent again"
    assert all(p.stat().st_mtime > 1.5e9 for p in (store.root / BUCKET / "shards").rglob("*") if p.is_file())


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"cut")])
def test_an_incomplete_dataset_is_made_again(small: Small, damage: Callable[[Path], object]) -> None:
    store, ingested, _ = small
    dataset, before = work(store, ingested), digest(store)
    assert work(store, ingested).reused
    for shard in dataset.manifest.splits["train"].shards[:1]:
        for sha256 in (shard.sha256, shard.index_sha256):
            path = store.path(shard_uri(BUCKET, sha256))
            content = path.read_bytes()
            path.unlink()
            path.write_bytes(content)
            damage(path)
    again = work(store, ingested)
    assert (again.reused, again.dataset_id, digest(store)) == (False, dataset.dataset_id, before)


@pytest.mark.parametrize("nonsense", [b"", b"[]", b"{", b'{"train/shard-00000": {"path": 1}}', b"\xff"])
def test_an_invalid_journal_is_replaced(small: Small, nonsense: bytes) -> None:
    store, ingested, _ = small
    name = journal_name(ingested.fingerprint, SHARD_BYTES)
    asyncio.run(store.put(ingestion_uri(BUCKET, ingested.fingerprint, name), nonsense))
    assert work(store, ingested).manifest.splits["train"].samples == 80


def test_a_link_to_a_damaged_manifest_is_refused(small: Small) -> None:
    store, ingested, _ = small
    dataset = work(store, ingested)
    path = store.path(dataset.manifest_uri)
    path.write_bytes(path.read_bytes().replace(b"k", b"l", 1))
    with pytest.raises(PoisonMessage, match="damaged"):
        work(store, ingested)
    path.unlink()
    assert work(store, ingested).dataset_id == dataset.dataset_id


def test_disk_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs beyond the bound go as soon as no shard needs them; shards go once they are in the store."""
    held: list[int] = []
    fetch = pack_cache.PackCache._fetch

    async def watching(self: pack_cache.PackCache, number: int) -> Path:
        path = await fetch(self, number)
        held.append(sum(path.stat().st_size for path in self._folder.iterdir()))
        return path

    monkeypatch.setattr(pack_cache.PackCache, "_fetch", watching)
    store, ingested = made(tmp_path, images(2000), groups=32, pack_bytes=50_000)
    total = sum(p.stat().st_size for p in (store.root / BUCKET / "ingestions").rglob("pack-*"))
    work(store, ingested, workers=1, disk_bytes=200_000)
    assert max(held) < 700_000 < total / 4
    packs_there = len(list((store.root / BUCKET / "ingestions").rglob("pack-*")))
    assert len(held) < 2 * packs_there, "each pack is fetched about once"


async def test_a_missing_pack_is_reported(tmp_path: Path) -> None:
    there = pack_cache.PackCache(FolderStore(tmp_path), tmp_path / "packs", ingestion_uri(BUCKET, "0" * 64), 10)  # type: ignore[arg-type]
    await there.list_packs()
    with pytest.raises(ObjectNotFound, match="pack-00003"):
        async with there.pin([3]):
            pass
