"""The lists of files of large parts, which are in the store: read, and compared with what the fact says of them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence

from contracts.events.checkpoint import CheckpointFile, CheckpointStaged, FileListing
from contracts.manifest import files_of
from services.checkpoint.core.commit import Refusal, find_listing_problem
from services.kit.store.errors import ObjectCorrupted, ObjectNotFound
from services.kit.store.objects import ObjectStore


async def read_listing(objects: ObjectStore, listing: FileListing) -> tuple[CheckpointFile, ...]:
    """Return the files that a listing names.

    Raises:
        ObjectNotFound: it is not in the store.
        ObjectCorrupted: the store has other bytes.
        ValueError: these are no files.
    """
    content = bytearray()
    # The size is compared before the first byte is read: what is longer than the fact says takes no memory.
    await objects.reader.read(listing.uri, content.extend, size_bytes=listing.size_bytes)
    return await asyncio.to_thread(_parse, bytes(content), listing)


async def read_files_of_parts(
    objects: ObjectStore, parts: Sequence[CheckpointStaged], bucket: str
) -> list[CheckpointStaged] | Refusal:
    """Return the parts, each with all of its files in ``files``; or why one of them has none."""
    found = []
    for part in parts:
        resolved = await _read_files_of_part(objects, part, bucket)
        if isinstance(resolved, Refusal):
            return resolved
        found.append(resolved)
    return found


async def _read_files_of_part(objects: ObjectStore, part: CheckpointStaged, bucket: str) -> CheckpointStaged | Refusal:
    listing, whose = part.listing, f"the list of files of node {part.node_id}"
    if listing is None:
        return part
    if problem := find_listing_problem(listing, bucket):
        return Refusal(f"{whose} is not read: {problem}")
    try:
        files = await read_listing(objects, listing)
    except ObjectNotFound:
        return Refusal(f"{whose} is not in the store: {listing.uri} is missing", infrastructure_failure=True)
    except ObjectCorrupted as error:
        return Refusal(f"{whose} is corrupt in the store: {error}", infrastructure_failure=True)
    except ValueError as error:
        return Refusal(f"{whose} cannot be read: {error}")
    return part.model_copy(update={"files": files, "listing": None})


def _parse(content: bytes, listing: FileListing) -> tuple[CheckpointFile, ...]:
    digest = hashlib.sha256(content).hexdigest()
    if digest != listing.sha256:
        raise ObjectCorrupted(f"{listing.uri} has hash {digest}, expected {listing.sha256}")
    return files_of(content)
