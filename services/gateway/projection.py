"""Streams into the read model: batches and positions in one transaction, so each event counts once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import nats.errors
import sqlalchemy as sa
import structlog
from nats.js.api import StreamInfo
from nats.js.errors import APIError
from sqlalchemy.ext.asyncio import AsyncConnection

from contracts import topology
from contracts.base import Event, run_id_for
from contracts.earlier_events import model_of, read_data
from contracts.events.run import RunProgress, RunStarted
from contracts.texts import describe
from services.gateway import metrics
from services.gateway import store as tables
from services.gateway.core.fold import At, apply, apply_progress, keys
from services.gateway.core.rows import Point
from services.gateway.store import EVENTS, ForeignSchema, ProjectionMoved, Store, is_about_values
from services.kit.bus import Bus, Message

log = structlog.get_logger(__name__)

FACTS, REQUESTS, PROGRESS = topology.FACTS.name, topology.REQUESTS.name, topology.PROGRESS.name
#: What is projected, in the order in which a rebuild reads it: points know what was abandoned.
STREAMS = (REQUESTS, FACTS, PROGRESS)
REFOLD_BATCH = 2000
#: How often a projection that has caught up checks whether another instance has rewound it.
REWIND_CHECK_S = 1.0
#: Seconds between two looks whether the read model is this gateway's again.
SCHEMA_POLL_S = 5.0
#: How long an answer may wait for the read model to hold what its client has published before.
CATCH_UP_S = 2.0
#: How long an event may take into the read model before it is asked whether it can be decoded at all.
DECODE_S = 0.2
#: Events at the end of a stream of which at least one is taken to be one that can be decoded.
MAX_UNREADABLE = 200


class Projection:
    """Keeps one store up with the streams."""

    def __init__(self, bus: Bus, store: Store) -> None:
        self.bus, self.store = bus, store
        #: Streams whose end has been reached at least once: before that, answers are history.
        self.caught_up: set[str] = set()
        #: Whether a later gateway keeps the read model.
        self._is_superseded = False
        self._advanced = asyncio.Condition()
        #: The look at the ends of the streams that is being taken, and the one that waits for its end.
        self._look: asyncio.Task[bool] | None = None
        self._next_look: asyncio.Task[bool] | None = None
        #: Stream -> the last sequence at which it ended with what cannot be decoded.
        self._unreadable_ends: dict[str, int] = {}

    @property
    def ready(self) -> bool:
        return not self._is_superseded and self.caught_up >= set(STREAMS)

    async def adopt(self) -> None:
        """Make the store fit the streams that are there now."""
        created: dict[str, float] = {}
        for stream in STREAMS:
            info = await self._stream_info(stream)
            created[stream] = info.created.timestamp() if info.created else 0.0
        await self.store.adopt(created)

    async def run(self, stream: str, *, until_caught_up: bool = False) -> None:
        """Project ``stream`` for ever, or up to what is stored now."""
        while True:
            try:
                await self._run(stream, until_caught_up)
                return
            except ProjectionMoved as moved:
                # Another gateway, or a rebuild, writes to the same database: share the work.
                log.info("projection moved by another", stream=stream, reason=str(moved))
                await self.adopt()
            except ForeignSchema as error:
                # A later gateway has taken over. What is read here still holds, until this one is stopped.
                if not self._is_superseded:
                    log.error("the read model is no longer kept by this gateway", reason=str(error))
                self._is_superseded = True
                await self._wait_for_own_tables()
                self._is_superseded = False
                await self.adopt()

    async def _wait_for_own_tables(self) -> None:
        while True:
            if await self.store.has_own_tables():
                return
            await asyncio.sleep(SCHEMA_POLL_S)

    async def _run(self, stream: str, until_caught_up: bool) -> None:
        position = await self.store.position(stream)
        batches = self.bus.follow(stream, (), position + 1, until_caught_up=until_caught_up)
        checked_at = 0.0
        async for batch in batches:
            if batch:
                position = await self.commit(stream, position, batch)
                _measure(stream, batch[-1])
            if not batch or batch[-1].pending == 0:
                self.caught_up.add(stream)
                metrics.PROJECTION_BEHIND.labels(stream).set(0)
                metrics.PROJECTION_LAG_SECONDS.labels(stream).set(0)
                now = time.monotonic()
                if now - checked_at > REWIND_CHECK_S:
                    checked_at = now
                    if await self.store.position(stream) < position:
                        raise ProjectionMoved(f"projection of {stream} was rewound")
            async with self._advanced:
                self._advanced.notify_all()

    async def commit(self, stream: str, position: int, batch: Sequence[Message[Any]]) -> int:
        """Fold a batch into the store and return the new position.

        An event that the database cannot hold (a step beyond its integers) is left out and logged; the others count.
        """
        try:
            return await self._commit(stream, position, batch)
        except Exception as error:
            if not is_about_values(error):
                raise
            if len(batch) == 1:
                log.error(
                    "left an event out of the read model", subject=batch[0].subject, reason=str(error).splitlines()[0]
                )
                async with self.store.advance_projection(stream, position, batch[0].sequence):
                    return batch[0].sequence
        for item in batch:
            position = await self.commit(stream, position, [item])
        return position

    async def _commit(self, stream: str, position: int, batch: Sequence[Message[Any]]) -> int:
        to = batch[-1].sequence
        async with self.store.advance_projection(stream, position, to) as connection:
            if stream == PROGRESS:
                await self._fold_progress(connection, batch)
            else:
                await self._fold(connection, [(item.event, _at(item)) for item in batch])
            if stream == FACTS:
                await self.store.add_events(connection, [event_row(item) for item in batch])
        metrics.PROJECTED.labels(stream).inc(len(batch))
        return to

    async def _fold(self, connection: AsyncConnection, events: list[tuple[Event, At]]) -> None:
        before = await self.store.load(connection, keys(events))
        after = before.copy()
        for event, at in events:
            apply(after, event, at)
        await self.store.save(connection, before, after)
        abandoned = [
            (event.run_id, event.generation, placement["started_step"])
            for event, _ in events
            if isinstance(event, RunStarted) and event.run_id in after.runs
            for placement in after.runs[event.run_id].placements
            if placement["generation"] == event.generation > 1 and "started_step" in placement
        ]
        await self.store.add_points(connection, (), abandoned)

    async def _fold_progress(self, connection: AsyncConnection, batch: Sequence[Message[Any]]) -> None:
        reports = [(item.event, _at(item)) for item in batch if isinstance(item.event, RunProgress)]
        wanted = keys(reports)
        runs = (await self.store.load(connection, wanted)).runs
        progress = await self.store.load_progress(connection, wanted.runs)
        points: dict[tuple[object, ...], Point] = {}
        for event, at in reports:
            placements = runs[event.run_id].placements if event.run_id in runs else ()
            newest, found = apply_progress(progress.get(event.run_id), placements, event, at)
            if newest is not None:
                progress[event.run_id] = newest
            for point in found:
                # One statement may not touch a row twice, and the newest generation wins.
                key = (point.run_id, point.kind, point.name, point.node_id, point.step)
                if key not in points or points[key].generation <= point.generation:
                    points[key] = point
        await self.store.upsert(connection, tables.PROGRESS, progress.values())
        await self.store.add_points(connection, points.values(), ())

    # -- waiting ------------------------------------------------------------

    async def catch_up(self) -> bool:
        """Wait until everything that is stored at this moment is in the read model.

        What a client has published before it asks is then in the answer. Those who ask while a look is taken at what is
        stored share the next one: that one may have been taken before their client published.
        """
        if self._next_look is None:
            self._next_look = asyncio.create_task(self._look_after(self._look))
        return await asyncio.shield(self._next_look)

    async def catch_up_with_progress(self) -> None:
        """Wait as ``catch_up`` does, and for what runs have reported of their training."""
        await self.catch_up()
        with suppress(TimeoutError):
            async with asyncio.timeout(CATCH_UP_S):
                await self._wait_for_end(PROGRESS)

    async def _look_after(self, earlier: asyncio.Task[bool] | None) -> bool:
        if earlier is not None:
            await asyncio.wait([earlier])
        self._look, self._next_look = self._next_look, None
        try:
            async with asyncio.timeout(CATCH_UP_S):
                for stream in (REQUESTS, FACTS):
                    await self._wait_for_end(stream)
        except TimeoutError:
            return False
        return True

    async def _wait_for_end(self, stream: str) -> None:
        """Wait until the read model has the last event of a stream that it will see: what cannot be decoded it never
        does.
        """
        state = (await self._stream_info(stream)).state
        # (The sequences of an empty stream need not begin at 1.)
        if not state.messages or state.last_seq == self._unreadable_ends.get(stream):
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(DECODE_S):
                return await self._wait_for_position(stream, state.last_seq)
        position = await self.store.position(stream)
        # Of what is ahead, only the end counts: there may be very much of it.
        start = max(position, state.last_seq - MAX_UNREADABLE) + 1
        ahead = await self.bus.read_history(stream=stream, start_sequence=start)
        await self._wait_for_position(stream, ahead[-1].sequence if ahead else position)
        is_whole = start == position + 1
        if is_whole and (not ahead or ahead[-1].sequence < state.last_seq):
            self._unreadable_ends[stream] = state.last_seq

    async def _wait_for_position(self, stream: str, sequence: int) -> None:
        async with self._advanced:
            while await self.store.position(stream) < sequence:
                await self._advanced.wait()

    async def _stream_info(self, stream: str) -> StreamInfo:
        """Return the server's description of a stream; wait while the server is away."""
        while True:
            try:
                return await self.bus.js.stream_info(stream)
            except (nats.errors.Error, APIError, TimeoutError) as error:
                log.warning("waiting for the stream", stream=stream, error=repr(error))
                await asyncio.sleep(0.3)

    # -- starting over ------------------------------------------------------

    async def rewind(self, sequence: int) -> int:
        """Throw away every row, keep the events before ``sequence`` and fold those again. Returns their number.

        The projections then go on from there: the log decides again what follows.
        """
        count = 0
        async with self.store.rewind_projection(sequence - 1) as connection:
            position = 0
            while True:
                later = sa.select(EVENTS).where(EVENTS.c.sequence > position)
                query = later.order_by(EVENTS.c.sequence).limit(REFOLD_BATCH)
                rows = list((await connection.execute(query)).mappings())
                if not rows:
                    break
                events = [
                    (read_data(row["type"], row["data"]), At(row["sequence"], row["time"]))
                    for row in rows
                    if model_of(row["type"]) is not None
                ]
                await self._fold(connection, events)
                position = rows[-1]["sequence"]
                count += len(rows)
        return count


def _at(item: Message[Any]) -> At:
    return At(item.sequence, item.envelope.time.timestamp(), run_id_for(item.envelope.source, item.envelope.id))


def event_row(item: Message[Any]) -> dict[str, Any]:
    return {
        "sequence": item.sequence,
        "time": item.envelope.time.timestamp(),
        "subject": item.subject,
        "type": item.envelope.type,
        "event_id": item.envelope.id,
        "causation_id": item.envelope.causation_id,
        "correlation_id": item.envelope.correlation_id,
        "run_id": getattr(item.event, "run_id", None),
        "summary": describe(item.event),
        "data": item.event.to_plain(),
    }


def _measure(stream: str, last: Message[Any]) -> None:
    metrics.PROJECTION_BEHIND.labels(stream).set(last.pending)
    lag_s = time.time() - last.envelope.time.timestamp() if last.pending else 0.0
    metrics.PROJECTION_LAG_SECONDS.labels(stream).set(max(lag_s, 0.0))
