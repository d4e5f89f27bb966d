"""What reporting costs a training loop: seconds a step, its share of the rate, and what happens while nobody reads.

    python -m loadtest.reporting [--step-ms 2] [--away-s 60]

Targets: at most 5 microseconds a step and 1% of the rate; with nobody there for a minute, no step that waits and
nothing lost.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from contracts.base import Fact
from contracts.events.run import RunProgress
from contracts.ranks import EndedLine
from loadtest.common import percentile
from services.worker.core.journal import JournalSource
from services.worker.ranks.journal_follower import JournalFollower
from trainbus.agent_link.channels import Journal

VALUES = {"train/loss": 0.7, "train/grad_norm": 1.3, "train/lr": 1e-3, "train/samples_per_s": 4096.0}
CALLS, ROUNDS = 2_000, 25


def report(journal: Journal, step: int) -> None:
    """What a step of the trainer says."""
    journal.metrics(step, VALUES, epoch=1, samples_consumed=64 * step, total_steps=10**6)
    journal.heartbeat(step)


def cost_us(folder: Path) -> float:
    """Microseconds a step, the least of many rounds."""
    journal, best = Journal(folder / "rank_0.jsonl"), float("inf")
    for first in range(0, CALLS * ROUNDS, CALLS):
        begun = time.perf_counter()
        for step in range(first, first + CALLS):
            report(journal, step)
        best = min(best, (time.perf_counter() - begun) / CALLS)
    return best * 1e6


def share(folder: Path, step_ms: float) -> float:
    """How much longer a loop takes that reports; both interleaved, the least of each."""
    journal = Journal(folder / "rank_1.jsonl")
    a = torch.randn(256, 256)
    torch.set_num_threads(1)
    begun = time.perf_counter()
    for _ in range(200):
        a @ a
    products = max(1, round(step_ms / 1e3 / ((time.perf_counter() - begun) / 200)))

    def loop(say: Callable[[int], None]) -> float:
        begun = time.perf_counter()
        for step in range(50):
            for _ in range(products):
                a @ a
            say(step)
        return time.perf_counter() - begun

    silent, loud = float("inf"), float("inf")
    for _ in range(40):
        silent = min(silent, loop(lambda step: None))
        loud = min(loud, loop(lambda step: report(journal, step)))
    return loud / silent - 1


async def away(folder: Path, away_s: float, steps_per_s: int) -> tuple[float, int, bool]:
    """(99.9th percentile of a report in microseconds, points lost, whether the last word came) with nobody reading."""
    journal = Journal(folder / "rank_2.jsonl")
    steps, took = int(away_s * steps_per_s), []
    for step in range(1, steps + 1):
        begun = time.perf_counter()
        report(journal, step)
        took.append(time.perf_counter() - begun)
    journal.append(EndedLine(time=time.time(), outcome="succeeded", step=steps))
    seen: list[int] = []

    async def publish(fact: Fact) -> None:
        if isinstance(fact, RunProgress):
            seen.extend(point.step for point in fact.points)

    follower = JournalFollower(JournalSource("r", 1, "n"), (2,), folder, publish, time.time, interval_s=0.1)
    await follower.drain()
    missing = steps - len(set(seen)) + len(seen) - len(set(seen))
    return percentile(took, 0.999) * 1e6, missing, follower.state.ranks[2].ended is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=2.0)
    parser.add_argument("--away-s", type=float, default=60.0)
    parser.add_argument("--steps-per-s", type=int, default=2000, help="while nobody reads; more than the ring holds")
    given = parser.parse_args()
    table = Table("figure", "measured", "target")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        table.add_row("a step's report", f"{cost_us(folder):.2f} us", "<= 5 us")
        table.add_row(f"share of a {given.step_ms:g} ms step", f"{share(folder, given.step_ms):.2%}", "<= 1%")
        p999_us, missing, ended = asyncio.run(away(folder, given.away_s, given.steps_per_s))
        table.add_row("report while nobody reads, p99.9", f"{p999_us:.0f} us", "no stall")
        table.add_row("points lost or doubled; last word heard", f"{missing}; {ended}", "0; True")
    Console().print(table)


if __name__ == "__main__":
    main()
