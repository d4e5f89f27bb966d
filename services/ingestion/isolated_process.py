"""Isolated processes that read untrusted data: with resource limits, and their death does not affect the service."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import resource
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import connection
from typing import Any, TypeVar

from services.kit.concurrency import run_in_thread

T = TypeVar("T")

#: Address space of such a process: Python and its libraries, and an image of the most pixels in two copies.
MEMORY_BYTES = 3 * 2**30
#: Seconds of CPU that one image, or one batch of a table's rows, may take; the largest takes a few.
CPU_S = 120.0
#: How often something is tried that its process dies of.
ATTEMPTS = 2
READY = "ready"


class ProcessDied(Exception):
    """The process ended without a result."""


class IsolatedProcess:
    """One process and the connection to it. Start it and use it from any one thread at a time."""

    def __init__(self, work: Callable[..., None], *args: Any, memory_bytes: int = MEMORY_BYTES) -> None:
        """Start ``work(connection, *args)``, and wait until it is ready.

        Raises:
            TransientError: no process can be started, or it has not enough memory to begin.
        """
        # Spawned: the service has threads, which a forked child would find in any state.
        context = multiprocessing.get_context("spawn")
        self._killed = False
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs, memory_bytes, work, args), daemon=True)
        try:
            self._process.start()
            theirs.close()
            self.receive()
        except (OSError, ProcessDied) as error:
            theirs.close()
            self.connection.close()
            # Imported here: most of what a process would import at its start is the bus, which it has no use for.
            from services.kit.bus import TransientError

            raise TransientError(f"no process can be started that reads the source: {error!r}") from error

    def send(self, message: Any) -> None:
        """Send a message. Raises ``ProcessDied``."""
        try:
            self.connection.send(message)
        except OSError as error:
            raise ProcessDied from error

    def receive(self) -> Any:
        """Return its next message. Raises ``ProcessDied``, also after ``kill`` if a message is left."""
        content = self._receive(self.connection.recv)
        if self._killed:
            raise ProcessDied
        return content

    def receive_bytes(self) -> bytes:
        """Return the next bytes. Raises ``ProcessDied``."""
        return self._receive(self.connection.recv_bytes)

    def _receive(self, receive: Callable[[], T]) -> T:
        try:
            return receive()
        except (EOFError, OSError) as error:
            raise ProcessDied from error

    def kill(self) -> None:
        """Kill the process; a thread that waits for it gets ``ProcessDied``."""
        self._killed = True
        self._process.kill()

    def end(self) -> None:
        """End the process and close the connection."""
        self.kill()
        self._process.join()
        self.connection.close()


async def run_isolated(
    work: Callable[..., Any], *args: Any, report: Callable[..., None], memory_bytes: int = MEMORY_BYTES
) -> Any:
    """Run ``work(report, *args)`` in its own process and return its result; ``report`` runs in a thread of this one.

    Cancellation ends the process.

    Raises:
        ProcessDied: it died, or took more memory than it may have.
        Exception: what ``work`` raised.
    """
    child = await run_in_thread(IsolatedProcess, _report_and_return, work, args, memory_bytes=memory_bytes)
    following = asyncio.create_task(run_in_thread(_follow, child, report))
    try:
        return await asyncio.shield(following)
    finally:
        child.kill()
        with suppress(BaseException):
            await following
        await run_in_thread(child.end)


def _follow(child: IsolatedProcess, report: Callable[..., None]) -> Any:
    while True:
        kind, content = child.receive()
        if kind == "returned":
            return content
        if kind == "raised":
            raise content
        report(*content)


def limit_cpu(seconds: float) -> None:
    """End this process after ``seconds`` more of processor time; 0 removes the limit."""
    # The signal's default action ends the process; nothing else stops a decoder in C.
    signal.setitimer(signal.ITIMER_PROF, seconds)


def limit_resources(memory_bytes: int = MEMORY_BYTES) -> None:
    """Set the limits of a new process, and make it end when the service ends, even by SIGKILL."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _run(ours: Any, memory_bytes: int, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    limit_resources(memory_bytes)
    ours.send(READY)
    work(ours, *args)


def _report_and_return(ours: Any, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        answer = "returned", work(lambda *content: ours.send(("reported", content)), *args)
    except Exception as error:
        answer = "raised", error
    ours.send(answer)
