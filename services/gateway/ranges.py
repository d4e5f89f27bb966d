"""Parts of streams as one answer has them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from contracts import topology
from services.gateway.sse import Encode
from services.kit.bus import Bus, Message

#: Messages among which the newest ones are searched first.
NEAREST = 200


def cut_range(found: list[tuple[int, Any]], limit: int, after: int) -> tuple[list[Any], dict[str, Any]]:
    """Return the first ``limit`` of what was found after a sequence, each with its own, and the fields of ``Range``."""
    kept = found[:limit]
    position = {"last_event_id": kept[-1][0] if kept else after, "has_more": len(found) > limit}
    return [item for _, item in kept], position


async def read_range(
    bus: Bus, stream: str, filters: tuple[str, ...], after: int, limit: int, encode: Encode
) -> tuple[list[Any], dict[str, Any]]:
    """Read at most ``limit`` events that are stored after a sequence; return as ``cut_range`` does."""
    found: list[Message[Any]] = []
    async with aclosing(bus.follow(stream, filters, after + 1, until_caught_up=True)) as batches:
        async for batch in batches:
            found += batch
            if len(found) > limit:
                break
    return cut_range([(item.sequence, encode(item)[1]) for item in found], limit, after)


async def read_newest(
    bus: Bus, stream: topology.Stream, filters: tuple[str, ...], enough: Callable[[list[Message[Any]]], bool]
) -> list[Message[Any]]:
    """Return the newest events on ``filters``, oldest first: as many as are enough, or all there are.

    A long stream is read from its end, in ever longer parts.
    """
    last = max([await bus.get_last_sequence(each, stream.name) for each in filters or (">",)])
    reach = 0 if len(filters) == 1 else NEAREST
    while True:
        start = max(1, last - reach)
        found = await bus.read_history(*filters, stream=stream.name, start_sequence=start) if last else []
        if start <= 1 or enough(found):
            return found
        reach = reach * 10 or NEAREST
