"""Jobs: work that takes minutes, held by a claim instead of an unacknowledged message.

A handler submits a job (durable, idempotent) and its message is acknowledged; a runner on any
instance claims it with a compare-and-set, renews the claim while it works, and deletes the job once
the result is published. If the instance dies, the claim expires and another instance takes it over: job
handlers must be idempotent. ``give_up`` gets a job that fails too often.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import nats.errors
import structlog
from nats.js.errors import APIError, BadRequestError, KeyNotFoundError
from nats.js.kv import KeyValue
from pydantic_core import from_json

from contracts import topology
from contracts.envelope import EnvelopeError, RawMessage, decode, encode
from services.kit import metrics, telemetry
from services.kit.bus import Bus, Message, PoisonMessage, TransientError
from services.kit.concurrency import cancel_and_wait
from services.kit.lease import RENEW_SHARE, LeaseRecord, LeaseWatch
from services.kit.middlewares import RETRY_DELAYS_S

log = structlog.get_logger(__name__)

#: Interval of the checks for ended delays and expired claims while there are jobs; without jobs, only the arrival of
#: one wakes the runner.
POLL_INTERVAL_S = 0.25
IDLE_S = 1.0

JobHandler = Callable[[Message[Any]], Awaitable[None]]
FailureHandler = Callable[[Message[Any], str], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Job:
    key: str
    revision: int
    value: dict[str, object]


class JobQueue:
    """One service's queue of long jobs."""

    def __init__(
        self,
        bus: Bus,
        queue: str,
        work: JobHandler,
        give_up: FailureHandler,
        *,
        max_attempts: int = 20,
        concurrency: int = 1,
        ttl_s: float = 6.0,
    ) -> None:
        self._bus, self._queue, self._work, self._give_up = bus, queue, work, give_up
        metrics.initialize_series(metrics.JOBS_FINISHED, [queue], ("done", "retried", "failed", "taken over"))
        self._max_attempts, self._ttl_s = max_attempts, ttl_s
        self._concurrency = concurrency
        # Two processes with the same instance name are two holders all the same.
        self._holder = f"{bus.settings.instance}-{uuid.uuid4().hex[:8]}"
        self._watch = LeaseWatch(bus.clock)
        self._not_before: dict[str, float] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        #: Every job of the queue that the bucket has delivered.
        self._open: dict[str, _Job] = {}
        self._wake = asyncio.Event()

    async def submit(self, job_id: str, message: Message[Any]) -> None:
        """Store the job. Submitting it again changes nothing."""
        # The job continues the trace that it was submitted in.
        traceparent = telemetry.current_traceparent(message.envelope.traceparent)
        headers, body = encode(message.event, replace(message.envelope, traceparent=traceparent))
        value = {"subject": message.subject, "headers": headers, "body": body.decode(), "attempt": 0, "holder": ""}
        bucket = await self._bucket()
        with suppress(BadRequestError):  # it is there already
            await bucket.create(f"{self._queue}.{job_id}", json.dumps(value).encode())
        self._wake.set()

    async def run(self) -> None:
        """Claim and run jobs until cancelled."""
        following = asyncio.create_task(self._follow())
        following.add_done_callback(lambda _: self._wake.set())
        try:
            while True:
                self._wake.clear()
                try:
                    await self._claim_all()
                except (TimeoutError, nats.errors.Error, APIError, TransientError) as error:
                    log.warning("cannot claim jobs", queue=self._queue, error=repr(error))
                if following.done():
                    following.result()
                # Not wait_for: on Python 3.11 it swallows a cancellation that comes together with the event.
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_INTERVAL_S if self._open else IDLE_S):
                        await self._wake.wait()
        finally:
            await cancel_and_wait(following, *self._running.values())

    async def _follow(self) -> None:
        """Follow the bucket and keep the open jobs up to date."""
        async for batch in self._bus.follow_bucket(topology.JOBS, f"{self._queue}.>", idle_s=IDLE_S):
            for entry in batch:
                if entry.value is None:
                    self._forget(entry.key)
                elif (value := _value(entry.key, entry.value)) is not None:
                    self._open[entry.key] = _Job(entry.key, entry.revision, value)
            if batch:
                self._wake.set()

    def _forget(self, key: str) -> None:
        self._open.pop(key, None)
        self._not_before.pop(key, None)
        self._watch.forget(key)

    async def _bucket(self) -> KeyValue:
        return await self._bus.open_bucket(topology.JOBS)

    async def _claim_all(self) -> None:
        for job in list(self._open.values()):
            # Claim only what starts at once: a claim that waits is not renewed.
            if job.key in self._running or len(self._running) >= self._concurrency:
                continue
            if self._bus.clock.monotonic() < self._not_before.get(job.key, 0):
                continue
            holder = str(job.value["holder"])
            record = LeaseRecord(holder, self._ttl_s, job.revision, {})
            if holder and holder != self._holder and not self._watch.is_expired(job.key, record, self._ttl_s):
                continue
            value = {**job.value, "holder": self._holder, "attempt": int(str(job.value["attempt"])) + 1}
            bucket = await self._bucket()
            try:
                revision = await bucket.update(job.key, json.dumps(value).encode(), last=job.revision)
            except BadRequestError:
                # Another instance was faster, or the job is done: the bucket delivers the change.
                if self._open.get(job.key) is job:
                    del self._open[job.key]
                continue
            claimed = _Job(job.key, revision, value)
            self._running[job.key] = asyncio.create_task(self._run(bucket, claimed))

    async def _run(self, bucket: KeyValue, job: _Job) -> None:
        metrics.JOBS_RUNNING.labels(self._queue).inc()
        outcome = "failed"
        try:
            outcome = await self._attempt(bucket, job)
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("job bookkeeping failed, another claim follows", job=job.key)
        finally:
            metrics.JOBS_RUNNING.labels(self._queue).dec()
            metrics.JOBS_FINISHED.labels(self._queue, outcome).inc()
            self._running.pop(job.key, None)
            self._wake.set()

    async def _attempt(self, bucket: KeyValue, job: _Job) -> str:
        message = _decode_job(job)
        work = asyncio.create_task(self._traced(message))
        renewal = asyncio.create_task(self._renew_claim(bucket, job))
        try:
            await asyncio.wait({work, renewal}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return "taken over"
            await work
        except asyncio.CancelledError:
            raise
        except PoisonMessage as error:
            await self._give_up(message, str(error))
        except Exception as error:
            attempt = int(str(job.value["attempt"]))
            level = log.info if isinstance(error, TransientError) else log.exception
            level("job failed", job=job.key, attempt=attempt, error=repr(error))
            if attempt < self._max_attempts:
                delay_s = RETRY_DELAYS_S[min(attempt, len(RETRY_DELAYS_S)) - 1]
                self._not_before[job.key] = self._bus.clock.monotonic() + delay_s
                return "retried"
            await self._give_up(message, f"given up after {attempt} attempts: {error}")
        finally:
            await cancel_and_wait(work, renewal)
        await bucket.delete(job.key)
        self._forget(job.key)
        return "done"

    async def _traced(self, message: Message[Any]) -> None:
        with (
            telemetry.start_span(f"job {self._queue}", traceparent=message.envelope.traceparent),
            telemetry.bind_log_context({"run_id": getattr(message.event, "run_id", None) or "", "queue": self._queue}),
        ):
            await self._work(message)

    async def _renew_claim(self, bucket: KeyValue, job: _Job) -> None:
        """Renew the claim; return when another instance has taken it."""
        revision = job.revision
        while True:
            await asyncio.sleep(self._ttl_s * RENEW_SHARE)
            try:
                try:
                    revision = await bucket.update(job.key, json.dumps(job.value).encode(), last=revision)
                except BadRequestError:
                    # Taken over; or an earlier renewal of ours arrived whose answer was lost.
                    entry = await bucket.get(job.key)
                    if from_json(entry.value or b"{}").get("holder") != self._holder:
                        return
                    revision = entry.revision or revision
            except KeyNotFoundError:
                return  # another instance took it over and finished it
            except (TimeoutError, nats.errors.Error, APIError) as error:
                log.warning("claim not renewed", job=job.key, error=repr(error))


def _value(key: str, raw: bytes) -> dict[str, object] | None:
    """Parse a job as ``submit`` wrote it; return None for anything else."""
    try:
        value: dict[str, object] = from_json(raw)
        _decode_job(_Job(key, 0, value))
        str(value["holder"])
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError, EnvelopeError) as error:
        log.warning("invalid job, ignored", job=key, error=repr(error))
        return None
    return value


def _decode_job(job: _Job) -> Message[Any]:
    headers = job.value["headers"]
    assert isinstance(headers, dict)
    raw = RawMessage(str(job.value["subject"]), str(job.value["body"]).encode(), headers)
    envelope, event = decode(raw)
    return Message(event, envelope, raw.subject, deliveries=int(str(job.value["attempt"])))
