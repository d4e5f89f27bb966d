"""Run a computation on a snapshot of this process: a forked child answers, and the event loop goes on."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple


class ChildError(RuntimeError):
    """The child ended without an answer; the text says why."""


class Child(NamedTuple):
    """A started child: its process id, and the end of the pipe from which its answer is read."""

    pid: int
    pipe_fd: int


async def read_child(child: Child, timeout_s: float) -> dict[str, Any]:
    """Return the child's answer.

    Raises:
        ChildError: it raised an exception, or took too long.
    """
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    pipe = os.fdopen(child.pipe_fd, "rb", buffering=0)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    try:
        async with asyncio.timeout(timeout_s):
            body = await reader.read()
    except TimeoutError:
        raise ChildError(f"it took longer than {timeout_s:g} s") from None
    finally:
        transport.close()
        # It is not reaped yet, so the id is still its own.
        with suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
        await asyncio.to_thread(os.waitpid, child.pid, 0)
    answer: dict[str, Any] = json.loads(body) if body else {"error": "it ended without an answer"}
    if "error" in answer:
        raise ChildError(answer["error"])
    return dict(answer["result"])


def start_child(compute: Callable[[], dict[str, Any]]) -> Child:
    """Fork a child that calls ``compute``. Only memory is shared, copied on write: it must do no I/O."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return Child(pid, reading)
    try:
        gc.disable()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        with suppress(OSError):
            os.nice(10)
        try:
            answer: dict[str, Any] = {"result": compute()}
        except Exception as error:
            answer = {"error": repr(error)}
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(json.dumps(answer).encode())
    finally:
        os._exit(0)
