"""The files of runs, over HTTP from the gateway: no credentials of the object store are needed."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import httpx

from contracts.events.checkpoint import CheckpointFile
from contracts.events.run import Artifact
from contracts.spec.run import Code
from services.checkpoint.core import digests
from services.kit.kept_files import list_files, unpack_files
from services.kit.store.files import hash_file
from trainbus.client.address import StackAddress
from trainbus.client.checkpoints import LoadedCheckpoint, StoredCheckpoint, parse_manifest
from trainbus.client.connection import check_answer
from trainbus.client.errors import TrainbusError, UsageError
from trainbus.client.gateway import download, open_gateway


@dataclass(frozen=True, slots=True)
class FetchedCheckpoint:
    """A checkpoint whose files are in a local folder, each with the hash that was committed."""

    stored: StoredCheckpoint
    folder: Path
    paths: tuple[Path, ...]


class FileSource:
    """Where the files of runs are read: the gateway. Nothing that it returns or writes is verified yet."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def read_manifest(self, stored: StoredCheckpoint) -> bytes:
        """Return the bytes of a checkpoint's manifest."""
        response = await self._http.get(_path_of(stored, "manifest"))
        check_answer(response)
        return response.content

    async def read_file(self, stored: StoredCheckpoint, file: CheckpointFile) -> bytes:
        """Return a file of a checkpoint, which is known to be small."""
        response = await self._http.get(_path_of(stored, f"files/{quote(file.path)}"))
        check_answer(response)
        return response.content

    async def write_file(self, stored: StoredCheckpoint, file: CheckpointFile, target: Path) -> None:
        """Write a file of a checkpoint."""
        await download(self._http, _path_of(stored, f"files/{quote(file.path)}"), target)

    async def write_artifact(self, run_id: str, artifact: Artifact, target: Path) -> None:
        """Write an artifact of a run."""
        await download(self._http, f"/training-runs/{run_id}/artifacts/{quote(artifact.name)}", target)

    async def write_code(self, run_id: str, code: Code, target: Path) -> None:
        """Write the code package of a run."""
        await download(self._http, f"/training-runs/{run_id}/code", target)


def _path_of(stored: StoredCheckpoint, part: str) -> str:
    commit = stored.commit
    return f"/training-runs/{commit.run_id}/checkpoints/{stored.step}/{part}?generation={commit.generation}"


@asynccontextmanager
async def open_file_source(address: StackAddress) -> AsyncIterator[FileSource]:
    """Open the gateway of a stack for the files of runs.

    Raises:
        StackUnreachableError: no gateway is named, or it does not answer.
    """
    async with open_gateway(address) as http:
        yield FileSource(http)


async def fetch_checkpoint(
    address: StackAddress, stored: StoredCheckpoint, folder: Path, manifest_sha256: str | None = None
) -> FetchedCheckpoint:
    """Write a checkpoint's files into a new or empty folder and verify every hash.

    Raises:
        UsageError: the folder is not empty.
        TrainbusError: the manifest is not the one of ``manifest_sha256``, or a file is missing or differs.
    """
    check_is_empty(folder)
    async with open_file_source(address) as source:
        loaded = await read_manifest(source, stored, manifest_sha256)
        return FetchedCheckpoint(stored, folder, await fetch_files(source, loaded, folder))


def check_is_empty(folder: Path) -> None:
    """Raise UsageError unless the folder is new or empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is there and not an empty folder: name a new one")


async def read_manifest(
    source: FileSource, stored: StoredCheckpoint, manifest_sha256: str | None = None
) -> LoadedCheckpoint:
    """Return a checkpoint with its files.

    Raises:
        TrainbusError: it is not the manifest that was committed, or not the one of ``manifest_sha256``.
    """
    loaded = parse_manifest(stored, await source.read_manifest(stored))
    if manifest_sha256 not in (None, loaded.manifest_sha256):
        raise TrainbusError(
            f"refused: the manifest of {stored.uri} has SHA-256 {loaded.manifest_sha256}, not {manifest_sha256}"
        )
    return loaded


async def read_digests_of(address: StackAddress, checkpoints: Iterable[StoredCheckpoint]) -> list[dict[str, str]]:
    """Return tensor -> hash of each checkpoint, as the ranks wrote them.

    Raises:
        TrainbusError: a checkpoint has none, or cannot be read.
    """
    async with open_file_source(address) as source:
        return [await _read_digests(source, await read_manifest(source, each)) for each in checkpoints]


async def _read_digests(source: FileSource, loaded: LoadedCheckpoint) -> dict[str, str]:
    by_path = {}
    for file in loaded.files:
        if digests.DIGESTS.match(file.path):
            content = await source.read_file(loaded.stored, file)
            if hashlib.sha256(content).hexdigest() != file.sha256:
                raise TrainbusError(
                    f"{file.path!r} of {loaded.stored.uri} does not have the hash that was committed: "
                    "`trainbus checkpoints verify --repair`"
                )
            by_path[file.path] = content
    if not by_path:
        raise TrainbusError(f"{loaded.stored.uri} holds no digests: only runs of a Task write them")
    try:
        return digests.union(by_path)
    except ValueError as error:
        raise TrainbusError(f"{loaded.stored.uri}: {error}") from error


async def fetch_files(source: FileSource, loaded: LoadedCheckpoint, folder: Path) -> tuple[Path, ...]:
    """Write all files of a checkpoint below a folder, verify them and return their paths."""
    paths = [await fetch_file(source, loaded, file, folder) for file in loaded.files]
    # What a script kept: its files as they were, whatever their names and number.
    if await asyncio.to_thread(unpack_files, folder) is not None:
        paths = [path for _, path in sorted(list_files(folder))]
    return tuple(paths)


async def fetch_file(source: FileSource, loaded: LoadedCheckpoint, file: CheckpointFile, folder: Path) -> Path:
    """Write one file of a checkpoint below a folder, verify it and return its path."""
    path = _path_below(folder, file.path)
    await source.write_file(loaded.stored, file, path)
    await verify(path, file.sha256, f"{file.path!r} of {loaded.stored.uri}")
    return path


async def fetch_artifact(source: FileSource, run_id: str, artifact: Artifact, folder: Path) -> Path:
    """Write one artifact of a run below a folder, verify it and return its path."""
    path = _path_below(folder, artifact.name)
    await source.write_artifact(run_id, artifact, path)
    await verify(path, artifact.sha256, f"the artifact {artifact.name!r} of run {run_id}")
    return path


async def verify(path: Path, sha256: str, what: str) -> None:
    """Remove a file and raise TrainbusError unless it has that hash."""
    if await asyncio.to_thread(hash_file, path) != sha256:
        path.unlink()
        raise TrainbusError(f"{what} does not have the hash that was committed: `trainbus checkpoints verify --repair`")


def _path_below(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise TrainbusError(f"{name!r} leaves the folder: this manifest was not written by trainbus")
    return path
