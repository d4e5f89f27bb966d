"""Ingestions: request one, follow it until its dataset is made, repair a dataset by another."""

from __future__ import annotations

import asyncio
import json
import time
import tomllib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from contracts import streams, subjects
from contracts.events.dataset import DatasetIngested, DatasetIngestFailed, DatasetProgress, DatasetShardFailed
from contracts.events.train import IngestRequested
from contracts.verification import DamagedFile
from trainbus.client.connection import Connection
from trainbus.client.errors import TrainbusError, UsageError, invalid_request
from trainbus.datasets.history import DatasetRecord

POLL_S = 0.5
#: Seconds after which progress is out of date: the ingestion stopped without a fact about its end.
MAX_PROGRESS_AGE_S = 60.0

FindDataset = Callable[[DatasetIngested], Awaitable[str | None]]
#: Gets the ingestion's result once, and its progress again and again.
Report = Callable[[DatasetIngested | DatasetProgress], None]


def read_settings(path: Path) -> dict[str, Any]:
    """Return the ``data`` of a settings file.

    Raises:
        UsageError: it cannot be read, or holds no object.
    """
    try:
        read = (tomllib if path.suffix == ".toml" else json).loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"--settings {path}: {error}") from error
    if not isinstance(read, dict):
        raise UsageError(f"--settings {path}: it must hold an object, the request's 'data'")
    # A request as it is published works too.
    return dict(read["data"]) if isinstance(read.get("data"), dict) else read


def settings_of(known: DatasetRecord) -> dict[str, Any]:
    """Return the ``data`` of a dataset's newest ingestion.

    Raises:
        UsageError: the log no longer has it.
    """
    found = [each.found for each in known.ingestions if each.found is not None]
    if not found:
        raise UsageError(f"the log no longer says how dataset {known.dataset_id[:12]} was made: give its source")
    return found[-1].data.model_dump(mode="json", exclude_defaults=True)


def build_ingestion(data: dict[str, Any]) -> IngestRequested:
    """Return the request with this ``data``.

    Raises:
        UsageError: it is not valid.
    """
    if "source" not in data:
        raise UsageError("say what to ingest: `trainbus datasets ingest s3://lake/digits --format images`")
    try:
        return IngestRequested.model_validate({"data": data})
    except ValidationError as error:
        raise invalid_request(error, {"data": data}, IngestRequested) from error


async def request_ingestion(connection: Connection, request: IngestRequested) -> str:
    """Publish a request and return the id of its ingestion."""
    published = await connection.publish_request(request)
    assert published.ingestion_id is not None
    return published.ingestion_id


async def read_progress(connection: Connection, ingestion_id: str = subjects.WILDCARD) -> list[DatasetProgress]:
    """Return the newest progress of one ingestion or of each, without what is out of date."""
    messages = await connection.read(subjects.dataset_progress(ingestion_id), stream=streams.PROGRESS)
    newest: dict[str, DatasetProgress] = {each.event.ingestion_id: each.event for each in messages}
    return [event for event in newest.values() if time.time() - event.time < MAX_PROGRESS_AGE_S]


async def follow_ingestion(
    connection: Connection, ingestion_id: str, find_dataset_id: FindDataset, report: Report
) -> str:
    """Follow an ingestion until ``find_dataset_id`` returns the dataset's id, and return it.

    Raises:
        TrainbusError: the ingestion or the sharding failed.
    """
    ingested = False
    while True:
        fact = await connection.read_last(streams.FACTS, subjects.fact("dataset", ingestion_id, subjects.WILDCARD))
        match fact.event if fact is not None else None:
            case DatasetIngestFailed(reason=reason) | DatasetShardFailed(reason=reason):
                raise TrainbusError(f"{ingestion_id} failed: {reason}")
            case DatasetIngested() as event:
                if not ingested:
                    report(event)
                ingested = True
                if (dataset_id := await find_dataset_id(event)) is not None:
                    return dataset_id
        for progress in await read_progress(connection, ingestion_id):
            report(progress)
        await asyncio.sleep(POLL_S)


async def find_made_dataset(connection: Connection, event: DatasetIngested) -> str | None:
    """Return the dataset's id once it is stored: sharding publishes nothing for the same input again."""
    found = await connection.get(f"/ingestions/{event.ingestion_id}")
    return None if found["dataset_id"] is None else str(found["dataset_id"])


async def repair_dataset(
    connection: Connection, known: DatasetRecord, files: Sequence[DamagedFile], report: Report
) -> None:
    """Have the gateway delete the damaged files, and sharding write them again.

    Raises:
        TrainbusError: the source has changed.
    """
    ingested = next((each.found for each in reversed(known.ingestions) if each.found is not None), None)
    if ingested is None:
        raise TrainbusError(
            f"the log no longer says how dataset {known.dataset_id[:12]} was made: ingest its source again"
        )

    async def find_dataset_id(event: DatasetIngested) -> str | None:
        if event.fingerprint != ingested.fingerprint:
            raise TrainbusError(
                f"{ingested.data.source} is no longer what dataset {known.dataset_id[:12]} was made of: what it holds "
                "now becomes another dataset. Put it back as it was and repair again, or train on the new one"
            )
        return await find_made_dataset(connection, event)

    body = {"ingestion_id": ingested.ingestion_id, "files": [each.path for each in files]}
    path = f"/datasets/{known.dataset_id}/repair"
    repaired = await connection.await_result(path, lambda done, total: None, json=body)
    await follow_ingestion(connection, repaired["ingestion_id"], find_dataset_id, report)
