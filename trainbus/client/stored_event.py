"""An event of the bus with its place in its stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

from contracts.envelope import Envelope, parse, read_envelope
from contracts.texts import describe


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """An event with its place in its stream."""

    sequence: int
    subject: str
    envelope: Envelope
    event: Any

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Self:
        """Return an event from how the gateway has it.

        Raises:
            EnvelopeError: it is none that this version knows.
        """
        envelope = Envelope(
            id=found["id"],
            source=found["source"],
            type=found["type"],
            time=datetime.fromisoformat(found["time"]),
            subject=found["subject"],
            correlation_id=found["correlationid"],
            causation_id=found["causationid"],
        )
        event = parse(envelope, found["data"])
        return cls(found["sequence"], found["natssubject"], read_envelope(envelope, event), event)

    @property
    def time(self) -> datetime:
        """When it happened, UTC."""
        return self.envelope.time

    @property
    def text(self) -> str:
        """The fact in one line."""
        return describe(self.event)

    def to_cloud_event(self) -> dict[str, Any]:
        """Return the event in CloudEvents' structured form, with its sequence number."""
        envelope = self.envelope
        return {
            "specversion": "1.0",
            "id": envelope.id,
            "source": envelope.source,
            "type": envelope.type,
            "time": envelope.time.isoformat(),
            "subject": envelope.subject,
            "correlationid": envelope.correlation_id,
            "causationid": envelope.causation_id,
            "sequence": self.sequence,
            "natssubject": self.subject,
            "data": self.event.to_plain(),
        }
