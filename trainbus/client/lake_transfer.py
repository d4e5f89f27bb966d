"""Files of this machine on their way into the store.

What is there with the same content is not sent again, so a transfer that broke off goes on when it is repeated.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.kit.store.etags import PART_BYTES, etag_of_parts, find_key_problem, md5_of, part_bytes_of
from trainbus.client.address import StackAddress
from trainbus.client.errors import TrainbusError, UsageError
from trainbus.client.lake import Lake, StoredObject, UploadEndedError, check_address, list_whole, open_lake

#: Requests at a time; each part of them is in memory.
CONCURRENCY = 6

#: Gets the bytes that are done, and all bytes.
Advance = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class PutResult:
    """What ``put`` found and sent. ``uri`` is the address for ``--data``."""

    uri: str
    files: int
    size_bytes: int
    #: Files whose content was not there yet.
    sent: int
    sent_bytes: int
    #: Names that begin with a dot, and links to folders: left out.
    left_out: tuple[str, ...] = ()


async def put_files(
    address: StackAddress, path: Path, uri: str, advance: Advance = lambda done, total: None
) -> PutResult:
    """Put a file, or what lies in a folder, into the store; what is there with the same content is not sent.

    Each object appears whole or not at all. A file's name is added to an address that ends with a slash, or that has no
    ending where the file has one.

    Raises:
        UsageError: there is no such path, nothing in it, or no data belongs at the address.
        TrainbusError: a file changed while it was sent.
    """
    if not path.exists():
        raise UsageError(f"there is no file or folder {path}")
    root, files, left_out = await asyncio.to_thread(_list_files, path)
    if not files:
        raise UsageError(f"{path} has no files" + (" but hidden ones" if left_out else ""))
    target = _choose_target(path, check_address(uri))
    async with open_lake(address) as lake:
        transfer = _Transfer(lake, advance, sum(size for _, size in files))
        there = {each.uri: each async for each in list_whole(lake, target)}
        base = target if target.endswith("/") else target.rpartition("/")[0] + "/"
        todo: list[tuple[Path, str]] = []
        for file, _ in files:
            key = target if path.is_file() else base + file.relative_to(root).as_posix()
            _check_key(file, key)
            todo.append((file, key))
        await transfer.run(todo, there)
    result_uri = target if path.is_file() else base
    size_bytes = sum(size for _, size in files)
    return PutResult(result_uri, len(files), size_bytes, transfer.sent, transfer.sent_bytes, tuple(left_out))


class _Transfer:
    """Sends files, several at a time."""

    def __init__(self, lake: Lake, advance: Advance, total_bytes: int) -> None:
        self._lake, self._advance, self._total = lake, advance, total_bytes
        self._places = asyncio.Semaphore(CONCURRENCY)
        self._done = 0
        self.sent = self.sent_bytes = 0

    async def run(self, files: Sequence[tuple[Path, str]], there: dict[str, StoredObject]) -> None:
        """Send what is not there; the first file that fails ends the others."""
        self._report(0)
        queue = iter(files)

        async def work() -> None:
            for file, uri in queue:
                await self._put_file(file, uri, there.get(uri))

        workers = [asyncio.create_task(work()) for _ in range(min(CONCURRENCY, len(files)))]
        try:
            await asyncio.gather(*workers)
        except BaseException:
            for each in workers:
                each.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            raise

    async def _put_file(self, file: Path, uri: str, known: StoredObject | None) -> None:
        found = file.stat()
        size_bytes = found.st_size
        if known is not None and known.size_bytes == size_bytes:
            async with self._places:
                etag = await asyncio.to_thread(_etag_of, file, size_bytes)
            if etag == known.etag:
                self._report(size_bytes)
                return
        if size_bytes <= PART_BYTES:
            async with self._places:
                body = await asyncio.to_thread(file.read_bytes)
                _check_unchanged(file, found)
                await self._lake.put(uri, body)
            self._count(len(body))
        else:
            await self._put_parts(file, uri, found)
        self.sent += 1

    async def _put_parts(self, file: Path, uri: str, found: os.stat_result) -> None:
        """Send a large file; parts that have arrived before are not sent again."""
        part_bytes = part_bytes_of(found.st_size)
        upload = await self._lake.begin_upload(uri)

        async def send(number: int) -> str:
            async with self._places:
                body = await asyncio.to_thread(_read_part, file, (number - 1) * part_bytes, part_bytes)
                etag = md5_of(body)
                if upload.etags.get(number) == etag:
                    self._report(len(body))
                else:
                    await self._lake.put_part(uri, upload.upload_id, number, body)
                    self._count(len(body))
                return etag

        count = -(-found.st_size // part_bytes)
        etags: list[str] = []
        try:
            for first in range(1, count + 1, CONCURRENCY):
                numbers = range(first, min(first + CONCURRENCY, count + 1))
                etags += await asyncio.gather(*map(send, numbers))
            _check_unchanged(file, found)
            await self._lake.complete(uri, upload.upload_id, etags)
        except UploadEndedError:
            # Another client, or an answer that was lost, has ended it: fine if the object is this file.
            # This client may not have read all of its parts by then.
            etag = await asyncio.to_thread(_etag_of, file, found.st_size)
            stored = [each async for each in list_whole(self._lake, uri) if each.uri == uri]
            if not stored or stored[0].etag != etag:
                raise TrainbusError(f"{uri} was written by somebody else meanwhile: put it again") from None

    def _count(self, size_bytes: int) -> None:
        self.sent_bytes += size_bytes
        self._report(size_bytes)

    def _report(self, size_bytes: int) -> None:
        self._done += size_bytes
        self._advance(self._done, self._total)


def _list_files(path: Path) -> tuple[Path, list[tuple[Path, int]], list[str]]:
    """Return the folder, its files with their sizes, and what is left out: hidden names, and links to folders."""
    if path.is_file():
        return path.parent, [(path, path.stat().st_size)], []
    left_out: list[str] = []
    files: list[tuple[Path, int]] = []
    for file in _walk(path, left_out):
        files.append((file, file.stat().st_size))
    return path, files, left_out


def _walk(path: Path, left_out: list[str]) -> Iterator[Path]:
    for folder, folders, names in os.walk(path):
        hidden = [name for name in folders if name.startswith(".") or os.path.islink(os.path.join(folder, name))]
        left_out += [f"{name}/" for name in hidden]
        folders[:] = sorted(set(folders) - set(hidden))
        for name in sorted(names):
            file = Path(folder, name)
            if name.startswith(".") or not file.is_file():
                left_out.append(name)
            else:
                yield file


def _choose_target(path: Path, uri: str) -> str:
    """Return the prefix of a folder's objects, with a slash at its end, or the address of a file's object."""
    if path.is_dir():
        return uri if uri.endswith("/") else f"{uri}/"
    last = uri.rpartition("/")[2]
    if not last or (path.suffix and not Path(last).suffix):
        return f"{uri.removesuffix('/')}/{path.name}"
    return uri


def _check_key(file: Path, uri: str) -> None:
    if problem := find_key_problem(uri.removeprefix("s3://").partition("/")[2]):
        raise UsageError(f"{file} cannot be stored as {uri}: {problem}")


def _etag_of(file: Path, size_bytes: int) -> str:
    """Return the ETag that the store gives this file's content."""
    if size_bytes <= PART_BYTES:
        return md5_of(file.read_bytes())
    part_bytes = part_bytes_of(size_bytes)
    return etag_of_parts([md5_of(_read_part(file, at, part_bytes)) for at in range(0, size_bytes, part_bytes)])


def _read_part(file: Path, offset: int, size_bytes: int) -> bytes:
    with file.open("rb") as content:
        content.seek(offset)
        return content.read(size_bytes)


def _check_unchanged(file: Path, before: os.stat_result) -> None:
    now = file.stat()
    if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        raise TrainbusError(f"{file} was written to while it was sent: put it again once nothing writes to it")
