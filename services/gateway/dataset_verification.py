"""Verify datasets: read back every byte that a manifest names and compare it."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from fastapi import HTTPException

from contracts.datasets import Manifest, shard_uri
from contracts.disk_space import DISK_FULL
from contracts.events.dataset import ShardFile
from contracts.verification import DamagedFile, DatasetVerification
from services.gateway.index_check import find_index_mismatch
from services.gateway.long_answer import Advance
from services.gateway.stored_dataset import StoredDataset
from services.kit.concurrency import gather_limited, run_in_thread
from services.kit.messages import TransientError
from services.kit.store.errors import ObjectNotFound
from services.kit.store.objects import ObjectStore

#: Shards that are read back at the same time; each is on the local disk while it is verified.
PARALLEL = 4
#: Errors that come from this machine's disk, never from the store: what is intact must not be taken for damaged.
LOCAL_ERRORS = (*DISK_FULL, errno.EROFS, errno.EACCES)


async def verify_datasets(
    objects: ObjectStore,
    datasets: Iterable[StoredDataset],
    scratch: Path,
    advance: Advance,
    paths: Collection[str] = (),
) -> DatasetVerification:
    """Compare every manifest, shard and index with its hash, and each index with its shard.

    A shard that several datasets share is read once. ``advance`` gets (bytes read, all bytes).

    Args:
        scratch: folder for the shards in work.
        paths: only the shards with these paths; all if none is given.
    """
    found = DatasetVerification()
    users: dict[tuple[str, str, int], list[tuple[str, str]]] = {}
    shards: dict[tuple[str, str, int], tuple[str, ShardFile]] = {}
    for stored in datasets:
        found.datasets += 1
        try:
            manifest = stored.read(await objects.get_or_find_damage(stored.manifest_uri))
        except (ObjectNotFound, ValueError) as error:
            text = str(error).removeprefix(f"{stored.manifest_uri} ")
            problem = "is missing" if isinstance(error, ObjectNotFound) else text
            found.damaged[stored.dataset_id] = [DamagedFile(uri=stored.manifest_uri, problem=problem)]
            continue
        for shard in _list_shards(stored, manifest, found):
            if paths and shard.path not in paths:
                continue
            named = (shard.sha256, shard.index_sha256, shard.samples)
            users.setdefault(named, []).append((stored.dataset_id, shard.path))
            shards[named] = (stored.bucket, shard)
    found.shards, found.size_bytes = len(shards), sum(shard.size_bytes for _, shard in shards.values())
    done = 0

    async def check(named: tuple[str, str, int]) -> None:
        nonlocal done
        bucket, shard = shards[named]
        damage = await _check_shard(objects, bucket, shard, scratch)
        if damage is not None:
            uri, problem = damage
            for dataset_id, path in users[named]:
                damaged = DamagedFile(uri=uri, problem=problem, path=path)
                found.damaged.setdefault(dataset_id, []).append(damaged)
        done += shard.size_bytes
        advance(done, found.size_bytes)

    await gather_limited((check(each) for each in shards), limit=PARALLEL)
    for files in found.damaged.values():
        files.sort(key=lambda each: each.path)
    return found


def _list_shards(stored: StoredDataset, manifest: Manifest, found: DatasetVerification) -> Iterator[ShardFile]:
    """Yield a dataset's shards, and add splits whose shards do not hold all their samples."""
    for name, split in manifest.splits.items():
        found.samples += split.samples
        if (held := sum(shard.samples for shard in split.shards)) != split.samples:
            problem = f"split {name!r} has {split.samples:,} samples, its shards hold {held:,}"
            damaged = DamagedFile(uri=stored.manifest_uri, problem=problem)
            found.damaged.setdefault(stored.dataset_id, []).append(damaged)
        yield from split.shards


async def _check_shard(objects: ObjectStore, bucket: str, shard: ShardFile, scratch: Path) -> tuple[str, str] | None:
    """Return the address of a damaged shard or index and its problem, None if both are intact."""
    with tempfile.TemporaryDirectory(prefix="verify.", dir=scratch) as folder:
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
            except TransientError as error:
                if getattr(error.__cause__, "errno", None) in LOCAL_ERRORS:
                    raise HTTPException(507, f"the gateway cannot verify: {error}") from error
                # A store with checksums of its own does not serve rotten bytes. If it is away, this raises, too.
                await objects.head(uri)
                return uri, "cannot be read: the store finds it damaged"
            if size and path.stat().st_size != size:
                return uri, f"has {path.stat().st_size:,} bytes, the manifest says {size:,}"
            if hashed != sha256:
                return uri, f"is rotten: its SHA-256 is {hashed}"
        problem = await run_in_thread(find_index_mismatch, archive, index.read_bytes(), shard.samples)
        return (shard_uri(bucket, shard.sha256), problem) if problem else None
