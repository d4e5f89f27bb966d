"""Threads and tasks that end in good order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def run_in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run ``function`` in a thread. A cancelled caller waits until the thread has finished.

    A thread cannot be stopped, and the files and databases that it uses must stay open until then.
    """
    work = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        with suppress(Exception):
            await work
        raise


async def cancel_and_wait(*tasks: asyncio.Future[Any]) -> None:
    """Cancel ``tasks`` and wait until they have ended; ignore their results and errors.

    One cancellation is not enough: on Python 3.11 ``asyncio.wait_for``, which nats-py uses, swallows a cancellation
    that comes at the moment its own work is done. Waiting for such a task would wait for ever.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=0.5)
    await asyncio.gather(*tasks, return_exceptions=True)


async def run_ahead(work: Iterable[Coroutine[Any, Any, T]], *, limit: int) -> AsyncGenerator[T, None]:
    """Yield the results in order; ``limit`` coroutines run at a time, so that the next ones go on meanwhile."""
    running: deque[asyncio.Task[T]] = deque()
    try:
        for coroutine in work:
            running.append(asyncio.create_task(coroutine))
            if len(running) >= limit:
                yield await running.popleft()
        while running:
            yield await running.popleft()
    finally:
        await cancel_and_wait(*running)


async def gather_limited(work: Iterable[Coroutine[Any, Any, T]], *, limit: int) -> list[T]:
    """Run everything, at most ``limit`` at once, and return the results in order.

    The first error cancels the rest and is raised as it is; a TaskGroup would wrap it.
    """
    gate = asyncio.Semaphore(limit)

    async def one(coroutine: Coroutine[Any, Any, T]) -> T:
        async with gate:
            return await coroutine

    coroutines = list(work)
    tasks = [asyncio.create_task(one(coroutine)) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_and_wait(*tasks)
        for coroutine in coroutines:
            coroutine.close()  # those that were never started
