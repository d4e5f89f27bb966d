"""Build the read model again from the streams: ``python -m services.gateway rebuild``."""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import dataclass
from datetime import UTC, datetime

import sqlalchemy as sa

from services.gateway.projection import FACTS, STREAMS, Projection
from services.gateway.settings import GatewaySettings
from services.gateway.store import EVENTS, Store
from services.kit.bus import Bus
from services.kit.settings import Settings


@dataclass(frozen=True, slots=True)
class RebuildResult:
    """What a rebuild did."""

    #: First fact that was read from the stream again; those before it were folded from the copy in SQL.
    from_sequence: int
    to_sequence: int
    refolded: int
    runs: int
    seconds: float


async def rebuild(
    settings: Settings, *, from_sequence: int | None = None, from_time: datetime | None = None
) -> RebuildResult:
    """Throw the read model away and build it from the streams; a gateway that is running goes on.

    With ``from_sequence`` (a sequence of FACTS) or ``from_time``, facts before it are taken from the
    read model's own copy instead, and only the rest is read from the stream.
    """
    if from_sequence is not None and from_time is not None:
        raise ValueError("give from_sequence or from_time, not both")
    own = GatewaySettings.of(settings)
    started = time.monotonic()
    bus = Bus("gateway-rebuild", own)
    await bus.connect(reconcile_topology=True)
    try:
        async with Store(own.database_url, replaces_later=True) as store:
            projection = Projection(bus, store)
            await projection.adopt()
            first = await _first(store, from_sequence, from_time)
            refolded = await projection.rewind(first)
            await projection.adopt()
            for stream in STREAMS:
                await projection.run(stream, until_caught_up=True)
            runs = (await store.fetch(sa.text("SELECT COUNT(*) AS runs FROM runs")))[0]["runs"]
            to = await store.position(FACTS)
            return RebuildResult(first, to, refolded, runs, time.monotonic() - started)
    finally:
        await bus.close()


async def _first(store: Store, from_sequence: int | None, from_time: datetime | None) -> int:
    """The first sequence to read again: never beyond the first one that is not in SQL."""
    beyond = await store.position(FACTS) + 1
    if from_sequence is not None:
        if from_sequence < 1:
            raise ValueError("from_sequence counts from 1")
        return min(from_sequence, beyond)
    if from_time is not None:
        since = from_time if from_time.tzinfo else from_time.replace(tzinfo=UTC)
        query = sa.select(sa.func.min(EVENTS.c.sequence).label("first")).where(EVENTS.c.time >= since.timestamp())
        first = (await store.fetch(query))[0]["first"]
        return beyond if first is None else int(first)
    return 1


def main(settings: Settings, arguments: list[str]) -> None:
    """The command line of ``python -m services.gateway rebuild``."""
    parser = argparse.ArgumentParser(prog="python -m services.gateway rebuild", description=rebuild.__doc__)
    parser.add_argument("--from-sequence", type=int, help="read FACTS from the stream from here on only")
    parser.add_argument("--from-time", type=datetime.fromisoformat, help="the same, by time (ISO 8601)")
    chosen = parser.parse_args(arguments)
    done = asyncio.run(rebuild(settings, from_sequence=chosen.from_sequence, from_time=chosen.from_time))
    print(
        f"rebuilt {done.runs} runs from {done.to_sequence} facts in {done.seconds:.2f} s "
        f"({done.refolded} of them from SQL, the rest from sequence {done.from_sequence} of the stream)"
    )
