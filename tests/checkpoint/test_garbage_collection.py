"""Garbage collection beside uploads, on a real store and a real log."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from contracts.events.checkpoint import CheckpointFile
from services.checkpoint.garbage_collection import collect_garbage
from services.checkpoint.settings import CheckpointSettings
from services.kit.bus import Bus
from services.kit.settings import Settings
from services.kit.store import objects as objects_module
from services.kit.store.objects import ObjectInfo, ObjectPage, ObjectStore
from services.worker.cache.file_cache import FileCache
from services.worker.cache.node_cache import NodeCache
from services.worker.checkpoints.uploader import CheckpointUploader, KnownBlobs
from tests.kit.support import until
from tests.kit.test_conditional_deletes import ignore_conditions
from tests.manual_clock import ManualClock

MIB = 2**20


class AgingBucket:
    """A bucket whose collection sees all that is there as three days old, and an agent that uploads into it."""

    def __init__(self, bus: Bus, objects: ObjectStore, settings: Settings, folder: Path) -> None:
        self.bus, self.objects, self.folder = bus, objects, folder
        self.settings = CheckpointSettings.of(settings)
        self.cache = NodeCache(FileCache(folder / "cache", objects), objects, 2**30)
        bus.clock = ManualClock(start=bus.clock.now() + timedelta(days=3))

    async def upload(self, content: bytes, known: KnownBlobs | None = None) -> tuple[str, int]:
        """Upload a file of one blob as an agent that knows nothing does; return its address and the bytes sent."""
        path = self.folder / "file"
        path.write_bytes(content)
        uploader = CheckpointUploader(self.objects, self.settings.bucket_models, self.cache, known or KnownBlobs())
        (file,) = await uploader.upload({"file": path})
        assert isinstance(file, CheckpointFile)
        return file.chunks[0].uri, uploader.sent_bytes

    async def collect(self) -> int:
        return (await collect_garbage(self.bus, self.objects, self.settings)).blobs


@pytest.fixture
def world(bus: Bus, objects: ObjectStore, s3_settings: Settings, tmp_path: Path) -> AgingBucket:
    return AgingBucket(bus, objects, s3_settings, tmp_path)


def interrupt_head(
    objects: ObjectStore, monkeypatch: pytest.MonkeyPatch, uri: str, work: Callable[[], Awaitable[object]]
) -> None:
    """Do ``work`` once between the next ``head`` of an object and what its caller does then."""
    head = objects.head

    async def interrupted(asked: str) -> ObjectInfo:
        found = await head(asked)
        if asked == uri:
            monkeypatch.setattr(objects, "head", head)
            await work()
        return found

    monkeypatch.setattr(objects, "head", interrupted)


@pytest.mark.parametrize("size_bytes", [1000, MIB])
@pytest.mark.parametrize("life", ["put", "renewed", "distrusted"])
async def test_blob_that_is_renewed_between_the_look_and_the_delete_stays(
    world: AgingBucket, monkeypatch: pytest.MonkeyPatch, size_bytes: int, life: str
) -> None:
    content = b"7" * size_bytes
    uri, _ = await world.upload(content)
    known = KnownBlobs()
    if life == "distrusted":
        known.distrust([uri.rpartition("/")[2]])
    monkeypatch.setattr(objects_module, "REUSE_AGE_S", -1.0)
    if life == "renewed":
        await world.upload(content)
    interrupt_head(world.objects, monkeypatch, uri, lambda: world.upload(content, known))
    assert await world.collect() == 0
    assert await world.objects.get(uri) == content


async def test_renewal_sends_no_bytes(world: AgingBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    content = b"7" * MIB
    _, sent = await world.upload(content)
    assert sent == MIB
    monkeypatch.setattr(objects_module, "REUSE_AGE_S", -1.0)
    assert (await world.upload(content))[1] == 0
    monkeypatch.undo()
    assert (await world.upload(content))[1] == 0


async def test_blob_that_goes_while_it_is_renewed_is_sent_again(
    world: AgingBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = b"7" * MIB
    uri, _ = await world.upload(content)
    monkeypatch.setattr(objects_module, "REUSE_AGE_S", -1.0)
    collected: list[int] = []

    async def collect() -> None:
        collected.append(await world.collect())

    interrupt_head(world.objects, monkeypatch, uri, collect)
    assert (await world.upload(content))[1] == MIB
    assert collected == [1]
    assert await world.objects.get(uri) == content


async def test_store_without_conditional_deletes_still_spares_what_was_renewed_after_the_listing(
    world: AgingBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = b"7" * MIB
    uri, _ = await world.upload(content)
    written_at = (await world.objects.head(uri)).modified_at
    ignore_conditions(world.objects, monkeypatch)
    await world.objects.probe_conditional_deletes(world.settings.bucket_models)
    monkeypatch.setattr(objects_module, "REUSE_AGE_S", -1.0)
    list_page = world.objects.list_page

    async def interrupted(asked: str, **rest: Any) -> ObjectPage:
        page = await list_page(asked, **rest)
        if any(info.uri == uri for info in page.objects):
            await until(lambda: time.time() >= written_at.timestamp() + 1, "the store's next second")
            await world.upload(content)
        return page

    monkeypatch.setattr(world.objects, "list_page", interrupted)
    assert await world.collect() == 0
    assert await world.objects.get(uri) == content
