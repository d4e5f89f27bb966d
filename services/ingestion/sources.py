"""Sources of raw data: a prefix in the object store, or a local folder. Every read is of the version listed."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

from services.kit.bus import PoisonMessage
from services.kit.concurrency import run_in_thread
from services.kit.store.errors import ObjectChanged, ObjectNotFound
from services.kit.store.files import READ_BYTES
from services.kit.store.objects import ObjectInfo, ObjectStore
from services.kit.store.uris import split_uri

LISTING_PAGE = 1000


class SourceObject(NamedTuple):
    """One object of the source, at one version."""

    #: Its path under the source.
    path: str
    etag: str
    size: int
    #: When it was written, in microseconds since 1970.
    written_us: int


class Source(Protocol):
    """What an ingestion needs of the place that its data is in."""

    #: Whether sharding can read objects from here by their uri; if not, every record is copied.
    shared: bool

    def list_objects(self) -> AsyncIterator[list[SourceObject]]:
        """List every object, in pages, in any order. A source may also name a single object."""
        ...

    def uri(self, listed: SourceObject) -> str: ...

    def find_objection(self, listed: SourceObject) -> str | None:
        """Return why this object must not be read; None if it may."""
        ...

    async def read(self, listed: SourceObject) -> bytes:
        """Return the whole object; raises ``ObjectChanged`` if it is no longer what was listed."""
        ...

    async def download(self, listed: SourceObject, local: Path) -> None:
        """Write the object to ``local``; raises ``ObjectChanged`` if it is no longer what was listed."""
        ...


def open_source(uri: str, objects: ObjectStore, folders: tuple[Path, ...] = ()) -> Source:
    """Return the source that ``uri`` names.

    Raises:
        PoisonMessage: a folder that this service may not read.
    """
    if uri.startswith("file:"):
        return FolderSource.of(uri, folders)
    return StoreSource(objects, uri)


class StoreSource:
    """A prefix in the object store."""

    shared = True

    def __init__(self, objects: ObjectStore, uri: str) -> None:
        self._objects, self._uri = objects, uri
        self._bucket, prefix = split_uri(uri)
        # With the slash, digits/ does not include digits2/.
        self._folder = prefix if not prefix or prefix.endswith("/") else f"{prefix}/"
        self._prefix = prefix

    async def list_objects(self) -> AsyncIterator[list[SourceObject]]:
        try:
            found = False
            async for page in _chunks(self._objects.list(f"s3://{self._bucket}/{self._folder}"), LISTING_PAGE):
                found = True
                yield [self._source_object(info) for info in page]
            if not found and self._folder != self._prefix:
                async for one in self._one_object():
                    yield one
        except ObjectNotFound as error:
            raise PoisonMessage(f"there is no bucket {self._bucket!r}: check the source {self._uri}") from error

    async def _one_object(self) -> AsyncIterator[list[SourceObject]]:
        try:
            info = await self._objects.head(self._uri)
        except ObjectNotFound:
            return
        folder = info.key.rpartition("/")[0]
        self._folder = f"{folder}/" if folder else ""
        yield [self._source_object(info)]

    def _source_object(self, info: ObjectInfo) -> SourceObject:
        written_us = round(info.modified_at.timestamp() * 1_000_000)
        return SourceObject(info.key.removeprefix(self._folder), info.etag, info.size_bytes, written_us)

    def uri(self, listed: SourceObject) -> str:
        return f"s3://{self._bucket}/{self._folder}{listed.path}"

    def find_objection(self, listed: SourceObject) -> str | None:
        return None

    async def read(self, listed: SourceObject) -> bytes:
        return await self._objects.get(self.uri(listed), etag=listed.etag, size_bytes=listed.size)

    async def download(self, listed: SourceObject, local: Path) -> None:
        await self._objects.download(self.uri(listed), local, etag=listed.etag, size_bytes=listed.size)


@dataclass
class FolderSource:
    """A folder of this machine, for stacks whose services share it. Nothing outside of it is ever read."""

    root: Path
    shared = False
    #: The one file that is meant, if it is one.
    only: str | None = None

    @classmethod
    def of(cls, uri: str, folders: tuple[Path, ...]) -> FolderSource:
        """Return the folder if it is inside one that may be read.

        Raises:
            PoisonMessage: it does not, or there is none.
        """
        parts = urlsplit(uri)
        wanted = Path(unquote(parts.path))
        # Where it really is: neither '..' nor a link leads out of what is allowed.
        path = Path(os.path.realpath(wanted))
        allowed = [Path(os.path.realpath(folder)) for folder in folders]
        if not any(path.is_relative_to(folder) for folder in allowed):
            names = ", ".join(map(str, allowed)) or "none"
            raise PoisonMessage(
                f"the ingestion service may not read {wanted}; folders that it may read: {names}. Put the data into "
                "the lake (`trainbus put FOLDER s3://lake/NAME`) and give that address, or start the stack with the "
                "folder in TRAINBUS_SOURCE_FOLDERS (a JSON list)"
            )
        if path.is_file():
            return cls(path.parent, path.name)
        if not path.is_dir():
            raise PoisonMessage(f"there is no folder {path}: check data.source ({uri})")
        return cls(path)

    async def list_objects(self) -> AsyncIterator[list[SourceObject]]:
        walk = self._walk()
        while found := await run_in_thread(lambda: list(islice(walk, LISTING_PAGE))):
            yield found

    def _walk(self) -> Iterator[SourceObject]:
        if self.only is not None:
            yield self._source_object(self.root / self.only)
            return
        for folder, folders, names in os.walk(self.root):
            # Links to folders are listed and not followed, as they may form a cycle.
            names += [name for name in folders if os.path.islink(os.path.join(folder, name))]
            for name in names:
                yield self._source_object(Path(folder, name))

    def _source_object(self, path: Path) -> SourceObject:
        found = path.lstat()
        name = os.fsencode(path.relative_to(self.root)).decode(errors="backslashreplace")
        if not stat.S_ISREG(found.st_mode):
            return SourceObject(name, "", 0, found.st_mtime_ns // 1000)
        return SourceObject(name, _version(found), found.st_size, found.st_mtime_ns // 1000)

    def uri(self, listed: SourceObject) -> str:
        return (self.root / listed.path).as_uri()

    def find_objection(self, listed: SourceObject) -> str | None:
        return "it is a link or no plain file: only files in the folder itself are read" if not listed.etag else None

    async def read(self, listed: SourceObject) -> bytes:
        def read() -> bytes:
            with open(self._open(listed), "rb") as file:
                content = file.read(listed.size + 1)
            if len(content) != listed.size:
                raise ObjectChanged(f"{self.uri(listed)} has another size than it was listed with")
            return content

        return await run_in_thread(read)

    async def download(self, listed: SourceObject, local: Path) -> None:
        def copy() -> None:
            handle = self._open(listed)
            with open(handle, "rb") as file, local.open("wb") as target:
                while chunk := file.read(READ_BYTES):
                    target.write(chunk)
                # Written to in the meantime: what was copied may be half old and half new.
                if _version(os.fstat(handle)) != listed.etag:
                    raise ObjectChanged(f"{self.uri(listed)} was written to")

        await run_in_thread(copy)

    def _open(self, listed: SourceObject) -> int:
        path = self.root / listed.path
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise ObjectChanged(f"{path.as_uri()} cannot be opened any more ({error.strerror})") from error
        if _version(os.fstat(handle)) != listed.etag:
            os.close(handle)
            raise ObjectChanged(f"{path.as_uri()} is another version than the one listed")
        return handle


def _version(found: os.stat_result) -> str:
    """Return a version that changes whenever the file is written or replaced, even by a link's new target."""
    text = f"{found.st_size}/{found.st_mtime_ns}/{found.st_ino}/{found.st_dev}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


async def _chunks(items: AsyncIterator[ObjectInfo], size: int) -> AsyncIterator[list[ObjectInfo]]:
    chunk: list[ObjectInfo] = []
    async for item in items:
        chunk.append(item)
        if len(chunk) >= size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
