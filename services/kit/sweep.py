"""The sweep of a garbage collection: deletes objects under their hash that are old and that nothing names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from services.kit.concurrency import gather_limited
from services.kit.hash_partitions import PARTITIONS, HashPartitions, find_missing
from services.kit.store.errors import ObjectChanged, ObjectNotFound
from services.kit.store.objects import ObjectInfo, ObjectStore

if TYPE_CHECKING:
    from services.kit.hash_partitions import SortedHashes

PARALLEL_DELETES = 16


@dataclass(slots=True)
class SweepReport:
    """What a sweep found and deleted."""

    listed: int = 0
    deleted: int = 0
    freed_bytes: int = 0


async def sweep_unnamed(
    objects: ObjectStore, root: str, names: HashPartitions, cutoff: datetime, on_deleted: Callable[[ObjectInfo], object]
) -> SweepReport:
    """Delete what lies under ``root`` by its hash (``ab/ab12...``), was last written before ``cutoff`` and is unnamed.

    One of the 256 folders after the other is listed, a page at a time, with the names of that folder in memory.
    Everything else under ``root`` stays.

    Raises:
        ObjectNotFound: there is no such bucket.
    """
    report = SweepReport()
    for number in range(PARTITIONS):
        folder = f"{root}{number:02x}/"
        named = await asyncio.to_thread(names.read, number)
        async for page in objects.list_pages(folder):
            report.listed += len(page.objects)
            garbage = select_garbage(page.objects, named, cutoff)
            deleted = await gather_limited(
                (delete_unchanged(objects, each.uri, each.modified_at) for each in garbage), limit=PARALLEL_DELETES
            )
            for each, is_deleted in zip(garbage, deleted, strict=True):
                if is_deleted:
                    report.deleted += 1
                    report.freed_bytes += each.size_bytes
                    on_deleted(each)
    return report


def select_garbage(there: Sequence[ObjectInfo], named: SortedHashes, cutoff: datetime) -> list[ObjectInfo]:
    """Return the objects under their hash that were last written before ``cutoff`` and are not named.

    An empty object stays: the store cannot give it another ETag when it is renewed, and it takes no space.
    """
    old = [each for each in there if each.modified_at < cutoff and each.size_bytes and _is_under_its_hash(each.key)]
    missing = find_missing(named, [each.key[-64:] for each in old])
    return [each for each, is_missing in zip(old, missing, strict=True) if is_missing]


async def delete_unchanged(objects: ObjectStore, uri: str, modified_at: datetime) -> bool:
    """Delete an object unless it was written after it was listed. Return whether it was deleted.

    The look just before is for stores that ignore the condition: it leaves them a moment instead of hours.
    """
    try:
        there = await objects.head(uri)
        if there.modified_at != modified_at:
            return False
        await objects.delete(uri, if_match=there.etag)
    except (ObjectNotFound, ObjectChanged):
        return False
    return True


def _is_under_its_hash(key: str) -> bool:
    folder, _, name = key.rpartition("/")
    return len(name) == 64 and not set(name) - set("0123456789abcdef") and folder.endswith(f"/{name[:2]}")
