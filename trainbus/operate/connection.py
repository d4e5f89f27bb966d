"""An operator's connection to a stack's NATS: it reads the streams and asks the services.

It uses plain nats-py and the kit's ``follow``, not the kit's Bus: importing FastStream alone would cost every
command half a second.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

from contracts import subjects, topology
from contracts.envelope import EnvelopeError, RawMessage, decode
from trainbus.client.address import StackAddress
from trainbus.client.errors import StackUnreachableError
from trainbus.client.stored_event import StoredEvent
from trainbus.operate.nats_import import aiohttp_hidden

with aiohttp_hidden():
    import nats.errors
    from nats.aio.client import Client as NatsClient
    from nats.aio.msg import Msg
    from nats.js.api import ConsumerInfo
    from nats.js.errors import NotFoundError

    from services.kit.follow import follow

#: Seconds after which a server that listens and does not answer is given up.
CONNECT_S = 10.0


class Connection:
    """An open connection to one stack's NATS."""

    def __init__(self, nc: NatsClient) -> None:
        self.nc = nc
        self.js = nc.jetstream(timeout=5)

    async def follow(
        self, stream: topology.Stream, *filters: str, start_sequence: int = 1, until_caught_up: bool = False
    ) -> AsyncIterator[list[StoredEvent]]:
        """Yield batches of events in order, and an empty batch four times a second while nothing happens."""
        async for batch in self._follow(stream, filters, start_sequence, until_caught_up):
            yield [stored for message in batch if (stored := _decode_message(message)) is not None]

    async def follow_raw(
        self, stream: topology.Stream, *filters: str, start_sequence: int = 1, until_caught_up: bool = False
    ) -> AsyncIterator[list[RawMessage]]:
        """Yield the same batches as ``follow``, undecoded: messages that cannot be decoded are among them."""
        async for batch in self._follow(stream, filters, start_sequence, until_caught_up):
            yield [_to_raw(message) for message in batch]

    def _follow(
        self, stream: topology.Stream, filters: tuple[str, ...], start_sequence: int, until_caught_up: bool
    ) -> AsyncIterator[list[Msg]]:
        return follow(
            lambda: self.nc, stream.name, filters, start_sequence, idle_s=0.25, until_caught_up=until_caught_up
        )

    async def read(
        self, *filters: str, stream: topology.Stream = topology.FACTS, start_sequence: int = 1
    ) -> list[StoredEvent]:
        """Return every event that the stream holds now, oldest first."""
        found: list[StoredEvent] = []
        async for batch in self.follow(stream, *filters, start_sequence=start_sequence, until_caught_up=True):
            found += batch
        return found

    async def read_last(self, stream: topology.Stream, subject: str) -> StoredEvent | None:
        """Return the newest event on one subject, None if there is none."""
        try:
            message = await self.js.get_last_msg(stream.name, subject, direct="*" not in subject)
        except NotFoundError:
            return None
        return _decode(
            RawMessage(
                message.subject or "",
                message.data or b"",
                message.headers or {},
                stream.name,
                message.seq or 0,
                message.time,
            )
        )

    async def query(
        self, service: str, endpoint: str, question: dict[str, Any], timeout_s: float
    ) -> dict[str, Any] | None:
        """Send a question to a service and return its answer, None if none comes in time."""
        try:
            subject = subjects.service(service, endpoint)
            reply = await self.nc.request(subject, json.dumps(question).encode(), timeout=timeout_s)
            answer = json.loads(reply.data)
        except (nats.errors.Error, TimeoutError, ValueError):
            return None
        return answer if isinstance(answer, dict) else None

    async def find_consumer(self, consumer: topology.Consumer) -> ConsumerInfo | None:
        """Return the state of a service's consumer, None before the service has ever been there."""
        try:
            state: ConsumerInfo = await self.js.consumer_info(consumer.stream, consumer.name)
        except NotFoundError:
            return None
        return state

    async def last_sequence(self, stream: topology.Stream) -> int:
        """Return the sequence number of the newest message of a stream."""
        return (await self.js.stream_info(stream.name)).state.last_seq


def print_status(text: str) -> None:
    """Print a line about the connection on stderr."""
    print(f"trainbus: {text}", file=sys.stderr, flush=True)


@asynccontextmanager
async def connect(address: StackAddress, report: Callable[[str], None] = print_status) -> AsyncIterator[Connection]:
    """Connect to the stack's NATS. ``report`` gets a line when an open connection is lost, and when it is back.

    Raises:
        StackUnreachableError: NATS does not answer, refuses the client, or holds no streams of trainbus.
    """
    if not address.nats_url:
        raise StackUnreachableError("this command reads the bus itself: set TRAINBUS_NATS_URL to its address")
    servers = [server.strip() for server in address.nats_url.split(",") if server.strip()]
    if not any(_is_listening(server) for server in servers):
        raise StackUnreachableError(
            f"NATS does not answer at {address.nats_url}: is the stack up? (`trainbus doctor` shows what is wrong)"
        )
    connected = closing = False
    patience = asyncio.timeout(CONNECT_S)
    refusals: list[str] = []

    async def on_error(error: Exception) -> None:
        if connected or patience.expired():
            return
        refusals.append(str(error))
        if sum(map(_is_unauthorized, refusals)) >= len(servers):  # another attempt would change nothing
            patience.reschedule(asyncio.get_running_loop().time())

    async def on_disconnected() -> None:
        if connected and not closing:
            report(f"NATS at {address.nats_url} is away; waiting for it")

    async def on_reconnected() -> None:
        if connected:
            report("NATS is back")

    nc = NatsClient()
    try:
        async with patience:
            await nc.connect(
                servers,
                user=address.nats_user,
                password=address.nats_password,
                name="trainbus-client",
                connect_timeout=3,
                max_reconnect_attempts=-1,
                reconnect_time_wait=0.3,  # type: ignore[arg-type]
                error_cb=on_error,
                disconnected_cb=on_disconnected,
                reconnected_cb=on_reconnected,
            )
            # nats-py takes an end of file for a connection; only an answer proves one.
            await nc.flush()
        connected = True
    except (nats.errors.Error, TimeoutError) as error:
        await _close(nc)
        raise StackUnreachableError(_describe_refusal(address, refusals or [str(error)])) from error
    try:
        connection = Connection(nc)
        try:
            await connection.js.stream_info(topology.FACTS.name)
        except NotFoundError:
            raise StackUnreachableError(
                f"the NATS at {address.nats_url} has no stream {topology.FACTS.name}: no service of trainbus "
                "has been connected to it yet"
            ) from None
        yield connection
    except nats.errors.Error as error:
        raise StackUnreachableError(f"NATS at {address.nats_url} does not answer: {error}") from error
    finally:
        closing = True
        await _close(nc)


async def _close(nc: NatsClient) -> None:
    """Close the connection; one that does not close in time ends with the process."""
    with suppress(nats.errors.Error, OSError, TimeoutError):
        await asyncio.wait_for(nc.close(), 2)


def _describe_refusal(address: StackAddress, refusals: list[str]) -> str:
    # A server that refuses a client closes at once, and the reset may overtake its reason.
    why = next(filter(_is_unauthorized, refusals), refusals[-1]) or "no answer"
    hint = (
        "; set TRAINBUS_NATS_USER and TRAINBUS_NATS_PASSWORD to what this server knows" if _is_unauthorized(why) else ""
    )
    return f"the NATS at {address.nats_url} listens but refuses this client: {why}{hint}"


def _is_unauthorized(refusal: str) -> bool:
    return "authorization" in refusal.lower()


def _is_listening(server: str) -> bool:
    parts = urlsplit(server if "//" in server else f"nats://{server}")
    try:
        socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 4222), timeout=2).close()
    except OSError:
        return False
    return True


def _to_raw(message: Msg) -> RawMessage:
    metadata = message.metadata
    return RawMessage(
        message.subject,
        message.data,
        message.headers or {},
        metadata.stream,
        metadata.sequence.stream,
        metadata.timestamp,
    )


def _decode_message(message: Msg) -> StoredEvent | None:
    return _decode(_to_raw(message))


def _decode(raw: RawMessage) -> StoredEvent | None:
    try:
        envelope, event = decode(raw)
    except EnvelopeError:
        return None
    return StoredEvent(raw.sequence, raw.subject, envelope, event)
