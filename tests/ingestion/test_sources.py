"""Folders as sources: what may be read, and that it is what was listed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.ingestion.sources import FolderSource, SourceObject
from services.kit.bus import PoisonMessage
from services.kit.store.errors import ObjectChanged


async def listed(source: FolderSource) -> dict[str, SourceObject]:
    return {one.path: one async for page in source.list_objects() for one in page}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    data = tmp_path / "allowed" / "data"
    data.mkdir(parents=True)
    (data / "a.jsonl").write_bytes(b'{"a":1}\n')
    (data / "deep").mkdir()
    (data / "deep" / "b c%.jsonl").write_bytes(b'{"b":1}\n')
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "password").write_bytes(b"hunter2")
    return data


async def test_a_folder_is_read(folder: Path, tmp_path: Path) -> None:
    source = FolderSource.of(folder.as_uri(), (tmp_path / "allowed",))
    found = await listed(source)
    assert set(found) == {"a.jsonl", "deep/b c%.jsonl"}
    one = found["deep/b c%.jsonl"]
    assert await source.read(one) == b'{"b":1}\n'
    await source.download(one, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b'{"b":1}\n'
    # The address of a file is a source of its own.
    alone = FolderSource.of(source.uri(one), (tmp_path / "allowed",))
    assert set(await listed(alone)) == {"b c%.jsonl"}


@pytest.mark.parametrize(
    "path",
    ["secret", "allowed/../secret", "allowed/data/../../secret", "allowed/link", "secret/password", "allowedness"],
)
def test_other_folders_are_refused(folder: Path, tmp_path: Path, path: str) -> None:
    (tmp_path / "allowedness").mkdir()
    (tmp_path / "allowed" / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(PoisonMessage, match=r"may not read .*TRAINBUS_SOURCE_FOLDERS"):
        FolderSource.of(f"file://{tmp_path}/{path}", (tmp_path / "allowed",))


def test_no_folder_is_allowed_by_default(folder: Path) -> None:
    with pytest.raises(PoisonMessage, match="folders that it may read: none"):
        FolderSource.of(folder.as_uri(), ())


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PoisonMessage, match="there is no folder"):
        FolderSource.of(f"file://{tmp_path}/nothing", (tmp_path,))


async def test_links_and_pipes_are_listed_and_not_followed(folder: Path, tmp_path: Path) -> None:
    (folder / "out.jsonl").symlink_to(tmp_path / "secret" / "password")
    (folder / "round").symlink_to(folder)
    os.mkfifo(folder / "pipe.jsonl")
    source = FolderSource.of(folder.as_uri(), (folder,))
    found = await listed(source)
    assert set(found) == {"a.jsonl", "deep/b c%.jsonl", "out.jsonl", "round", "pipe.jsonl"}
    assert {path for path, one in found.items() if source.find_objection(one)} == {"out.jsonl", "round", "pipe.jsonl"}


@pytest.mark.parametrize("how", ["rewritten", "replaced", "link", "gone", "pipe"])
async def test_a_file_changed_after_the_listing_is_refused(folder: Path, tmp_path: Path, how: str) -> None:
    source = FolderSource.of(folder.as_uri(), (folder,))
    one = (await listed(source))["a.jsonl"]
    path = folder / "a.jsonl"
    before = path.stat()
    if how == "rewritten":
        path.write_bytes(b'{"a":2}\n')
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    else:
        path.unlink()
    if how == "replaced":
        # Another file of the same size and time.
        (folder / "other").write_bytes(b'{"a":2}\n')
        (folder / "new").write_bytes(b'{"a":2}\n')
        os.utime(folder / "new", ns=(before.st_atime_ns, before.st_mtime_ns))
        (folder / "new").rename(path)
    elif how == "link":
        path.symlink_to(tmp_path / "secret" / "password")
    elif how == "pipe":
        os.mkfifo(path)
    with pytest.raises(ObjectChanged):
        await source.read(one)
    with pytest.raises(ObjectChanged):
        await source.download(one, tmp_path / "copy")
