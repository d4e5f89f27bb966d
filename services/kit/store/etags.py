"""The parts of a large object, and its ETag, both by the content of a file alone.

A file is cut by its size, so its ETag can be computed without the store, and tells whether an object has the file's
content. The tag is an MD5: it finds what is the same, and is no proof against forgery.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

#: Bytes of a part; a file up to this size is sent whole.
PART_BYTES = 16 * 2**20
#: The most parts that S3 accepts.
MAX_PARTS = 10_000
#: Parts of keys between slashes that are fine in S3, and not in a folder that the data may be copied into.
FORBIDDEN_SEGMENTS = ("", ".", "..")
MAX_KEY_BYTES = 1024


def part_bytes_of(size_bytes: int) -> int:
    """Return the bytes of each part of a file but the last: a power of two times PART_BYTES."""
    part_bytes = PART_BYTES
    while part_bytes * MAX_PARTS < size_bytes:
        part_bytes *= 2
    return part_bytes


def md5_of(content: bytes | memoryview) -> str:
    """Return the lower-case hex MD5, which is the ETag of a part."""
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def etag_of_parts(etags: Sequence[str]) -> str:
    """Return the ETag that the store gives an object of these parts."""
    joined = b"".join(bytes.fromhex(each) for each in etags)
    return f"{md5_of(joined)}-{len(etags)}"


def find_key_problem(key: str) -> str:
    """Return why no object should have this key, '' if one may."""
    if any(segment in FORBIDDEN_SEGMENTS for segment in key.split("/")):
        return "a part of it between slashes is empty, '.' or '..'"
    if not key.isprintable():
        return "it has a character that cannot be printed"
    if len(key.encode()) > MAX_KEY_BYTES:
        return f"it has more than {MAX_KEY_BYTES} bytes"
    return ""
