"""Raw data in the store, as a client reaches it: through the gateway, which reaches the lake alone."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from urllib.parse import quote

import httpx

from services.kit.store.etags import md5_of
from trainbus.client.address import StackAddress
from trainbus.client.connection import check_answer, describe_absence
from trainbus.client.errors import NotFoundError, StackUnreachableError, TrainbusError, UsageError
from trainbus.client.gateway import open_gateway

#: Seconds for which a request is repeated.
PATIENCE_S = 20.0


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object of the store."""

    uri: str
    size_bytes: int
    modified_at: datetime
    etag: str = ""


@dataclass(frozen=True, slots=True)
class ObjectList:
    """A page of what lies under an address: objects, and folders (addresses that end with a slash)."""

    objects: tuple[StoredObject, ...]
    folders: tuple[str, ...] = ()
    next_cursor: str = ""


@dataclass(frozen=True, slots=True)
class BegunUpload:
    """An upload in parts, and the ETag of each part that has arrived."""

    upload_id: str
    etags: dict[int, str] = field(default_factory=dict)


class UploadEndedError(Exception):
    """There is no such upload any more."""


class Lake:
    """Where data is put: the gateway's HTTP interface."""

    def __init__(self, http: httpx.AsyncClient, bucket: str) -> None:
        self._http, self.bucket = http, bucket

    async def list_page(self, uri: str, *, recursive: bool, cursor: str, limit: int) -> ObjectList:
        """Return a page of what is under a prefix."""
        asked = {"prefix": self._key(uri), "recursive": recursive, "cursor": cursor, "limit": limit}
        page = await self._send("GET", "/lake", params=asked)
        objects = (
            StoredObject(each["uri"], each["size_bytes"], datetime.fromisoformat(each["modified_at"]), each["etag"])
            for each in page["objects"]
        )
        folders = tuple(f"s3://{self.bucket}/{each}" for each in page["folders"])
        return ObjectList(tuple(objects), folders, page["next_cursor"] or "")

    async def put(self, uri: str, body: bytes) -> None:
        """Store a small object."""
        await self._send("PUT", f"/lake/objects/{quote(self._key(uri))}", body=body)

    async def begin_upload(self, uri: str) -> BegunUpload:
        """Begin or resume an object in parts."""
        begun = await self._send("POST", "/lake/uploads", params={"key": self._key(uri)})
        return BegunUpload(begun["upload_id"], {each["number"]: each["etag"] for each in begun["parts"]})

    async def put_part(self, uri: str, upload_id: str, number: int, body: bytes) -> None:
        """Store a part; raises ``UploadEndedError`` if another client has ended the upload."""
        named = {"key": self._key(uri), "upload_id": upload_id}
        await self._send("PUT", f"/lake/uploads/parts/{number}", params=named, body=body)

    async def complete(self, uri: str, upload_id: str, etags: Sequence[str]) -> None:
        """Make the object of its parts; raises ``UploadEndedError`` if another client has ended the upload."""
        named = {"key": self._key(uri), "upload_id": upload_id}
        await self._send("POST", "/lake/uploads/complete", params=named, json={"etags": list(etags)})

    def _key(self, uri: str) -> str:
        bucket, _, key = uri.removeprefix("s3://").partition("/")
        if bucket != self.bucket:
            raise UsageError(f"{uri} is not in the lake: raw data is in s3://{self.bucket}, and nowhere else")
        return key

    async def _send(self, method: str, path: str, *, body: bytes | None = None, **more: Any) -> Any:
        """Return the gateway's answer; a connection that breaks is made again. Every request may be repeated."""
        headers = {}
        if body is not None:
            md5 = base64.b64encode(bytes.fromhex(md5_of(body))).decode()
            headers = {"Content-Type": "application/octet-stream", "Content-MD5": md5}
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        delay_s = 0.2
        while True:
            try:
                answer = await self._http.request(method, path, content=body, headers=headers, **more)
                check_answer(answer)
                return answer.json()
            except httpx.TransportError as error:
                problem: TrainbusError = StackUnreachableError(describe_absence(self._http.base_url, error))
            except TrainbusError as refusal:
                if answer.status_code == 404 and "/lake/uploads/" in path:
                    raise UploadEndedError(str(refusal)) from refusal
                if answer.status_code < 500:
                    raise
                problem = refusal
            if asyncio.get_running_loop().time() > deadline:
                raise problem
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, 2.0)


@asynccontextmanager
async def open_lake(address: StackAddress) -> AsyncIterator[Lake]:
    """Open the lake.

    Raises:
        StackUnreachableError: no gateway is named, or it or the object store does not answer.
    """
    async with open_gateway(address) as http:
        answer = await http.get("/lake", params={"limit": 1})
        check_answer(answer)
        yield Lake(http, answer.json()["bucket"])


async def list_objects(
    address: StackAddress,
    uri: str | None = None,
    *,
    recursive: bool = False,
    limit: int | None = None,
    cursor: str = "",
) -> AsyncIterator[ObjectList]:
    """Yield what lies under an address, a page at a time: without one, in the lake.

    An address without a slash at its end is one object, or the folder of this name.

    Raises:
        UsageError: it is no address in the lake.
        NotFoundError: nothing is there.
    """
    async with open_lake(address) as lake:
        prefix = check_address(uri) if uri else f"s3://{lake.bucket}/"
        if not prefix.endswith("/"):
            found = await lake.list_page(prefix, recursive=False, cursor="", limit=1)
            if not any(each.uri == prefix for each in found.objects):
                prefix += "/"
        left, is_empty = limit, not cursor
        while True:
            size = 1000 if left is None else min(1000, left)
            page = await lake.list_page(prefix, recursive=recursive, cursor=cursor, limit=size)
            if not prefix.endswith("/"):
                page = ObjectList(tuple(each for each in page.objects if each.uri == prefix))
            is_empty &= not page.objects and not page.folders
            yield page
            cursor = page.next_cursor
            left = None if left is None else left - len(page.objects) - len(page.folders)
            if not cursor or (left is not None and left <= 0):
                break
    if is_empty and uri and uri.rstrip("/").count("/") > 2:
        raise NotFoundError(f"there is nothing at {uri}: `trainbus ls` lists what is in the lake")


async def list_whole(lake: Lake, uri: str) -> AsyncIterator[StoredObject]:
    """Yield every object under a prefix."""
    cursor = ""
    while True:
        page = await lake.list_page(uri, recursive=True, cursor=cursor, limit=1000)
        for each in page.objects:
            yield each
        cursor = page.next_cursor
        if not cursor:
            return


def check_address(uri: str) -> str:
    """Return an address in the store.

    Raises:
        UsageError: it has not the form of one.
    """
    bucket, slash, _ = uri.removeprefix("s3://").partition("/")
    if not uri.startswith("s3://") or not bucket:
        raise UsageError(f"{uri!r} is no address in the store: give s3://lake/NAME")
    return uri if slash else f"{uri}/"
