"""Whole objects into files and hashes, beside the caller's event loop.

Each is read by a thread, into one buffer, and hashed and written out of it while it is still in the processor's cache.
None of the three holds the interpreter's lock: several threads use several cores, and a disk that is slow holds up
nobody who has a lease to renew.
"""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import os
import ssl
import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import SHUT_RDWR
from typing import Any, NoReturn, Protocol, TypeVar
from urllib.parse import quote, urlsplit

from services.kit import metrics
from services.kit.bus import TransientError
from services.kit.settings import Settings
from services.kit.signing import signed_headers
from services.kit.store.errors import ObjectNotFound, StoreRefused
from services.kit.store.objects import CHUNK, split_uri, write_at
from services.kit.store.reader import CONNECT_S, STALL_S

T = TypeVar("T")
#: ObjectStore that are read at a time; each takes a connection, and ``CHUNK`` of memory.
THREADS = 16


class Hasher(Protocol):
    """What ``hashlib`` and others make."""

    def update(self, content: memoryview, /) -> Any: ...
    def hexdigest(self) -> str: ...


class Bulk:
    """Reads large objects of one store. Its threads start as they are needed and end with ``close``."""

    def __init__(self, settings: Settings, session: Any) -> None:
        """``session``: aioboto3's, which knows the credentials."""
        self._settings, self._session = settings, session
        self._endpoint = (settings.s3_endpoint or f"https://s3.{settings.s3_region}.amazonaws.com").rstrip("/")
        self._credentials: Any = None
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="bulk")
        self._lines = _Lines(self._endpoint)
        self._reads: set[_Read] = set()

    async def close(self) -> None:
        """End the threads; what is still being read is given up."""
        for read in tuple(self._reads):
            read.give_up()
        await asyncio.to_thread(self._pool.shutdown, cancel_futures=True)
        self._lines.close()

    async def hash(self, uri: str) -> str:
        """Lower-case hex SHA-256 of an object's content. Raises what ``read_into`` does."""
        return await self._run(_hash, uri)

    async def read_into(
        self, uri: str, path: Path, offset: int, size_bytes: int | None, hasher: Callable[[], Hasher] = hashlib.sha256
    ) -> str:
        """Write an object's content into an existing file from ``offset`` on; return its hash by ``hasher``.

        When it is cancelled nothing more is written.

        Raises:
            ValueError: the object has not ``size_bytes``; None takes any.
            TransientError: the file cannot be written.
            ObjectNotFound, StoreRefused: there is no such object, or the store will not answer.
            OSError: the connection broke, or nothing came; to be tried again.
        """
        return await self._run(_read_into, uri, path, offset, size_bytes, hasher)

    async def _run(self, job: Callable[..., T], uri: str, *given: Any) -> T:
        credentials = None
        if self._credentials is None:
            self._credentials = await self._session.get_credentials()
        if self._credentials is not None:
            # Temporary ones renew themselves in here.
            credentials = await self._credentials.get_frozen_credentials()
        bucket, key = split_uri(uri)
        url = f"{self._endpoint}/{bucket}/{quote(key, safe='/~')}"
        read = _Read(self._lines, uri, url, credentials, self._settings.s3_region)
        self._reads.add(read)
        work = self._pool.submit(job, read, *given)
        done = asyncio.wrap_future(work)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            if not work.cancel():
                read.give_up()
                with suppress(Exception):
                    await done
            raise
        finally:
            self._reads.discard(read)


class _Line:
    """A connection, and the buffer for what comes over it."""

    def __init__(self, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        host = parts.hostname or ""
        self._connection = (
            http.client.HTTPSConnection(host, parts.port, timeout=CONNECT_S, context=ssl.create_default_context())
            if parts.scheme == "https"
            else http.client.HTTPConnection(host, parts.port, timeout=CONNECT_S)
        )
        self.buffer = memoryview(bytearray(CHUNK))
        #: Whether it has brought an answer before.
        self.used = False

    @property
    def is_open(self) -> bool:
        return self._connection.sock is not None

    def open(self) -> None:
        if not self.is_open:
            self._connection.connect()
            self._connection.sock.settimeout(STALL_S)

    def ask(self, path: str, headers: dict[str, str]) -> http.client.HTTPResponse:
        self._connection.request("GET", path, headers=headers)
        return self._connection.getresponse()

    def break_off(self) -> None:
        """Have the thread that waits for bytes wait no longer."""
        with suppress(OSError):
            self._connection.sock.shutdown(SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()


class _Lines:
    """Connections to one store that nobody uses at the moment."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._idle: deque[_Line] = deque()

    def take(self) -> _Line:
        try:
            return self._idle.pop()
        except IndexError:
            return _Line(self._endpoint)

    def give_back(self, line: _Line) -> None:
        line.used = True
        self._idle.append(line)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()


class _Read:
    """One object that is being read, in a thread."""

    def __init__(self, lines: _Lines, uri: str, url: str, credentials: Any, region: str) -> None:
        self.uri = uri
        self._lines, self._url, self._credentials, self._region = lines, url, credentials, region
        self._line: _Line | None = None
        self._given_up = False
        self._lock = threading.Lock()

    def give_up(self) -> None:
        """Make the thread that reads end soon, with an error that nobody looks at."""
        with self._lock:
            self._given_up = True
            if self._line is not None:
                self._line.break_off()

    def chunks(self, size_bytes: int | None = None) -> Generator[memoryview]:
        """The content as it comes; each chunk lasts until the next one.

        Raises what ``Bulk.read_into`` does.
        """
        with self._answer() as (answer, buffer):
            if answer.status != 200:
                self._refuse(answer)
            expected = answer.length
            if size_bytes is not None and expected != size_bytes:
                raise ValueError(f"{self.uri} has {expected} bytes, expected {size_bytes}")
            received = 0
            while count := answer.readinto(buffer):
                if self._given_up:
                    raise ConnectionAbortedError(f"{self.uri} is not wanted any more")
                received += count
                metrics.OBJECT_BYTES.labels("down").inc(count)
                yield buffer[:count]
            if expected is not None and received < expected:
                raise ConnectionError(f"{self.uri} ended {expected - received} bytes early")

    @contextmanager
    def _answer(self) -> Generator[tuple[http.client.HTTPResponse, memoryview]]:
        """The store's answer, and room for what comes. The connection is used again if all went well."""
        line, answer = self._ask()
        is_good = False
        try:
            yield answer, line.buffer
            is_good = answer.isclosed() and line.is_open
        except http.client.HTTPException as error:
            raise ConnectionError(f"{self.uri}: {error!r}") from error
        finally:
            self._uses(None)
            if is_good and not self._given_up:
                self._lines.give_back(line)
            else:
                answer.close()
                line.close()

    def _ask(self) -> tuple[_Line, http.client.HTTPResponse]:
        headers: dict[str, str] = {}
        if self._credentials is not None:
            headers = signed_headers(self._credentials, self._region, "GET", self._url)
        while not self._given_up:
            line = self._lines.take()
            try:
                line.open()
                self._uses(line)
                return line, line.ask(urlsplit(self._url).path, headers)
            except (OSError, http.client.HTTPException) as error:
                self._uses(None)
                line.close()
                # The store may have closed one that was idle, which says nothing about the store.
                if not line.used:
                    raise ConnectionError(f"{self.uri}: {error!r}") from error
        raise ConnectionAbortedError(f"{self.uri} is not wanted any more")

    def _uses(self, line: _Line | None) -> None:
        with self._lock:
            self._line = line
            if line is not None and self._given_up:
                line.break_off()

    def _refuse(self, answer: http.client.HTTPResponse) -> NoReturn:
        text = answer.read().decode(errors="replace")
        if answer.status == 404:
            raise ObjectNotFound(self.uri)
        if answer.status in (408, 429) or answer.status >= 500:
            raise ConnectionError(f"{self.uri}: status {answer.status}")
        raise StoreRefused(f"{self.uri}: the store answers {answer.status}: {text[:300]}")


def _hash(read: _Read) -> str:
    digest = hashlib.sha256()
    for chunk in read.chunks():
        digest.update(chunk)
    return digest.hexdigest()


def _read_into(read: _Read, path: Path, offset: int, size_bytes: int | None, hasher: Callable[[], Hasher]) -> str:
    digest = hasher()
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _unwritable(path, error) from error
    chunks = read.chunks(size_bytes)
    try:
        for chunk in chunks:
            digest.update(chunk)
            try:
                write_at(handle, chunk, offset)
            except OSError as error:
                raise _unwritable(path, error) from error
            offset += len(chunk)
    finally:
        # With the file: a disk that is full must not leave the connection open.
        chunks.close()
        os.close(handle)
    return digest.hexdigest()


def _unwritable(path: Path, error: OSError) -> TransientError:
    # Said as what it is: the store's errors are OSErrors too, and trying again would not help.
    return TransientError(f"{path} cannot be written: {error.strerror or repr(error)}")
