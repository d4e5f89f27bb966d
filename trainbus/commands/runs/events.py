"""``trainbus events``."""

from __future__ import annotations

import json
import sys
from typing import Any

from trainbus.client.client import AsyncClient
from trainbus.client.connection import StoredEvent
from trainbus.client.views import describe
from trainbus.commands import render


async def print_events(
    client: AsyncClient, run: str | None, *, follow: bool, start: int | None, tail: int, as_json: bool
) -> None:
    """Print the log of facts, one line each."""
    console = render.console()
    async for message in client.events(run, follow=follow, start_sequence=start, tail=tail):
        if as_json:
            print(json.dumps(to_cloud_event(message)), flush=True)
        else:
            console.print(format_event(message), soft_wrap=True)
            sys.stdout.flush()


def format_event(message: StoredEvent) -> str:
    """Return one line about an event: when, its sequence number, about what, what."""
    aggregate, name, fact = message.subject.split(".")[:3]
    # A text that begins with the fact's name does not repeat it.
    text = describe(message.event).removeprefix(fact.replace("_", " ")).lstrip(": ")
    return (
        f"[dim]{message.envelope.time:%H:%M:%S.%f}"[:-3]
        + f"[/] [dim]{message.sequence:>6}[/] {aggregate:<7} [cyan]{name[:14]:<14}[/] "
        + f"[bold]{fact:<20}[/] {render.escape(text)}"
    ).rstrip()


def to_cloud_event(message: StoredEvent) -> dict[str, Any]:
    """Return the event in CloudEvents' structured form, with its sequence number."""
    envelope = message.envelope
    return {
        "specversion": "1.0",
        "id": envelope.id,
        "source": envelope.source,
        "type": envelope.type,
        "time": envelope.time.isoformat(),
        "subject": envelope.subject,
        "correlationid": envelope.correlation_id,
        "causationid": envelope.causation_id,
        "sequence": message.sequence,
        "natssubject": message.subject,
        "data": message.event.model_dump(mode="json", exclude_defaults=True),
    }
