"""Whole objects into files and hashes, beside the caller's event loop.

A thread has an event loop of its own for it. What comes is hashed and written there as it comes, without a change of
threads for each portion, and a disk that is slow holds up nobody who has a lease to renew.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, TypeVar

from services.kit.bus import Transient
from services.kit.objects import write_at
from services.kit.reader import Reader
from services.kit.settings import Settings

T = TypeVar("T")


class Bulk:
    """Reads large objects of one store. Its thread starts with the first call and ends with ``close``."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._starting = asyncio.Lock()
        self._running: _Running | None = None

    async def close(self) -> None:
        """End the thread; what is still being read is cancelled."""
        if self._running is not None:
            running, self._running = self._running, None
            await running.stop()

    async def hash(self, uri: str) -> str:
        """Lower-case hex SHA-256 of an object's content. Raises what ``Reader.whole`` does."""
        return await self._run(_hash, uri)

    async def read_into(
        self, uri: str, path: Path, offset: int, size_bytes: int | None, hasher: Callable[[], Any] = hashlib.sha256
    ) -> str:
        """Write an object's content into an existing file from ``offset`` on; return its hash by ``hasher``.

        Raises:
            ValueError: the object has not ``size_bytes``; None takes any.
            Transient: the file cannot be written.
        """
        return await self._run(_read_into, uri, path, offset, size_bytes, hasher)

    async def _run(self, job: Callable[..., Coroutine[Any, Any, T]], *given: Any) -> T:
        async with self._starting:
            if self._running is None:
                self._running = await _Running.start(self._settings)
        running = self._running
        # Whoever cancels us cancels the job.
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(job(running.reader, *given), running.loop))


class _Running:
    """The thread, its event loop and what reads there."""

    reader: Reader
    loop: asyncio.AbstractEventLoop

    def __init__(self, settings: Settings) -> None:
        self._started: Future[None] = Future()
        self._stopping: asyncio.Event
        # A daemon: a process that ends without closing anything does not wait for a store that is away.
        self._thread = threading.Thread(target=self._main, args=(settings,), name="bulk", daemon=True)

    @classmethod
    async def start(cls, settings: Settings) -> _Running:
        running = cls(settings)
        running._thread.start()
        await asyncio.wrap_future(running._started)
        return running

    async def stop(self) -> None:
        with suppress(RuntimeError):  # its loop has ended
            self.loop.call_soon_threadsafe(self._stopping.set)
        await asyncio.to_thread(self._thread.join)

    def _main(self, settings: Settings) -> None:
        try:
            asyncio.run(self._serve(settings))
        except BaseException as error:
            if self._started.done():
                raise
            self._started.set_exception(error)

    async def _serve(self, settings: Settings) -> None:
        self.loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        async with Reader(settings) as self.reader:
            self._started.set_result(None)
            await self._stopping.wait()


async def _hash(reader: Reader, uri: str) -> str:
    digest = hashlib.sha256()
    async with aclosing(reader.whole(uri)) as chunks:
        async for chunk in chunks:
            digest.update(chunk)
    return digest.hexdigest()


async def _read_into(
    reader: Reader, uri: str, path: Path, offset: int, size_bytes: int | None, hasher: Callable[[], Any]
) -> str:
    digest = hasher()
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        # Closed with the block: a disk that is full must not leave the connection open.
        async with aclosing(reader.whole(uri, size_bytes)) as chunks:
            async for chunk in chunks:
                digest.update(chunk)
                try:
                    write_at(handle, chunk, offset)
                except OSError as error:
                    raise _unwritable(path, error) from error
                offset += len(chunk)
    finally:
        os.close(handle)
    return str(digest.hexdigest())


def _unwritable(path: Path, error: OSError) -> Transient:
    # Said as what it is: the store's errors are OSErrors too, and trying again would not help.
    return Transient(f"{path} cannot be written: {error.strerror or repr(error)}")
