"""``trainbus dead-letters ls`` and ``show``."""

from __future__ import annotations

from typing import Any

from services.kit.dead_letters import DeadLetter
from trainbus.client import dead_letters
from trainbus.client.client import AsyncClient
from trainbus.commands import render


async def print_dead_letters(client: AsyncClient, consumer: str | None, *, as_json: bool) -> None:
    """Print one line for each dead letter."""
    letters = await dead_letters.list_dead_letters(client.connection, consumer)
    if as_json:
        print(render.as_json([to_plain(letter) for letter in letters]))
        return
    if not letters:
        print("there are no dead letters")
        return
    table = render.table("number", "age", "consumer", "subject", "reason", right=("number", "age"))
    for letter in letters:
        age = render.ago(letter.at, render.utc_now())
        subject, reason = render.escape(letter.message.subject), render.escape(letter.reason)
        table.add_row(str(letter.sequence), age, letter.consumer, subject, reason)
    render.console().print(table)


async def print_dead_letter(client: AsyncClient, sequence: int, *, as_json: bool) -> None:
    """Print everything about one dead letter."""
    letter = await dead_letters.get_dead_letter(client.connection, sequence)
    plain = to_plain(letter)
    if as_json:
        print(render.as_json(plain))
        return
    for name in ("sequence", "at", "consumer", "subject", "stream", "stream_sequence", "reason", "is_cut"):
        print(f"{name:16}{render.visible(str(plain[name]))}")
    for name, value in letter.message.headers.items():
        print(render.visible(f"{name}: {value}"))
    print(render.visible(plain["body"]))


def to_plain(letter: DeadLetter) -> dict[str, Any]:
    """Return a dead letter as JSON."""
    message = letter.message
    return {
        "sequence": letter.sequence,
        "at": letter.at.isoformat() if letter.at else None,
        "consumer": letter.consumer,
        "reason": letter.reason,
        "subject": message.subject,
        "stream": message.stream,
        "stream_sequence": message.sequence,
        "headers": dict(message.headers),
        "body": message.body.decode(errors="replace"),
        "is_cut": letter.is_cut,
    }
