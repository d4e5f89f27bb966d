"""``trainbus datasets verify``."""

from __future__ import annotations

import sys

from contracts.events.dataset import DatasetIngested
from contracts.events.train import IngestRequested
from services.kit.store.objects import ObjectStore
from services.sharding.core.manifest import link_name
from trainbus.client import dataset_verification
from trainbus.client.address import StackAddress
from trainbus.client.connection import Connection, connect
from trainbus.client.dataset_verification import DamagedFile, Verification
from trainbus.client.datasets import find_dataset, read_history
from trainbus.client.errors import TrainbusError
from trainbus.client.object_store import open_object_store
from trainbus.commands import render
from trainbus.commands.datasets.ingest import follow_ingestion, request_ingestion
from trainbus.commands.progress import byte_bar
from trainbus.datasets.history import DatasetRecord


async def verify_datasets(address: StackAddress, name: str | None, *, repair: bool, as_json: bool) -> None:
    """Read datasets back and print what is damaged; fail if anything is, with ``repair`` if anything still is."""
    async with connect(address) as connection, open_object_store(address) as objects:
        history = await read_history(connection)
        datasets = [find_dataset(history, each, address) for each in ([name] if name is not None else history.datasets)]
        found = await _verify(objects, datasets, quiet=as_json)
        if repair and found.damaged:
            _print(found, as_json=False, stderr=True)
            damaged = [known for known in datasets if known.dataset_id in found.damaged]
            for known in damaged:
                await _repair(connection, objects, known, found.damaged[known.dataset_id], quiet=as_json)
            found = await _verify(objects, damaged, quiet=as_json)
    _print(found, as_json=as_json)
    if found.damaged:
        raise TrainbusError(f"{len(found.damaged)} of {found.datasets} datasets damaged" + (
            "" if repair else "; --repair makes the damaged files again, from what was ingested or from the source"
        ))  # fmt: skip


async def _verify(objects: ObjectStore, datasets: list[DatasetRecord], *, quiet: bool) -> Verification:
    with byte_bar("reading back", quiet=quiet) as advance:
        return await dataset_verification.verify_datasets(objects, datasets, advance)


def _print(found: Verification, *, as_json: bool, stderr: bool = False) -> None:
    stream = sys.stderr if stderr else sys.stdout
    if as_json:
        print(render.as_json(found), file=stream)
        return
    for dataset_id, files in found.damaged.items():
        print(f"dataset {dataset_id}", file=stream)
        for each in files:
            print(f"  {each.path or 'manifest.json'}: {each.problem}\n    {each.uri}", file=stream)
    if not found.damaged:
        print(
            f"{_datasets(found.datasets)} whole: {found.samples:,} samples in {found.shards:,} shards, "
            f"{render.size(found.size_bytes)}, every byte verified",
            file=stream,
        )


def _datasets(count: int) -> str:
    return "1 dataset is" if count == 1 else f"{count} datasets are"


async def _repair(
    connection: Connection, objects: ObjectStore, known: DatasetRecord, files: list[DamagedFile], *, quiet: bool
) -> None:
    """Delete the damaged files and have sharding write them again.

    Raises:
        TrainbusError: the source has changed.
    """
    ingested = next((each.found for each in reversed(known.ingestions) if each.found is not None), None)
    if ingested is None:
        raise TrainbusError(
            f"the log no longer says how dataset {known.dataset_id[:12]} was made: ingest its source again"
        )
    # Without this link sharding checks every shard instead of trusting that it exists.
    name = link_name(ingested.fingerprint, ingested.data.shard_bytes)
    link = f"{ingested.index_uri.rpartition('/')[0]}/{name}"
    for uri in [link, *(each.uri for each in files)]:
        await objects.delete(uri)

    async def find_dataset_id(event: DatasetIngested) -> str | None:
        if event.fingerprint != ingested.fingerprint:
            raise TrainbusError(
                f"{ingested.data.source} is no longer what dataset {known.dataset_id[:12]} was made of: what it holds "
                "now becomes another dataset. Put it back as it was and repair again, or train on the new one"
            )
        return known.dataset_id if await objects.exists(link) else None

    ingestion_id = await request_ingestion(connection, IngestRequested(data=ingested.data))
    await follow_ingestion(connection, ingestion_id, find_dataset_id, quiet=quiet)
