"""How long a scheduler takes to know everything, and what that weighs: 100,000 runs that are over, 10,000 that wait.

    python -m loadtest.scheduler.recovery [--past 100000] [--queued 10000]

Targets: state from snapshot and tail in under 2 s; less than 300 MB. A snapshot of the whole log is taken as a leader
has it taken; then some thousand facts more are said (the tail), and the state is recalled, and the service started.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

import structlog
from rich.progress import Progress

from loadtest.common import report
from loadtest.scheduler.bench import Prefill, connected, resident_mb, service, until_leading
from loadtest.server import nats_server
from services.kit.bus import Bus
from services.kit.settings import Settings
from services.scheduler.cluster_cache import ClusterCache
from services.scheduler.snapshot import SnapshotStore, environment
from trainbus.embedded.servers import NatsServer

NODES, SLOTS = 250, 8
Figures = dict[str, float]


async def taken(server: NatsServer) -> float:
    """Have a snapshot taken by a process of its own; the seconds it took."""
    settings, begun = Settings(nats_url=server.url, http_port=-1), time.perf_counter()
    command = ("-m", "services.scheduler.snapshot_process")
    child = await asyncio.create_subprocess_exec(
        sys.executable, *command, env=environment(settings), stderr=asyncio.subprocess.DEVNULL
    )
    if await child.wait():
        raise RuntimeError("no snapshot was taken")
    return time.perf_counter() - begun


async def recalled(bus: Bus) -> Figures:
    """From a connection to a folded log, in this process."""
    cache, wall, cpu = ClusterCache(bus), time.perf_counter(), time.process_time()
    following = asyncio.create_task(cache.follow())
    await cache.caught_up.wait()
    wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    following.cancel()
    return {
        "recovery_s": wall_s,
        "recovery_cpu_s": cpu_s,
        "recalled_sequence": cache.snapshot_sequence,
        "tail_facts": cache.cluster.sequence - cache.snapshot_sequence,
        "runs": cache.cluster.runs.total,
        "queued": len(cache.cluster.queued),
    }


async def measure(given: argparse.Namespace, server: NatsServer) -> Figures:
    figures: Figures = {}
    async with connected(server) as bus:
        prefill = Prefill(bus)
        with Progress(transient=True) as progress:
            bar = progress.add_task("writing the past", total=given.past)
            await prefill.nodes(NODES, SLOTS)
            await prefill.past(given.past, lambda done: progress.update(bar, completed=done))
        await prefill.placed("gate", [f"n{number:04}" for number in range(NODES)], SLOTS)
        await prefill.queued(given.queued, lambda number: 1 + number % 8)
        figures["facts"] = (await bus.js.stream_info("FACTS")).state.messages
        figures["first_snapshot_s"] = await taken(server)
        await prefill.queued(given.tail // 2, lambda number: 1, prefix="t")
        figures |= await recalled(bus)
        store = await bus.js.object_store("SNAPSHOTS")
        figures["snapshot_mb"] = max(info.size or 0 for info in await store.list(ignore_deletes=True)) / 1e6
        figures["next_snapshot_s"] = await taken(server)
        assert await SnapshotStore(bus).newest() is not None
        begun = time.perf_counter()
        with service(server) as child:
            await until_leading(bus)
            figures["process_to_leading_s"] = time.perf_counter() - begun
            await asyncio.sleep(given.settle_s)
            figures["resident_mb"] = resident_mb(child.pid)
            answer = await bus.nc.request("svc.scheduler.state", b"{}", timeout=30)
            assert json.loads(answer.data)["queue_length"] >= given.queued
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--past", type=int, default=100_000)
    parser.add_argument("--queued", type=int, default=10_000)
    parser.add_argument("--tail", type=int, default=5_000, help="facts after the snapshot")
    parser.add_argument("--settle-s", type=float, default=10.0, help="how long the service runs before it is weighed")
    parser.add_argument("--name", default="scheduler-recovery", help="name of the result file")
    given = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    with tempfile.TemporaryDirectory(prefix="trainbus-recovery-") as folder, nats_server(Path(folder)) as server:
        figures = asyncio.run(measure(given, server))
    recovery_s, resident = figures["recovery_s"], figures["resident_mb"]
    rows = [
        ("facts in the log; runs", f"{figures['facts']:,.0f}; {figures['runs']:,.0f}", ""),
        ("state from snapshot and tail", f"{recovery_s:.2f} s", f"< 2 s  ratio {recovery_s / 2:.2f}"),
        ("of it processor time", f"{figures['recovery_cpu_s']:.2f} s", f"tail of {figures['tail_facts']:,.0f} facts"),
        ("process started to leading", f"{figures['process_to_leading_s']:.2f} s", "lease and imports included"),
        ("snapshot", f"{figures['snapshot_mb']:.1f} MB", ""),
        ("first snapshot, of the whole log", f"{figures['first_snapshot_s']:.1f} s", ""),
        ("next snapshot", f"{figures['next_snapshot_s']:.1f} s", ""),
        ("memory of the service", f"{resident:.0f} MB", f"< 300 MB  ratio {resident / 300:.2f}"),
    ]
    report(given.name, rows, figures)


if __name__ == "__main__":
    main()
