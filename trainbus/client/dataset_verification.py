"""Verify datasets: read back every byte that a manifest names and compare it."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from contracts.datasets import shard_uri
from contracts.events.dataset import ShardFile
from services.kit.messages import TransientError
from services.kit.store.errors import ObjectNotFound
from trainbus.client.datasets import LoadedDataset, load_dataset
from trainbus.client.errors import TrainbusError
from trainbus.datasets.history import DatasetRecord
from trainbus.datasets.verify import find_index_mismatch

if TYPE_CHECKING:
    from services.kit.store.objects import ObjectStore

#: Shards that are read back at the same time; each is on the local disk while it is verified.
PARALLEL = 4


@dataclass(frozen=True, slots=True)
class DamagedFile:
    """A file of a dataset that differs from its manifest."""

    uri: str
    problem: str
    #: Its path in the manifest; '' for the manifest itself.
    path: str = ""


@dataclass(slots=True)
class Verification:
    """What was verified, and the damage by dataset."""

    datasets: int = 0
    shards: int = 0
    samples: int = 0
    size_bytes: int = 0
    damaged: dict[str, list[DamagedFile]] = field(default_factory=dict)


async def verify_datasets(
    objects: ObjectStore, datasets: Iterable[DatasetRecord], advance: Callable[[int, int], None]
) -> Verification:
    """Compare every manifest, shard and index with its hash, and each index with its shard.

    A shard that several datasets share is read once. ``advance`` gets (bytes read, all bytes).
    """
    found = Verification()
    users: dict[tuple[str, str, int], list[tuple[str, str]]] = {}
    shards: dict[tuple[str, str, int], tuple[str, ShardFile]] = {}
    for known in datasets:
        found.datasets += 1
        try:
            loaded = await load_dataset(objects, known)
        except TrainbusError as error:
            found.damaged[known.dataset_id] = [
                DamagedFile(known.manifest_uri, str(error).removeprefix(f"{known.manifest_uri} "))
            ]
            continue
        for path, bucket, shard in _shards(loaded, found):
            named = (shard.sha256, shard.index_sha256, shard.samples)
            users.setdefault(named, []).append((known.dataset_id, path))
            shards[named] = (bucket, shard)
    found.shards, found.size_bytes = len(shards), sum(shard.size_bytes for _, shard in shards.values())
    slots = asyncio.Semaphore(PARALLEL)
    done = 0

    async def check(named: tuple[str, str, int]) -> None:
        nonlocal done
        bucket, shard = shards[named]
        async with slots:
            damage = await _check_shard(objects, bucket, shard)
        if damage is not None:
            uri, problem = damage
            for dataset_id, path in users[named]:
                found.damaged.setdefault(dataset_id, []).append(DamagedFile(uri, problem, path))
        done += shard.size_bytes
        advance(done, found.size_bytes)

    await asyncio.gather(*(check(each) for each in shards))
    for files in found.damaged.values():
        files.sort(key=lambda each: each.path)
    return found


def _shards(loaded: LoadedDataset, found: Verification) -> Iterable[tuple[str, str, ShardFile]]:
    """Yield a dataset's shards with their paths, and add splits whose shards do not hold all their samples."""
    for name, split in loaded.manifest.splits.items():
        found.samples += split.samples
        if (held := sum(shard.samples for shard in split.shards)) != split.samples:
            problem = f"split {name!r} has {split.samples:,} samples, its shards hold {held:,}"
            found.damaged.setdefault(loaded.known.dataset_id, []).append(
                DamagedFile(loaded.known.manifest_uri, problem)
            )
        for shard in split.shards:
            yield shard.path, loaded.bucket, shard


async def _check_shard(objects: ObjectStore, bucket: str, shard: ShardFile) -> tuple[str, str] | None:
    """Return the address of a damaged shard or index and its problem, None if both are intact."""
    with tempfile.TemporaryDirectory(prefix="trainbus-verify-") as folder:
        index, archive = Path(folder) / "index", Path(folder) / "shard"
        for sha256, path, size in (
            (shard.index_sha256, index, shard.index_bytes),
            (shard.sha256, archive, shard.size_bytes),
        ):
            uri = shard_uri(bucket, sha256)
            try:
                hashed = await objects.download(uri, path)
            except ObjectNotFound:
                return uri, "is missing"
            except TransientError:
                # A store with checksums of its own does not serve rotten bytes. If it is away, this raises, too.
                await objects.head(uri)
                return uri, "cannot be read: the store finds it damaged"
            if size and path.stat().st_size != size:
                return uri, f"has {path.stat().st_size:,} bytes, the manifest says {size:,}"
            if hashed != sha256:
                return uri, f"is rotten: its SHA-256 is {hashed}"
        problem = await asyncio.to_thread(find_index_mismatch, archive, index.read_bytes(), shard.samples)
        return (shard_uri(bucket, shard.sha256), problem) if problem else None
