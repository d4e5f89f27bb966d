"""The reader reads pinned versions of objects, for every character in a key."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.kit.settings import Settings
from services.kit.store.errors import ObjectChanged, ObjectNotFound, StoreRefused
from services.kit.store.objects import ObjectStore
from services.kit.workdir import Workdir

NAMES = ["plain.png", "with space & ümläut.png", "a+b=c?d#e%41.png", "deep/er/~x(1)!*'.png", "a//b.png"]


async def test_every_key_is_read_as_it_was_listed(objects: ObjectStore, s3_settings: Settings) -> None:
    prefix = f"s3://{s3_settings.bucket_lake}/x/"
    for name in NAMES:
        await objects.put(prefix + name, name.encode())
    listed = [info async for info in objects.list(prefix)]
    read = [await objects.get(info.uri, etag=info.etag, size_bytes=info.size_bytes) for info in listed]
    assert sorted(read) == sorted(name.encode() for name in NAMES)


async def test_a_changed_object_raises_object_changed(
    objects: ObjectStore, s3_settings: Settings, tmp_path: Path
) -> None:
    uri = f"s3://{s3_settings.bucket_lake}/x"
    await objects.put(uri, b"one")
    info = await objects.head(uri)
    await objects.download(info.uri, tmp_path / "x", etag=info.etag)
    assert (tmp_path / "x").read_bytes() == b"one"
    await objects.put(uri, b"two")
    with pytest.raises(ObjectChanged):
        await objects.get(uri, etag=info.etag)
    with pytest.raises(ObjectChanged):
        await objects.download(uri, tmp_path / "x", etag=info.etag)
    await objects.delete(uri)
    with pytest.raises(ObjectNotFound):
        await objects.get(uri, etag=info.etag)
    async with ObjectStore(s3_settings.model_copy(update={"s3_access_key": "wrong"})) as stranger:
        with pytest.raises(StoreRefused):
            await stranger.get(uri, etag=info.etag)
        with pytest.raises(StoreRefused):
            await stranger.download(uri, tmp_path / "x")


async def test_a_workdir_removes_abandoned_folders_only(tmp_path: Path) -> None:
    (tmp_path / "left").mkdir()
    (tmp_path / "left" / ".lock").touch()
    (tmp_path / "left" / "large").touch()
    async with Workdir(tmp_path) as one, Workdir(tmp_path) as two:
        assert not (tmp_path / "left").exists()
        assert one.path != two.path
        assert one.path.exists()
        assert two.path.exists()
    assert [entry for entry in tmp_path.iterdir() if entry.is_dir()] == []
