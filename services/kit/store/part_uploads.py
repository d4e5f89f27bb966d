"""Objects that arrive in parts: an upload that breaks off goes on where it was, and is visible once it is whole."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.kit.store.objects import ObjectStore
from services.kit.store.uris import split_uri


@dataclass(frozen=True, slots=True)
class PartUpload:
    """An upload that has begun: its id, and the ETag of each part that the store has."""

    upload_id: str
    etags: dict[int, str] = field(default_factory=dict)


async def put_whole(objects: ObjectStore, uri: str, body: bytes) -> str:
    """Store a small object and return its ETag; the store compares the content with its MD5."""
    bucket, key = split_uri(uri)
    answer = await objects.call(
        lambda client: client.put_object(Bucket=bucket, Key=key, Body=io.BytesIO(body), ContentMD5=_content_md5(body)),
        uri,
    )
    return str(answer["ETag"]).strip('"')


async def begin_upload(objects: ObjectStore, uri: str) -> PartUpload:
    """Return the newest upload to this address that has begun and not ended, else a new one."""
    bucket, key = split_uri(uri)
    listed = await objects.call(lambda client: client.list_multipart_uploads(Bucket=bucket, Prefix=key), uri)
    begun = [each for each in listed.get("Uploads", ()) if each["Key"] == key]
    if not begun:
        return PartUpload(await create_upload(objects, uri))
    upload_id = max(begun, key=lambda each: each["Initiated"])["UploadId"]
    etags: dict[int, str] = {}
    marker = 0
    while True:
        page = await objects.call(
            lambda client, marker=marker: client.list_parts(  # type: ignore[misc]
                Bucket=bucket, Key=key, UploadId=upload_id, PartNumberMarker=marker
            ),
            uri,
        )
        etags |= {part["PartNumber"]: part["ETag"].strip('"') for part in page.get("Parts", ())}
        if not page.get("IsTruncated"):
            return PartUpload(upload_id, etags)
        marker = page["NextPartNumberMarker"]


async def create_upload(objects: ObjectStore, uri: str) -> str:
    """Begin a new upload and return its id."""
    bucket, key = split_uri(uri)
    made = await objects.call(lambda client: client.create_multipart_upload(Bucket=bucket, Key=key), uri)
    return str(made["UploadId"])


async def put_part(objects: ObjectStore, uri: str, upload_id: str, number: int, body: bytes) -> str:
    """Store a part and return its ETag.

    Raises:
        ObjectNotFound: the upload has ended, or there is no such bucket.
    """
    bucket, key = split_uri(uri)
    answer = await objects.call(
        lambda client: client.upload_part(
            Bucket=bucket,
            Key=key,
            UploadId=upload_id,
            PartNumber=number,
            Body=io.BytesIO(body),
            ContentMD5=_content_md5(body),
        ),
        uri,
    )
    return str(answer["ETag"]).strip('"')


async def complete_upload(objects: ObjectStore, uri: str, upload_id: str, etags: Sequence[str]) -> str:
    """Make the object of the parts with these ETags, in order; return its own.

    Raises:
        ObjectNotFound: the upload has ended.
    """
    bucket, key = split_uri(uri)
    parts = {"Parts": [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, 1)]}
    answer = await objects.call(
        lambda client: client.complete_multipart_upload(
            Bucket=bucket, Key=key, UploadId=upload_id, MultipartUpload=parts
        ),
        uri,
    )
    return str(answer["ETag"]).strip('"')


async def abort_upload(objects: ObjectStore, uri: str, upload_id: str) -> None:
    """Have the store forget the parts of an upload."""
    bucket, key = split_uri(uri)
    await objects.call(lambda client: client.abort_multipart_upload(Bucket=bucket, Key=key, UploadId=upload_id), uri)


def _content_md5(body: bytes) -> str:
    return base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
