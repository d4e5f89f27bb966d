"""The command line's own thin connection to the bus: reads the log, publishes requests.

It uses plain nats-py and the kit's ``follow``, not the kit's Bus: FastStream alone would cost every
command half a second.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import structlog

from contracts import subjects, topology
from contracts.base import Request, run_id_for
from contracts.envelope import Envelope, EnvelopeError, RawMessage, decode, encode
from trainbus.client.address import Address
from trainbus.client.errors import CliError
from trainbus.client.light_nats import without_aiohttp

with without_aiohttp():
    import nats.errors
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.js.errors import NotFoundError

    from services.kit.follow import follow

SOURCE = "trainbus/cli"
#: Seconds that a server which listens has to answer in.
CONNECT_S = 10.0


@dataclass(frozen=True, slots=True)
class Stored:
    """An event of the log with its place in it. ``pending``: how many come after it at present."""

    sequence: int
    subject: str
    envelope: Envelope
    event: Any
    pending: int = 0


class Link:
    """A connection to one stack's NATS."""

    def __init__(self, nc: Client) -> None:
        self.nc = nc
        self.js = nc.jetstream(timeout=5)

    async def follow(
        self, stream: topology.Stream, *filters: str, start_sequence: int = 1, until_caught_up: bool = False
    ) -> AsyncIterator[list[Stored]]:
        """BatchPublisher of events in order; an empty one now and then while nothing happens."""
        batches = follow(
            lambda: self.nc,
            stream.name,
            filters,
            start_sequence,
            idle_s=0.25,
            until_caught_up=until_caught_up,
        )
        async for batch in batches:
            yield [stored for message in batch if (stored := _stored(message)) is not None]

    async def raw(
        self, stream: topology.Stream, *filters: str, start_sequence: int = 1, until_caught_up: bool = False
    ) -> AsyncIterator[list[RawMessage]]:
        """The same as ``follow``, with every message as it stands there, readable or not."""
        batches = follow(
            lambda: self.nc, stream.name, filters, start_sequence, idle_s=0.25, until_caught_up=until_caught_up
        )
        async for batch in batches:
            yield [_raw(message) for message in batch]

    async def read(
        self, *filters: str, stream: topology.Stream = topology.FACTS, start_sequence: int = 1
    ) -> list[Stored]:
        """Every event there is now, oldest first."""
        found: list[Stored] = []
        async for batch in self.follow(stream, *filters, start_sequence=start_sequence, until_caught_up=True):
            found += batch
        return found

    async def last(self, stream: topology.Stream, subject: str) -> Stored | None:
        """The newest event on one subject."""
        try:
            message = await self.js.get_last_msg(stream.name, subject, direct="*" not in subject)
        except NotFoundError:
            return None
        return _decoded(
            RawMessage(
                message.subject or "",
                message.data or b"",
                message.headers or {},
                stream.name,
                message.seq or 0,
                message.time,
            )
        )

    async def ask(
        self, service: str, endpoint: str, question: dict[str, Any], timeout_s: float
    ) -> dict[str, Any] | None:
        """What a service answers directly; None if it does not."""
        try:
            subject = subjects.service(service, endpoint)
            reply = await self.nc.request(subject, json.dumps(question).encode(), timeout=timeout_s)
            answer = json.loads(reply.data)
        except (nats.errors.Error, TimeoutError, ValueError):
            return None
        return answer if isinstance(answer, dict) else None

    async def last_sequence(self, stream: topology.Stream) -> int:
        return (await self.js.stream_info(stream.name)).state.last_seq

    async def request(self, event: Request, event_id: str | None = None) -> str:
        """Publish a request and return its event id. The server has stored it then."""
        envelope = Envelope(id=event_id or uuid.uuid4().hex, source=SOURCE, type=event.type, time=datetime.now(UTC))
        headers, body = encode(event, envelope)
        await self.js.publish(event.subject, body, headers=headers)
        return envelope.id


@asynccontextmanager
async def connect(address: Address) -> AsyncIterator[Link]:
    """Connect to the stack's NATS, or say at once that it does not answer."""
    servers = [server.strip() for server in address.nats_url.split(",") if server.strip()]
    if not any(_listens(server) for server in servers):
        raise CliError(f"NATS does not answer at {address.nats_url}: is the stack up? (`trainbus doctor` looks closer)")
    hush()
    connected = closing = False
    patience = asyncio.timeout(CONNECT_S)
    refusals: list[str] = []

    async def refused(error: Exception) -> None:
        if connected or patience.expired():
            return
        refusals.append(str(error))
        if sum(map(_unauthorized, refusals)) >= len(servers):  # asking again would change nothing
            patience.reschedule(asyncio.get_running_loop().time())

    async def away() -> None:
        if connected and not closing:
            print(f"trainbus: NATS at {address.nats_url} is away; waiting for it", file=sys.stderr, flush=True)

    async def back() -> None:
        if connected:
            print("trainbus: NATS is back", file=sys.stderr, flush=True)

    nc = Client()
    try:
        async with patience:
            await nc.connect(
                servers,
                user=address.nats_user,
                password=address.nats_password,
                name="trainbus-cli",
                connect_timeout=3,
                max_reconnect_attempts=-1,
                reconnect_time_wait=0.3,  # type: ignore[arg-type]
                error_cb=refused,
                disconnected_cb=away,
                reconnected_cb=back,
            )
            # To nats-py an end of file is a welcome, too; only an answer tells.
            await nc.flush()
        connected = True
    except (nats.errors.Error, TimeoutError) as error:
        await _closed(nc)
        raise CliError(_not_let_in(address, refusals or [str(error)])) from error
    try:
        link = Link(nc)
        try:
            await link.js.stream_info(topology.FACTS.name)
        except NotFoundError:
            raise CliError(
                f"the NATS at {address.nats_url} has no stream {topology.FACTS.name}: no service of trainbus "
                "has been connected to it yet"
            ) from None
        yield link
    except nats.errors.Error as error:
        raise CliError(f"NATS at {address.nats_url} does not answer: {error}") from error
    finally:
        closing = True
        await _closed(nc)


async def _closed(nc: Client) -> None:
    """Close in order; what cannot be is gone with the process."""
    with suppress(nats.errors.Error, OSError, TimeoutError):
        await asyncio.wait_for(nc.close(), 2)


def _not_let_in(address: Address, refusals: list[str]) -> str:
    # A server that refuses a client closes at once, and the reset may overtake its word for it.
    why = next(filter(_unauthorized, refusals), refusals[-1]) or "no answer"
    hint = "; set TRAINBUS_NATS_USER and TRAINBUS_NATS_PASSWORD to what this server knows" if _unauthorized(why) else ""
    return f"the NATS at {address.nats_url} listens, but does not let us in: {why}{hint}"


def _unauthorized(refusal: str) -> bool:
    return "authorization" in refusal.lower()


def hush() -> None:
    """Keep the kit's modules from logging: a person who asked a question wants the answer alone."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))


def run_id_of(event_id: str) -> str:
    """The run that a request published here under ``event_id`` means."""
    return run_id_for(SOURCE, event_id)


def _listens(server: str) -> bool:
    parts = urlsplit(server if "//" in server else f"nats://{server}")
    try:
        socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 4222), timeout=2).close()
    except OSError:
        return False
    return True


def _raw(message: Msg) -> RawMessage:
    metadata = message.metadata
    return RawMessage(
        message.subject,
        message.data,
        message.headers or {},
        metadata.stream,
        metadata.sequence.stream,
        metadata.timestamp,
    )


def _stored(message: Msg) -> Stored | None:
    return _decoded(_raw(message), message.metadata.num_pending)


def _decoded(raw: RawMessage, pending: int = 0) -> Stored | None:
    try:
        envelope, event = decode(raw)
    except EnvelopeError:
        return None
    return Stored(raw.sequence, raw.subject, envelope, event, pending)
