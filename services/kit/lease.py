"""Leases in a key-value bucket, for leadership and liveness.

A holder renews its record. Others watch the record's revision; when it has not changed for its time to live, *by the
watcher's own monotonic clock*, the lease has expired (as in Kubernetes). Clocks of two machines are never compared.
Taking over is a compare-and-set on the revision: one of many rivals wins, and the revision is the fencing token.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import nats.errors
import structlog
from nats.js.errors import APIError, BadRequestError, KeyNotFoundError
from nats.js.kv import KeyValue
from pydantic import BaseModel, Field, FiniteFloat

from contracts import topology
from services.kit import metrics
from services.kit.bus import Bus
from services.kit.clock import Clock, SystemClock
from services.kit.concurrency import cancel_and_wait

log = structlog.get_logger(__name__)

#: Share of the time to live after which a holder renews, tries again, and stops trusting itself.
RENEW_SHARE = 0.3
RETRY_SHARE = 0.03
TRUST_SHARE = 0.8
#: The holder of a lease that was revoked.
REVOKED = "revoked"


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """A lease as the bucket holds it."""

    holder: str
    ttl_s: float
    revision: int
    data: dict[str, str]


class Lease:
    """One instance's claim on one key."""

    def __init__(
        self,
        bucket: KeyValue,
        key: str,
        holder: str,
        ttl_s: float,
        *,
        clock: Clock | None = None,
        data: Callable[[], Mapping[str, str]] | None = None,
        renew_share: float = RENEW_SHARE,
        on_confirmed: Callable[[float], Awaitable[None]] | None = None,
    ) -> None:
        """``data``: what the record says besides, asked anew at each renewal.

        ``on_confirmed`` is called with the time at which a write was asked for that the server has confirmed.
        """
        self.key, self.holder, self.ttl_s = key, holder, ttl_s
        self._bucket = bucket
        self._clock: Clock = clock or SystemClock()
        self._data = data or dict
        self._renew_share, self._on_confirmed = renew_share, on_confirmed
        self._revision: int | None = None
        self._renewed_at = 0.0
        self._watch = LeaseWatch(self._clock)

    @property
    def is_held(self) -> bool:
        """Whether this instance holds the lease. Turns false before a rival may take over."""
        return self._revision is not None and self._clock.monotonic() - self._renewed_at < self.ttl_s * TRUST_SHARE

    @property
    def token(self) -> int:
        """The fencing token: the revision of our last write."""
        if self._revision is None:
            raise RuntimeError(f"lease {self.key} is not held")
        return self._revision

    async def try_acquire(self) -> bool:
        """Acquire the lease if it is free, expired or already ours. Never waits for a holder."""
        asked_at = self._clock.monotonic()
        try:
            record = await read_record(self._bucket, self.key)
            if record is None:
                self._revision = await self._bucket.create(self.key, self._value())
            elif record.holder == self.holder or self._watch.is_expired(self.key, record, record.ttl_s):
                self._revision = await self._bucket.update(self.key, self._value(), last=record.revision)
            else:
                return False
        except BadRequestError:
            return False  # a rival was faster
        await self._confirm(asked_at)
        return True

    async def renew(self) -> bool:
        """Renew the lease; return False if another holder has it now."""
        while self._revision is not None:
            asked_at = self._clock.monotonic()
            try:
                self._revision = await self._bucket.update(self.key, self._value(), last=self._revision)
            except BadRequestError:
                # Either a rival has it, or an earlier write of ours arrived whose answer was lost. When that was is
                # unknown, so it renews nothing: the next write does.
                record = await read_record(self._bucket, self.key)
                is_ours = record is not None and record.holder == self.holder
                self._revision = record.revision if record is not None and is_ours else None
            else:
                await self._confirm(asked_at)
                return True
        return False

    async def _confirm(self, asked_at: float) -> None:
        self._renewed_at = asked_at
        if self._on_confirmed is not None:
            await self._on_confirmed(asked_at)

    async def release(self) -> None:
        """Release the lease, so that others need not wait for it to expire."""
        revision, self._revision = self._revision, None
        if revision is not None:
            with suppress(APIError, nats.errors.Error, asyncio.TimeoutError):
                await self._bucket.delete(self.key, last=revision)

    async def renew_until_lost(self) -> None:
        """Renew until the lease is lost. Returns then; cancel it to stop."""
        share = self._renew_share
        while True:
            await asyncio.sleep(self.ttl_s * share)
            share = self._renew_share
            try:
                if not await self.renew():
                    log.warning("another instance holds the lease", key=self.key)
                    return
            except (TimeoutError, nats.errors.Error, APIError) as error:
                log.warning("lease not renewed", key=self.key, error=repr(error))
                share = RETRY_SHARE
            if not self.is_held:
                log.warning("lease expired", key=self.key)
                self._revision = None
                return

    @asynccontextmanager
    async def leadership(self) -> AsyncIterator[asyncio.Task[None]]:
        """Wait until the lease is ours, keep it inside the block, release it after.

        Yields the renewal task: it is done as soon as the lease is lost.
        """
        while True:
            try:
                if await self.try_acquire():
                    break
            except (TimeoutError, nats.errors.Error, APIError) as error:
                log.warning("lease not acquired", key=self.key, error=repr(error))
            await asyncio.sleep(self.ttl_s * RENEW_SHARE / 2)
        renewal = asyncio.create_task(self.renew_until_lost())
        # The part behind the dot is a node: labels must not grow with the cluster.
        held = metrics.LEADER.labels(self.key.partition(".")[0])
        held.set(1)
        log.info("lease acquired", key=self.key, token=self._revision)
        try:
            yield renewal
        finally:
            held.set(0)
            await cancel_and_wait(renewal)
            await self.release()

    def _value(self) -> bytes:
        return json.dumps({"holder": self.holder, "ttl_s": self.ttl_s, "data": dict(self._data())}).encode()


class LeaseWatch:
    """Decides by our own clock which leases have expired. Needs every record that is read."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock: Clock = clock or SystemClock()
        self._seen: dict[str, tuple[int, float]] = {}

    def is_expired(self, key: str, record: LeaseRecord | None, ttl_s: float) -> bool:
        """Return whether ``key`` has not changed for ``ttl_s``. A missing record counts from its first miss."""
        revision, now = (record.revision if record else 0), self._clock.monotonic()
        known = self._seen.get(key)
        if known is None or known[0] != revision:
            self._seen[key] = (revision, now)
            return False
        return now - known[1] > ttl_s

    def forget(self, key: str) -> None:
        self._seen.pop(key, None)


async def revoke(bucket: KeyValue, key: str, holder: str, ttl_s: float) -> None:
    """Take the lease from ``holder``, who can then no longer renew it; its last renewal may still be trusted.

    Nobody acquires the lease before ``ttl_s`` is over, or before ``lift_revocation``. To be repeated: a holder may
    renew in the same moment.
    """
    value = json.dumps({"holder": REVOKED, "ttl_s": ttl_s}).encode()
    record = await read_record(bucket, key)
    with suppress(BadRequestError):
        if record is None:
            await bucket.create(key, value)
        elif record.holder == holder:
            await bucket.update(key, value, last=record.revision)


async def lift_revocation(bucket: KeyValue, key: str) -> None:
    """Let a revoked lease be acquired again."""
    record = await read_record(bucket, key)
    if record is not None and record.holder == REVOKED:
        with suppress(BadRequestError):
            await bucket.delete(key, last=record.revision)


async def read_record(bucket: KeyValue, key: str) -> LeaseRecord | None:
    """Return the lease's record, or None if there is no holder."""
    try:
        entry = await bucket.get(key)
    except KeyNotFoundError:  # deleted keys raise a subclass of it
        return None
    return _record(key, entry.value, entry.revision or 0)


async def read_records(bus: Bus, prefix: str) -> dict[str, LeaseRecord]:
    """Return every lease whose key starts with ``prefix``.

    It uses ``Bus.follow_bucket``: nats-py's ``watch`` can report a full bucket as empty, when the server's end marker
    overtakes the entries.
    """
    records: dict[str, LeaseRecord] = {}
    async for batch in bus.follow_bucket(topology.LEASES, f"{prefix}>", idle_s=1.0, until_caught_up=True):
        for entry in batch:
            if entry.value is None:
                records.pop(entry.key, None)
            else:
                records[entry.key] = _record(entry.key, entry.value, entry.revision)
    return records


class _Written(BaseModel):
    """A record as its holder writes it."""

    holder: str
    #: A finite time: the lease would never be free again.
    ttl_s: FiniteFloat
    data: dict[str, str] = Field(default_factory=dict)


def _record(key: str, raw: bytes | None, revision: int) -> LeaseRecord:
    """Parse a record; an invalid one counts as an expired lease without a holder."""
    try:
        written = _Written.model_validate_json(raw or b"{}")
    except ValueError as error:
        log.warning("invalid lease record, treated as expired", key=key, error=str(error))
        return LeaseRecord("", 0.0, revision, {})
    return LeaseRecord(written.holder, written.ttl_s, revision, written.data)
