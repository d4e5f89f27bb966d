"""Dead letters: messages that a service could not handle, and what an operator does with them."""

from __future__ import annotations

from typing import Any

from contracts import subjects, topology
from contracts.envelope import RawMessage
from services.kit.dead_letters import RETRY_ENDPOINT, DeadLetter, read_dead_letter
from trainbus.client.errors import NotFoundError as NoSuchDeadLetterError
from trainbus.client.errors import TrainbusError
from trainbus.operate.connection import Connection
from trainbus.operate.nats_import import aiohttp_hidden

with aiohttp_hidden():
    from nats.js.errors import NotFoundError

RETRY_TIMEOUT_S = 60.0
STREAM = topology.DEAD_LETTERS


async def list_dead_letters(connection: Connection, consumer: str | None = None) -> list[DeadLetter]:
    """Return every dead letter, oldest first; with ``consumer``, those of that consumer."""
    filters = (subjects.dead(consumer, ">"),) if consumer else ()
    found: list[DeadLetter] = []
    async for batch in connection.follow_raw(STREAM, *filters, until_caught_up=True):
        found += [read_dead_letter(raw) for raw in batch]
    return found


async def get_dead_letter(connection: Connection, sequence: int) -> DeadLetter:
    """Return one dead letter.

    Raises:
        NoSuchDeadLetterError: there is none with this number.
    """
    try:
        stored = await connection.js.get_msg(STREAM.name, sequence)
    except NotFoundError:
        raise NoSuchDeadLetterError(
            f"there is no dead letter {sequence}: `trainbus dead-letters ls` lists them"
        ) from None
    headers, body = stored.headers or {}, stored.data or b""
    return read_dead_letter(RawMessage(stored.subject or "", body, headers, STREAM.name, sequence, stored.time))


async def retry_dead_letter(connection: Connection, sequence: int) -> None:
    """Have its consumer, and no other, handle a dead letter once more; it is removed when that succeeds.

    Publishing the message again would not do: its stream drops a known id, and every other consumer would get it too.

    Raises:
        NoSuchDeadLetterError: there is none with this number.
        TrainbusError: it failed again, or its service does not run.
    """
    letter = await get_dead_letter(connection, sequence)
    answer = await connection.query(letter.consumer, RETRY_ENDPOINT, {"sequence": sequence}, RETRY_TIMEOUT_S)
    if answer is None:
        raise TrainbusError(
            f"dead letter {sequence} was not retried: the service of consumer {letter.consumer!r} does not answer"
        )
    if answer.get("outcome") != "ok":
        raise TrainbusError(f"dead letter {sequence} failed again and is kept: {answer.get('reason')}")


async def drop_dead_letter(connection: Connection, sequence: int) -> None:
    """Delete a dead letter for good.

    Raises:
        NoSuchDeadLetterError: there is none with this number.
    """
    await get_dead_letter(connection, sequence)
    await connection.js.delete_msg(STREAM.name, sequence)


def to_plain(letter: DeadLetter) -> dict[str, Any]:
    """Return a dead letter as JSON."""
    message = letter.message
    return {
        "sequence": letter.sequence,
        "at": letter.at.isoformat() if letter.at else None,
        "consumer": letter.consumer,
        "subject": message.subject,
        "stream": message.stream,
        "stream_sequence": message.sequence,
        "reason": letter.reason,
        "is_cut": letter.is_cut,
        "headers": dict(message.headers),
        "body": message.body.decode(errors="replace"),
    }
