"""Atomic batches: the server stores all facts of a batch, one behind the other, or none (ADR-50 of NATS).

One round trip carries the facts of a whole decision, each with its own expected sequence. The sequences refer to the
stream before the batch: a fact of the batch does not count against another one. ``is_available`` checks first whether
the server (2.12 or later) and the stream support batches.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import nats.errors
from nats.js.errors import APIError

from contracts import topology
from services.kit import metrics
from services.kit.bus import PUBLISH_TIMEOUT_S, Bus
from services.kit.messages import WRONG_LAST_SEQUENCE, Conflict, OutgoingMessage, TransientError

#: The most messages that the server takes in one batch, with its default limits.
MAX_BATCH_MESSAGES = 1000
#: Bytes of one batch: what a slow link carries well within the timeout.
MAX_BATCH_BYTES = 4 * 2**20
ID, SEQUENCE, COMMIT = "Nats-Batch-Id", "Nats-Batch-Sequence", "Nats-Batch-Commit"
DUPLICATE = 10201
#: The stream no longer allows batches, or too many are open at this moment.
NOT_AVAILABLE_NOW = (10174, 10210, 10211)


class DuplicateMessage(Exception):
    """The server has at least one of the facts already: it stored nothing of the batch."""


class WrongLastSequence(Conflict):
    """An expected sequence was not the last: the server stored nothing. ``sequence`` is the real last one."""

    def __init__(self, text: str, sequence: int) -> None:
        super().__init__(text)
        self.sequence = sequence


@dataclass(frozen=True, slots=True)
class BatchAck:
    """The facts of a batch stand at ``first`` and the sequences after it, in the order given."""

    first: int
    last: int


class BatchPublisher:
    """Atomic publishing on one stream, over one connection."""

    def __init__(self, bus: Bus, stream: str = topology.FACTS.name) -> None:
        self.bus, self.stream = bus, stream
        #: The server's answer, and the number of reconnects at that time: after a reconnect the server may be another
        #: one, and a server that does not know the headers would store each message as it arrives.
        self._availability: tuple[int, bool] | None = None

    async def is_available(self) -> bool:
        """Return whether the server supports batches on this stream. Asks once for each connection."""
        connection = self.bus.nc.stats["reconnects"]
        if self._availability is None or self._availability[0] != connection:
            try:
                config = (await self.bus.js.stream_info(self.stream)).config
            except (TimeoutError, nats.errors.Error, APIError):
                return False
            self._availability = (connection, bool(config.allow_atomic))
        return self._availability[1]

    async def publish(self, facts: Sequence[OutgoingMessage]) -> BatchAck:
        """Store ``facts`` in this order, all or none. Does not retry.

        Raises:
            WrongLastSequence: an expectation does not hold.
            DuplicateMessage: the server has one of them already.
            TransientError: no answer came, or the server accepts no batch now. Publish them one by one.
        """
        if not await self.is_available():
            raise TransientError("the server does not publish batches on this stream")
        if any(one.find_size_problem(self.bus.nc.max_payload) for one in facts):
            raise TransientError("a fact of the batch is larger than the server takes, or than readers decode")
        batch_id = uuid.uuid4().hex
        nc = self.bus.nc
        try:
            for place, one in enumerate(facts[:-1], 1):
                await nc.publish(one.subject, one.body, headers={**one.headers, ID: batch_id, SEQUENCE: str(place)})
            last = facts[-1]
            headers = {**last.headers, ID: batch_id, SEQUENCE: str(len(facts)), COMMIT: "1"}
            answer = await nc.request(last.subject, last.body, timeout=PUBLISH_TIMEOUT_S, headers=headers)
        except (TimeoutError, nats.errors.Error) as error:
            raise TransientError(f"NATS did not answer to a batch of {len(facts)}: {error!r}") from error
        stored = self._read(json.loads(answer.data or b"{}"), len(facts))
        for one in facts:
            metrics.PUBLISHED.labels(one.type).inc()
        if self.bus.settings.inject_duplicates:
            with suppress(nats.errors.Error):
                for one in facts:  # each a second time, by itself
                    await nc.publish(one.subject, one.body, headers=one.headers)
        return stored

    def _read(self, answer: dict[str, object], count: int) -> BatchAck:
        error = answer.get("error")
        if not isinstance(error, dict):
            last = answer.get("seq")
            if not isinstance(last, int) or answer.get("count") != count:
                raise TransientError(f"no answer to a batch of {count}: {answer}")
            return BatchAck(last - count + 1, last)
        code, text = error.get("err_code"), str(error.get("description"))
        if code in WRONG_LAST_SEQUENCE:
            number = text.rsplit(" ", 1)[-1]
            raise WrongLastSequence(text, int(number) if number.isdigit() else 0)
        if code == DUPLICATE:
            raise DuplicateMessage(text)
        if code in NOT_AVAILABLE_NOW:
            self._availability = None
        raise TransientError(f"NATS did not take a batch of {count}: {text}")


def split_into_batches(
    facts: Sequence[OutgoingMessage], max_messages: int = MAX_BATCH_MESSAGES, max_bytes: int = MAX_BATCH_BYTES
) -> list[list[OutgoingMessage]]:
    """Return ``facts`` in batches that the server accepts, in order."""
    found: list[list[OutgoingMessage]] = []
    room = 0
    for one in facts:
        if not found or len(found[-1]) == max_messages or one.size > room:
            found.append([])
            room = max_bytes
        found[-1].append(one)
        room -= one.size
    return found
