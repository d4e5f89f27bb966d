"""``trainbus datasets fetch``: a dataset as a folder, for your own training loop or for tar."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path, PurePosixPath

from contracts.datasets import shard_uri
from contracts.events.dataset import ShardFile
from services.kit.concurrency import gather_limited
from services.kit.store.errors import ObjectNotFound
from services.kit.store.files import hash_file
from services.kit.store.objects import ObjectStore
from trainbus.client.address import StackAddress
from trainbus.client.connection import connect
from trainbus.client.datasets import LoadedDataset, find_dataset, load_dataset, read_history
from trainbus.client.errors import TrainbusError, UsageError
from trainbus.client.object_store import open_object_store
from trainbus.commands import render

#: Files that are fetched at the same time.
PARALLEL = 4


async def fetch_dataset(address: StackAddress, name: str, folder: Path, splits: list[str], *, as_json: bool) -> None:
    """Fetch shards and indexes and verify them; intact files stay. The manifest is written last."""
    async with connect(address) as connection, open_object_store(address) as objects:
        loaded = await load_dataset(objects, find_dataset(await read_history(connection), name, address))
        if unknown := [split for split in splits if split not in loaded.manifest.splits]:
            raise UsageError(f"there is no split {unknown[0]!r}: choose among {', '.join(loaded.manifest.splits)}")
        manifest = folder / "manifest.json"
        if manifest.exists() and manifest.read_bytes() != loaded.content:
            raise UsageError(f"{folder} holds another dataset: give a folder of its own")
        wanted = [
            file
            for split in splits or loaded.manifest.splits
            for shard in loaded.manifest.splits[split].shards
            for file in _files(shard)
        ]
        fetched = await _fetch_all(objects, loaded, folder, wanted, quiet=as_json)
        manifest.parent.mkdir(parents=True, exist_ok=True)
        partial = folder / ".manifest.json"
        partial.write_bytes(loaded.content)
        partial.replace(manifest)
    size_bytes = sum(size for _, _, size in wanted)
    if as_json:
        fetched_files = {
            "dataset_id": loaded.known.dataset_id,
            "folder": str(folder),
            "files": len(wanted),
            "fetched": fetched,
        }
        print(json.dumps({**fetched_files, "size_bytes": size_bytes}))
    else:
        kept = f" ({len(wanted) - fetched} were there)" if fetched < len(wanted) else ""
        print(f"{folder}: {len(wanted)} files, {render.size(size_bytes)}{kept}, every byte verified")


def _files(shard: ShardFile) -> list[tuple[str, str, int]]:
    """Return (path, hash, bytes) of a shard and of its index."""
    return [(shard.path, shard.sha256, shard.size_bytes), (shard.index_path, shard.index_sha256, shard.index_bytes)]


async def _fetch_all(
    objects: ObjectStore, loaded: LoadedDataset, folder: Path, wanted: list[tuple[str, str, int]], *, quiet: bool
) -> int:
    """Fetch the files that are missing or differ; return how many."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("fetching"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console, fetched = render.console(stderr=True), 0
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("", total=sum(size for _, _, size in wanted))

        async def one(name: str, sha256: str, size: int) -> None:
            nonlocal fetched
            path = folder / _check_path(name)
            if not (path.exists() and await asyncio.to_thread(hash_file, path) == sha256):
                try:
                    await objects.download(shard_uri(loaded.bucket, sha256), path, sha256=sha256)
                except (ObjectNotFound, ValueError) as error:
                    raise TrainbusError(
                        f"{name} cannot be had, {error}: `trainbus datasets verify --repair` makes it again"
                    ) from error
                fetched += 1
            bar.advance(task, size)

        await gather_limited((one(*each) for each in wanted), limit=PARALLEL)
    return fetched


def _check_path(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise TrainbusError(f"the manifest names {name!r}, which leads out of its folder")
    return path
