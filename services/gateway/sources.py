"""The objects that a dataset was made of, compared with what the store has now."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic_core import from_json

from services.gateway import views
from services.kit.concurrency import gather_limited, run_in_thread
from services.kit.store.errors import ObjectNotFound
from services.kit.store.objects import ObjectStore

#: Source objects that are looked up at the same time, and those that are named when they differ.
PARALLEL, MAX_NAMED = 16, 100


async def compare_sources(objects: ObjectStore, source: str, index: Path) -> views.SourceVerification:
    """Compare each source object with the version that was read, by the store's own hash of it (ETag)."""
    versions = await run_in_thread(lambda: set(_read_versions(index)))
    found = views.SourceVerification(source=source, objects=len(versions))
    if not source.startswith("s3://"):
        return found
    present = {(info.uri, info.etag) async for info in objects.list(source)}

    async def read_version(uri: str) -> tuple[str, str] | None:
        try:
            return uri, (await objects.head(uri)).etag
        except ObjectNotFound:
            return None

    # Entity and feature tables may lie elsewhere.
    elsewhere = sorted({uri for uri, _ in versions - present if not uri.startswith(source)})
    read = await gather_limited((read_version(uri) for uri in elsewhere), limit=PARALLEL)
    changed = sorted({uri for uri, _ in versions - present - {each for each in read if each is not None}})
    return found.model_copy(update={"is_compared": True, "changed_count": len(changed), "changed": changed[:MAX_NAMED]})


def _read_versions(index: Path) -> Iterator[tuple[str, str]]:
    with index.open("rb") as file:
        for line in file:
            record = from_json(line)
            yield record["uri"], record["etag"]
