"""From the weights that answer back to where they came from: version, checkpoint, run, code, data; each verified."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from contracts import streams, subjects
from contracts.base import run_id_for
from contracts.events.run import RunAccepted, RunPrepared
from contracts.events.train import RestoreRequested, TrainRequested
from contracts.formats import format_bytes, plural
from contracts.manifest import artifacts_of, blobs_of_files
from trainbus.client.address import StackAddress
from trainbus.client.checkpoints import LoadedCheckpoint, StoredCheckpoint, read_checkpoints
from trainbus.client.connection import Connection, check_answer
from trainbus.client.datasets import verify_datasets
from trainbus.client.errors import NotFoundError, StackUnreachableError, TrainbusError
from trainbus.client.gateway import open_gateway
from trainbus.client.models import ModelRecord, ModelVersion, find_model
from trainbus.client.run_files import open_file_source, read_manifest
from trainbus.client.run_list import read_detail
from trainbus.client.served_version import ServedVersion, read_served_version

#: Files or objects that are named when they differ.
MAX_NAMED = 3

Advance = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class TraceLink:
    """One link of the chain: what it is, and whether it is what was recorded. None: nothing recorded to compare."""

    name: str
    what: str
    verified: bool | None
    detail: str = ""


async def trace_model(
    connection: Connection, address: StackAddress, target: str, advance: Advance, serving_url: str | None = None
) -> AsyncIterator[TraceLink]:
    """Yield the chain of MODEL, MODEL@VERSION or a RUN that was promoted, link by link, all bytes read and compared.

    Where a serving server is known, the chain begins with what it says that it has loaded. Of MODEL alone, the version
    that answers there is traced; without a server the champion is.

    Args:
        advance: gets (bytes read, all bytes) of the link that is verified.
        serving_url: of the serving server that must answer; None: the stack's, which need not serve the model.

    Raises:
        NotFoundError: there is no such model or version, or the run was not promoted.
    """
    record, mark = await _find_target(connection, target)
    version: ModelVersion | None = record.find(mark)
    if (url := serving_url or address.serving_url) is not None:
        link, version = await _trace_served(connection, record, mark, url, must_answer=serving_url is not None)
        yield link
        if version is None:
            return
    assert version is not None
    what = f"{record.model} version {version.version}, promoted {version.promoted_at:%Y-%m-%d %H:%M} UTC"
    yield TraceLink("version", what, None, version.describe_reason())
    async for link in _trace_checkpoint(connection, address, version, advance):
        yield link
    accepted = await connection.read_last(streams.FACTS, subjects.fact("run", version.run_id, RunAccepted.fact))
    if accepted is None:
        yield TraceLink("run", version.run_id, False, "the log has no such run")
        return
    spec = accepted.event.spec
    yield TraceLink("run", f"{version.run_id} {spec.name}", None, spec.task or " ".join(spec.command or ()))
    yield await _trace_request(connection, accepted.event)
    yield await _trace_code(address, version.run_id, spec.code)
    async for link in _trace_dataset(connection, version, advance):
        yield link


async def _find_target(connection: Connection, target: str) -> tuple[ModelRecord, str]:
    """Return the model, and the version as it was named or as the run became it; a model goes before a run."""
    name, _, mark = target.partition("@")
    try:
        return await find_model(connection, name), mark
    except NotFoundError as no_model:
        try:
            run = await read_detail(connection, target)
        except NotFoundError:
            raise no_model from None
    record = await find_model(connection, run["model"]) if run["model"] is not None else None
    versions = [each.version for each in record.versions if each.run_id == run["run_id"]] if record is not None else []
    if record is None or not versions:
        raise NotFoundError(f"run {run['run_id']} is no version of a model: it was not promoted")
    return record, str(versions[-1])


async def _trace_served(
    connection: Connection, record: ModelRecord, mark: str, url: str, *, must_answer: bool
) -> tuple[TraceLink, ModelVersion | None]:
    """Return what answers at a serving server, and the version to trace; None: the log does not have it."""
    version = record.find(mark)
    try:
        served = await read_served_version(url, record.model, version.version if mark else None)
    except StackUnreachableError as error:
        if must_answer:
            raise
        return TraceLink("served", url, None, str(error)), version
    if served is None:
        what = f"{record.model} version {version.version}" if mark else record.model
        return TraceLink("served", f"{url} does not serve {what}", False if must_answer else None), version
    if not mark and served.version:
        try:
            version = record.find(served.version)
        except NotFoundError as error:
            return TraceLink("served", f"{url} answers with version {served.version}", False, str(error)), None
    stored = (await read_checkpoints(connection, version.run_id)).get(version.checkpoint_uri)
    return _compare_served(f"{url} answers", served, version, stored), version


def _compare_served(
    what: str, served: ServedVersion, version: ModelVersion, stored: StoredCheckpoint | None
) -> TraceLink:
    """Compare what a serving server says that it has loaded with what the log says of the version."""
    if not served.version:
        return TraceLink("served", what, None, "the server does not say what it has loaded: it is an earlier trainbus")
    what = f"{what} with version {served.version} of run {served.run_id}, manifest {served.manifest_sha256[:16]}"
    recorded = stored.commit.manifest_sha256 if stored is not None else None
    pairs = {
        "version": (served.version, str(version.version)),
        "run": (served.run_id, version.run_id),
        "manifest": (served.manifest_sha256, recorded if recorded is not None else served.manifest_sha256),
    }
    differing = [f"{name} {ours}, the log has {logged}" for name, (ours, logged) in pairs.items() if ours != logged]
    if differing:
        return TraceLink("served", what, False, f"it says {'; '.join(differing)}")
    return TraceLink("served", what, None if recorded is None else True)


async def _trace_checkpoint(
    connection: Connection, address: StackAddress, version: ModelVersion, advance: Advance
) -> AsyncIterator[TraceLink]:
    stored = (await read_checkpoints(connection, version.run_id)).get(version.checkpoint_uri)
    if stored is None:
        yield TraceLink("checkpoint", version.checkpoint_uri, False, "it was never committed, or is deleted")
        return
    commit = stored.commit
    try:
        async with open_file_source(address) as source:
            loaded = await read_manifest(source, stored)
    except StackUnreachableError:
        raise
    except TrainbusError as error:
        problem = str(error).removeprefix(f"{version.checkpoint_uri} ")
        yield TraceLink("checkpoint", version.checkpoint_uri, False, problem)
        return
    recorded = commit.manifest_sha256
    detail = f"{commit.checkpoint.point}, manifest {loaded.manifest_sha256[:16]}"
    yield TraceLink("checkpoint", version.checkpoint_uri, None if recorded is None else True, detail)
    async for link in _trace_files(connection, loaded, advance):
        yield link


async def _trace_files(connection: Connection, loaded: LoadedCheckpoint, advance: Advance) -> AsyncIterator[TraceLink]:
    """Compare each blob with its name: those of the Task's artifacts, then all others."""
    stored = loaded.stored
    params = {"mark": stored.step, "generation": stored.commit.generation}
    path = f"/training-runs/{stored.commit.run_id}/checkpoints/verify"
    found = await connection.await_result(path, advance, params=params)
    rotten = set(found["rotten"].get(stored.uri, ()))
    damaged = [file.path for file in loaded.files if any(blob.uri in rotten for blob in blobs_of_files([file]))]
    damaged = damaged or sorted(rotten)
    repair = f"`trainbus checkpoints verify {stored.commit.run_id} --repair` looks for another copy"
    artifacts = artifacts_of(loaded.files)
    of_artifacts = {each.path for each in artifacts.values()}
    digest = f", state {stored.commit.state_digest[:16]}" if stored.commit.state_digest else ""
    weights = f"{plural(len(loaded.files), 'file')}, {format_bytes(stored.commit.size_bytes)}{digest}"
    for name, what, broken in (
        ("artifacts", ", ".join(sorted(artifacts)), [path for path in damaged if path in of_artifacts]),
        ("weights", weights, [path for path in damaged if path not in of_artifacts]),
    ):
        if what:
            problem = f"missing or damaged: {_name_some(broken)}; {repair}" if broken else ""
            yield TraceLink(name, what, not broken, problem)


async def _trace_request(connection: Connection, accepted: RunAccepted) -> TraceLink:
    """Compare the request that the bus still holds with what was accepted."""
    what = f"{accepted.request_id} from {accepted.request_source}"
    if run_id_for(accepted.request_source, accepted.request_id) != accepted.run_id:
        return TraceLink("request", what, False, "the run's id does not follow from its request")
    wanted = [event.subject_filter() for event in (TrainRequested, RestoreRequested)]
    async for batch in connection.follow(streams.REQUESTS, *wanted, until_caught_up=True):
        for stored in batch:
            if (stored.envelope.source, stored.envelope.id) != (accepted.request_source, accepted.request_id):
                continue
            if isinstance(stored.event, RestoreRequested):
                return TraceLink("request", what, True, f"a restoration of {stored.event.run_id}")
            same = stored.event.run_spec == accepted.spec
            return TraceLink("request", what, same, "" if same else "what was accepted is not what was requested")
    return TraceLink("request", what, False, "the stream REQUESTS no longer holds it")


async def _trace_code(address: StackAddress, run_id: str, code: Any) -> TraceLink:
    if code is None:
        return TraceLink("code", "none: a command of the node", None)
    dirty = " with changes that are not committed" if code.git_dirty else ""
    what = f"commit {code.git_commit}{dirty}" if code.git_commit else "a package without a commit"
    digest = hashlib.sha256()
    try:
        async with open_gateway(address) as http, http.stream("GET", f"/training-runs/{run_id}/code") as answer:
            if not answer.is_success:
                await answer.aread()
            check_answer(answer)
            async for block in answer.aiter_bytes():
                digest.update(block)
    except NotFoundError:
        return TraceLink("code", what, False, f"{code.uri} is no longer in the store")
    except StackUnreachableError:
        raise
    except TrainbusError as error:
        return TraceLink("code", what, False, str(error))
    detail = f"package {code.sha256[:16]}"
    is_same = digest.hexdigest() == code.sha256
    return TraceLink("code", what, is_same, detail if is_same else f"{code.uri} is damaged")


async def _trace_dataset(connection: Connection, version: ModelVersion, advance: Advance) -> AsyncIterator[TraceLink]:
    prepared = await connection.read_last(streams.FACTS, subjects.fact("run", version.run_id, RunPrepared.fact))
    if prepared is None:
        yield TraceLink("dataset", "none: the run had no data of trainbus", None)
        return
    dataset_id = prepared.event.dataset_id
    found = await verify_datasets(connection, [dataset_id], advance)
    damaged = found.damaged.get(dataset_id, [])
    what = f"{dataset_id}, {plural(found.samples, 'sample')} in {plural(found.shards, 'shard')}"
    problems = "; ".join(f"{each.path or each.uri} {each.problem}" for each in damaged[:MAX_NAMED])
    yield TraceLink("dataset", what, not damaged, problems)
    yield await _trace_sources(connection, dataset_id)


async def _trace_sources(connection: Connection, dataset_id: str) -> TraceLink:
    """Compare each source object with the version that was read, by the store's own hash of it (ETag)."""
    try:
        path = f"/datasets/{dataset_id}/sources/verify"
        found = await connection.await_result(path, lambda done, total: None)
    except StackUnreachableError:
        raise
    except TrainbusError as error:
        return TraceLink("sources", "what the dataset was made of", False, str(error))
    what = f"{found['source']}, {plural(found['objects'], 'object')}"
    if not found["is_compared"]:
        return TraceLink("sources", what, None, "a folder of a machine: only the dataset's own copy can be verified")
    if found["changed_count"]:
        named = _name_some(found["changed"])
        count = plural(found["changed_count"], "object is", "objects are")
        detail = f"{count} gone or changed since ({named}); the dataset holds what was read"
        return TraceLink("sources", what, False, detail)
    return TraceLink("sources", what, True, "by their ETags")


def _name_some(names: Sequence[str]) -> str:
    return ", ".join(names[:MAX_NAMED]) + (" ..." if len(names) > MAX_NAMED else "")
