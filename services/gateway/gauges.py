"""Gauges over the whole read model, and of the server itself."""

from __future__ import annotations

import asyncio
import time

import httpx
import nats.errors
import structlog
from nats.js.errors import Error as JetStreamError

from contracts import topology
from contracts.run_states import STATES
from contracts.state.node import SEVERITY
from services.gateway import metrics, queries
from services.gateway.store import Store
from services.kit.backlog import count_unhandled
from services.kit.bus import Bus

log = structlog.get_logger(__name__)

READ_MODEL_EVERY_S = 2.0
SERVER_EVERY_S = 10.0


async def watch_read_model(store: Store) -> None:
    """Keep the gauges over runs, nodes and slots fresh."""
    while True:
        counts = await queries.states(store)
        for state in STATES:
            metrics.RUNS.labels(state).set(counts.get(state, 0))
        oldest = await queries.oldest_queued(store)
        metrics.OLDEST_QUEUED_SECONDS.set(0 if oldest is None else max(time.time() - oldest, 0))
        nodes = await queries.count_nodes(store)
        for state in SEVERITY:
            metrics.NODES.labels(state).set(nodes.get(state, 0))
        used, free = await queries.count_slots(store)
        metrics.SLOTS.labels("used").set(used)
        metrics.SLOTS.labels("free").set(free)
        await asyncio.sleep(READ_MODEL_EVERY_S)


async def watch_nats_store(url: str) -> None:
    """Keep the gauges over JetStream's files fresh, as nats-server's monitor reports them."""
    async with httpx.AsyncClient(timeout=SERVER_EVERY_S) as client:
        while True:
            try:
                answer = (await client.get(f"{url.rstrip('/')}/jsz")).raise_for_status().json()
                metrics.JETSTREAM_BYTES.labels("used").set(answer["storage"])
                metrics.JETSTREAM_BYTES.labels("limit").set(answer["config"]["max_storage"])
            except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
                log.warning("nats-server's monitor does not answer", url=url, error=repr(error))
            await asyncio.sleep(SERVER_EVERY_S)


async def watch_server(bus: Bus) -> None:
    """Keep the gauges over streams and consumers fresh; while the server is away they stand still."""
    while True:
        try:
            for stream in topology.STREAMS:
                state = (await bus.js.stream_info(stream.name)).state
                metrics.STREAM_MESSAGES.labels(stream.name).set(state.messages)
                metrics.STREAM_BYTES.labels(stream.name).set(state.bytes)
            for consumer in topology.CONSUMERS:
                info = await bus.js.consumer_info(consumer.stream, consumer.name)
                metrics.CONSUMER_PENDING.labels(consumer.name).set(count_unhandled(info))
                metrics.CONSUMER_REDELIVERED.labels(consumer.name).set(info.num_redelivered or 0)
        except (nats.errors.Error, JetStreamError, TimeoutError) as error:
            log.warning("the server's figures cannot be had", error=repr(error))
        await asyncio.sleep(SERVER_EVERY_S)
