"""A dataset of random bytes in a store, and a node's cache that reads it: for measurements and tests of the cache."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import structlog

from contracts import shard_index
from contracts.datasets import Manifest, SplitFiles, dataset_uri, shard_uri
from contracts.events.dataset import ShardFile
from contracts.spec.data import Split
from services.kit.settings import Settings
from services.kit.store.objects import ObjectStore
from services.kit.store.ranged_download import RangedDownloader
from services.worker.cache.file_cache import FileCache
from services.worker.cache.node_cache import SHARDS_FOLDER, NodeCache
from services.worker.cache.shard_cache import ShardCache
from services.worker.cache.shard_files import ShardFiles

ZERO = "0" * 64


@dataclass(frozen=True, slots=True)
class Stored:
    """A dataset in a store, and the bytes of its shards by path."""

    bucket: str
    dataset_id: str
    manifest: Manifest
    contents: dict[str, bytes]

    @property
    def manifest_uri(self) -> str:
        return dataset_uri(self.bucket, self.dataset_id)

    def shards(self, split: str = "train") -> tuple[ShardFile, ...]:
        return self.manifest.splits[split].shards

    @property
    def row_count(self) -> int:
        return self.manifest.splits["train"].samples

    @property
    def size_bytes(self) -> int:
        return sum(shard.size_bytes + shard.index_bytes for shard in self.shards())


async def store(
    objects: ObjectStore,
    bucket: str,
    *,
    shards: int = 4,
    samples: int = 8,
    sample_bytes: int = 1000,
    validation: int = 0,
    seed: int = 0,
) -> Stored:
    """Write a dataset of flat shards: samples of one size, one after the other."""
    contents: dict[str, bytes] = {}
    source = random.Random(seed)

    async def one(split: str, number: int) -> ShardFile:
        content = source.randbytes(samples * sample_bytes)
        keys = [f"{split}{number}/{row}" for row in range(samples)]
        places = [row * sample_bytes for row in range(samples)], [sample_bytes] * samples
        index = shard_index.encode(keys, {"bin": places})
        path = f"{split}/shard-{number:05d}.bin"
        shard = ShardFile(
            path=path,
            sha256=hashlib.sha256(content).hexdigest(),
            size_bytes=len(content),
            samples=samples,
            index_path=f"{path}.idx",
            index_sha256=hashlib.sha256(index).hexdigest(),
            index_bytes=len(index),
        )
        contents[shard.path], contents[shard.index_path] = content, index
        await objects.put(shard_uri(bucket, shard.sha256), content)
        await objects.put(shard_uri(bucket, shard.index_sha256), index)
        return shard

    splits: dict[str, SplitFiles] = {}
    for split, count in (("train", shards), ("validation", validation), ("test", 0)):
        files = [await one(split, number) for number in range(count)]
        splits[split] = SplitFiles(samples=count * samples, shards=tuple(files))
    manifest = Manifest(
        format="binary",
        token_bytes=1,
        source="made",
        fingerprint=ZERO,
        split=Split(),
        split_config_hash=ZERO,
        splits=splits,
    )
    content = manifest.to_bytes()
    stored = Stored(bucket, hashlib.sha256(content).hexdigest(), manifest, contents)
    await objects.put(stored.manifest_uri, content)
    return stored


def be_quiet() -> None:
    """Leave out what the cache says of each fault: here there are a thousand."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


@asynccontextmanager
async def node(
    settings: Settings,
    folder: Path,
    *,
    max_bytes: int = 2**30,
    range_bytes: int = 2**20,
    stall_s: float = 2.0,
    patience_s: float = 60.0,
    warm: Path | None = None,
    objects: ObjectStore | None = None,
) -> AsyncIterator[tuple[NodeCache, ShardCache]]:
    """One life of a node's cache in a folder."""
    made = nullcontext(objects) if objects is not None else ObjectStore(settings)
    async with made as objects:
        downloader = RangedDownloader(objects.reader, range_bytes=range_bytes, stall_s=stall_s, patience_s=patience_s)
        files = await asyncio.to_thread(ShardFiles, folder / SHARDS_FOLDER, objects, downloader, warm)
        others = FileCache(folder, objects, excluded=(folder / SHARDS_FOLDER,))
        async with ShardCache(files, max_bytes, other_files=others) as shards:
            yield NodeCache(others, objects, max_bytes, shards), shards
