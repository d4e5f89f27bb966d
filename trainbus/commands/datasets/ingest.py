"""``trainbus datasets ingest``: ask for a dataset, and follow until it is there."""

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
from trainbus.client.address import Address
from trainbus.client.connection import SOURCE, Link, connect
from trainbus.client.datasets import find, read_history
from trainbus.client.errors import USAGE, CliError
from trainbus.client.object_store import store
from trainbus.client.source_location import data_location
from trainbus.commands import render
from trainbus.datasets.history import History

POLL_S = 0.5


async def ingest(
    address: Address,
    source: str | None,
    *,
    given: dict[str, Any],
    settings: Path | None,
    again: str | None,
    follow: bool,
    as_json: bool,
) -> None:
    """Publish the request; with ``follow`` stay until the dataset is there, and fail if none comes of it."""
    given = {"source": data_location(source) if source is not None else None, **given}
    async with connect(address) as link:
        data = await _settings(link, address, settings, again)
        data |= {name: value for name, value in given.items() if value is not None}
        ingestion_id = await ask(link, _request(data))
        if not follow:
            print(render.as_json({"ingestion_id": ingestion_id}) if as_json else ingestion_id)
            return
        async with store(address) as objects:

            async def there(event: DatasetIngested) -> str | None:
                return await _there(link, objects, event)

            dataset_id = await until(link, ingestion_id, there, quiet=as_json)
    print(render.as_json({"ingestion_id": ingestion_id, "dataset_id": dataset_id}) if as_json else dataset_id)


async def ask(link: Link, request: IngestRequested) -> str:
    """Publish a request; return the id of the ingestion that it means."""
    event_id = uuid.uuid4().hex
    await link.request(request, event_id)
    return "i" + short_hash(SOURCE, event_id)


async def _settings(link: Link, address: Address, path: Path | None, again: str | None) -> dict[str, Any]:
    """``data`` as a file gives it, or as it was asked for the last time."""
    if again is not None:
        known = find(await read_history(link), again, address)
        found = [each.found for each in known.ingestions if each.found is not None]
        if not found:
            raise CliError(
                f"the log no longer says how dataset {known.dataset_id[:12]} was made: give its source", USAGE
            )
        return found[-1].data.model_dump(mode="json", exclude_defaults=True)
    if path is None:
        return {}
    try:
        read = (tomllib if path.suffix == ".toml" else json).loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CliError(f"--settings {path}: {error}", USAGE) from error
    if not isinstance(read, dict):
        raise CliError(f"--settings {path}: it must hold an object, the request's 'data'", USAGE)
    # A request as it is published works too.
    return dict(read["data"]) if isinstance(read.get("data"), dict) else read


def _request(data: dict[str, Any]) -> IngestRequested:
    if "source" not in data:
        raise CliError("say what to ingest: `trainbus datasets ingest s3://lake/digits --format images`", USAGE)
    if "format" not in data:
        raise CliError(
            "say what it is: --format images, jsonl, parquet, text, tokens, binary, webdataset or mds", USAGE
        )
    try:
        return IngestRequested.model_validate({"data": data})
    except ValidationError as error:
        problems = "\n".join(
            f"  {'.'.join(str(part) for part in each['loc'])}: {each['msg'].removeprefix('Value error, ')}"
            for each in error.errors()
        )
        raise CliError(f"the request is not valid:\n{problems}", USAGE) from error


# -- following -------------------------------------------------------------------


async def until(
    link: Link, ingestion_id: str, there: Callable[[DatasetIngested], Awaitable[str | None]], *, quiet: bool
) -> str:
    """Show how far it is until ``there`` gives the dataset's id, and return that.

    Raises:
        CliError: it failed.
    """
    console = render.console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    disable = quiet or not console.is_terminal
    ingested = False
    with Progress(*columns, console=console, disable=disable, transient=True) as bar:
        task = bar.add_task("waiting", total=None)
        while True:
            fact = await link.last(topology.FACTS, subjects.fact("dataset", ingestion_id, subjects.WILDCARD))
            if fact is not None and isinstance(fact.event, DatasetIngestFailed | DatasetShardFailed):
                raise CliError(f"{ingestion_id} failed: {fact.event.reason}")
            if fact is not None and isinstance(fact.event, DatasetIngested):
                if not ingested and not quiet:
                    _say_ingested(fact.event)
                ingested = True
                if (dataset_id := await there(fact.event)) is not None:
                    return dataset_id
            await _show(link, bar, task, ingestion_id)
            await asyncio.sleep(POLL_S)


async def _there(link: Link, objects: ObjectStore, event: DatasetIngested) -> str | None:
    """The dataset, once its manifest is in the store: the same input again says nothing on the bus."""
    facts = await link.read(*(subjects.fact("dataset", subjects.WILDCARD, name) for name in ("ingested", "sharded")))
    made = History((each.envelope.time, each.event) for each in facts).ingestions[event.ingestion_id]
    if made.dataset_id is None:
        return None
    bucket = split_uri(event.index_uri)[0]
    return made.dataset_id if await objects.exists(dataset_uri(bucket, made.dataset_id)) else None


async def _show(link: Link, bar: Progress, task: TaskID, ingestion_id: str) -> None:
    last = await link.last(topology.PROGRESS, subjects.dataset_progress(ingestion_id))
    if last is not None and isinstance(event := last.event, DatasetProgress) and time.time() - event.time < 60:
        bar.update(task, description=event.phase, completed=event.done, total=event.total)


def _say_ingested(event: DatasetIngested) -> None:
    bad = sum(kind.count for kind in event.quarantined)
    line = f"{event.accepted:,} records accepted"
    if event.left_out:
        line += f", {event.left_out:,} left out"
    if bad:
        codes = ", ".join(f"{kind.count:,} {kind.code}" for kind in event.quarantined)
        line += f", {bad:,} in quarantine ({codes}): {event.quarantine_uri}"
    render.console(stderr=True).print(render.escape(line), soft_wrap=True)
