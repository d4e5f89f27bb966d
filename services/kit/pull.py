"""JetStream's pull protocol over one inbox: requests, heartbeats, and what ends a subscription.

nats-py's own ``fetch`` waits in a task of its own for each message, holds messages back until a batch is full,
and raises at once, for ever, when the client is closed.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import suppress

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import api

#: Seconds a pull request stays open on the server.
EXPIRES_S = 30.0
#: The server sends a heartbeat this often; without one for ``SILENCE_S`` the subscription counts as broken.
HEARTBEAT_S = 1.0
SILENCE_S = 3.0
#: Bytes that one request brings, at most: nats-py drops what does not fit its buffer (128 MiB), and two may be open.
MAX_BYTES = 32 * 2**20
#: What ends a request that has brought as many bytes.
BYTES_REACHED = "MaxBytes"
#: What ends a request, of those with a limit of bytes, that has brought as many messages as it asked for.
BATCH_COMPLETED = "Batch Completed"
NANO = 1_000_000_000


class PullBroken(Exception):
    """The subscription no longer gets messages: open a new one."""


class PullSubscription:
    """One pull consumer's messages, handed to ``deliver`` as they arrive."""

    def __init__(self, nc: Client, stream: str, consumer: str, deliver: Callable[[Msg], None]) -> None:
        self.stream, self.consumer = stream, consumer
        #: Messages requested that have not arrived yet.
        self.outstanding = 0
        #: Consumer sequence of the last message that the server has sent, as its heartbeats state it.
        self.last_sent = 0
        #: Set when a status arrives; ``deliver`` may set it for a message.
        self.activity = asyncio.Event()
        self._nc, self._deliver = nc, deliver
        self._inbox: Subscription | None = None
        self._failure = ""
        self._active_at = time.monotonic()
        self._reconnects = nc.stats["reconnects"]

    async def open(self) -> None:
        self._inbox = await self._nc.subscribe(self._nc.new_inbox(), cb=self._on_message)

    async def unsubscribe(self) -> None:
        """Stop receiving. Safe on a closed connection."""
        if self._inbox is not None:
            with suppress(Exception):
                await self._inbox.unsubscribe()

    async def request(self, count: int) -> None:
        """Ask the server for ``count`` more messages."""
        assert self._inbox is not None
        request = {
            "batch": count,
            # A single message is never too large for a request.
            "max_bytes": max(MAX_BYTES, 2 * self._nc.max_payload),
            "expires": int(EXPIRES_S * NANO),
            "idle_heartbeat": int(HEARTBEAT_S * NANO),
        }
        if self.outstanding == 0:
            self._active_at = time.monotonic()
        self.outstanding += count
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self.stream}.{self.consumer}"
        await self._nc.publish(subject, json.dumps(request).encode(), self._inbox.subject)

    async def wait_for_activity(self, timeout_s: float) -> None:
        """Wait until something arrives, at most ``timeout_s``; then check that the subscription still works.

        Raises:
            PullBroken: it does not.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.activity.wait()
        self.activity.clear()
        self.check()

    def check(self) -> None:
        """Raise ``PullBroken`` if the subscription no longer gets messages."""
        if self._nc.is_closed:
            raise PullBroken("the connection is closed")
        if self._failure:
            raise PullBroken(self._failure)
        if self._nc.stats["reconnects"] != self._reconnects:
            # A restarted server may have lost the request, and an ephemeral consumer with it.
            raise PullBroken("the client has reconnected")
        if self.outstanding > 0 and time.monotonic() - self._active_at > SILENCE_S:
            raise PullBroken("the server is silent")

    async def _on_message(self, msg: Msg) -> None:
        self._active_at = time.monotonic()
        # A stream's message has a reply subject for its acknowledgement, a status has none: any client may send
        # a header named "Status".
        if msg.reply:
            self.outstanding -= 1
            self._deliver(msg)
        else:
            self._on_status(msg.headers or {})
            self.activity.set()

    def _on_status(self, headers: dict[str, str]) -> None:
        status, description = headers.get("Status"), headers.get("Description", "")
        if status in ("404", "408") or (status == "409" and BYTES_REACHED in description):
            # The request ended; what it did not deliver can be requested again.
            unsent = headers.get("Nats-Pending-Messages", "")
            self.outstanding = max(self.outstanding - int(unsent), 0) if unsent.isdigit() else 0
        elif status == "409" and BATCH_COMPLETED in description:
            pass  # its messages have been counted as they came
        elif status == "100":
            self.last_sent = int(headers.get(api.Header.LAST_CONSUMER, 0))
        else:
            self._failure = f"{status} {description}".strip()
