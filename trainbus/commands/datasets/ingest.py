"""``trainbus datasets ingest``."""

from __future__ import annotations

import asyncio
import json
import time
import tomllib
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from contracts import subjects, topology
from contracts.base import short_hash
from contracts.datasets import dataset_uri
from contracts.events.dataset import DatasetIngested, DatasetIngestFailed, DatasetProgress, DatasetShardFailed
from contracts.events.train import IngestRequested
from services.kit.store.objects import ObjectStore
from services.kit.store.uris import split_uri
from trainbus.client.address import StackAddress
from trainbus.client.connection import SOURCE, Connection, connect
from trainbus.client.datasets import find_dataset, read_history
from trainbus.client.errors import TrainbusError, UsageError, invalid_request
from trainbus.client.object_store import open_object_store
from trainbus.client.submission import resolve_source
from trainbus.commands import render
from trainbus.datasets.history import History

POLL_S = 0.5


async def ingest_dataset(
    address: StackAddress,
    source: str | None,
    *,
    given: dict[str, Any],
    settings: Path | None,
    again: str | None,
    follow: bool,
    as_json: bool,
) -> None:
    """Request an ingestion; with ``follow`` stay until the dataset is made, and fail if it is not."""
    given = {"source": resolve_source(source) if source is not None else None, **given}
    async with connect(address) as connection:
        data = await _settings(connection, address, settings, again)
        data |= {name: value for name, value in given.items() if value is not None}
        ingestion_id = await request_ingestion(connection, _request(data))
        if not follow:
            print(render.as_json({"ingestion_id": ingestion_id}) if as_json else ingestion_id)
            return
        async with open_object_store(address) as objects:

            async def find_dataset_id(event: DatasetIngested) -> str | None:
                return await _find_dataset_id(connection, objects, event)

            dataset_id = await follow_ingestion(connection, ingestion_id, find_dataset_id, quiet=as_json)
    print(render.as_json({"ingestion_id": ingestion_id, "dataset_id": dataset_id}) if as_json else dataset_id)


async def request_ingestion(connection: Connection, request: IngestRequested) -> str:
    """Publish a request and return the id of its ingestion."""
    event_id = uuid.uuid4().hex
    await connection.publish_request(request, event_id)
    return "i" + short_hash(SOURCE, event_id)


async def _settings(
    connection: Connection, address: StackAddress, path: Path | None, again: str | None
) -> dict[str, Any]:
    """Return the ``data`` of a settings file, or of the newest ingestion of a dataset."""
    if again is not None:
        known = find_dataset(await read_history(connection), again, address)
        found = [each.found for each in known.ingestions if each.found is not None]
        if not found:
            raise UsageError(f"the log no longer says how dataset {known.dataset_id[:12]} was made: give its source")
        return found[-1].data.model_dump(mode="json", exclude_defaults=True)
    if path is None:
        return {}
    try:
        read = (tomllib if path.suffix == ".toml" else json).loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"--settings {path}: {error}") from error
    if not isinstance(read, dict):
        raise UsageError(f"--settings {path}: it must hold an object, the request's 'data'")
    # A request as it is published works too.
    return dict(read["data"]) if isinstance(read.get("data"), dict) else read


def _request(data: dict[str, Any]) -> IngestRequested:
    if "source" not in data:
        raise UsageError("say what to ingest: `trainbus datasets ingest s3://lake/digits --format images`")
    if "format" not in data:
        raise UsageError("say what it is: --format images, jsonl, parquet, text, tokens, binary, webdataset or mds")
    try:
        return IngestRequested.model_validate({"data": data})
    except ValidationError as error:
        raise invalid_request(error) from error


# -- following -------------------------------------------------------------------


async def follow_ingestion(
    connection: Connection,
    ingestion_id: str,
    find_dataset_id: Callable[[DatasetIngested], Awaitable[str | None]],
    *,
    quiet: bool,
) -> str:
    """Show the progress of an ingestion until ``find_dataset_id`` returns the dataset's id, and return it.

    Raises:
        TrainbusError: the ingestion or the sharding failed.
    """
    console = render.console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    disable = quiet or not console.is_terminal
    ingested = False
    with Progress(*columns, console=console, disable=disable, transient=True) as bar:
        task = bar.add_task("waiting", total=None)
        while True:
            fact = await connection.read_last(topology.FACTS, subjects.fact("dataset", ingestion_id, subjects.WILDCARD))
            if fact is not None and isinstance(fact.event, DatasetIngestFailed | DatasetShardFailed):
                raise TrainbusError(f"{ingestion_id} failed: {fact.event.reason}")
            if fact is not None and isinstance(fact.event, DatasetIngested):
                if not ingested and not quiet:
                    _print_ingested(fact.event)
                ingested = True
                if (dataset_id := await find_dataset_id(fact.event)) is not None:
                    return dataset_id
            await _update_bar(connection, bar, task, ingestion_id)
            await asyncio.sleep(POLL_S)


async def _find_dataset_id(connection: Connection, objects: ObjectStore, event: DatasetIngested) -> str | None:
    """Return the dataset's id once its manifest is stored: sharding publishes nothing for the same input again."""
    facts = await connection.read(
        *(subjects.fact("dataset", subjects.WILDCARD, name) for name in ("ingested", "sharded"))
    )
    made = History((each.envelope.time, each.event) for each in facts).ingestions[event.ingestion_id]
    if made.dataset_id is None:
        return None
    bucket = split_uri(event.index_uri)[0]
    return made.dataset_id if await objects.exists(dataset_uri(bucket, made.dataset_id)) else None


async def _update_bar(connection: Connection, bar: Progress, task: TaskID, ingestion_id: str) -> None:
    last = await connection.read_last(topology.PROGRESS, subjects.dataset_progress(ingestion_id))
    if last is not None and isinstance(event := last.event, DatasetProgress) and time.time() - event.time < 60:
        bar.update(task, description=event.phase, completed=event.done, total=event.total)


def _print_ingested(event: DatasetIngested) -> None:
    bad = sum(kind.count for kind in event.quarantined)
    line = f"{event.accepted:,} records accepted"
    if event.left_out:
        line += f", {event.left_out:,} left out"
    if bad:
        codes = ", ".join(f"{kind.count:,} {kind.code}" for kind in event.quarantined)
        line += f", {bad:,} in quarantine ({codes}): {event.quarantine_uri}"
    render.console(stderr=True).print(render.escape(line), soft_wrap=True)
