"""All figures of the scheduler beside their targets, in one table.

    python -m loadtest.scheduler --traces FOLDER [--only waiting,packing] [--seeds 10]

``FOLDER`` holds the traces (philly_*.csv, openb_*.csv, fgd_published.csv); without it the parts that need them are left
out, and said to be. Each part is made of commands of its own, shown as they run with the time that is left. All of it
takes over an hour on two cores. A part that fails is named in the table and keeps no other from running; the exit
status is then 1.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from loadtest.common import RESULTS, report

#: Policy -> what it stands for in the part about waiting.
POLICY = "even-wait"
#: An oracle's shortest remaining service on philly_2017-10-09 with 400 GPUs, and strict FIFO's longest wait there;
#: skipping FIFO's p99 completion is measured in the same run.
ORACLE_S, FIFO_LONGEST_S = 558.0, 109_533.0
LISTS = ("default", "gpushare40", "multigpu20")
console = Console(stderr=True)


class Line(NamedTuple):
    """One figure: what is measured, its target, and the ratio of the two (below 1 is better than asked for)."""

    label: str
    measured: str
    target: str
    ratio: float | None = None


class Failed(RuntimeError):
    """A command of a part has ended without its figures."""


class Bench:
    """Runs the commands of the parts, and shows how much time is left."""

    def __init__(self, traces: Path | None, seeds: int, minutes: dict[str, float]) -> None:
        """``minutes``: part -> how long it takes, about."""
        self.traces, self.seeds = traces or Path(), seeds
        self._minutes = minutes
        self._to_come = list(minutes)
        self._now = ""
        self._begun = self._since = time.monotonic()
        #: What the parts that were measured took, and were expected to take.
        self._took_min = self._expected_min = 0.0

    def begin(self, name: str) -> None:
        """The next part begins."""
        self._now, self._since = name, time.monotonic()
        self._to_come.remove(name)

    def end(self) -> None:
        """The present part was measured: the rest will go as fast as it did."""
        self._took_min += (time.monotonic() - self._since) / 60
        self._expected_min += self._minutes[self._now]

    def left_min(self) -> float:
        """How long all of it still takes, about."""
        pace = self._took_min / self._expected_min if self._expected_min else 1.0
        of_this = self._minutes[self._now] * pace - (time.monotonic() - self._since) / 60
        return max(of_this, 0.0) + sum(self._minutes[name] for name in self._to_come) * pace

    def command(self, *arguments: str) -> tuple[int, str]:
        """Run a command of the present part; its exit status and what it prints."""
        number, gone_min = len(self._minutes) - len(self._to_come), (time.monotonic() - self._begun) / 60
        so_far = f"{number}/{len(self._minutes)} {self._now}, {gone_min:.0f} min, about {self.left_min():.0f} left"
        console.print(f"[bold]{so_far}[/] [dim]$ python -m {' '.join(arguments)}[/]", soft_wrap=True)
        done = subprocess.run([sys.executable, "-m", *arguments], stdout=subprocess.PIPE, text=True, check=False)
        return done.returncode, done.stdout

    def printed(self, *arguments: str) -> dict[str, Any]:
        """The figures that a command prints as JSON.

        Raises:
            Failed: it prints none.
        """
        status, text = self.command(*arguments)
        try:
            found: dict[str, Any] = json.loads(text)
        except ValueError as error:
            raise Failed(f"python -m {' '.join(arguments)} ended with {status} and printed no figures") from error
        return found

    def simulated(self, *arguments: str) -> dict[str, Any]:
        """The figures of one simulation."""
        return self.printed("trainbus.commands.main", "simulate", "--json", *arguments)

    def kept(self, name: str, *arguments: str) -> dict[str, Any]:
        """The figures that a command keeps in results/<name>.json.

        Raises:
            Failed: it has kept none. (Those of an earlier run are none.)
        """
        path = RESULTS / f"{name}.json"
        before = path.stat().st_mtime_ns if path.exists() else 0
        status, _ = self.command(*arguments)
        if not path.exists() or path.stat().st_mtime_ns == before:
            raise Failed(f"python -m {' '.join(arguments)} ended with {status} and kept no figures")
        found: dict[str, Any] = json.loads(path.read_text())
        return found


# -- the parts ----------------------------------------------------------------------------------------


def waiting(bench: Bench) -> Iterator[Line]:
    week, quiet = (str(bench.traces / f"philly_2017-10-{day}.csv") for day in ("09", "23"))
    base = ("--trace", week, "--format", "pai", "--gpus", "400")
    skip = bench.simulated(*base, "--policy", "fifo-skip")
    ours = bench.simulated(*base, "--policy", POLICY)
    average, longest, p99 = ours["avg_wait_s"], ours["max_wait_s"], ours["p99_jct_s"]
    yield Line(
        "average wait, contended week", f"{average:,.0f} s", "<= 837 s (1.5 x oracle)", average / (1.5 * ORACLE_S)
    )
    yield Line("longest wait", f"{longest:,.0f} s", "<= 109,533 s (strict FIFO)", longest / FIFO_LONGEST_S)
    yield Line(
        "p99 completion", f"{p99:,.0f} s", f"<= {skip['p99_jct_s']:,.0f} s (skipping FIFO)", p99 / skip["p99_jct_s"]
    )
    dear = bench.simulated(*base, "--policy", POLICY, "--resume-cost-s", "300")
    for name, label in (("avg_wait_s", "average"), ("max_wait_s", "longest"), ("p99_jct_s", "p99 completion")):
        ratio = dear[name] / (1.5 * ours[name])
        yield Line(f"{label}, 300 s to resume", f"{dear[name]:,.0f} s", f"<= {1.5 * ours[name]:,.0f} s", ratio)
    base = ("--trace", quiet, "--format", "pai", "--gpus", "650")
    fifo, ours = bench.simulated(*base, "--policy", "fifo"), bench.simulated(*base, "--policy", POLICY)
    bound = max(fifo["avg_wait_s"], 1e-9)
    yield Line(
        "average wait, quiet week",
        f"{ours['avg_wait_s']:,.1f} s",
        f"<= {bound:,.1f} s (FIFO)",
        ours["avg_wait_s"] / bound,
    )


def packing(bench: Bench) -> Iterator[Line]:
    with (bench.traces / "fgd_published.csv").open() as file:
        published = {
            row["workload"]: float(row["allocated_gpu_percent_at_100_mean"])
            for row in csv.DictReader(file)
            if "FGD" in row["policy"]
        }
    slowest = 0.0
    for name in LISTS:
        found = []
        for seed in range(42, 42 + bench.seeds):
            pods = str(bench.traces / f"openb_pod_list_{name}.csv")
            nodes = str(bench.traces / "openb_node_list_gpu_node.csv")
            figures = bench.simulated(
                "--nodes", nodes, "--pods", pods, "--format", "openb", "--tune", "1.3", "--seed", str(seed)
            )
            found.append(figures["allocated_gpu_percent_at_100"])
            slowest = max(slowest, figures["decide_p99_ms"])
        target, mean = published[f"openb_pod_list_{name}"], statistics.mean(found)
        yield Line(f"packing, {name}, {bench.seeds} seeds", f"{mean:.2f} %", f">= {target:.2f} % (FGD)", target / mean)
    yield Line("one decision on 1,213 nodes, p99", f"{slowest:.1f} ms", "<= 10 ms", slowest / 10)


def use(bench: Bench) -> Iterator[Line]:
    found = bench.kept("use", "loadtest.scheduler.use", "--days", "1")
    yield Line("GPUs allocated under a backlog", f"{found['allocated']:.1%}", ">= 95 %", 0.95 / found["allocated"])
    kept, promises = found["kept"], found["promises"]
    yield Line("promised starts of 1,000-GPU gangs kept", f"{kept} of {promises}", "all", promises / max(kept, 1))


def speed(bench: Bench) -> Iterator[Line]:
    found = bench.kept("scheduler-speed", "loadtest.scheduler.speed")
    rate = found["placements_per_s"]
    yield Line("placements, 10,000 queued, 2,000 GPUs", f"{rate:,.0f}/s", ">= 1,000/s", 1000 / rate)
    for name, label, most, unit in (
        ("submit_to_placed_p99_ms", "submit to placed at 50/s, p99", 50, "ms"),
        ("reclaim_decided_s", "preemption of 2,000 GPUs decided", 2, "s"),
        ("infeasible_explained_s", "infeasible gang explained", 1, "s"),
    ):
        yield Line(label, f"{found[name]:.2f} {unit}", f"<= {most} {unit}", found[name] / most)


def recovery(bench: Bench) -> Iterator[Line]:
    found = bench.kept("scheduler-recovery", "loadtest.scheduler.recovery")
    yield Line("state with 100,000 past runs", f"{found['recovery_s']:.2f} s", "< 2 s", found["recovery_s"] / 2)
    yield Line(
        "memory with 10,000 queued as well", f"{found['resident_mb']:.0f} MB", "< 300 MB", found["resident_mb"] / 300
    )


def why(bench: Bench) -> Iterator[Line]:
    found = bench.kept("why", "loadtest.scheduler.why")
    share = found["true"] / max(found["named"], 1)
    yield Line(f"smallest change starts the run ({found['named']} asked)", f"{share:.1%}", ">= 99 %", 0.99 / share)


def fairness(bench: Bench) -> Iterator[Line]:
    found = bench.kept("fairness", "loadtest.scheduler.fairness")
    off = max(abs(value) for each in found["in turn"]["off"] for value in each.values())
    yield Line("shares off their weights after three half-lives", f"{off:.2%}", "<= 2 %", off / 0.02)
    yield Line("limits exceeded", str(len(found["violations"])), "0")


def crash(bench: Bench) -> Iterator[Line]:
    found = bench.kept("scheduler-crash", "loadtest.scheduler.crash")
    yield Line(f"violations, {found['rounds']} leaders killed", str(len(found["problems"])), "0")


def estimates(bench: Bench) -> Iterator[Line]:
    trace = str(bench.traces / "philly_2017-10-09.csv")
    arguments = ("--trace", trace, "--gpus", "400", "--policy", "fifo", "--every", "40", "--json")
    found = bench.printed("loadtest.scheduler.estimates", *arguments)
    for name, when in (("as_queued", "as queued"), ("later", "at a later moment")):
        each = found[name]
        error, naive = each["error"], each["error_by_position"]
        yield Line(f"starts within p10..p90, {when}", f"{each['held']:.1%}", "75 to 85 %")
        yield Line("  median error of p50", f"{error:.1%}", "<= 30 %", error / 0.30)
        yield Line("  over that of position over rate", f"{error / naive:.2f}", "below 1", error / naive)


class Part(NamedTuple):
    """Some of the figures."""

    measure: Callable[[Bench], Iterator[Line]]
    needs_traces: bool
    #: How long it takes on two cores, about: what is left is reckoned by it.
    minutes: float


PARTS = {
    "waiting": Part(waiting, True, 10),
    "packing": Part(packing, True, 20),
    "use": Part(use, False, 5),
    "speed": Part(speed, False, 3),
    "recovery": Part(recovery, False, 3),
    "estimates": Part(estimates, True, 6),
    "why": Part(why, False, 8),
    "fairness": Part(fairness, False, 6),
    "crash": Part(crash, False, 8),
}


def measured(names: Sequence[str], traces: Path | None, seeds: int) -> tuple[list[Line], list[str]]:
    """The lines of these parts, and those of the parts that failed."""
    able = [name for name in names if traces is not None or not PARTS[name].needs_traces]
    bench = Bench(traces, seeds, {name: PARTS[name].minutes for name in able})
    lines = [Line(name, "left out", "needs --traces") for name in names if name not in able]
    failed = []
    for name in able:
        bench.begin(name)
        try:
            for line in PARTS[name].measure(bench):
                lines.append(line)
            bench.end()
        except Exception as error:  # an hour of the others' figures is not to be lost with it
            if not isinstance(error, Failed):
                console.print_exception()
            failed.append(name)
            lines.append(Line(name, "failed", str(error) if isinstance(error, Failed) else repr(error)))
    return lines, failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--seeds", type=int, default=10, help="of the packing")
    given = parser.parse_args()
    names = list(dict.fromkeys(given.only.split(",")))
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"--only: there is no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if given.traces is not None and not given.traces.is_dir():
        parser.error(f"--traces: {given.traces} is no folder")
    lines, failed = measured(names, given.traces, given.seeds)
    rows = [
        (line.label, line.measured, line.target + (f"  ratio {line.ratio:.2f}" if line.ratio is not None else ""))
        for line in lines
    ]
    report("scheduler", rows, {"lines": [line._asdict() for line in lines]})
    if failed:
        console.print(f"[red]failed: {', '.join(failed)}[/]")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
