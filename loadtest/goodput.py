"""How much of the undisturbed rate is left when slots are taken away at random, and how many steps are made twice.

    python -m loadtest.goodput --minutes 20 --every-s 60

One run on an embedded stack, disturbed at the times of a Poisson process: either preempted for a moment by a run of
higher priority, or with the whole node (agent and ranks) killed by SIGKILL. Goodput is steps that count for each second
in which the run could have had its slots, against the same run undisturbed just before. What losing nodes costs at best
is Young's and Daly's: with checkpoints every sqrt(2 C M) seconds (C: their cost, M: mean time between losses), a share
of sqrt(2 C / M) + R / M of the time is lost, R being the time to start again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import signal
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import structlog
from rich.progress import Progress

from loadtest.common import report
from loadtest.turnaround.ours import Loop
from tests.e2e.support import Stack, connected
from trainbus.embedded.launch import StackProcess
from trainbus.embedded.layout import StackOptions

Kind = Literal["preempt", "node", "rank"]
#: Seconds for which a run of higher priority has the slots.
TAKEN_S = 2.0
#: Share of the goodput that a loss of nodes may cost beyond the optimum.
BEYOND_OPTIMUM = 0.03


@dataclass(slots=True)
class Disturbed:
    """What came of one run."""

    steps: int
    available_s: float
    disturbances: int
    #: Steps made, again or for the first time: what is beyond ``steps`` was made twice.
    made: int
    #: Steps made twice, for each disturbance.
    lost: list[int] = field(default_factory=list)
    resumed_from: list[str] = field(default_factory=list)
    restart_s: list[float] = field(default_factory=list)

    @property
    def per_s(self) -> float:
        return self.steps / self.available_s


class Trial:
    """One run for a while, left alone or disturbed."""

    def __init__(self, stack: Stack, loop: Loop, rng: random.Random) -> None:
        self._stack, self._loop, self._rng = stack, loop, rng

    async def run(self, seconds: float, kind: Kind | None, every_s: float) -> Disturbed:
        """Train for ``seconds``, disturbed every ``every_s`` seconds on average; None: not at all."""
        run_id = await self._loop.publish(slots={"min": 2, "max": 2}, max_attempts=100)
        await self._stack.wait_for(run_id, "started", 60)
        begun = time.time()
        taken_s, count = 0.0, 0
        if kind is None:
            await asyncio.sleep(seconds)
        else:
            for at in self._times(seconds, every_s):
                await asyncio.sleep(max(begun + at - time.time(), 0))
                taken_s += await self._disturb(kind, run_id)
                count += 1
            await asyncio.sleep(max(begun + seconds - time.time(), 0))
        ended = time.time()
        disturbed = await self._read(run_id, begun, ended, taken_s, count)
        await self._stack.bus.js.publish("cancel.requested", json.dumps({"run_id": run_id}).encode())
        await self._stack.wait_for(run_id, "cancelled", 60)
        return disturbed

    def _times(self, seconds: float, every_s: float) -> list[float]:
        found, at = [], self._rng.expovariate(1 / every_s)
        while at < seconds - TAKEN_S:
            found.append(at)
            at += TAKEN_S + self._rng.expovariate(1 / every_s)
        return found

    async def _disturb(self, kind: Kind, run_id: str) -> float:
        """Do it; return the seconds for which somebody else had the slots by right."""
        if kind == "preempt":
            sleepers = [await self._stack.sleeper(seconds=TAKEN_S, priority=10) for _ in range(4)]
            held = []
            for sleeper in sleepers:
                placed = await self._fact_at(sleeper, "placed")
                held.append((placed, await self._fact_at(sleeper, "completed")))
            return max(end for _, end in held) - min(start for start, _ in held)
        notes = sorted(
            self._stack.data_dir.glob(f"node-*/runs/{run_id}/g*/processes.json"), key=lambda path: path.stat().st_mtime
        )
        ranks = [each["pid"] for each in json.loads(notes[-1].read_text())]
        victims = ranks[-1:] if kind == "rank" else [self._stack.pid(notes[-1].parts[-5]), *ranks]
        for pid in victims:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        return 0.0

    async def _fact_at(self, run_id: str, name: str) -> float:
        await self._stack.wait_for(run_id, name, 60)
        return next(r.envelope.time.timestamp() for r in await self._stack.facts(run_id) if r.event.fact == name)

    async def _read(self, run_id: str, begun: float, ended: float, taken_s: float, count: int) -> Disturbed:
        """What the ranks reported: the steps that count, those made twice, and the pauses."""
        points: dict[int, list[tuple[float, int]]] = {}
        for message in await self._stack.bus.read_history(f"progress.{run_id}", stream="PROGRESS"):
            event = message.event
            if event.kind == "training":
                points.setdefault(event.generation, []).extend((point.time, point.step) for point in event.points)
        inside = {
            number: sorted({(at, step) for at, step in found if begun <= at <= ended})
            for number, found in points.items()
        }
        starts: dict[int, Any] = {
            r.event.generation: r.event for r in await self._stack.facts(run_id) if r.event.fact == "started"
        }
        lost, restart_s = [], []
        for number in sorted(inside)[1:]:
            before, now = inside.get(number - 1, []), inside[number]
            if before and now:
                lost.append(max(max(step for _, step in before) - starts[number].step, 0))
                restart_s.append(now[0][0] - before[-1][0])
        every = [step for found in inside.values() for _, step in found]
        return Disturbed(
            steps=max(every) - min(every) + 1 if every else 0,
            available_s=ended - begun - taken_s,
            disturbances=count,
            made=len(every),
            lost=lost,
            resumed_from=[start.resumed_from for number, start in sorted(starts.items()) if number > 1],
            restart_s=restart_s,
        )


def optimum(checkpoint_s: float, restart_s: float, every_s: float) -> float:
    """The best share of the time that checkpoints and losses leave (Young 1974, Daly 2006, first order)."""
    return 1 - math.sqrt(2 * checkpoint_s / every_s) - restart_s / every_s


async def measure(data_dir: Path, arguments: argparse.Namespace, progress: Progress) -> dict[str, Disturbed]:
    found: dict[str, Disturbed] = {}
    async with connected(data_dir) as stack:
        loop = await Loop.open(stack, arguments.width, arguments.checkpoint_steps)
        trial = Trial(stack, loop, random.Random(arguments.seed))
        kinds: list[Kind | None] = [None, *arguments.kinds.split(",")]
        bar = progress.add_task("runs", total=len(kinds))
        for kind in kinds:
            seconds = arguments.minutes * 60 if kind else max(arguments.minutes * 6, 20)
            found[kind or "undisturbed"] = await trial.run(seconds, kind, arguments.every_s)
            progress.update(bar, advance=1)
    return found


def show(found: dict[str, Disturbed], every_s: float, checkpoint_s: float) -> None:
    undisturbed = found["undisturbed"].per_s
    rows = [("undisturbed", f"{undisturbed:.1f} steps a second", "")]
    for kind in [kind for kind in found if kind != "undisturbed"]:
        each = found[kind]
        restart_s = statistics.median(each.restart_s) if each.restart_s else 0.0
        best = optimum(checkpoint_s, restart_s, every_s)
        target = 0.97 if kind == "preempt" else best - BEYOND_OPTIMUM
        rows += [
            (f"goodput, {kind} ({each.disturbances} times)", f"{each.per_s / undisturbed:.1%}", f"{target:.1%}"),
            ("  steps made twice", f"{sum(each.lost)}, at most {max(each.lost, default=0)}", _most_lost(kind)),
            ("  last step to next step", f"{restart_s:.2f} s (median)", ""),
            ("  state taken from", ", ".join(sorted(set(each.resumed_from))) or "-", ""),
        ]
    figures = {kind: {"per_s": each.per_s, **_as_json(each)} for kind, each in found.items()}
    report("goodput", rows, {"runs": figures, "every_s": every_s})


def _most_lost(kind: str) -> str:
    return {"preempt": "0", "rank": "1 each"}.get(kind, "those since the last commit")


def _as_json(each: Disturbed) -> dict[str, Any]:
    return {name: getattr(each, name) for name in Disturbed.__dataclass_fields__}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20, help="length of each disturbed run")
    parser.add_argument("--every-s", type=float, default=60, help="mean time between disturbances")
    parser.add_argument("--kinds", default="preempt,rank,node")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--checkpoint-steps", type=int, default=200)
    parser.add_argument("--checkpoint-s", type=float, default=0.01, help="what one costs the training, as measured")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    with tempfile.TemporaryDirectory(prefix="trainbus-goodput-") as folder, Progress(transient=True) as progress:
        options = StackOptions(Path(folder) / "data")
        with StackProcess(options, output=Path(folder) / "output.log") as stack:
            stack.wait_ready()
            found = asyncio.run(measure(options.data_dir, arguments, progress))
    show(found, arguments.every_s, arguments.checkpoint_s)


if __name__ == "__main__":
    main()
