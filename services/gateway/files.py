"""The files of runs over HTTP: checkpoints, artifacts, reports and code, from the object store, verified on the way.

A client needs no credentials for the store. Each piece of a file is verified before its bytes are sent, so a connection
that ends early is the only sign of damage that comes late; the answer's ``ETag`` is the SHA-256 of the whole file.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Annotated, Any, Self, TypeVar
from urllib.parse import quote

from fastapi import APIRouter, Header, HTTPException, Response
from fastapi.responses import StreamingResponse

from contracts.events.checkpoint import CheckpointFile, Chunk
from contracts.manifest import files_of
from contracts.verification import CheckpointVerification
from services.gateway import checkpoint_queries, views
from services.gateway.checkpoint_lookup import Generation, Mark, MarkQuery, find_checkpoint
from services.gateway.checkpoint_verification import verify_checkpoints
from services.gateway.core.rows import Checkpoint
from services.gateway.long_answer import Advance, LongAnswers
from services.gateway.projection import Projection
from services.gateway.queries import Row
from services.gateway.run_lookup import find_run
from services.kit.chunks import read_piece
from services.kit.concurrency import cancel_and_wait
from services.kit.messages import TransientError
from services.kit.settings import Settings
from services.kit.store.errors import ObjectCorrupted, ObjectNotFound
from services.kit.store.objects import ObjectStore

#: A piece of an object that is read at a time.
PIECE_BYTES = 8 * 2**20
#: Seconds for which a read is repeated while the store does not answer: a client waits behind it.
PATIENCE_S = 10.0
REMEDY = "`trainbus checkpoints verify --repair` looks for another copy"
CODE_REMEDY = "delete it there, and submit the same project again"
RANGE = re.compile(r"bytes=(\d*)-(\d*)")

T = TypeVar("T")
Range = Annotated[str | None, Header(alias="Range", description="one range of bytes, to go on after an interruption")]
#: Returns the bytes ``start`` to ``stop`` of a file in pieces.
Read = Callable[[int, int], AsyncIterator[bytes]]
#: Returns the files of one kind that a run's row lists, each with name, address, size and hash.
ListFiles = Callable[[Row], Sequence[Mapping[str, Any]]]


class RunFiles:
    """The object store, opened at the first use. Use it as an async context manager."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._stack = AsyncExitStack()
        self._opening = asyncio.Lock()
        self._objects: ObjectStore | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def open(self) -> ObjectStore:
        """Return the store."""
        async with self._opening:
            if self._objects is None:
                store = ObjectStore(self._settings, patience_s=PATIENCE_S)
                self._objects = await self._stack.enter_async_context(store)
            return self._objects

    async def get(self, uri: str) -> bytes:
        """Return a whole object, which is known to be small."""
        return await (await self.open()).get_or_find_damage(uri)

    async def read_chunks(self, file: CheckpointFile, start: int, stop: int) -> AsyncIterator[bytes]:
        """Yield the bytes of a checkpoint's file; the piece after the one in hand is read ahead."""
        objects = await self.open()
        wanted: list[tuple[Chunk, int, int]] = []
        offset = 0
        for chunk in file.chunks:
            first, last = max(start - offset, 0), min(stop - offset, chunk.size_bytes)
            if first < last:
                wanted.append((chunk, first, last))
            offset += chunk.size_bytes
        ahead: asyncio.Task[bytes] | None = None
        try:
            for place, (_, first, last) in enumerate(wanted):
                ahead = ahead or asyncio.create_task(read_piece(objects, wanted[place][0]))
                piece, ahead = await ahead, None
                if place + 1 < len(wanted):
                    ahead = asyncio.create_task(read_piece(objects, wanted[place + 1][0]))
                yield piece[first:last]
        finally:
            if ahead is not None:
                await cancel_and_wait(ahead)

    async def read_object(self, uri: str, start: int, stop: int) -> AsyncIterator[bytes]:
        """Yield the bytes of an object."""
        objects = await self.open()
        for begin in range(start, stop, PIECE_BYTES):
            received = bytearray()
            await objects.reader.read(uri, received.extend, start=begin, stop=min(begin + PIECE_BYTES, stop))
            yield bytes(received)


def file_routes(projection: Projection, files: RunFiles, answers: LongAnswers) -> APIRouter:
    """Return the routes of checkpoints' files, artifacts and code."""
    router, store = APIRouter(), projection.store

    async def read_manifest(checkpoint: Checkpoint) -> bytes:
        content = await guard(files.get(checkpoint.uri))
        if checkpoint.manifest_sha256 not in (None, hashlib.sha256(content).hexdigest()):
            raise HTTPException(
                502, f"{checkpoint.uri} is not the manifest that was committed: `trainbus checkpoints verify --repair`"
            )
        return content

    async def read_files(checkpoint: Checkpoint) -> tuple[CheckpointFile, ...]:
        try:
            return files_of(await read_manifest(checkpoint))
        except ValueError as error:
            raise HTTPException(502, f"{checkpoint.uri} is {error}") from error

    async def send_listed(run: str, name: str, what: str, list_files: ListFiles, wanted: str | None) -> Response:
        row = await find_run(projection, run)
        if not any(each["name"] == name for each in list_files(row)):
            # The run may have ended, or been evaluated, a moment ago.
            await projection.catch_up()
            row = await find_run(projection, run)
        found = next((each for each in list_files(row) if each["name"] == name), None)
        if found is None:
            names = ", ".join(each["name"] for each in list_files(row)) or "none"
            raise HTTPException(404, f"run {row['run_id']} has no {what} {name!r}; it has {names}")

        def read(start: int, stop: int) -> AsyncIterator[bytes]:
            return files.read_object(found["uri"], start, stop)

        return await respond(read, found["size_bytes"], found["sha256"], wanted)

    @router.get("/training-runs/{run}/checkpoints/{mark}/files", response_model=views.CheckpointFiles)
    async def get_files(run: str, mark: Mark, generation: Generation = None) -> views.CheckpointFiles:
        """The files of a checkpoint with their sizes and hashes: of a step, the best or the last."""
        row, checkpoint = await find_checkpoint(projection, run, mark, generation)
        base = f"/training-runs/{row['run_id']}/checkpoints/{checkpoint.step}/files/"
        listed = [
            views.RunFile(path=each.path, size_bytes=each.size_bytes, sha256=each.sha256, url=base + quote(each.path))
            for each in await read_files(checkpoint)
        ]
        return views.CheckpointFiles(checkpoint=checkpoint, files=listed)

    @router.get("/training-runs/{run}/checkpoints/{mark}/manifest", response_class=Response)
    async def get_manifest(run: str, mark: Mark, generation: Generation = None) -> Response:
        """The manifest of a checkpoint, to the byte: its SHA-256 is in ``checkpoint_committed``."""
        _, checkpoint = await find_checkpoint(projection, run, mark, generation)
        content = await read_manifest(checkpoint)
        return Response(content, media_type="application/json", headers=tag(hashlib.sha256(content).hexdigest()))

    @router.get("/training-runs/{run}/checkpoints/{mark}/files/{path:path}", response_class=Response)
    async def get_file(
        run: str, mark: Mark, path: str, generation: Generation = None, wanted: Range = None
    ) -> Response:
        """One file of a checkpoint."""
        _, checkpoint = await find_checkpoint(projection, run, mark, generation)
        listed = await read_files(checkpoint)
        file = next((each for each in listed if each.path == path), None)
        if file is None:
            names = ", ".join(each.path for each in listed)
            raise HTTPException(404, f"the checkpoint of step {checkpoint.step} has no file {path!r}; it has {names}")

        def read(start: int, stop: int) -> AsyncIterator[bytes]:
            return files.read_chunks(file, start, stop)

        return await respond(read, file.size_bytes, file.sha256, wanted)

    @router.post("/training-runs/{run}/checkpoints/verify", response_class=StreamingResponse)
    async def verify_run(run: str, mark: MarkQuery = None, generation: Generation = None) -> StreamingResponse:
        """Read checkpoints of a run back and compare every hash: server-sent events `progress`, then `result`.

        Or `problem` at the end. `result` has the address of each rotten checkpoint with what of it is rotten.
        """
        if mark is not None:
            return verify([(await find_checkpoint(projection, run, mark, generation))[1]])
        row = await find_run(projection, run)
        await projection.catch_up()
        return verify(await checkpoint_queries.read_present(store, row["run_id"]))

    @router.post("/checkpoints/verify", response_class=StreamingResponse)
    async def verify_all() -> StreamingResponse:
        """Read the checkpoints of all runs back, as those of one."""
        await projection.catch_up()
        return verify(await checkpoint_queries.read_present(store))

    def verify(chosen: list[Checkpoint]) -> StreamingResponse:
        async def work(advance: Advance) -> CheckpointVerification:
            return await verify_checkpoints(await files.open(), chosen, advance)

        return answers.respond(work, "verify")

    @router.get("/training-runs/{run}/artifacts", response_model=views.Artifacts)
    async def get_artifacts(run: str) -> views.Artifacts:
        """The artifacts of a run."""
        row = await find_run(projection, run)
        base = f"/training-runs/{row['run_id']}/artifacts/"
        listed = [
            views.RunFile(
                path=each["name"], size_bytes=each["size_bytes"], sha256=each["sha256"], url=base + quote(each["name"])
            )
            for each in row["artifacts"]
        ]
        return views.Artifacts(artifacts=listed)

    @router.get("/training-runs/{run}/artifacts/{name:path}", response_class=Response)
    async def get_artifact(run: str, name: str, wanted: Range = None) -> Response:
        """One artifact of a run."""
        return await send_listed(run, name, "artifact", lambda row: row["artifacts"], wanted)

    @router.get("/training-runs/{run}/report/{name:path}", response_class=Response)
    async def get_report(run: str, name: str, wanted: Range = None) -> Response:
        """One file of the report of a run's evaluation: ``report.json``, ``report.html``, ``report.md``."""
        return await send_listed(run, name, "report", lambda row: (row["evaluation"] or {}).get("report", ()), wanted)

    @router.get("/training-runs/{run}/code", response_class=Response)
    async def get_code(run: str) -> Response:
        """The code package of a run: a gzipped tar."""
        row = await find_run(projection, run)
        code = (row["spec"] or {}).get("code")
        if code is None:
            raise HTTPException(404, f"run {row['run_id']} has no code package")
        content = await guard(files.get(code["uri"]), CODE_REMEDY)
        return Response(content, media_type="application/gzip", headers=tag(code["sha256"]))

    return router


async def respond(read: Read, size_bytes: int, etag: str, wanted: str | None, remedy: str = "") -> Response:
    """Return an answer that streams a file, or the range of it that was asked for. ``remedy``: as in ``guard``."""
    headers = {**tag(etag), "Accept-Ranges": "bytes"}
    start, stop, status = 0, size_bytes, 200
    if wanted is not None and (bounds := parse_range(wanted, size_bytes)) is not None:
        start, stop = bounds
        if start >= stop:
            return Response(status_code=416, headers={**headers, "Content-Range": f"bytes */{size_bytes}"})
        status, headers["Content-Range"] = 206, f"bytes {start}-{stop - 1}/{size_bytes}"
    headers["Content-Length"] = str(stop - start)
    pieces = read(start, stop)
    # The first piece before the answer begins: what is missing has a status of its own.
    first = await guard(anext(pieces, b""), remedy)

    async def body() -> AsyncIterator[bytes]:
        yield first
        async for piece in pieces:
            yield piece

    return StreamingResponse(body(), status, headers, media_type="application/octet-stream")


def parse_range(text: str, size_bytes: int) -> tuple[int, int] | None:
    """Return the bounds of a ``Range`` header with one range, the second exclusive; None: answer with the whole."""
    match = RANGE.fullmatch(text.strip())
    if match is None or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    if not first:
        return max(size_bytes - int(last), 0), size_bytes
    return int(first), min(int(last) + 1, size_bytes) if last else size_bytes


def tag(etag: str) -> dict[str, str]:
    """Return the header that names a version of a content."""
    return {"ETag": f'"{etag}"'}


async def guard(work: Awaitable[T], remedy: str = "") -> T:
    """Await a question to the store; an object that is missing or damaged, or a store that is away, is an answer.

    ``remedy``: what to do about an object that is missing or damaged; '' for those of runs.
    """
    try:
        return await work
    except ObjectNotFound as error:
        raise HTTPException(404, f"{error} is not in the object store" + (remedy and f": {remedy}")) from error
    except ObjectCorrupted as error:
        raise HTTPException(502, f"{error}: {remedy or REMEDY}") from error
    except TransientError as error:
        raise HTTPException(503, f"the object store does not answer: {error}") from error
