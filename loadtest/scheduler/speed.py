"""How fast the real service places, preempts and explains, over a real nats-server, with played agents.

    python -m loadtest.scheduler.speed [--runs 20000] [--only large]

The service, the server and the agents are processes of their own on this machine; everything is measured on the
server's clock. Targets: at least 1,000 placements a second while 10,000 runs are queued on 2,000 GPUs; submit to placed
p99 at most 50 ms at 50 requests a second; a preemption of 2,000 GPUs decided within 2 s; an infeasible gang
explained within 1 s. Each figure stands beside what the bare server takes from one client in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import structlog
from rich.console import Console

from loadtest.common import percentile, report
from loadtest.scheduler.bench import (
    Prefill,
    Watch,
    connected,
    cpu_s,
    process,
    resident_mb,
    service,
    submit,
    until_leading,
)
from loadtest.server import nats_server, raw_publish_rate
from services.kit.bus import Bus
from services.kit.concurrency import cancel_and_wait
from trainbus.embedded.servers import NatsServer

NODES, SLOTS = 250, 8
QUEUED = 10_000
#: How long nothing may happen before it is given up.
PATIENCE_S = 60.0
#: Slots of the runs, and how many of a hundred ask for so many.
SIZES = {1: 80, 2: 10, 4: 6, 8: 4}
Figures = dict[str, float]
log = Console(stderr=True)


def body(name: str, slots: int = 1, priority: int = 0) -> dict[str, Any]:
    return {"name": name, "command": ["true"], "slots": slots, "priority": priority, "grace_s": 5}


class Trial:
    """One server, one service, one set of agents."""

    def __init__(self, bus: Bus, watch: Watch, server: NatsServer, pid: int) -> None:
        self.bus, self.watch, self.server, self.pid = bus, watch, server, pid
        self._named = 0

    def stored(self, name: str, runs: set[str]) -> list[float]:
        at = self.watch.at.get(name, {})
        return [at[run_id] for run_id in runs if run_id in at]

    async def all_stored(self, name: str, runs: set[str], what: str) -> None:
        await self.watch.until(lambda: len(runs) <= len(self.stored(name, runs)), what, PATIENCE_S)

    async def send(self, bodies: list[dict[str, Any]], rate: float = 0) -> dict[str, float]:
        self._named += 1
        return await submit(self.bus, bodies, f"t{self._named}", rate)

    # -- the figures ---------------------------------------------------------

    async def latency(self, count: int, rate: float) -> Figures:
        """Submit to placed while there is room."""
        sent = await self.send([body(f"l{number}") for number in range(count)], rate)
        await self.all_stored("completed", set(sent), "the end of the runs")
        waits_ms = [1e3 * (self.watch.at["placed"][run_id] - at) for run_id, at in sent.items()]
        return {
            "submit_to_placed_p50_ms": percentile(waits_ms, 0.5),
            "submit_to_placed_p99_ms": percentile(waits_ms, 0.99),
            "submit_to_placed_max_ms": max(waits_ms),
        }

    async def burst(self, count: int) -> Figures:
        """Requests as fast as they can be sent."""
        before = cpu_s(self.pid)
        sent = set(await self.send([body(f"b{number}") for number in range(count)]))
        await self.all_stored("completed", sent, "the end of the runs")
        accepted = self.stored("accepted", sent)
        return {
            "requests_answered_per_s": count / (max(accepted) - min(accepted)),
            "burst_completed_per_s": count / (max(self.stored("completed", sent)) - min(accepted)),
            "service_cpu_ms_per_run": 1e3 * (cpu_s(self.pid) - before) / count,
        }

    async def placements(self, runs: set[str], wanted: int) -> Figures:
        """``wanted`` of the queued runs get their slots, from those that end meanwhile."""
        await self.watch.until(lambda: len(self.stored("placed", runs)) > 0, "the first placement", PATIENCE_S)
        before_cpu, before_facts = cpu_s(self.pid), self.watch.facts
        await self.watch.until(lambda: len(self.stored("placed", runs)) >= wanted, f"{wanted} placements", PATIENCE_S)
        used_cpu, facts = cpu_s(self.pid) - before_cpu, self.watch.facts - before_facts
        placed = sorted(self.stored("placed", runs))[:wanted]
        took_s = placed[-1] - placed[0]
        return {
            "placements_per_s": wanted / took_s,
            "facts_per_s": facts / took_s,
            "queued_at_the_end": len(runs) - wanted,
            "service_cpu_share": used_cpu / took_s,
            "service_cpu_ms_per_placement": 1e3 * used_cpu / wanted,
            "resident_mb_placing": resident_mb(self.pid),
        }

    def players(self, *arguments: str) -> AbstractContextManager[subprocess.Popen[bytes]]:
        """Agents, from now on or from the fact on that ``--start`` names."""
        more = ("--nats", self.server.url, *arguments)
        return process("loadtest.scheduler.players", *more, log=self.server.folder / "players.log")

    async def preemption(self) -> Figures:
        """Everything is held by small runs; a gang of higher priority wants all of it."""
        low = set(await self.send([body(f"low{n}") for n in range(NODES * SLOTS)]))
        await self.all_stored("placed", low, "everything to be held")
        await asyncio.sleep(1.0)
        ((_, at),) = (await self.send([body("high", NODES * SLOTS, 100)])).items()
        await self.all_stored("stopping", low, "the preemption")
        # (The name under which results are on file.)
        return {"reclaim_decided_s": max(self.stored("stopping", low)) - at}

    async def infeasible(self) -> Figures:
        """A gang that is larger than the cluster."""
        ((gang, at),) = (await self.send([body("huge", NODES * SLOTS * 2)])).items()
        await self.all_stored("waiting", {gang}, "the explanation")
        answer = json.loads(self.watch.bodies["waiting"][gang])
        assert answer["code"] == "infeasible", answer
        return {"infeasible_explained_s": self.watch.at["waiting"][gang] - at}


@asynccontextmanager
async def trial(bus: Bus, server: NatsServer) -> AsyncIterator[Trial]:
    """The service, started on what is in the log, and a reader of its facts."""
    watch = Watch(bus)
    watching = asyncio.create_task(watch.run(1))
    try:
        with service(server) as child:
            await until_leading(bus)
            yield Trial(bus, watch, server, child.pid)
    finally:
        await cancel_and_wait(watching)


async def small(given: argparse.Namespace, server: NatsServer) -> Figures:
    """Figures of a cluster with room."""
    figures: Figures = {}
    async with connected(server) as bus:
        figures["raw_publish_per_s"] = await raw_publish_rate(bus)
        await Prefill(bus).nodes(NODES, SLOTS)
        async with trial(bus, server) as current:
            with current.players("--mean-s", "0.5") as players:
                assert players.stdout is not None
                await asyncio.to_thread(players.stdout.readline)
                await current.latency(10, given.rate)
                log.print("latency")
                figures |= await current.latency(given.requests, given.rate)
                log.print("burst")
                figures |= await current.burst(given.burst)
            log.print("infeasible gang, preemption")
            figures |= await current.infeasible()
            figures |= await current.preemption()
    return figures


async def large(given: argparse.Namespace, server: NatsServer) -> Figures:
    """Placements with a long queue: one gang has everything, and ends."""
    rng = random.Random(0)
    sizes = rng.choices(list(SIZES), list(SIZES.values()), k=given.runs)
    async with connected(server) as bus:
        prefill = Prefill(bus)
        await prefill.nodes(NODES, SLOTS)
        start = await prefill.placed("gate", [f"n{number:04}" for number in range(NODES)], SLOTS)
        runs = set(await prefill.queued(given.runs, lambda number: sizes[number]))
        async with trial(bus, server) as current:
            await asyncio.sleep(2.0)
            figures = {"resident_mb_queued": resident_mb(current.pid)}
            log.print("placements")
            with current.players("--mean-s", str(given.mean_s), "--start", str(start)):
                return figures | await current.placements(runs, max(given.runs - QUEUED, given.runs // 2))


def rows(figures: Figures) -> list[tuple[str, str, str]]:
    raw = figures["raw_publish_per_s"]
    lines: list[tuple[str, str, str, str, Callable[[float], float] | None]] = [
        ("placements_per_s", "placements", "{:,.0f}/s", ">= 1,000/s", lambda v: v / 1000),
        ("facts_per_s", "facts meanwhile", "{:,.0f}/s", f"bare server {raw:,.0f}/s", lambda v: v / raw),
        ("requests_answered_per_s", "requests answered", "{:,.0f}/s", "", None),
        ("submit_to_placed_p50_ms", "submit to placed, p50", "{:.1f} ms", "", None),
        ("submit_to_placed_p99_ms", "submit to placed, p99", "{:.1f} ms", "<= 50 ms", lambda v: v / 50),
        ("reclaim_decided_s", "2,000-GPU preemption decided", "{:.2f} s", "<= 2 s", lambda v: v / 2),
        ("infeasible_explained_s", "infeasible gang explained", "{:.3f} s", "<= 1 s", lambda v: v),
        ("resident_mb_queued", "memory with the queue", "{:.0f} MB", "<= 300 MB", lambda v: v / 300),
        ("service_cpu_ms_per_placement", "service's time a placement", "{:.2f} ms", "", None),
        ("service_cpu_share", "service's share of a core", "{:.2f}", "", None),
    ]
    return [
        (label, form.format(figures[name]), target + (f"  ratio {ratio(figures[name]):.2f}" if ratio else ""))
        for name, label, form, target, ratio in lines
        if name in figures
    ]


Measure = Callable[[argparse.Namespace, NatsServer], Coroutine[Any, Any, Figures]]


def on_a_server(measure: Measure, given: argparse.Namespace) -> Figures:
    """Measure on a server of its own."""
    with tempfile.TemporaryDirectory(prefix="trainbus-speed-") as folder, nats_server(Path(folder)) as server:
        try:
            return asyncio.run(measure(given, server))
        except BaseException:
            log.print((Path(folder) / "scheduler.log").read_text()[-3000:])
            raise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20_000, help="runs in the queue; 10,000 stay there")
    parser.add_argument("--mean-s", type=float, default=0.8, help="how long a run has its slots")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=50.0)
    parser.add_argument("--burst", type=int, default=2000)
    parser.add_argument("--only", choices=("small", "large"))
    parser.add_argument("--name", default="scheduler-speed", help="name of the result file")
    given = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    figures = on_a_server(small, given) if given.only != "large" else {"raw_publish_per_s": 1.0}
    if given.only != "small":
        figures |= on_a_server(large, given)
    report(given.name, rows(figures), figures)


if __name__ == "__main__":
    main()
