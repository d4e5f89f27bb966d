"""N requests through the real scheduler over a real nats-server, with simulated agents.

    python -m loadtest.requests --requests 2000 --nodes 50 --slots 8

Prints requests a second, submit-to-placed p50 and p99, and bytes a run, beside what the bare
nats-server does in the same run with the same client (publish and wait for the acknowledgement).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import structlog
from rich.progress import Progress

from contracts.base import run_id_for
from loadtest.common import percentile, report
from loadtest.server import nats_server, raw_publish_rate
from loadtest.simulated_agents import SimulatedAgents
from services.kit.bus import Bus
from services.kit.settings import Settings
from trainbus.embedded.servers import NatsServer

SOURCE = "loadtest"
#: The load test stops by itself after so long, whatever happens.
TIME_LIMIT_S = 300.0


@dataclass(slots=True)
class Observed:
    """When each run was requested and placed (seconds, the server's clock), and what is over."""

    requested: dict[str, float] = field(default_factory=dict)
    placed: dict[str, float] = field(default_factory=dict)
    completed: set[str] = field(default_factory=set)


async def publish_requests(bus: Bus, count: int, rate: float, observed: Observed) -> float:
    """Publish ``count`` bare requests, at most ``rate`` a second (0: as fast as can be); return seconds."""
    gate = asyncio.Semaphore(64)

    async def one(number: int) -> None:
        async with gate:
            event_id = f"load-{number}"
            body = {"name": event_id, "command": ["true"], "slots": 1 + number % 4}
            run_id = run_id_for(SOURCE, event_id)
            observed.requested[run_id] = time.time()
            headers = {"ce-source": SOURCE, "ce-id": event_id, "Nats-Msg-Id": event_id}
            await bus.js.publish("train.requested", json.dumps(body).encode(), headers=headers, timeout=30)

    started = time.perf_counter()
    tasks = []
    for number in range(count):
        if rate and (ahead := started + number / rate - time.perf_counter()) > 0:
            await asyncio.sleep(ahead)
        tasks.append(asyncio.create_task(one(number)))
    await asyncio.gather(*tasks)
    return time.perf_counter() - started


async def observe(bus: Bus, count: int, observed: Observed, progress: Progress) -> None:
    """Follow the facts until every run is completed."""
    bar = progress.add_task("completed", total=count)
    filters = ("run.*.placed", "run.*.completed", "run.*.failed", "run.*.rejected")
    async for batch in bus.follow("FACTS", filters):
        for message in batch:
            fact = message.event.fact
            if fact == "placed":
                observed.placed.setdefault(message.event.run_id, message.envelope.time.timestamp())
            elif fact == "completed":
                observed.completed.add(message.event.run_id)
            else:
                raise RuntimeError(f"unexpected {message.subject}: {message.event}")
        done = len(observed.completed & observed.requested.keys())
        progress.update(bar, completed=done)
        if done >= count:
            return


async def warm_up(bus: Bus) -> None:
    """Wait until the scheduler leads and places: its start is not what is measured."""
    body = json.dumps({"name": "warm-up", "command": ["true"]}).encode()
    await bus.js.publish("train.requested", body, headers={"Nats-Msg-Id": "warm-up"})
    async for batch in bus.follow("FACTS", ("run.*.completed",)):
        if batch:
            return


async def measure(arguments: argparse.Namespace, server: NatsServer) -> None:
    settings = Settings(nats_url=server.url, http_port=-1)
    bus, player = Bus("loadtest", settings), Bus("agents", settings)
    await bus.connect()
    await player.connect()
    raw = await raw_publish_rate(bus)
    environment = {**os.environ, "TRAINBUS_NATS_URL": server.url, "TRAINBUS_HTTP_PORT": "-1"}
    with (server.folder / "scheduler.log").open("wb") as log:
        command = (sys.executable, "-m", "services.scheduler")
        scheduler = await asyncio.create_subprocess_exec(*command, env=environment, stderr=log)
    agents = SimulatedAgents(player, arguments.nodes, arguments.slots, arguments.duration_s, arguments.speed)
    observed = Observed()
    playing = asyncio.create_task(agents.run())
    try:
        await agents.join()
        await asyncio.wait_for(warm_up(bus), TIME_LIMIT_S)
        with Progress(transient=True) as progress:
            watching = asyncio.create_task(observe(bus, arguments.requests, observed, progress))
            started = time.perf_counter()
            publish_s = await publish_requests(bus, arguments.requests, arguments.rate, observed)
            await asyncio.wait_for(watching, TIME_LIMIT_S)
            total_s = time.perf_counter() - started
        rss = psutil.Process(scheduler.pid).memory_info().rss
        facts = (await bus.js.stream_info("FACTS")).state
        requests = (await bus.js.stream_info("REQUESTS")).state
    finally:
        playing.cancel()
        scheduler.terminate()
        await asyncio.wait_for(scheduler.wait(), 10)
        await bus.close()
        await player.close()
    waits_ms = [1000 * (observed.placed[run] - observed.requested[run]) for run in observed.requested]
    count = arguments.requests
    figures = {
        "requests": count,
        "nodes": arguments.nodes,
        "slots_per_node": arguments.slots,
        "requests_per_s": count / publish_s,
        "runs_completed_per_s": count / total_s,
        "facts_per_s": facts.messages / total_s,
        "submit_to_placed_p50_ms": percentile(waits_ms, 0.5),
        "submit_to_placed_p99_ms": percentile(waits_ms, 0.99),
        "bytes_per_run": (facts.bytes + requests.bytes) / count,
        "raw_publish_per_s": raw,
        "scheduler_rss_mib": rss / 2**20,
    }
    rows = [
        ("requests published", f"{figures['requests_per_s']:,.0f}/s", f"bare server {raw:,.0f} messages/s"),
        ("runs completed", f"{figures['runs_completed_per_s']:,.0f}/s", ""),
        ("facts", f"{figures['facts_per_s']:,.0f}/s", f"{figures['facts_per_s'] / raw:.2f} of the bare server's rate"),
        ("submit to placed, p50", f"{figures['submit_to_placed_p50_ms']:,.1f} ms", ""),
        ("submit to placed, p99", f"{figures['submit_to_placed_p99_ms']:,.1f} ms", ""),
        ("bytes a run", f"{figures['bytes_per_run']:,.0f}", "REQUESTS and FACTS, as stored"),
        ("scheduler memory", f"{figures['scheduler_rss_mib']:.0f} MiB", "120 MiB allowed"),
    ]
    report(arguments.name, rows, figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=0, help="requests a second; 0: as fast as can be")
    parser.add_argument("--nodes", type=int, default=50)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--duration-s", type=float, default=60, help="virtual seconds a run takes")
    parser.add_argument("--speed", type=float, default=1000, help="virtual seconds in a real one")
    parser.add_argument("--name", default="requests", help="name of the result file")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    with tempfile.TemporaryDirectory(prefix="trainbus-loadtest-") as folder, nats_server(Path(folder)) as server:
        asyncio.run(measure(arguments, server))


if __name__ == "__main__":
    main()
