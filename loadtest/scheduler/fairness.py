"""Whether teams get their shares, get back what they lent, and never get more than they may.

    python -m loadtest.scheduler.fairness [--half-life-h 2] [--seeds 3] [--hours 12] [--compare]

Shares: 64 GPUs, teams of teams with runs of a few minutes and of very different sizes, gangs of half the cluster among
them. One team has had everything for five half-lives; then all of them always have runs that wait. After three
half-lives decayed use is compared with the weights. Quotas: teams lend and borrow at random, every agent takes its full
grace period; all limits are recomputed from the facts alone. The simulator drives the ``fold`` and ``decide`` that
run live.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from contracts.base import Fact
from contracts.events.run import RunAccepted, RunExited, RunPlaced, RunReleased, RunStopping
from contracts.scheduling import Admit, FairShare, Order, Policy, Preemption, Quota, Reserve
from contracts.spec.resources import Slots
from contracts.spec.run import Code, RunSpec
from contracts.spec.training import Training
from loadtest.common import percentile, report
from trainbus.operate.simulation.agents import Agents
from trainbus.operate.simulation.engine import Core, WorldEvents, play_trace
from trainbus.operate.simulation.traces import INSTANT_GRACE_S, START, Job, Trace, nodes_of

GPUS, PER_NODE, RUN_S = 64, 8, 300.0
GRACE_S = 30.0
#: Team -> its share of everything, and sizes of its runs.
TEAMS: dict[str, tuple[float, tuple[int, ...]]] = {
    "research/vision": (3 / 6 * 2 / 3, (1, 1, 2)),
    "research/nlp": (3 / 6 * 1 / 3, (4, 8)),
    "ops": (2 / 6, (16, 32)),
    "sales": (1 / 6, (1, 2, 4)),
}
WEIGHTS = {"research": 3.0, "research/vision": 2.0, "ops": 2.0}
QUOTAS = (
    Quota(team="research", slots=32, ceiling=48),
    Quota(team="research/vision", slots=16),
    Quota(team="ops", slots=16, ceiling=56),
    Quota(team="sales", slots=16, slot_hours=150, period_h=6),
)


class LastMinute(Agents):
    """Agents that use all of the grace period before they release slots."""

    def __init__(self, durations_s: dict[str, float], resume_cost_s: float) -> None:
        super().__init__(durations_s, resume_cost_s)
        self._releases: list[tuple[float, int, list[Fact]]] = []
        self._number = 0

    def handle_fact(self, fact: Fact, now_s: float) -> list[Fact]:
        facts = super().handle_fact(fact, now_s)
        if not isinstance(fact, RunStopping) or fact.grace_s <= INSTANT_GRACE_S:
            return facts
        self._number += 1
        heapq.heappush(self._releases, (now_s + fact.grace_s, self._number, facts))
        return []

    def next_s(self) -> float:
        return min(super().next_s(), self._releases[0][0] if self._releases else math.inf)

    def finish_due(self, now_s: float) -> list[Fact]:
        facts: list[Fact] = []
        while self._releases and self._releases[0][0] <= now_s:
            facts += heapq.heappop(self._releases)[2]
        while super().next_s() <= now_s:
            facts += super().finish_due(now_s)
        return facts


@dataclass(slots=True)
class Audit:
    """Recomputes allocations from the facts, with no code of the scheduler."""

    half_life_s: float
    quotas: tuple[Quota, ...] = ()
    last_s: float = 0.0
    specs: dict[str, RunSpec] = field(default_factory=dict)
    held: dict[tuple[str, str], int] = field(default_factory=dict)
    using: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    decayed: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    spent: dict[tuple[str, int], float] = field(default_factory=lambda: defaultdict(float))
    idle_slot_s: float = 0.0
    from_s: float = 0.0
    violations: list[str] = field(default_factory=list)
    #: Run -> since when it has waited for slots that its team is owed; and how long each such wait was.
    owed_since: dict[str, float] = field(default_factory=dict)
    waits_s: list[float] = field(default_factory=list)
    preemptions: int = 0

    def __call__(self, fact: Fact, sequence: int, now_s: float) -> None:
        self.pass_time(now_s)
        if isinstance(fact, RunAccepted):
            self.specs[fact.run_id] = fact.spec
        elif isinstance(fact, RunPlaced):
            for member in fact.members:
                self._change(fact.run_id, member.node_id, len(member.slots))
            if fact.run_id in self.owed_since:
                self.waits_s.append(now_s - self.owed_since.pop(fact.run_id))
            # A team that has got its slots for another of its runs is owed no more.
            self.owed_since = {run_id: since for run_id, since in self.owed_since.items() if self._is_owed(run_id)}
        elif isinstance(fact, RunExited | RunReleased):
            self._change(fact.run_id, fact.node_id, 0)
        elif isinstance(fact, RunStopping):
            self.preemptions += 1
            if fact.preemptor is not None and self._is_owed(fact.preemptor):
                self.owed_since.setdefault(fact.preemptor, now_s)

    def _is_owed(self, run_id: str) -> bool:
        """Whether all teams that the run is part of are owed as many slots as it needs."""
        spec = self.specs[run_id]
        return all(
            self.using[quota.team] + spec.slots.min <= quota.slots
            for quota in self.quotas
            if quota.slots is not None and f"{spec.team}/".startswith(f"{quota.team}/")
        )

    def pass_time(self, now_s: float) -> None:
        dt = now_s - self.last_s
        if dt <= 0:
            return
        left = 0.5 ** (dt / self.half_life_s)
        for team in {*self.using, *self.decayed}:
            added = self.using[team] * self.half_life_s / math.log(2) * (1 - left)
            self.decayed[team] = self.decayed[team] * left + added
        if self.last_s >= self.from_s:
            self.idle_slot_s += (GPUS - self.using[""]) * dt
        for quota in self.quotas:
            if quota.slot_hours is not None:
                self._spend(quota, now_s)
        self.last_s = now_s

    def _spend(self, quota: Quota, now_s: float) -> None:
        length_s, epoch_s = quota.period_h * 3600, START.timestamp()
        at = self.last_s
        while at < now_s:
            number = math.floor((at + epoch_s) / length_s + 1e-12)
            until = min(now_s, (number + 1) * length_s - epoch_s)
            self.spent[quota.team, number] += self.using[quota.team] * (until - at) / 3600
            if self.spent[quota.team, number] > (quota.slot_hours or 0) + 1e-6:
                self.violations.append(f"{quota.team} has used {self.spent[quota.team, number]} slot-hours")
            at = until

    def _change(self, run_id: str, node_id: str, slots: int) -> None:
        delta = slots - self.held.pop((run_id, node_id), 0)
        if slots:
            self.held[run_id, node_id] = slots
        path = (self.specs[run_id].team or "").split("/")
        for name in ("", *("/".join(path[: depth + 1]) for depth in range(len(path)))):
            self.using[name] += delta
        for quota in self.quotas:
            if quota.ceiling is not None and self.using[quota.team] > quota.ceiling:
                self.violations.append(f"{quota.team} has {self.using[quota.team]} slots")


def job(
    number: int, team: str, submit_s: float, slots: int, duration_s: float, grace_s: float = INSTANT_GRACE_S
) -> Job:
    spec = RunSpec(
        name="run",
        team=team,
        user=team,
        task="m:T",
        code=Code(uri="s3://code/c.tar.gz", sha256="0" * 64),
        training=Training(epochs=1),
        slots=Slots(min=slots, max=slots),
        grace_s=grace_s,
    )
    return Job(f"run-{number}", submit_s, duration_s, spec)


def saturated(half_life_s: float, seed: int) -> Trace:
    """One team has everything for five half-lives; then every team has more runs than there are slots."""
    rng = random.Random(seed)
    jobs: list[Job] = []

    def fill(team: str, sizes: tuple[int, ...], at_s: float, slot_s: float) -> None:
        while slot_s > 0:
            slots, duration_s = rng.choice(sizes), RUN_S * (0.3 + 0.7 * rng.expovariate(1.0))
            jobs.append(job(len(jobs), team, at_s, slots, duration_s))
            slot_s -= slots * duration_s

    begin_s = 5 * half_life_s
    fill("sales", (GPUS,), 0.0, GPUS * (begin_s - RUN_S))
    for team, (_, sizes) in TEAMS.items():
        fill(team, sizes, begin_s, GPUS * 3 * half_life_s * 0.9)
    return Trace(nodes_of(GPUS, PER_NODE), tuple(jobs), "saturated")


def run_until(trace: Trace, policy: Policy, audit: Audit, agents: Agents, until_s: float) -> None:
    """Play the trace up to then."""
    core = Core(policy, [audit])
    player = play_trace(trace, agents)
    try:
        turn: WorldEvents = next(player)
        while turn.now_s <= until_s:
            turn = player.send(core.turn(turn))
    except StopIteration:
        pass


def errors(policy: Policy, half_life_s: float, seed: int) -> tuple[dict[str, float], float, int]:
    """By how much each decayed share is off its weight after three half-lives; what was idle; preemptions."""
    trace = saturated(half_life_s, seed)
    agents = Agents.of(trace, 60.0)
    audit = Audit(half_life_s, from_s=5 * half_life_s)
    end_s = 8 * half_life_s
    run_until(trace, policy, audit, agents, end_s)
    audit.pass_time(end_s)
    whole = sum(audit.decayed[team] for team in TEAMS)
    off = {team: audit.decayed[team] / whole - share for team, (share, _) in TEAMS.items()}
    return off, audit.idle_slot_s / (GPUS * 3 * half_life_s), audit.preemptions


def lending(seed: int, hours: float) -> Trace:
    """Teams that come and go: for a while they have much to do, then nothing."""
    rng = random.Random(seed)
    jobs: list[Job] = []
    for team, (_, sizes) in TEAMS.items():
        at_s = rng.uniform(0, 3600)
        while at_s < hours * 3600:
            for _ in range(rng.randint(5, 60)):
                at_s += rng.expovariate(1 / 20)
                slots = min(rng.choice(sizes), 16)
                jobs.append(job(len(jobs), team, at_s, slots, RUN_S * (0.3 + 3 * rng.expovariate(1.0)), GRACE_S))
            at_s += rng.expovariate(1 / 3600)
    return Trace(nodes_of(GPUS, PER_NODE), tuple(sorted(jobs, key=lambda each: each.submit_s)), "lending")


def policy_of(half_life_s: float, **parts: Any) -> Policy:
    fair_share = FairShare(weights=WEIGHTS, half_life_s=half_life_s)
    return Policy(fair_share=fair_share, order=Order(by=("fair-share",), skip=parts.pop("skip", False)), **parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half-life-h", type=float, default=2.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--hours", type=float, default=12.0, help="virtual hours of lending and borrowing")
    parser.add_argument("--compare", action="store_true", help="also where runs overtake, and with backfill")
    arguments = parser.parse_args()
    half_life_s = arguments.half_life_h * 3600
    ways = {"in turn": policy_of(half_life_s)}
    if arguments.compare:
        ways["any that fits"] = policy_of(half_life_s, skip=True)
        ways["EASY backfill"] = policy_of(half_life_s, reserve=Reserve(backfill="easy"))
        larger_shares = Preemption(by=("fair-share",), min_run_s=60.0)
        ways["preempting larger shares"] = policy_of(half_life_s, skip=True, preemption=larger_shares)
    rows: list[tuple[str, str, str]] = []
    figures: dict[str, Any] = {}
    for name, policy in ways.items():
        found = [errors(policy, half_life_s, seed) for seed in range(arguments.seeds)]
        worst = max(abs(off) for each, _, _ in found for off in each.values())
        idle = sum(each for _, each, _ in found) / len(found)
        taken = sum(each for _, _, each in found) / len(found)
        rows.append((f"share off its weight at most, {name}", f"{worst:.2%}", "2 %"))
        rows.append(("  idle / runs preempted", f"{idle:.1%} / {taken:.0f}", ""))
        figures[name] = {"off": [each for each, _, _ in found], "idle": idle, "preemptions": taken}
    waits_s, violations = [], []
    for seed in range(arguments.seeds):
        trace = lending(seed, arguments.hours)
        audit = Audit(half_life_s, QUOTAS)
        agents = LastMinute({each.run_id: each.duration_s for each in trace.jobs}, 60.0)
        policy = policy_of(half_life_s, skip=True, admit=Admit(quotas=QUOTAS))
        run_until(trace, policy, audit, agents, arguments.hours * 3600 * 1.5)
        waits_s += audit.waits_s
        violations += audit.violations
    rows.append(("lent slots were taken back", f"{len(waits_s)} times", ""))
    if waits_s:
        shown = f"{percentile(waits_s, 0.5):g} / {max(waits_s):g} s"
        rows.append(("  until their owner has them, p50 / longest", shown, f"one grace, {GRACE_S:g} s"))
    rows.append(("limits exceeded", str(len(violations)), "never"))
    figures |= {"taken_back_s": waits_s, "violations": violations}
    report("fairness", rows, figures)


if __name__ == "__main__":
    main()
