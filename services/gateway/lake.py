"""The lake over HTTP: a client without credentials for the object store lists raw data and puts it there.

An object appears whole or not at all. A large file goes in parts, which outlive a connection that breaks: the same
request to begin names those that are there.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
from collections.abc import AsyncIterator, Awaitable
from typing import Annotated, Any, TypeVar

from botocore.exceptions import ClientError
from fastapi import APIRouter, Header, HTTPException, Query, Request

from services.gateway import views
from services.gateway.bodies import body_of, read_body
from services.gateway.files import RunFiles
from services.kit.messages import TransientError
from services.kit.settings import Settings
from services.kit.store import part_uploads
from services.kit.store.errors import ObjectNotFound
from services.kit.store.etags import MAX_PARTS, PART_BYTES, find_key_problem

T = TypeVar("T")
#: The largest part: parts of a file of 640 GB.
MAX_PART_BYTES = 4 * PART_BYTES
#: Bodies at a time; each part is in memory.
MAX_BODIES = 8
#: A form or plain text is what a web page may send across sites without asking.
REFUSED_CONTENT_TYPES = ("application/x-www-form-urlencoded", "multipart/form-data", "text/plain")

Key = Annotated[str, Query(min_length=1, max_length=1024, description="the object's key in the lake")]
UploadId = Annotated[str, Query(min_length=1, max_length=1024)]
Md5 = Annotated[str | None, Header(alias="Content-MD5", description="base64; other content is refused")]
BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}


def lake_routes(settings: Settings, files: RunFiles) -> APIRouter:
    """Return the routes of the lake."""
    router, places = APIRouter(), asyncio.Semaphore(MAX_BODIES)

    def uri_of(key: str) -> str:
        if problem := find_key_problem(key):
            raise HTTPException(422, f"key {key!r}: {problem}")
        return f"s3://{settings.bucket_lake}/{key}"

    @router.get("/lake", response_model=views.LakePage)
    async def list_lake(
        prefix: Annotated[str, Query(max_length=1024, description="the beginning of the keys")] = "",
        recursive: Annotated[bool, Query(description="also what lies in folders")] = False,
        limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
        cursor: Annotated[str, Query(max_length=2048)] = "",
    ) -> views.LakePage:
        """Objects and folders of the lake in the order of their keys, with sizes and times."""
        uri = f"s3://{settings.bucket_lake}/{prefix}"
        objects = await files.open()
        page = await _guard(objects.list_page(uri, cursor=cursor, limit=limit, by_folder=not recursive))
        listed = [views.LakeObject.model_validate(each) for each in page.objects]
        return views.LakePage(
            bucket=settings.bucket_lake,
            folders=list(page.folders),
            objects=listed,
            next_cursor=page.next_cursor or None,
        )

    @router.put("/lake/objects/{key:path}", status_code=201, response_model=views.PutObject, openapi_extra=BODY)
    async def put_object(key: str, request: Request, md5: Md5 = None) -> views.PutObject:
        """Store an object of any size; one that is there is replaced once the new one has arrived whole."""
        uri = uri_of(key)
        async with places:
            etag, size_bytes = await _store_stream(files, uri, _checked_body(request, md5))
        return views.PutObject(uri=uri, size_bytes=size_bytes, etag=etag)

    @router.post("/lake/uploads", response_model=views.LakeUpload)
    async def begin_upload(key: Key) -> views.LakeUpload:
        """Begin to send a file in parts, or go on: the answer names the parts that have arrived."""
        upload = await _guard(part_uploads.begin_upload(await files.open(), uri_of(key)))
        parts = [views.LakePart(number=number, etag=etag) for number, etag in sorted(upload.etags.items())]
        return views.LakeUpload(upload_id=upload.upload_id, parts=parts)

    @router.put("/lake/uploads/parts/{number}", response_model=views.LakePart, openapi_extra=BODY)
    async def put_part(number: int, key: Key, upload_id: UploadId, request: Request, md5: Md5 = None) -> views.LakePart:
        """Store a part of an upload: 1 to 10000, each but the last of at least 5 MiB."""
        uri = uri_of(key)
        if not 1 <= number <= MAX_PARTS:
            raise HTTPException(422, f"number: give 1 to {MAX_PARTS}")
        async with places:
            body = bytearray()
            async for chunk in _checked_body(request, md5):
                body += chunk
                if len(body) > MAX_PART_BYTES:
                    raise HTTPException(413, f"a part has at most {MAX_PART_BYTES // 2**20} MiB: send smaller ones")
            store = part_uploads.put_part(await files.open(), uri, upload_id, number, bytes(body))
            return views.LakePart(number=number, etag=await _guard(store))

    @router.post(
        "/lake/uploads/complete", status_code=201, response_model=views.LakePart, openapi_extra=body_of(views.LakeParts)
    )
    async def complete(key: Key, upload_id: UploadId, request: Request) -> views.LakePart:
        """Make the object of its parts, in the order of this list of ETags."""
        parts = await read_body(views.LakeParts, request)
        work = part_uploads.complete_upload(await files.open(), uri_of(key), upload_id, parts.etags)
        return views.LakePart(number=len(parts.etags), etag=await _guard(work))

    return router


async def _checked_body(request: Request, md5: str | None) -> AsyncIterator[bytes]:
    """Yield a body; the last piece only if the whole has the announced MD5."""
    if request.headers.get("content-type", "").split(";")[0].strip().lower() in REFUSED_CONTENT_TYPES:
        raise HTTPException(415, "send the file as it is, with Content-Type: application/octet-stream")
    try:
        wanted = None if md5 is None else base64.b64decode(md5, validate=True).hex()
    except binascii.Error as error:
        raise HTTPException(422, "Content-MD5: give the MD5 of the body in base64") from error
    digest, held = hashlib.md5(usedforsecurity=False), b""
    async for chunk in request.stream():
        if held:
            yield held
        digest.update(chunk)
        held = chunk
    if wanted not in (None, digest.hexdigest()):
        raise HTTPException(422, "the body did not arrive as it was sent (Content-MD5): send it again")
    yield held


async def _store_stream(files: RunFiles, uri: str, body: AsyncIterator[bytes]) -> tuple[str, int]:
    """Store a body of any size, a part at a time; return the object's ETag and size."""
    objects = await files.open()
    held, etags, upload_id, size_bytes = bytearray(), list[str](), "", 0
    try:
        async for chunk in body:
            size_bytes += len(chunk)
            held += chunk
            while len(held) > PART_BYTES:
                part = bytes(held[:PART_BYTES])
                del held[:PART_BYTES]
                if not upload_id:
                    upload_id = await _guard(part_uploads.create_upload(objects, uri))
                work = part_uploads.put_part(objects, uri, upload_id, len(etags) + 1, part)
                etags.append(await _guard(work))
        if not upload_id:
            return await _guard(part_uploads.put_whole(objects, uri, bytes(held))), size_bytes
        work = part_uploads.put_part(objects, uri, upload_id, len(etags) + 1, bytes(held))
        etags.append(await _guard(work))
        return await _guard(part_uploads.complete_upload(objects, uri, upload_id, etags)), size_bytes
    except BaseException:
        # A stream cannot go on later: its parts would only take up room.
        if upload_id:
            await asyncio.shield(_guard(part_uploads.abort_upload(objects, uri, upload_id)))
        raise


async def _guard(work: Awaitable[T]) -> T:
    """Await a request to the store; what it refuses, or a store that is away, becomes an answer."""
    try:
        return await work
    except ObjectNotFound as error:
        raise HTTPException(404, f"{error}: there is no such bucket, or the upload has ended") from error
    except TransientError as error:
        raise HTTPException(503, f"the object store does not answer: {error}") from error
    except ClientError as error:
        found = error.response.get("Error", {})
        raise HTTPException(422, f"the object store refuses it: {found.get('Code')}: {found.get('Message')}") from error
