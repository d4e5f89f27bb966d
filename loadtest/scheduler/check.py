"""Check a simulation from its event log, and compute its figures again.

    python -m loadtest.scheduler.check EVENTS --trace FILE [--report simulate.json]
    python -m loadtest.scheduler.check EVENTS --pods PODS.csv [--report simulate.json]

EVENTS is the JSONL that ``trainbus simulate --events`` writes. This file shares no code with the scheduler or the
simulator: it was written against the log's format alone. Exit status 1: the
log breaks an invariant, or the report has other figures than the log.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

Json = dict[str, Any]
#: Shares of an accelerator are floating-point numbers.
EPSILON = 1e-6
#: Times in the log have microseconds.
CLOCK_S = 1e-4
#: Processors and memory are given a slot, rounded.
SLACK = 1e-3
RUN = "trainbus.run."
#: How many violations are shown.
SHOWN = 20
#: What the log cannot tell: how long the simulator itself took.
COMPARED = [
    "jobs",
    "completed",
    "infeasible",
    "preemptions",
    "avg_wait_s",
    "p50_wait_s",
    "p99_wait_s",
    "max_wait_s",
    "avg_jct_s",
    "p99_jct_s",
    "makespan_s",
    "utilisation",
    "decisions",
    "arrived",
    "placed",
    "unplaced",
    "allocated_gpu_percent_at_100",
]
#: Facts that agents and users publish.
HEARD = {"accepted", "started", "released", "exited", "checkpoint_committed", "cancelling"}


class Run:
    """A run as the log tells it."""

    def __init__(self, run_id: str, spec: Json, submitted_s: float) -> None:
        self.run_id, self.submitted_s = run_id, submitted_s
        slots = spec.get("slots", {})
        self.least = slots if isinstance(slots, int) else slots.get("min", 1)
        self.most = slots if isinstance(slots, int) else slots.get("max", self.least)
        resources = spec.get("resources", {})
        self.share = resources.get("share", 1.0)
        self.cpus, self.memory = resources.get("cpus", 0.0), resources.get("memory_bytes", 0)
        self.models = set(resources.get("accelerators", ()))
        gang = spec.get("gang", {})
        self.bundle, self.apart = gang.get("bundle", 1), gang.get("apart", False)
        self.user, self.team = spec.get("user"), spec.get("team") or ""
        self.generation = 0
        #: Node -> slots that it has there now.
        self.held: dict[str, list[int]] = {}
        #: (start, end, slots) of each placement.
        self.spans: list[list[float]] = []
        self.preempted = 0
        #: (team, kind of accelerator) that its slots count for.
        self.counted: list[tuple[str, str | None]] = []
        self.ended_s: float | None = None
        self.how = ""

    @property
    def count(self) -> int:
        return sum(len(slots) for slots in self.held.values())


class Node:
    """A node, and what is taken of it."""

    def __init__(self, data: Json) -> None:
        self.slots = data["slots"]
        self.model = data.get("accelerator", "cpu")
        self.cpus, self.memory = data.get("cpus", 0.0), data.get("memory_bytes", 0)
        #: Slot -> run -> share.
        self.taken: dict[int, dict[str, float]] = defaultdict(dict)
        self.cpus_used = self.memory_used = 0.0


class Checker:
    """Reads the log once and notes every violation."""

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}
        self.nodes: dict[str, Node] = {}
        self.policy: Json = {}
        self.problems: list[str] = []
        self.sequence, self.now_s = 0, -math.inf
        self.zero: datetime | None = None
        self.decisions = 0
        #: (accelerators asked for so far, accelerators given) after each arrival.
        self.packed: list[list[float]] = []
        self.asked = self.given = 0.0
        self.by_user: Counter[str] = Counter()
        self.by_team: Counter[tuple[str, str | None]] = Counter()
        #: The most that each has had at once.
        self.most_of_user: Counter[str] = Counter()
        self.most_of_team: Counter[tuple[str, str | None]] = Counter()

    def wrong(self, text: str) -> None:
        self.problems.append(f"#{self.sequence} at {self.now_s:g} s: {text}")

    def read(self, event: Json) -> None:
        """One line of the log."""
        time = datetime.fromisoformat(event["time"].replace("Z", "+00:00"))
        self.zero = self.zero or time
        now_s = (time - self.zero).total_seconds()
        if event["sequence"] <= self.sequence:
            self.wrong(f"sequence {event['sequence']} follows {self.sequence}")
        if now_s < self.now_s:
            self.wrong(f"time goes back to {now_s:g} s")
        self.sequence, self.now_s = event["sequence"], now_s
        kind, data = event["type"].rpartition(".")[0], event["data"]
        if kind == "trainbus.policy.adopted":
            self.policy = data["policy"]
        elif kind == "trainbus.node.joined":
            self.nodes[data["node_id"]] = Node(data)
        elif kind.startswith(RUN):
            self.fact(kind.removeprefix(RUN), data)

    def fact(self, name: str, data: Json) -> None:
        run_id = data["run_id"]
        self.decisions += name not in HEARD
        if name == "accepted":
            if run_id in self.runs:
                self.wrong(f"{run_id} is accepted twice")
            run = self.runs[run_id] = Run(run_id, data["spec"], self.now_s)
            self.asked += run.least * run.share
            self.packed.append([self.asked, self.given])
            return
        known = self.runs.get(run_id)
        if known is None:
            self.wrong(f"{name} of {run_id}, which was never accepted")
        elif name == "placed":
            self.placed(known, data)
        elif name in ("released", "exited"):
            self.let_go(known, data)
        elif name == "stopping":
            known.preempted += 1
        elif name in ("completed", "failed", "cancelled"):
            self.ended(known, name)

    # -- slots --------------------------------------------------------------

    def placed(self, run: Run, data: Json) -> None:
        generation, members = data["generation"], data["members"]
        if run.ended_s is not None:
            self.wrong(f"{run.run_id} is placed after it has {run.how}")
        if run.held:
            self.wrong(f"{run.run_id} is placed while generation {run.generation} still holds slots")
        if generation != run.generation + 1:
            self.wrong(f"{run.run_id}: generation {generation} follows {run.generation}")
        if self.now_s < run.submitted_s:
            self.wrong(f"{run.run_id} is placed before it was submitted")
        run.generation = generation
        self.whole(run, data, members)
        for member in members:
            self.take(run, member)
        run.spans.append([self.now_s, math.inf, run.count])
        self.given += run.count * run.share
        if self.packed:
            self.packed[-1][1] = self.given
        run.counted = self.teams(run)
        self.count(run, run.count)
        self.ceilings(run)

    def whole(self, run: Run, data: Json, members: list[Json]) -> None:
        """All ranks, each once, and as the gang wants them."""
        ranks = sorted(rank for member in members for rank in member["ranks"])
        size = sum(len(member["slots"]) for member in members)
        if ranks != list(range(data["world_size"])) or size != data["world_size"]:
            self.wrong(f"{run.run_id}: a gang of {data['world_size']} has the ranks {ranks} on {size} slots")
        if not run.least <= size <= run.most:
            self.wrong(f"{run.run_id}: {size} slots are not between {run.least} and {run.most}")
        by_node: Counter[str] = Counter()
        for member in members:
            by_node[member["node_id"]] += len(member["slots"])
        if len(by_node) < len(members):
            self.wrong(f"{run.run_id} has a node twice")
        if any(count % run.bundle for count in by_node.values()):
            self.wrong(f"{run.run_id}: a bundle of {run.bundle} is torn apart: {dict(by_node)}")
        if run.apart and any(count > run.bundle for count in by_node.values()):
            self.wrong(f"{run.run_id}: bundles that must be apart share a node: {dict(by_node)}")

    def take(self, run: Run, member: Json) -> None:
        node_id, slots = member["node_id"], member["slots"]
        node = self.nodes.get(node_id)
        if node is None:
            self.wrong(f"{run.run_id} is placed on {node_id}, which never joined")
            return
        run.held[node_id] = slots
        if len(set(slots)) < len(slots) and run.share > 0:
            self.wrong(f"{run.run_id} has a slot of {node_id} twice: {slots}")
        if run.models and node.model not in run.models:
            self.wrong(f"{run.run_id} wants {sorted(run.models)}, and is placed on {node.model} ({node_id})")
        node.cpus_used += run.cpus * len(slots)
        node.memory_used += run.memory * len(slots)
        if node.cpus and node.cpus_used > node.cpus * (1 + SLACK):
            self.wrong(f"{node_id} has {node.cpus:g} processors, {node.cpus_used:g} are taken")
        if node.memory and run.memory and node.memory_used > node.memory * (1 + SLACK):
            self.wrong(f"{node_id} has {node.memory:g} bytes of memory, {node.memory_used:g} are taken")
        for slot in slots if run.share > 0 else ():
            if not 0 <= slot < node.slots:
                self.wrong(f"{node_id} has no slot {slot}")
            node.taken[slot][run.run_id] = run.share
            if (total := math.fsum(node.taken[slot].values())) > 1 + EPSILON:
                self.wrong(f"slot {slot} of {node_id} is used twice: {dict(node.taken[slot])} make {total:g}")

    def let_go(self, run: Run, data: Json) -> None:
        if data["generation"] != run.generation:
            return
        slots = run.held.pop(data["node_id"], None)
        if slots is None:
            return
        node = self.nodes[data["node_id"]]
        node.cpus_used -= run.cpus * len(slots)
        node.memory_used -= run.memory * len(slots)
        for slot in slots:
            node.taken[slot].pop(run.run_id, None)
        if not run.held:
            span = run.spans[-1]
            span[1] = self.now_s
            self.given -= span[2] * run.share
            self.count(run, -int(span[2]))

    def ended(self, run: Run, how: str) -> None:
        if run.ended_s is not None:
            self.wrong(f"{run.run_id} has {how} after it has {run.how}")
        if how == "completed" and (run.held or not run.spans):
            self.wrong(f"{run.run_id} is complete and {'still holds slots' if run.held else 'never ran'}")
        run.ended_s, run.how = self.now_s, how

    # -- ceilings -----------------------------------------------------------

    def teams(self, run: Run) -> list[tuple[str, str | None]]:
        parts = run.team.split("/")
        teams = ["/".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
        models = {self.nodes[node_id].model for node_id in run.held}
        return [(team, None) for team in teams] + [(team, model) for team in teams for model in models]

    def count(self, run: Run, slots: int) -> None:
        if run.user:
            self.by_user[run.user] += slots
            self.most_of_user[run.user] = max(self.most_of_user[run.user], self.by_user[run.user])
        for key in run.counted:
            self.by_team[key] += slots
            self.most_of_team[key] = max(self.most_of_team[key], self.by_team[key])

    def ceilings(self, run: Run) -> None:
        admit = self.policy.get("admit", {})
        limit = admit.get("max_slots_per_user")
        if limit is not None and run.user and self.by_user[run.user] > limit:
            self.wrong(f"user {run.user} has {self.by_user[run.user]} slots, more than the {limit} of the policy")
        limit = admit.get("max_slots_per_run")
        if limit is not None and run.count > limit:
            self.wrong(f"{run.run_id} has {run.count} slots, more than the {limit} of the policy")
        for quota in admit.get("quotas", ()):
            key = quota["team"], quota.get("accelerator")
            if (ceiling := quota.get("ceiling")) is not None and self.by_team[key] > ceiling:
                self.wrong(f"team {key} has {self.by_team[key]} slots, more than its ceiling of {ceiling}")

    # -- at the end ---------------------------------------------------------

    def nothing_lost(self) -> None:
        """Every job is over, goes on, or can never run."""
        capacity = sum(node.slots for node in self.nodes.values())
        ceiling = self.policy.get("admit", {}).get("max_slots_per_run") or math.inf
        for run in self.runs.values():
            if run.ended_s is None and not run.held and run.least <= min(capacity, ceiling):
                self.wrong(f"{run.run_id} of {run.least} slots is lost: it never ended and has no slots")
            if run.how == "failed":
                self.wrong(f"{run.run_id} has failed")

    def against_trace(self, jobs: dict[str, tuple[float, int, float, str]], resume_cost_s: float) -> None:
        """Every job of the trace is in the log as it was, and has had its time."""
        for name in sorted(set(jobs) ^ set(self.runs))[:SHOWN]:
            self.wrong(f"{name} is {'not in the log' if name in jobs else 'in the log and not in the trace'}")
        for name in set(jobs) & set(self.runs):
            submit_s, slots, duration_s, user = jobs[name]
            run = self.runs[name]
            if abs(run.submitted_s - submit_s) > CLOCK_S or run.least != slots or (run.user or "") != user:
                self.wrong(f"{name} is in the log as {run.submitted_s, run.least, run.user}, not {jobs[name]}")
            if run.ended_s is None:
                continue
            worked = [max(end - start - resume_cost_s * (i > 0), 0.0) for i, (start, end, _) in enumerate(run.spans)]
            # A run that has more slots than its least is faster.
            work_s = math.fsum(s * span[2] / run.least for s, span in zip(worked, run.spans, strict=True))
            if abs(work_s - duration_s) > CLOCK_S * (1 + len(run.spans)):
                self.wrong(f"{name} is over after {work_s:g} s of work, and takes {duration_s:g} s")

    def figures(self, durations: dict[str, float]) -> Json:
        """The figures, from the log and the true durations alone."""
        runs = list(self.runs.values())
        found: Json = {"jobs": len(runs), "decisions": self.decisions, "preemptions": sum(r.preempted for r in runs)}
        capacity = sum(node.slots for node in self.nodes.values())
        if not durations:
            at_100 = next((given for asked, given in self.packed if asked >= capacity), None)
            placed = sum(bool(run.spans) for run in runs)
            found |= {"arrived": len(runs), "placed": placed, "unplaced": len(runs) - placed}
            return found | {"allocated_gpu_percent_at_100": None if at_100 is None else 100 * at_100 / capacity}
        done = [run for run in runs if run.how == "completed"]
        times = sorted(run.ended_s - run.submitted_s for run in done if run.ended_s is not None)
        waits = sorted(r.ended_s - r.submitted_s - durations[r.run_id] for r in done if r.ended_s is not None)
        first_s = min((run.submitted_s for run in runs), default=0.0)
        last_s = max((run.ended_s for run in done if run.ended_s is not None), default=first_s)
        held = math.fsum((min(end, last_s) - start) * n * run.share for run in runs for start, end, n in run.spans)
        return found | {
            "completed": len(done),
            "infeasible": sum(not run.spans and run.ended_s is None for run in runs),
            "avg_wait_s": math.fsum(waits) / max(len(waits), 1),
            "p50_wait_s": percentile(waits, 50),
            "p99_wait_s": percentile(waits, 99),
            "max_wait_s": percentile(waits, 100),
            "avg_jct_s": math.fsum(times) / max(len(times), 1),
            "p99_jct_s": percentile(times, 99),
            "makespan_s": last_s - first_s,
            "utilisation": held / (capacity * (last_s - first_s)) if last_s > first_s else 0.0,
        }


def percentile(ordered: list[float], percent: float) -> float:
    """Linear between the two nearest ranks."""
    if not ordered:
        return 0.0
    rank = (len(ordered) - 1) * percent / 100
    low, high = ordered[math.floor(rank)], ordered[math.ceil(rank)]
    return low + (high - low) * (rank - math.floor(rank))


def read_log(path: Path) -> Iterator[Json]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                yield json.loads(line)
            except ValueError as error:
                raise SystemExit(f"{path}, line {number}: {error}") from error


def read_trace(path: Path) -> dict[str, tuple[float, int, float, str]]:
    """Run -> (submit time, slots, duration, user), of a job log in the columns of philly_*.csv."""
    jobs = {}
    with path.open(newline="", encoding="utf-8-sig") as file:
        for number, row in enumerate(csv.DictReader(file), 2):
            slots = max(math.ceil(float(row["num_gpu"])), 1)
            job = float(row["submit_time"]), slots, float(row["duration"]), row["user"].strip()
            jobs[f"job-{row.get('job_id') or number}"] = job
    return jobs


def compare(report: Json, figures: Json) -> list[str]:
    """Where the report and the log differ."""
    return [
        f"the report says {name} {report[name]!r}, the log {figures[name]!r}"
        for name in COMPARED
        if name in report and name in figures and not same(report[name], figures[name])
    ]


def same(reported: float | None, found: float | None) -> bool:
    if reported is None or found is None:
        return reported is found
    return abs(reported - found) <= 2e-6 + 1e-6 * abs(found) if isinstance(found, float) else reported == found


def check(
    events: Path, trace: Path | None, report: Path | None = None, resume_cost_s: float | None = None
) -> tuple[Json, list[str]]:
    """The figures of a log and everything that is wrong with it."""
    reported: Json = json.loads(report.read_text()) if report is not None else {}
    cost_s = resume_cost_s if resume_cost_s is not None else reported.get("resume_cost_s", 60.0)
    checker = Checker()
    for event in read_log(events):
        checker.read(event)
    checker.nothing_lost()
    jobs = read_trace(trace) if trace is not None else {}
    if jobs:
        checker.against_trace(jobs, cost_s)
    figures = checker.figures({name: job[2] for name, job in jobs.items()})
    return figures, checker.problems + compare(reported, figures)


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the event log of a simulation.")
    parser.add_argument("events", type=Path, help="the JSONL of `trainbus simulate --events`")
    parser.add_argument("--trace", type=Path, help="the job log that was simulated; none for a test of packing")
    parser.add_argument("--report", type=Path, help="the JSON of `trainbus simulate --json`, to be compared")
    parser.add_argument("--resume-cost-s", type=float, help="default: that of the report, else 60")
    given = parser.parse_args()
    figures, problems = check(given.events, given.trace, given.report, given.resume_cost_s)
    print(json.dumps(figures, indent=2))
    for problem in problems[:SHOWN]:
        print(f"WRONG {problem}", file=sys.stderr)
    if problems:
        print(f"{len(problems)} problems", file=sys.stderr)
    else:
        print("no slot twice, gangs whole, ceilings kept, no job lost", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
