"""All figures of the scheduler beside their targets, in one table.

    python -m loadtest.scheduler --traces FOLDER [--only waiting,packing,use,speed,recovery,why,fairness,crash]

``FOLDER`` holds the traces (philly_*.csv, openb_*.csv, fgd_published.csv); without it the parts that need them are left
out, and said to be. Each part is a command of its own, shown as it runs. All of it takes over an hour on two cores.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
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


def command(*arguments: str) -> str:
    """Run one part and return what it prints."""
    console.print(f"[dim]$ python -m {' '.join(arguments)}[/]")
    done = subprocess.run([sys.executable, "-m", *arguments], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"python -m {' '.join(arguments)} ended with {done.returncode}")
    return done.stdout


def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def simulated(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(command("trainbus.cli.main", "simulate", "--json", *arguments))
    return found


# -- the parts ----------------------------------------------------------------------------------------


def waiting(traces: Path, given: argparse.Namespace) -> Iterator[Line]:
    week, quiet = str(traces / "philly_2017-10-09.csv"), str(traces / "philly_2017-10-23.csv")
    base = ("--trace", week, "--format", "pai", "--gpus", "400")
    skip = simulated(*base, "--policy", "fifo-skip")
    ours = simulated(*base, "--policy", POLICY)
    average, longest, p99 = ours["avg_wait_s"], ours["max_wait_s"], ours["p99_jct_s"]
    yield Line(
        "average wait, contended week", f"{average:,.0f} s", "<= 837 s (1.5 x oracle)", average / (1.5 * ORACLE_S)
    )
    yield Line("longest wait", f"{longest:,.0f} s", "<= 109,533 s (strict FIFO)", longest / FIFO_LONGEST_S)
    yield Line(
        "p99 completion", f"{p99:,.0f} s", f"<= {skip['p99_jct_s']:,.0f} s (skipping FIFO)", p99 / skip["p99_jct_s"]
    )
    dear = simulated(*base, "--policy", POLICY, "--resume-cost-s", "300")
    for name, label in (("avg_wait_s", "average"), ("max_wait_s", "longest"), ("p99_jct_s", "p99 completion")):
        ratio = dear[name] / (1.5 * ours[name])
        yield Line(f"{label}, 300 s to resume", f"{dear[name]:,.0f} s", f"<= {1.5 * ours[name]:,.0f} s", ratio)
    base = ("--trace", quiet, "--format", "pai", "--gpus", "650")
    fifo, ours = simulated(*base, "--policy", "fifo"), simulated(*base, "--policy", POLICY)
    bound = max(fifo["avg_wait_s"], 1e-9)
    yield Line(
        "average wait, quiet week",
        f"{ours['avg_wait_s']:,.1f} s",
        f"<= {bound:,.1f} s (FIFO)",
        ours["avg_wait_s"] / bound,
    )


def packing(traces: Path, given: argparse.Namespace) -> Iterator[Line]:
    with (traces / "fgd_published.csv").open() as file:
        published = {
            row["workload"]: float(row["allocated_gpu_percent_at_100_mean"])
            for row in csv.DictReader(file)
            if "FGD" in row["policy"]
        }
    slowest = 0.0
    for name in LISTS:
        found = []
        for seed in range(42, 42 + given.seeds):
            pods = str(traces / f"openb_pod_list_{name}.csv")
            nodes = str(traces / "openb_node_list_gpu_node.csv")
            figures = simulated(
                "--nodes", nodes, "--pods", pods, "--format", "openb", "--tune", "1.3", "--seed", str(seed)
            )
            found.append(figures["allocated_gpu_percent_at_100"])
            slowest = max(slowest, figures["decide_p99_ms"])
        target, mean = published[f"openb_pod_list_{name}"], statistics.mean(found)
        yield Line(f"packing, {name}, {given.seeds} seeds", f"{mean:.2f} %", f">= {target:.2f} % (FGD)", target / mean)
    yield Line("one decision on 1,213 nodes, p99", f"{slowest:.1f} ms", "<= 10 ms", slowest / 10)


def use(traces: Path, given: argparse.Namespace) -> Iterator[Line]:
    command("loadtest.scheduler.use", "--days", "1")
    found = result("use")
    yield Line("GPUs allocated under a backlog", f"{found['allocated']:.1%}", ">= 95 %", 0.95 / found["allocated"])
    kept, promises = found["kept"], found["promises"]
    yield Line("promised starts of 1,000-GPU gangs kept", f"{kept} of {promises}", "all", promises / max(kept, 1))


def speed(traces: Path, given: argparse.Namespace) -> Iterator[Line]:
    command("loadtest.scheduler.speed")
    found = result("scheduler-speed")
    rate = found["placements_per_s"]
    yield Line("placements, 10,000 queued, 2,000 GPUs", f"{rate:,.0f}/s", ">= 1,000/s", 1000 / rate)
    for name, label, most, unit in (
        ("submit_to_placed_p99_ms", "submit to placed at 50/s, p99", 50, "ms"),
        ("reclaim_decided_s", "reclaim of 2,000 GPUs decided", 2, "s"),
        ("infeasible_explained_s", "infeasible gang explained", 1, "s"),
    ):
        yield Line(label, f"{found[name]:.2f} {unit}", f"<= {most} {unit}", found[name] / most)


def recovery(traces: Path, given: argparse.Namespace) -> Iterator[Line]:
    command("loadtest.scheduler.recovery")
    found = result("scheduler-recovery")
    yield Line("state with 100,000 past runs", f"{found['recovery_s']:.2f} s", "< 2 s", found["recovery_s"] / 2)
    yield Line(
        "memory with 10,000 queued as well", f"{found['resident_mb']:.0f} MB", "< 300 MB", found["resident_mb"] / 300
    )


def why(traces: Path, given: argparse.Namespace) -> Iterator[Line]:
    command("loadtest.scheduler.why")
    found = result("why")
    share = found["true"] / max(found["named"], 1)
    yield Line(f"smallest change starts the run ({found['named']} asked)", f"{share:.1%}", ">= 99 %", 0.99 / share)


def fairness(traces: Path, given: argparse.Namespace) -> Iterator[Line]:
    command("loadtest.scheduler.fairness")
    found = result("fairness")
    off = max(abs(value) for each in found["in turn"]["off"] for value in each.values())
    yield Line("shares off their weights after three half-lives", f"{off:.2%}", "<= 2 %", off / 0.02)
    yield Line("limits exceeded", str(len(found["violations"])), "0")


def crash(traces: Path, given: argparse.Namespace) -> Iterator[Line]:
    command("loadtest.scheduler.crash")
    found = result("scheduler-crash")
    yield Line(f"violations, {found['rounds']} leaders killed", str(len(found["problems"])), "0")


def estimates(traces: Path, given: argparse.Namespace) -> Iterator[Line]:
    trace = str(traces / "philly_2017-10-09.csv")
    arguments = ("--trace", trace, "--gpus", "400", "--policy", "fifo", "--every", "40", "--json")
    found = json.loads(command("loadtest.scheduler.estimates", *arguments))
    for name, when in (("as_queued", "as queued"), ("later", "at a later moment")):
        each = found[name]
        error, naive = each["error"], each["error_by_position"]
        yield Line(f"starts within p10..p90, {when}", f"{each['held']:.1%}", "75 to 85 %")
        yield Line("  median error of p50", f"{error:.1%}", "<= 30 %", error / 0.30)
        yield Line("  over that of position over rate", f"{error / naive:.2f}", "below 1", error / naive)


#: Name -> the part, and whether it needs the traces.
PARTS: dict[str, tuple[Callable[[Path, argparse.Namespace], Iterator[Line]], bool]] = {
    "waiting": (waiting, True),
    "packing": (packing, True),
    "use": (use, False),
    "speed": (speed, False),
    "recovery": (recovery, False),
    "estimates": (estimates, True),
    "why": (why, False),
    "fairness": (fairness, False),
    "crash": (crash, False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--seeds", type=int, default=10, help="of the packing")
    given = parser.parse_args()
    lines: list[Line] = []
    for name in given.only.split(","):
        part, needs_traces = PARTS[name]
        if needs_traces and given.traces is None:
            lines.append(Line(name, "left out", "needs --traces"))
            continue
        lines += list(part(given.traces or Path(), given))
    rows = [
        (line.label, line.measured, line.target + (f"  ratio {line.ratio:.2f}" if line.ratio is not None else ""))
        for line in lines
    ]
    report("scheduler", rows, {"lines": [line._asdict() for line in lines]})


if __name__ == "__main__":
    main()
