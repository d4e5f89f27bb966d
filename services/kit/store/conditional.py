"""Conditional deletes: an object is deleted only while it is the version that was looked at.

The ETag tells versions apart. An object that is written again with the same bytes has the same ETag, so a renewal
changes the number of parts: the ETag of an object that one request wrote is the MD5 of its bytes, and that of an object
made of parts is another hash with the number of parts behind a dash. The bytes stay the same.
"""

from __future__ import annotations

import hashlib
from base64 import b64decode
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

#: Limits of S3: what one request copies, and every part but the last.
MAX_PART_BYTES = 5 * 2**30
MIN_PART_BYTES = 5 * 2**20

#: Sends a request by the client of S3, e.g. ``ObjectStore.call``; the text is what it is about.
Call = Callable[[Callable[[Any], Awaitable[Any]], str], Awaitable[Any]]


def count_parts(etag: str) -> int:
    """Return the number of parts that an object was made of; 0 if one request wrote it."""
    number = etag.partition("-")[2]
    return int(number) if number.isdigit() else 0


def renewal_ranges(size_bytes: int, etag: str) -> list[tuple[int, int]]:
    """Return the parts, [begin, end), from which an object gets another ETag; none if it is too small for that."""
    count, before = max(1, -(-size_bytes // MAX_PART_BYTES)), count_parts(etag)
    if count == before:
        count += 1
    part_bytes = max(-(-size_bytes // count), MIN_PART_BYTES)
    ranges = [(begin, min(begin + part_bytes, size_bytes)) for begin in range(0, size_bytes, part_bytes)]
    return [] if len(ranges) == before else ranges


async def copy_onto_itself(call: Call, bucket: str, key: str, size_bytes: int, etag: str) -> str:
    """Have the store write an object again under another ETag; return the ETag that it has then.

    An object that is too small for that stays as it is. (A plain copy would give it a new time, and by SeaweedFS the
    same ETag: others would rely on it, and a delete that was decided before would take it away.)

    Raises:
        ObjectNotFound: it is gone.
        ObjectExists: its ETag is another one by now.
    """
    ranges = renewal_ranges(size_bytes, etag)
    if not size_bytes or not ranges:
        return etag
    place, what = {"Bucket": bucket, "Key": key}, f"s3://{bucket}/{key}"
    # With a sum the store goes on vouching for the bytes: see ``vouched_sha256``.
    made = await call(lambda client: client.create_multipart_upload(**place, ChecksumAlgorithm="SHA256"), what)
    upload = {**place, "UploadId": made["UploadId"]}
    try:
        parts = []
        for number, (begin, end) in enumerate(ranges, 1):
            part = {"PartNumber": number, "CopySource": place, "CopySourceIfMatch": f'"{etag}"', **upload}
            if len(ranges) > 1:
                part["CopySourceRange"] = f"bytes={begin}-{end - 1}"
            answer = await call(lambda client, part=part: client.upload_part_copy(**part), what)  # type: ignore[misc]
            copied = answer["CopyPartResult"]
            kept = {name: copied[name] for name in ("ETag", "ChecksumSHA256") if name in copied}
            parts.append({"PartNumber": number, **kept})
        whole = {"Parts": parts}
        done = await call(lambda client: client.complete_multipart_upload(**upload, MultipartUpload=whole), what)
    except BaseException:
        with suppress(Exception):
            await call(lambda client: client.abort_multipart_upload(**upload), what)
        raise
    return str(done["ETag"]).strip('"')


def vouched_sha256(checksum: str, name_sha256: str) -> str:
    """Return the hash of an object by the checksum that the store has of it; '' if it has none that tells.

    Args:
        checksum: base64 of the hash, or, of an object in parts, of the hash of their hashes, with their number.
        name_sha256: the hash in the object's name, which the one part of an object must have.
    """
    digest, dash, parts = checksum.partition("-")
    if not dash:
        return b64decode(digest).hex()
    composite = hashlib.sha256(bytes.fromhex(name_sha256)).digest()
    return name_sha256 if name_sha256 and parts == "1" and b64decode(digest) == composite else ""
