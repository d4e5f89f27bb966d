"""From a model's version back to where it came from: weights, run, request, code, dataset, sources; each verified."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contracts import subjects, topology
from contracts.base import run_id_for
from contracts.events.run import RunAccepted, RunPrepared
from contracts.events.train import RestoreRequested, TrainRequested
from contracts.formats import format_bytes, plural
from services.kit.store.errors import ObjectNotFound
from trainbus.client.address import StackAddress
from trainbus.client.checkpoints import StoredCheckpoint, find_rotten, load_checkpoint, read_checkpoints
from trainbus.client.connection import Connection
from trainbus.client.dataset_verification import verify_datasets
from trainbus.client.datasets import fetch_index, find_dataset, iterate_records, load_dataset, read_history
from trainbus.client.errors import TrainbusError
from trainbus.client.models import ModelVersion, find_model
from trainbus.client.object_store import open_object_store

if TYPE_CHECKING:
    from services.kit.store.objects import ObjectStore

#: Source objects that are looked up at the same time, and those that are named when they differ.
PARALLEL, MAX_NAMED = 16, 3

Advance = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class TraceLink:
    """One link of the chain: what it is, and whether it is what was recorded. None: nothing recorded to compare."""

    name: str
    what: str
    verified: bool | None
    detail: str = ""


async def trace_model(
    connection: Connection, address: StackAddress, target: str, advance: Advance
) -> AsyncIterator[TraceLink]:
    """Yield the chain of MODEL or MODEL@VERSION, link by link, every byte of it read and compared.

    ``advance`` gets (bytes read, all bytes) of the link that is verified.

    Raises:
        NotFoundError: there is no such model or version.
    """
    name, _, mark = target.partition("@")
    version = (await find_model(connection, name)).find(mark)
    yield TraceLink(
        "version",
        f"{name} version {version.version}, promoted {version.promoted_at:%Y-%m-%d %H:%M} UTC",
        None,
        version.reason,
    )
    async with open_object_store(address) as objects:
        async for link in _trace_checkpoint(connection, objects, version, advance):
            yield link
        accepted = await connection.read_last(topology.FACTS, subjects.fact("run", version.run_id, RunAccepted.fact))
        if accepted is None:
            yield TraceLink("run", version.run_id, False, "the log has no such run")
            return
        spec = accepted.event.spec
        yield TraceLink("run", f"{version.run_id} {spec.name}", None, spec.task or " ".join(spec.command or ()))
        yield await _trace_request(connection, accepted.event)
        yield await _trace_code(objects, spec.code)
        async for link in _trace_dataset(connection, address, objects, version, advance):
            yield link


async def _trace_checkpoint(
    connection: Connection, objects: ObjectStore, version: ModelVersion, advance: Advance
) -> AsyncIterator[TraceLink]:
    stored = (await read_checkpoints(connection, version.run_id)).get(version.checkpoint_uri)
    if stored is None:
        yield TraceLink("checkpoint", version.checkpoint_uri, False, "it was never committed, or is deleted")
        return
    commit = stored.commit
    try:
        loaded = await load_checkpoint(objects, stored)
    except (TrainbusError, ObjectNotFound) as error:
        yield TraceLink("checkpoint", version.checkpoint_uri, False, str(error))
        return
    recorded = commit.manifest_sha256
    detail = f"step {commit.checkpoint.step}, manifest {loaded.manifest_sha256[:16]}"
    yield TraceLink("checkpoint", version.checkpoint_uri, None if recorded is None else True, detail)
    yield await _trace_weights(objects, stored, len(loaded.files), advance)


async def _trace_weights(objects: ObjectStore, stored: StoredCheckpoint, files: int, advance: Advance) -> TraceLink:
    rotten = await find_rotten(objects, {stored.uri: stored}, advance)
    digest = f", state {stored.commit.state_digest[:16]}" if stored.commit.state_digest else ""
    what = f"{plural(files, 'file')}, {format_bytes(stored.commit.size_bytes)}{digest}"
    damaged = rotten.get(stored.uri, set())
    if damaged:
        repair = f"`trainbus checkpoints verify {stored.commit.run_id} --repair` looks for another copy"
        return TraceLink("weights", what, False, f"{plural(len(damaged), 'blob')} missing or damaged: {repair}")
    return TraceLink("weights", what, True)


async def _trace_request(connection: Connection, accepted: RunAccepted) -> TraceLink:
    """Compare the request that the bus still holds with what was accepted."""
    what = f"{accepted.request_id} from {accepted.request_source}"
    if run_id_for(accepted.request_source, accepted.request_id) != accepted.run_id:
        return TraceLink("request", what, False, "the run's id does not follow from its request")
    wanted = [event.subject_filter() for event in (TrainRequested, RestoreRequested)]
    async for batch in connection.follow(topology.REQUESTS, *wanted, until_caught_up=True):
        for stored in batch:
            if (stored.envelope.source, stored.envelope.id) != (accepted.request_source, accepted.request_id):
                continue
            if isinstance(stored.event, RestoreRequested):
                return TraceLink("request", what, True, f"a restoration of {stored.event.run_id}")
            same = stored.event.run_spec == accepted.spec
            return TraceLink("request", what, same, "" if same else "what was accepted is not what was requested")
    return TraceLink("request", what, False, "the stream REQUESTS no longer holds it")


async def _trace_code(objects: ObjectStore, code: Any) -> TraceLink:
    if code is None:
        return TraceLink("code", "none: a command of the node", None)
    dirty = " with changes that are not committed" if code.git_dirty else ""
    what = f"commit {code.git_commit}{dirty}" if code.git_commit else "a package without a commit"
    try:
        found = await objects.hash(code.uri)
    except ObjectNotFound:
        return TraceLink("code", what, False, f"{code.uri} is no longer in the store")
    detail = f"package {code.sha256[:16]}"
    return TraceLink("code", what, found == code.sha256, detail if found == code.sha256 else f"{code.uri} is damaged")


async def _trace_dataset(
    connection: Connection, address: StackAddress, objects: ObjectStore, version: ModelVersion, advance: Advance
) -> AsyncIterator[TraceLink]:
    prepared = await connection.read_last(topology.FACTS, subjects.fact("run", version.run_id, RunPrepared.fact))
    if prepared is None:
        yield TraceLink("dataset", "none: the run had no data of trainbus", None)
        return
    record = find_dataset(await read_history(connection), prepared.event.dataset_id, address)
    found = await verify_datasets(objects, [record], advance)
    damaged = found.damaged.get(record.dataset_id, [])
    what = f"{record.dataset_id}: {plural(found.samples, 'sample')} in {plural(found.shards, 'shard')}"
    problems = "; ".join(f"{each.path or each.uri} {each.problem}" for each in damaged[:MAX_NAMED])
    yield TraceLink("dataset", what, not damaged, problems)
    try:
        loaded = await load_dataset(objects, record)
        with tempfile.TemporaryDirectory(prefix="trainbus-trace-") as folder:
            path = Path(folder) / "index.jsonl"
            await fetch_index(objects, loaded, path)
            versions = {(each["uri"], each["etag"]) for each in iterate_records(path)}
    except TrainbusError as error:
        yield TraceLink("sources", record.source, False, str(error))
        return
    yield await _trace_sources(objects, loaded.manifest.source, versions)


async def _trace_sources(objects: ObjectStore, source: str, versions: set[tuple[str, str]]) -> TraceLink:
    """Compare each source object with the version that was read, by the store's own hash of it (ETag)."""
    what = f"{source}: {plural(len(versions), 'object')}"
    if not source.startswith("s3://"):
        return TraceLink("sources", what, None, "a folder of a machine: only the dataset's own copy can be verified")
    present = {(f"s3://{info.bucket}/{info.key}", info.etag) async for info in objects.list(source)}
    # Entity and feature tables may lie elsewhere.
    elsewhere = sorted(uri for uri, _ in versions - present if not uri.startswith(source))
    slots = asyncio.Semaphore(PARALLEL)

    async def read_version(uri: str) -> tuple[str, str] | None:
        async with slots:
            try:
                return uri, (await objects.head(uri)).etag
            except ObjectNotFound:
                return None

    present |= {each for each in await asyncio.gather(*map(read_version, elsewhere)) if each is not None}
    changed = sorted(uri for uri, _ in versions - present)
    if changed:
        named = ", ".join(changed[:MAX_NAMED]) + (" ..." if len(changed) > MAX_NAMED else "")
        count = plural(len(changed), "object is", "objects are")
        detail = f"{count} gone or changed since ({named}); the dataset holds what was read"
        return TraceLink("sources", what, False, detail)
    return TraceLink("sources", what, True)
