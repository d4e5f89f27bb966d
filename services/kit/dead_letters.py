"""Dead letters: how they are stored and read again, and when a consumer stops rather than make more of them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from datetime import datetime

from contracts import subjects, topology
from contracts.envelope import MESSAGE_ID_HEADER, RawMessage

#: What begins the headers that we add to a dead letter.
PREFIX = "trainbus-dead-"
#: Name of the endpoint at which a consumer handles a dead letter once more: ``svc.<consumer>.retry``.
RETRY_ENDPOINT = "retry"
#: Bytes of a dead letter that are kept free for its headers; a body that leaves less is cut.
HEADERS_BYTES = 64 * 1024
#: Bytes of the sender's headers that a dead letter keeps.
SENDER_HEADERS_BYTES = 32 * 1024
REASON_CHARACTERS = 2000


class DeadLetterLimit:
    """Whether a consumer may still dead-letter, as arroyo's DLQ policy: a count in a row, and a share of a window.

    After a bad deploy every message fails; the stream must not end in DEAD_LETTERS for it.
    """

    def __init__(self, max_consecutive: int, max_share: float, window: int) -> None:
        self.max_consecutive, self.max_share = max_consecutive, max_share
        self._consecutive = 0
        #: Whether each of the last messages became a dead letter.
        self._window: deque[bool] = deque(maxlen=window)
        self.is_reached = False

    def record_handled(self) -> None:
        self._consecutive = 0
        self._window.append(False)

    def allows_dead_letter(self) -> bool:
        """Count a message that cannot be handled; return whether it may become a dead letter."""
        is_full = len(self._window) == self._window.maxlen
        exceeds_share = is_full and sum(self._window) >= self.max_share * len(self._window)
        self.is_reached |= exceeds_share or self._consecutive >= self.max_consecutive
        if not self.is_reached:
            self._consecutive += 1
            self._window.append(True)
        return not self.is_reached

    def reset(self) -> None:
        """Reset the counts."""
        self._consecutive = 0
        self._window.clear()
        self.is_reached = False


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A stored dead letter and the message that it was."""

    sequence: int
    consumer: str
    reason: str
    #: When it was stored.
    at: datetime | None
    message: RawMessage
    #: Whether its body or headers were cut, so that it cannot be retried.
    is_cut: bool


def build_dead_letter(
    consumer: topology.Consumer, raw: RawMessage, reason: str, max_payload: int
) -> tuple[str, dict[str, str], bytes]:
    """Return the subject, the headers and the body that keep ``raw`` in DEAD_LETTERS.

    The sender's ``Nats-*`` headers command the server (part of a batch, expected sequences, a time to live): with
    them the dead letter would be refused. What else is too large for a message is cut.
    """
    ours = {
        "Nats-Msg-Id": f"{consumer.name}/{raw.stream}/{raw.sequence}",
        f"{PREFIX}reason": " ".join(reason.split())[:REASON_CHARACTERS],
        f"{PREFIX}subject": raw.subject,
        f"{PREFIX}stream": raw.stream,
        f"{PREFIX}sequence": str(raw.sequence),
        f"{PREFIX}consumer": consumer.name,
    }
    kept, room = {}, SENDER_HEADERS_BYTES
    for name, value in raw.headers.items():
        if name.lower() == MESSAGE_ID_HEADER.lower():
            name = f"{PREFIX}message-id"
        elif name.lower().startswith(("nats-", PREFIX)):
            continue
        size = len(name.encode()) + len(value.encode()) + 4
        if size > room:
            ours[f"{PREFIX}headers-cut"] = "true"
            continue
        kept[name] = value
        room -= size
    body_room = max_payload - HEADERS_BYTES
    if len(raw.body) > body_room:
        ours[f"{PREFIX}bytes"] = str(len(raw.body))
    return subjects.dead(consumer.name, raw.subject), {**kept, **ours}, raw.body[:body_room]


def read_dead_letter(stored: RawMessage) -> DeadLetter:
    """Return what ``build_dead_letter`` made of a message."""
    headers = stored.headers
    sent = {name: value for name, value in headers.items() if not name.lower().startswith(("nats-", PREFIX))}
    if message_id := headers.get(f"{PREFIX}message-id"):
        sent[MESSAGE_ID_HEADER] = message_id
    original = RawMessage(
        headers.get(f"{PREFIX}subject", ""),
        stored.body,
        sent,
        headers.get(f"{PREFIX}stream", ""),
        int(headers.get(f"{PREFIX}sequence") or 0),
    )
    return DeadLetter(
        stored.sequence,
        headers.get(f"{PREFIX}consumer", ""),
        headers.get(f"{PREFIX}reason", ""),
        stored.stored_at,
        original,
        any(f"{PREFIX}{name}" in headers for name in ("bytes", "headers-cut")),
    )
