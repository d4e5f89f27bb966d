"""``trainbus datasets verify``: every byte that a manifest names, read back and compared."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from contracts.datasets import shard_uri
from contracts.events.dataset import DatasetIngested, ShardFile
from contracts.events.train import IngestRequested
from services.kit.bus import TransientError
from services.kit.store.errors import ObjectNotFound
from services.kit.store.objects import ObjectStore
from services.sharding.core import plan
from trainbus.client.address import Address
from trainbus.client.connection import Link, connect
from trainbus.client.datasets import Loaded, find, load, read_history
from trainbus.client.errors import CliError
from trainbus.client.object_store import store
from trainbus.commands import render
from trainbus.commands.datasets import ingest
from trainbus.datasets.history import Known
from trainbus.datasets.verify import disagreement

#: Shards that are read back at the same time; each lies on the local disk while it is looked at.
PARALLEL = 4


@dataclass(frozen=True, slots=True)
class Wrong:
    """Something of a dataset that is not as its manifest says."""

    uri: str
    what: str
    #: What the manifest calls it; '' for the manifest itself.
    path: str = ""


@dataclass(slots=True)
class Verified:
    """What was looked at, and what is wrong, by dataset."""

    datasets: int = 0
    shards: int = 0
    samples: int = 0
    size_bytes: int = 0
    wrong: dict[str, list[Wrong]] = field(default_factory=dict)


async def verify(address: Address, name: str | None, *, repair: bool, as_json: bool) -> None:
    """Read datasets back and print what is wrong; fail if anything is, or with ``repair`` stays so."""
    async with connect(address) as link, store(address) as objects:
        history = await read_history(link)
        datasets = [find(history, each, address) for each in ([name] if name is not None else history.datasets)]
        found = await look(objects, datasets, quiet=as_json)
        if repair and found.wrong:
            _print(found, as_json=False, stderr=True)
            damaged = [known for known in datasets if known.dataset_id in found.wrong]
            for known in damaged:
                await _repair(link, objects, known, found.wrong[known.dataset_id], quiet=as_json)
            found = await look(objects, damaged, quiet=as_json)
    _print(found, as_json=as_json)
    if found.wrong:
        raise CliError(f"{len(found.wrong)} of {found.datasets} datasets damaged" + (
            "" if repair else "; --repair makes what is wrong anew, from what was ingested or from the source"
        ))  # fmt: skip


def _print(found: Verified, *, as_json: bool, stderr: bool = False) -> None:
    to = sys.stderr if stderr else sys.stdout
    if as_json:
        print(render.as_json(found), file=to)
        return
    for dataset_id, wrong in found.wrong.items():
        print(f"dataset {dataset_id}", file=to)
        for each in wrong:
            print(f"  {each.path or 'manifest.json'}: {each.what}\n    {each.uri}", file=to)
    if not found.wrong:
        print(
            f"{_datasets(found.datasets)} whole: {found.samples:,} samples in {found.shards:,} shards, "
            f"{render.size(found.size_bytes)}, each byte as its manifest says",
            file=to,
        )


def _datasets(count: int) -> str:
    return "1 dataset is" if count == 1 else f"{count} datasets are"


async def _repair(link: Link, objects: ObjectStore, known: Known, wrong: list[Wrong], *, quiet: bool) -> None:
    """Remove what is wrong and have sharding write it anew.

    Raises:
        CliError: the source is no longer what it was.
    """
    asked = next((each.found for each in reversed(known.ingestions) if each.found is not None), None)
    if asked is None:
        raise CliError(f"the log no longer says how dataset {known.dataset_id[:12]} was made: ingest its source again")
    # Without this link sharding looks at each shard instead of trusting that it is there.
    made = f"{asked.index_uri.rpartition('/')[0]}/{plan.link_name(asked.fingerprint, asked.data.shard_bytes)}"
    for uri in [made, *(each.uri for each in wrong)]:
        await objects.delete(uri)

    async def there(event: DatasetIngested) -> str | None:
        if event.fingerprint != asked.fingerprint:
            raise CliError(
                f"{asked.data.source} is no longer what dataset {known.dataset_id[:12]} was made of; what it holds now "
                "becomes another dataset. Put it back as it was and repair again, or train on the new one"
            )
        return known.dataset_id if await objects.exists(made) else None

    ingestion_id = await ingest.ask(link, IngestRequested(data=asked.data))
    await ingest.until(link, ingestion_id, there, quiet=quiet)


async def look(objects: ObjectStore, datasets: Iterable[Known], *, quiet: bool) -> Verified:
    """Compare every manifest, shard and index with its hash, and each index with its shard.

    What several datasets share is read once.
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    found = Verified()
    users: dict[tuple[str, str, int], list[tuple[str, str]]] = {}
    shards: dict[tuple[str, str, int], tuple[str, ShardFile]] = {}
    for known in datasets:
        found.datasets += 1
        try:
            loaded = await load(objects, known)
        except CliError as error:
            found.wrong[known.dataset_id] = [
                Wrong(known.manifest_uri, str(error).removeprefix(f"{known.manifest_uri} "))
            ]
            continue
        for path, bucket, shard in _shards(loaded, found):
            named = (shard.sha256, shard.index_sha256, shard.samples)
            users.setdefault(named, []).append((known.dataset_id, path))
            shards[named] = (bucket, shard)
    found.shards, found.size_bytes = len(shards), sum(shard.size_bytes for _, shard in shards.values())
    gate = asyncio.Semaphore(PARALLEL)
    columns = (TextColumn("reading back"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = render.console(stderr=True)
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("", total=found.size_bytes)

        async def one(named: tuple[str, str, int]) -> None:
            bucket, shard = shards[named]
            async with gate:
                wrong = await _look_at(objects, bucket, shard)
            for dataset_id, path in users[named] if wrong else ():
                uri, what = wrong or ("", "")
                found.wrong.setdefault(dataset_id, []).append(Wrong(uri, what, path))
            bar.advance(task, shard.size_bytes)

        await asyncio.gather(*(one(each) for each in shards))
    for wrongs in found.wrong.values():
        wrongs.sort(key=lambda each: each.path)
    return found


def _shards(loaded: Loaded, found: Verified) -> Iterable[tuple[str, str, ShardFile]]:
    """A dataset's shards with their paths; a split whose shards do not add up is noted."""
    for name, split in loaded.manifest.splits.items():
        found.samples += split.samples
        if (held := sum(shard.samples for shard in split.shards)) != split.samples:
            what = f"split {name!r} has {split.samples:,} samples, its shards hold {held:,}"
            found.wrong.setdefault(loaded.known.dataset_id, []).append(Wrong(loaded.known.manifest_uri, what))
        for shard in split.shards:
            yield shard.path, loaded.bucket, shard


async def _look_at(objects: ObjectStore, bucket: str, shard: ShardFile) -> tuple[str, str] | None:
    """Address of what is wrong with a shard or its index, and what; None: nothing."""
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
                # A store with sums of its own gives no rotten bytes out. If it is away altogether, this says so.
                await objects.head(uri)
                return uri, "cannot be read: the store finds it damaged"
            if size and path.stat().st_size != size:
                return uri, f"has {path.stat().st_size:,} bytes, the manifest says {size:,}"
            if hashed != sha256:
                return uri, f"is rotten: its SHA-256 is {hashed}"
        told = await asyncio.to_thread(disagreement, archive, index.read_bytes(), shard.samples)
        return (shard_uri(bucket, shard.sha256), told) if told else None
