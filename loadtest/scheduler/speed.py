"""How fast the real service places, reclaims and explains, over a real nats-server, with played agents.

    python -m loadtest.scheduler.speed [--runs 20000] [--only placements]

The service, the server and the agents are processes of their own on this machine; everything is measured on the
server's clock. Targets: at least 1,000 placements a second while 10,000 runs are queued on 2,000 GPUs; submit to placed
p99 at most 50 ms at 50 requests a second; a reclaim of 2,000 GPUs decided within 2 s; an infeasible gang explained
within 1 s. Each figure stands beside what the bare server takes from one client in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import structlog
from rich.console import Console

from loadtest.common import percentile, report
from loadtest.scheduler.bench import (
    Watch,
    connected,
    cpu_s,
    process,
    raw_publish_rate,
    resident_mb,
    service,
    submit,
    until_leading,
)
from services.kit.bus import Bus
from services.kit.concurrency import end
from trainbus.cli.embedded.servers import NatsServer, free_ports

NODES, SLOTS = 250, 8
QUEUED = 10_000
LIMIT_S = 40.0
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
        await self.watch.until(lambda: len(runs) <= len(self.stored(name, runs)), what, LIMIT_S)

    async def send(self, bodies: list[dict[str, Any]], rate: float = 0) -> dict[str, float]:
        self._named += 1
        return await submit(self.bus, bodies, f"t{self._named}", rate)

    # -- the figures ---------------------------------------------------------

    async def latency(self, count: int, rate: float) -> Figures:
        """Submit to placed while there is room."""
        sent = await self.send([body(f"l{number}") for number in range(count)], rate)
        await self.all_stored("placed", set(sent), "the placements")
        await self.all_stored("completed", set(sent), "their end")
        waits_ms = [1e3 * (self.watch.at["placed"][run_id] - at) for run_id, at in sent.items()]
        return {
            "submit_to_placed_p50_ms": percentile(waits_ms, 0.5),
            "submit_to_placed_p99_ms": percentile(waits_ms, 0.99),
            "submit_to_placed_max_ms": max(waits_ms),
        }

    async def placements(self, count: int) -> Figures:
        """A gang over everything ends, with ``count`` runs behind it; 10,000 are still there when we stop counting."""
        (gate,) = await self.send([body("gate", NODES * SLOTS, 1)])
        await self.all_stored("placed", {gate}, "the gang that holds everything")
        rng = random.Random(0)
        sizes = rng.choices(list(SIZES), list(SIZES.values()), k=count)
        begun = self.watch.facts
        sent = set(await self.send([body(f"p{n}", slots) for n, slots in enumerate(sizes)]))
        await self.all_stored("queued", sent, "the queue")
        accept_s = max(self.stored("queued", sent)) - min(self.stored("accepted", sent))
        queued_mb = resident_mb(self.pid)
        before_cpu, before_facts = cpu_s(self.pid), self.watch.facts
        with self.players("--mean-s", "1.0", "--start", await self._sequence_of(gate, "placed")):
            wanted = max(count - QUEUED, count // 2)
            await self.watch.until(lambda: len(self.stored("placed", sent)) >= wanted, f"{wanted} placements", LIMIT_S)
            placed = sorted(self.stored("placed", sent))[:wanted]
            used_cpu = cpu_s(self.pid) - before_cpu
            facts = self.watch.facts - before_facts
            took_s = placed[-1] - placed[0]
            await self.all_stored("completed", sent, "the end of all runs")
        assert self.watch.facts > begun
        return {
            "requests_answered_per_s": count / accept_s,
            "placements_per_s": wanted / took_s,
            "facts_per_s": facts / took_s,
            "queued_at_the_end": count - wanted,
            "service_cpu_share": used_cpu / took_s,
            "resident_mb_queued": queued_mb,
        }

    def players(self, *arguments: str) -> AbstractContextManager[subprocess.Popen[bytes]]:
        """Agents, from now on or from the fact on that ``--start`` names."""
        more = ("--nats", self.server.url, *arguments)
        return process("loadtest.scheduler.players", *more, log=self.server.folder / "players.log")

    async def _sequence_of(self, run_id: str, name: str) -> str:
        return str(await self.bus.last_sequence(f"run.{run_id}.{name}"))

    async def reclaim(self) -> Figures:
        """Everything is held by small runs; a gang of higher priority wants all of it."""
        low = set(await self.send([body(f"low{n}") for n in range(NODES * SLOTS)]))
        await self.all_stored("placed", low, "everything to be held")
        await asyncio.sleep(1.0)
        ((gang, at),) = (await self.send([body("high", NODES * SLOTS, 100)])).items()
        await self.all_stored("preempting", low, "the reclaim")
        decided_s = max(self.stored("preempting", low)) - at
        started = time.perf_counter()
        with self.players("--start", str(await self.bus.last_sequence(f"run.{min(low)}.placed"))):
            await self.all_stored("placed", {gang}, "the gang")
        return {"reclaim_decided_s": decided_s, "gang_placed_s": time.perf_counter() - started}

    async def infeasible(self) -> Figures:
        """A gang that is larger than the cluster."""
        ((gang, at),) = (await self.send([body("huge", NODES * SLOTS * 2)])).items()
        await self.all_stored("waiting", {gang}, "the explanation")
        said = json.loads(self.watch.bodies["waiting"][gang])
        assert said["code"] == "infeasible", said
        return {"infeasible_explained_s": self.watch.at["waiting"][gang] - at}


async def measure(given: argparse.Namespace, server: NatsServer) -> Figures:
    figures: Figures = {}
    async with connected(server) as bus:
        figures["raw_publish_per_s"] = await raw_publish_rate(bus)
        with service(server) as child:
            await until_leading(bus)
            watch = Watch(bus)
            watching = asyncio.create_task(watch.run(1))
            trial = Trial(bus, watch, server, child.pid)
            nodes = ("--nodes", str(NODES), "--slots", str(SLOTS), "--mean-s", "0.5")
            with trial.players(*nodes) as players:
                assert players.stdout is not None
                await asyncio.to_thread(players.stdout.readline)
                warm = set(await trial.send([body("warm-up")]))
                await trial.all_stored("completed", warm, "the first run")
                log.print("latency")
                figures |= await trial.latency(given.requests, given.rate)
                figures |= await trial.infeasible()
            if given.only in ("", "placements"):
                log.print("placements")
                figures |= await trial.placements(given.runs)
            if given.only in ("", "reclaim"):
                log.print("reclaim")
                figures |= await trial.reclaim()
            figures["resident_mb"] = resident_mb(child.pid)
            await end(watching)
    return figures


def rows(figures: Figures) -> list[tuple[str, str, str]]:
    raw = figures["raw_publish_per_s"]
    lines: list[tuple[str, str, str, str, Callable[[float], float] | None]] = [
        ("placements_per_s", "placements", "{:,.0f}/s", ">= 1,000/s", lambda v: v / 1000),
        ("facts_per_s", "facts meanwhile", "{:,.0f}/s", f"bare server {raw:,.0f}/s", lambda v: v / raw),
        ("requests_answered_per_s", "requests answered", "{:,.0f}/s", "", None),
        ("submit_to_placed_p50_ms", "submit to placed, p50", "{:.1f} ms", "", None),
        ("submit_to_placed_p99_ms", "submit to placed, p99", "{:.1f} ms", "<= 50 ms", lambda v: v / 50),
        ("reclaim_decided_s", "2,000-GPU reclaim decided", "{:.2f} s", "<= 2 s", lambda v: v / 2),
        ("infeasible_explained_s", "infeasible gang explained", "{:.3f} s", "<= 1 s", lambda v: v),
        ("resident_mb_queued", "memory with the queue", "{:.0f} MB", "<= 300 MB", lambda v: v / 300),
        ("service_cpu_share", "service's share of a core", "{:.2f}", "", None),
    ]
    return [
        (label, form.format(figures[name]), target + (f"  ratio {ratio(figures[name]):.2f}" if ratio else ""))
        for name, label, form, target, ratio in lines
        if name in figures
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20_000, help="runs behind the gang; 10,000 stay queued")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=50.0)
    parser.add_argument("--only", choices=("", "latency", "placements", "reclaim"), default="")
    parser.add_argument("--name", default="scheduler-speed", help="name of the result file")
    given = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    with tempfile.TemporaryDirectory(prefix="trainbus-speed-") as folder:
        server = NatsServer(Path(folder), free_ports(1)[0])
        server.start()
        try:
            figures = asyncio.run(measure(given, server))
        except BaseException:
            log.print((Path(folder) / "scheduler.log").read_text()[-3000:])
            raise
        finally:
            server.stop()
    report(given.name, rows(figures), figures)


if __name__ == "__main__":
    main()
