"""Doing several things at once, where one failure ends the others."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def together(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """The results in order. If one fails the others are cancelled, and its own error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except BaseExceptionGroup as error:
        raise _first_cause(error) from error
    return [task.result() for task in tasks]


def _first_cause(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
