"""Reads of objects: signed GET requests, resumed where a connection broke, pinned to one version.

A large object is read by a thread, with a connection and a buffer. The caller's sink hashes and writes what comes
from the buffer, while it is still in the processor's cache. Receiving, hashing and writing release the interpreter's
lock: several threads use several cores, and a slow disk does not block the event loop, which has leases to renew.

A small object is read on the event loop: a thread would double the processor's time for it.
"""

from __future__ import annotations

import asyncio
import http.client
import socket
import ssl
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlsplit

import structlog

from services.kit import metrics
from services.kit.messages import TransientError
from services.kit.settings import Settings
from services.kit.store.credentials import aws_session, sign_request
from services.kit.store.errors import ObjectChanged, ObjectCorrupted, ObjectNotFound, StoreRefused
from services.kit.store.uris import split_uri

if TYPE_CHECKING:
    import aiohttp

log = structlog.get_logger(__name__)
T = TypeVar("T")

#: Objects that are read at a time: large ones, and small ones.
THREADS, CONNECTIONS = 16, 32
#: Memory of a connection.
BUFFER_BYTES = 2**20
#: Seconds to connect, and without a byte, after which a connection is given up.
CONNECT_S, STALL_S = 3.0, 30.0
#: Seconds to keep trying while no byte comes.
PATIENCE_S = 60.0
RETRY_S, RETRY_MAX_S = 0.05, 2.0

#: Takes content as it comes. The memory is only valid during the call.
Sink = Callable[[memoryview], object]


class _ReadInterrupted(Exception):
    """The connection broke, or the store cannot answer now; the rest can be read with another request."""


class ObjectReader:
    """Reads objects of one store. Its threads start as they are needed and end with ``close``."""

    def __init__(self, settings: Settings, *, patience_s: float = PATIENCE_S) -> None:
        self._settings, self._patience_s = settings, patience_s
        self._endpoint = (settings.s3_endpoint or f"https://s3.{settings.s3_region}.amazonaws.com").rstrip("/")
        self._credentials: Any = None
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="object-reader")
        self._connections = _ConnectionPool(self._endpoint)
        self._transfers: set[_Transfer] = set()
        self._http: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """End the threads; reads under way are aborted."""
        for transfer in tuple(self._transfers):
            transfer.abort()
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
        self._connections.close()
        if self._http is not None:
            await self._http.close()

    async def get(self, uri: str, *, etag: str = "", size_bytes: int | None = None) -> bytes:
        """Return a whole object, which is known to be small. Arguments and errors are those of ``read``."""
        target = self._target(uri, etag, size_bytes)

        async def attempt() -> bytes:
            from yarl import URL

            session, errors = self._open_session()
            try:
                url = URL(target.url, encoded=True)  # the path must go out exactly as it was signed
                async with session.get(url, headers=await self._sign(target.url)) as response:
                    content = await response.read()
            except errors as error:
                raise _ReadInterrupted(repr(error)) from error
            if response.status != 200:
                raise target.error(response.status, content)
            target.check_etag(response.headers.get("ETag", ""))
            target.check_size(len(content))
            return content

        content = await self._retry(target, attempt, self._patience_s)
        metrics.OBJECT_BYTES.labels("down").inc(len(content))
        return content

    async def read(
        self,
        uri: str,
        sink: Sink,
        *,
        start: int = 0,
        stop: int | None = None,
        etag: str = "",
        size_bytes: int | None = None,
        stall_s: float = STALL_S,
        patience_s: float | None = None,
    ) -> str:
        """Pass the bytes ``start`` to ``stop`` (exclusive) to ``sink``, in order and once; return the object's ETag.

        A cancelled read calls ``sink`` no more. What ``sink`` raises ends the read.

        Args:
            etag: of the version to read; '' reads any, and all of it from the same version.
            size_bytes: what the whole object must have.
            stall_s: seconds without a byte after which another connection is tried.
            patience_s: seconds without a byte after which the read fails.

        Raises:
            ObjectNotFound: there is no such object.
            ObjectChanged: the object is another version, or changed during the read.
            ObjectCorrupted: the object does not have ``size_bytes``.
            StoreRefused: no permission, or a request that the store does not support.
            TransientError: the store does not answer.
        """
        target = self._target(uri, etag, size_bytes, start)
        transfer = _Transfer(self._connections, target, sink, stop, stall_s)
        await self._retry(target, lambda: self._run(transfer), self._patience_s if patience_s is None else patience_s)
        return target.etag

    def _target(self, uri: str, etag: str, size_bytes: int | None, start: int = 0) -> _Target:
        bucket, key = split_uri(uri)
        return _Target(uri, f"{self._endpoint}/{bucket}/{quote(key, safe='/~')}", etag, size_bytes, start)

    async def _retry(self, target: _Target, attempt: Callable[[], Awaitable[T]], patience_s: float) -> T:
        """Repeat ``attempt`` until it is not interrupted, or no byte came for ``patience_s``."""
        loop = asyncio.get_running_loop()
        deadline, delay_s = loop.time() + patience_s, RETRY_S
        while True:
            position = target.position
            try:
                return await attempt()
            except _ReadInterrupted as error:
                if target.position > position:
                    deadline, delay_s = loop.time() + patience_s, RETRY_S
                if loop.time() > deadline:
                    raise TransientError(f"object store: {target.uri}: {error}") from error
                log.info("resuming an interrupted read", object=target.uri, position=target.position, error=str(error))
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, RETRY_MAX_S)

    async def _run(self, transfer: _Transfer) -> None:
        """Run the transfer in a thread; a cancelled caller waits until the thread is done with the sink."""
        headers = await self._sign(transfer.target.url)
        self._transfers.add(transfer)
        work = self._threads.submit(transfer.run, headers)
        done = asyncio.wrap_future(work)
        try:
            await asyncio.shield(done)
        except asyncio.CancelledError:
            if not work.cancel():
                transfer.abort()
                with suppress(Exception):
                    await done
            raise
        finally:
            self._transfers.discard(transfer)

    def _open_session(self) -> tuple[aiohttp.ClientSession, tuple[type[Exception], ...]]:
        """Return the session of the event loop, and the errors by which its requests fail."""
        import aiohttp

        if self._http is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=STALL_S)
            connector = aiohttp.TCPConnector(limit=CONNECTIONS)
            self._http = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
        return self._http, (aiohttp.ClientError, OSError)

    async def _sign(self, url: str) -> dict[str, str]:
        if self._credentials is None:
            self._credentials = await aws_session(self._settings).get_credentials()
            if self._credentials is None:
                return {}
        # Temporary credentials renew themselves in here.
        return sign_request(await self._credentials.get_frozen_credentials(), self._settings.s3_region, "GET", url)


class _Target:
    """The object to read, what is known of it, and how far the read is."""

    def __init__(self, uri: str, url: str, etag: str, size_bytes: int | None, position: int) -> None:
        self.uri, self.url, self.etag, self.size_bytes, self.position = uri, url, etag, size_bytes, position
        self._is_pinned = bool(etag)

    def check_etag(self, header: str) -> None:
        found = header.strip('"')
        if self.etag and found != self.etag:
            raise ObjectChanged(f"{self.uri} has ETag {found}, expected {self.etag}")
        self.etag = found

    def check_size(self, found: int) -> None:
        if self.size_bytes is not None and found != self.size_bytes:
            raise self._mismatch(f"{self.uri} has {found} bytes, expected {self.size_bytes}")

    def error(self, status: int, body: bytes) -> Exception:
        """Return the error that the store's answer means."""
        if status == 404:
            return ObjectNotFound(self.uri)
        if status == 412:
            return ObjectChanged(f"{self.uri} is no longer the version {self.etag}")
        if status == 416:
            return self._mismatch(f"{self.uri} has at most {self.position} bytes")
        if status in (408, 429) or status >= 500:
            return _ReadInterrupted(f"status {status}")
        return StoreRefused(f"{self.uri}: the store answers {status}: {body.decode(errors='replace')[:300]}")

    def _mismatch(self, text: str) -> Exception:
        return ObjectChanged(text) if self._is_pinned else ObjectCorrupted(text)


class _Transfer:
    """A read in a thread."""

    def __init__(
        self, connections: _ConnectionPool, target: _Target, sink: Sink, stop: int | None, stall_s: float
    ) -> None:
        self.target = target
        self._connections, self._sink, self._stop, self._stall_s = connections, sink, stop, stall_s
        self._connection: _Connection | None = None
        self._is_aborted = False
        self._lock = threading.Lock()

    def abort(self) -> None:
        """Make the thread end soon, with an error."""
        with self._lock:
            self._is_aborted = True
            if self._connection is not None:
                self._connection.interrupt()

    def run(self, headers: dict[str, str]) -> None:
        """Read from ``position`` on over one connection.

        Raises:
            _ReadInterrupted: the rest needs another request. All errors of ``ObjectReader.read``, too.
        """
        target = self.target
        if target.position or self._stop is not None:
            last = "" if self._stop is None else self._stop - 1
            headers = {**headers, "Range": f"bytes={target.position}-{last}"}
        if target.etag:
            headers = {**headers, "If-Match": f'"{target.etag}"'}
        connection, response = self._request(headers)
        try:
            self._receive(response, connection.buffer)
        finally:
            self._use(None)
            if response.isclosed() and connection.http.sock is not None and not self._is_aborted:
                self._connections.put(connection)
            else:
                response.close()
                connection.http.close()

    def _request(self, headers: dict[str, str]) -> tuple[_Connection, http.client.HTTPResponse]:
        while not self._is_aborted:
            connection = self._connections.get()
            try:
                connection.open(self._stall_s)
                self._use(connection)
                connection.http.request("GET", urlsplit(self.target.url).path, headers=headers)
                return connection, connection.http.getresponse()
            except (OSError, http.client.HTTPException) as error:
                self._use(None)
                connection.http.close()
                # The store may close an idle connection at any time; only a fresh one's failure means something.
                if not connection.was_used:
                    raise _ReadInterrupted(repr(error)) from error
        raise _ReadInterrupted("the read was cancelled")

    def _receive(self, response: http.client.HTTPResponse, buffer: memoryview) -> None:
        target = self.target
        if response.status not in (200, 206):
            raise target.error(response.status, bytes(buffer[: _read_into(response, buffer)]))
        target.check_etag(response.headers.get("ETag", ""))
        total: int | None = response.length
        skip = target.position  # a store that ignores the range sends the whole object
        if response.status == 206:
            total, skip = int(response.headers["Content-Range"].rpartition("/")[2]), 0
        if total is not None:
            target.check_size(total)
        stop = self._stop if self._stop is not None else total
        while (stop is None or target.position < stop) and (count := _read_into(response, buffer)):
            if self._is_aborted:
                raise _ReadInterrupted("the read was cancelled")
            metrics.OBJECT_BYTES.labels("down").inc(count)
            content = buffer[skip : count if stop is None else min(count, skip + stop - target.position)]
            skip = max(skip - count, 0)
            if content:
                self._sink(content)
                target.position += len(content)
        if stop is None:
            target.check_size(target.position)
        elif target.position < stop:
            raise _ReadInterrupted(f"the answer ended {stop - target.position} bytes early")
        elif not response.isclosed():
            _read_into(response, buffer)  # the end of an empty body, so that the connection can be used again

    def _use(self, connection: _Connection | None) -> None:
        with self._lock:
            self._connection = connection
            if connection is not None and self._is_aborted:
                connection.interrupt()


def _read_into(response: http.client.HTTPResponse, buffer: memoryview) -> int:
    try:
        return response.readinto(buffer)
    except (OSError, http.client.HTTPException) as error:
        raise _ReadInterrupted(repr(error)) from error


class _Connection:
    """A connection, and the buffer for what comes over it."""

    def __init__(self, host: str, port: int | None, tls: ssl.SSLContext | None) -> None:
        self.http = (
            http.client.HTTPSConnection(host, port, timeout=CONNECT_S, context=tls)
            if tls is not None
            else http.client.HTTPConnection(host, port, timeout=CONNECT_S)
        )
        self.buffer = memoryview(bytearray(BUFFER_BYTES))
        self.was_used = False

    def open(self, stall_s: float) -> None:
        if self.http.sock is None:
            self.http.timeout = min(CONNECT_S, stall_s)
            self.http.connect()
        self.http.sock.settimeout(stall_s)

    def interrupt(self) -> None:
        """End the wait of a thread that receives."""
        with suppress(OSError):
            self.http.sock.shutdown(socket.SHUT_RDWR)


class _ConnectionPool:
    """Idle connections to one store."""

    def __init__(self, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        self._host, self._port = parts.hostname or "", parts.port
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._idle: deque[_Connection] = deque()

    def get(self) -> _Connection:
        try:
            return self._idle.pop()
        except IndexError:
            return _Connection(self._host, self._port, self._tls)

    def put(self, connection: _Connection) -> None:
        connection.was_used = True
        self._idle.append(connection)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().http.close()
