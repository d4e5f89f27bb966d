"""How many messages a second a handler of the kit gets, against a thin nats-py loop that does the same.

    python -m loadtest.bus [--rounds 7] [--messages 1500]

The thin loop fetches, decodes, opens a span, counts, handles and acknowledges, one message after the other; it has no
dead letters, retries, deadlines or reconnects. All take turns in each round, and only ratios to the thin loop of the
same round count. Targets: 0.6 with one worker and a handler that does nothing; 2.0 with sixteen and a handler that
waits 2 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import structlog
from nats.aio.msg import Msg
from opentelemetry.trace import SpanKind

from contracts.envelope import decode
from contracts.events.run import RunCancelled
from contracts.topology import Consumer, Stream, Topology
from loadtest.common import report
from loadtest.server import nats_server
from services.kit import metrics, telemetry
from services.kit.bus import Bus, Message
from services.kit.messages import raw_of
from services.kit.reconcile import reconcile
from services.kit.settings import Settings

STREAM = Stream("BENCH", ("run.*.cancelled",), "messages to handle")
WORKERS = (1, 16)
WAITS_MS = (0, 2)
FETCH = 16


def consumer_named(name: str, concurrency: int) -> Consumer:
    return Consumer(name, STREAM.name, (RunCancelled,), "a load test", concurrency=concurrency)


async def handle(wait_ms: int) -> None:
    if wait_ms:
        await asyncio.sleep(wait_ms / 1e3)


async def measure_thin(bus: Bus, consumer: Consumer, count: int, wait_ms: int, *, synchronous: bool) -> float:
    """Return the messages a second of the thin loop; ``synchronous`` waits for each acknowledgement's answer."""
    subscription = await bus.js.pull_subscribe_bind(consumer=consumer.name, stream=consumer.stream)
    started, handled = time.perf_counter(), 0
    while handled < count:
        for msg in await subscription.fetch(min(FETCH, count - handled), timeout=5):
            await _handle_thinly(msg, consumer, wait_ms)
            await (msg.ack_sync() if synchronous else msg.ack())
            handled += 1
    await bus.nc.flush()
    elapsed_s = time.perf_counter() - started
    await subscription.unsubscribe()
    return count / elapsed_s


async def _handle_thinly(msg: Msg, consumer: Consumer, wait_ms: int) -> None:
    started_s = time.monotonic()
    envelope, _ = decode(raw_of(msg))
    with telemetry.start_span(f"handle {envelope.type}", SpanKind.CONSUMER, envelope.traceparent):
        await handle(wait_ms)
    metrics.HANDLED.labels(consumer.name, envelope.type, "ok").inc()
    metrics.HANDLING_SECONDS.labels(consumer.name, envelope.type).observe(time.monotonic() - started_s)


async def measure_kit(settings: Settings, consumer: Consumer, count: int, wait_ms: int) -> float:
    """Return the messages a second that a handler of the kit gets."""
    bus, done, handled = Bus("bench", settings), asyncio.Event(), 0
    await bus.connect(reconcile_topology=False)

    @bus.subscriber(consumer, RunCancelled)
    async def on_cancelled(_: Message[RunCancelled]) -> None:
        nonlocal handled
        await handle(wait_ms)
        handled += 1
        if handled == count:
            done.set()

    started = time.perf_counter()
    await bus.start()
    await done.wait()
    await bus.nc.flush()
    elapsed_s = time.perf_counter() - started
    await bus.close()
    return count / elapsed_s


async def measure(settings: Settings, rounds: int, count: int) -> dict[str, list[float]]:
    """Return each variant's messages a second, one value a round."""
    bus = Bus("bench", settings)
    await bus.connect(reconcile_topology=False)
    await reconcile(bus.js, Topology((STREAM,), (), (), ()))
    for number in range(count):
        await bus.publish(RunCancelled(run_id=f"r{number}", reason="load test"))
    rates: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds):
        for wait_ms in WAITS_MS:
            for synchronous in (False, True):
                name = f"thin-{'sync' if synchronous else 'async'}-{wait_ms}ms"
                consumer = consumer_named(f"{name}-{number}", 1)
                await reconcile(bus.js, Topology((), (consumer,), (), ()))
                rates[name].append(await measure_thin(bus, consumer, count, wait_ms, synchronous=synchronous))
            for workers in WORKERS:
                name = f"kit-{workers}-{wait_ms}ms"
                consumer = consumer_named(f"{name}-{number}", workers)
                await reconcile(bus.js, Topology((), (consumer,), (), ()))
                rates[name].append(await measure_kit(settings, consumer, count, wait_ms))
    await bus.close()
    return rates


async def profile(settings: Settings, count: int) -> None:
    """Print where the time of a handler that does nothing goes."""
    bus, consumer = Bus("bench", settings), consumer_named("profile", 1)
    await bus.connect(reconcile_topology=False)
    await reconcile(bus.js, Topology((), (consumer,), (), ()))
    profiler = cProfile.Profile()
    profiler.enable()
    await measure_kit(settings, consumer, count, 0)
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(40)
    await bus.close()


def compare(rates: dict[str, list[float]]) -> tuple[list[tuple[str, str, str]], dict[str, Any]]:
    """Return the table's rows and the figures: medians, and ratios to the thin loop of the same round."""
    rows, ratios = [], {}
    for wait_ms in WAITS_MS:
        for workers in WORKERS:
            for thin in ("async", "sync"):
                pairs = zip(rates[f"kit-{workers}-{wait_ms}ms"], rates[f"thin-{thin}-{wait_ms}ms"], strict=True)
                ratios[f"kit-{workers}_to_thin-{thin}_{wait_ms}ms"] = statistics.median(a / b for a, b in pairs)
    for name, values in rates.items():
        against = ""
        if name.startswith("kit"):
            _, of_workers, wait = name.split("-")
            targets = {"kit-1-0ms": " (target 0.6)", "kit-16-2ms": " (target 2.0)"}
            asynchronous, synchronous = (ratios[f"kit-{of_workers}_to_thin-{t}_{wait}"] for t in ("async", "sync"))
            against = f"{asynchronous:.2f}{targets.get(name, '')}; {synchronous:.2f} of one that waits for each answer"
        rows.append((name, f"{statistics.median(values):,.0f} messages/s", against))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return rows, {"messages_per_s": medians, "ratios": ratios, "rounds": len(next(iter(rates.values())))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--messages", type=int, default=1500)
    parser.add_argument("--profile", action="store_true", help="print a profile as well")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    with tempfile.TemporaryDirectory(prefix="trainbus-bus-") as folder, nats_server(Path(folder)) as server:
        settings = Settings(nats_url=server.url, data_dir=Path(folder), http_port=-1)
        rates = asyncio.run(measure(settings, arguments.rounds, arguments.messages))
        rows, figures = compare(rates)
        report("bus", rows, {**figures, "messages": arguments.messages})
        if arguments.profile:
            asyncio.run(profile(settings, arguments.messages))


if __name__ == "__main__":
    main()
