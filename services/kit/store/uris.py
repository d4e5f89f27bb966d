"""Addresses of objects: ``s3://bucket/key``, and keys of blobs, which are named by their content."""

from __future__ import annotations

import re

BLOB_KEY = re.compile(r"^blobs/sha256/[0-9a-f]{2}/([0-9a-f]{64})$")


def split_uri(uri: str) -> tuple[str, str]:
    """Split ``s3://bucket/key`` into (bucket, key)."""
    if not uri.startswith("s3://") or "/" not in uri[5:]:
        raise ValueError(f"{uri!r} is not of the form s3://bucket/key")
    bucket, _, key = uri[5:].partition("/")
    return bucket, key


def blob_key(sha256: str) -> str:
    """Return the key of a content-addressed blob."""
    return f"blobs/sha256/{sha256[:2]}/{sha256}"


def blob_sha256(uri: str) -> str:
    """Return the hash in a blob's name; '' for any other object."""
    match = BLOB_KEY.match(split_uri(uri)[1])
    return match[1] if match else ""
