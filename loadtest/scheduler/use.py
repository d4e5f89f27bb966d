"""How much of a large cluster is used while there is a backlog, and whether promised starts are kept.

    python -m loadtest.scheduler.use --days 3

250 nodes of 8, 500 runs a day from 1 to 1,000 GPUs, 100 of them large, all with a limit; large gangs are promised their
start. The simulator drives the ``fold`` and ``decide`` that run live.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from rich.progress import Progress

from contracts.base import Fact
from contracts.events.run import RunAccepted, RunExited, RunPlaced, RunReleased, RunReserved
from contracts.spec.resources import Scheduling, Slots
from contracts.spec.run import Code, RunSpec
from contracts.spec.training import Training
from loadtest.common import report
from services.scheduler.policies import load
from trainbus.operate.simulation.engine import simulate
from trainbus.operate.simulation.traces import INSTANT_GRACE_S, START, Job, Trace, nodes_of

NODES, PER_NODE, RUNS_A_DAY, LARGE_A_DAY = 250, 8, 500, 100
SMALL = (1, 1, 2, 4, 8)
LARGE = (64, 128, 256, 512, 1000)
DAY_S = 86_400.0


def day_of_runs(days: int, seed: int, load: float) -> Trace:
    """Runs that ask for ``load`` times what the cluster can do, evenly over the days."""
    source = random.Random(seed)
    drawn = []
    for number in range(RUNS_A_DAY * days):
        large = number % RUNS_A_DAY < LARGE_A_DAY
        drawn.append((source.choice(LARGE if large else SMALL), source.lognormvariate(0.0, 1.0)))
    work = sum(slots * length for slots, length in drawn)
    scale_s = load * NODES * PER_NODE * DAY_S * days / work
    jobs = []
    for number, (slots, length) in enumerate(drawn):
        duration_s = max(length * scale_s, 60.0)
        limit_s = duration_s * source.uniform(1.0, 3.0)
        jobs.append(_job(number, source.uniform(0, DAY_S * days), slots, duration_s, limit_s))
    return Trace(nodes_of(NODES * PER_NODE, PER_NODE), tuple(sorted(jobs, key=lambda job: job.submit_s)), "use")


def _job(number: int, submit_s: float, slots: int, duration_s: float, limit_s: float) -> Job:
    spec = RunSpec(
        name=f"run-{number}",
        task="m:T",
        code=Code(uri="s3://code/c.tar.gz", sha256="0" * 64),
        training=Training(epochs=1),
        slots=Slots(min=slots, max=slots),
        grace_s=INSTANT_GRACE_S,
        scheduling=Scheduling(limit_s=limit_s),
    )
    return Job(f"run-{number}", submit_s, duration_s, spec)


@dataclass(slots=True)
class Use:
    """Integrates what is allocated while more is asked for than there is."""

    slots: int
    last_s: float = 0.0
    allocated: int = 0
    waiting: dict[str, int] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    busy_slot_s: float = 0.0
    backlog_s: float = 0.0
    promises: dict[str, datetime] = field(default_factory=dict)
    starts: dict[str, datetime] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)

    def __call__(self, fact: Fact, sequence: int, now_s: float) -> None:
        if sum(self.waiting.values()) + self.allocated > self.slots and sum(self.waiting.values()) > self.slots:
            self.busy_slot_s += self.allocated * (now_s - self.last_s)
            self.backlog_s += now_s - self.last_s
        self.last_s = now_s
        if isinstance(fact, RunAccepted):
            self.waiting[fact.run_id] = self.sizes[fact.run_id] = fact.spec.slots.min
        elif isinstance(fact, RunPlaced):
            self.waiting.pop(fact.run_id, None)
            self.held[fact.run_id] = fact.world_size
            self.allocated += fact.world_size
            self.starts.setdefault(fact.run_id, START + timedelta(seconds=now_s))
        elif isinstance(fact, RunExited | RunReleased):
            part = self.held.pop(fact.run_id, 0)
            self.allocated -= part
        elif isinstance(fact, RunReserved):
            self.promises.setdefault(fact.run_id, fact.start_by)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=int, default=2)
    parser.add_argument("--load", type=float, default=1.6, help="work that comes over what the cluster can do")
    parser.add_argument("--policy", default="never-idle")
    parser.add_argument("--promise-slots", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    trace = day_of_runs(arguments.days, arguments.seed, arguments.load)
    policy = load(arguments.policy)
    reserve = policy.reserve.model_copy(update={"promise_slots": arguments.promise_slots})
    policy = policy.model_copy(update={"reserve": reserve})
    use = Use(trace.slots)
    with Progress(transient=True) as progress:
        bar = progress.add_task("runs submitted", total=len(trace.jobs))
        effort = simulate(
            trace,
            policy,
            resume_cost_s=60.0,
            listeners=[use],
            progress=lambda count: progress.update(bar, completed=count),
        )
    share = use.busy_slot_s / (use.backlog_s * use.slots) if use.backlog_s else 0.0
    kept = [run_id for run_id, start_by in use.promises.items() if use.starts[run_id] <= start_by]
    cycle_s = sorted(effort.cycle_s)
    report(
        "use",
        [
            ("GPUs allocated while the backlog exceeds capacity", f"{share:.2%}", "95 %"),
            ("  for", f"{use.backlog_s / 3600:.1f} h of virtual time", ""),
            (
                f"promised starts kept (gangs of {arguments.promise_slots})",
                f"{len(kept)} of {len(use.promises)}",
                "all",
            ),
            (
                "one cycle, p50 / p99",
                f"{cycle_s[len(cycle_s) // 2] * 1e3:.1f} / {cycle_s[len(cycle_s) * 99 // 100] * 1e3:.1f} ms",
                "",
            ),
        ],
        {"allocated": share, "backlog_s": use.backlog_s, "promises": len(use.promises), "kept": len(kept)},
    )


if __name__ == "__main__":
    main()
