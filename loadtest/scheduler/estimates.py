"""How good the wait estimates and the predicted durations are, on a trace that the real core plays.

    python -m loadtest.scheduler.estimates --trace FILE --gpus 400 [--policy NAME] [--every 20]

Of the runs that come to wait, every so many-th is estimated as it is queued, and so is one that waits already.
Targets: the range from p10 to p90 holds 75 to 85% of the actual starts; the median error of p50 is at most 30% of the
wait, and less than that of position divided by rate. Only waits of more than a second count.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from contracts.base import Fact
from contracts.events.run import RunAccepted, RunCompleted, RunPlaced, RunQueued
from contracts.scheduling import Policy
from loadtest.common import percentile
from services.scheduler import policies
from services.scheduler.core.explain.estimate import PACE_S, Estimator
from services.scheduler.core.order import queue
from services.scheduler.core.state.cluster import Cluster
from services.scheduler.core.state.durations import Distribution, run_kind_of
from trainbus.operate.simulation.agents import Agents
from trainbus.operate.simulation.engine import Core, play_trace
from trainbus.operate.simulation.traces import START, Trace, at, read_pai

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
SHORTEST_S = 1.0


@dataclass(frozen=True, slots=True)
class ShownEstimate:
    """An estimate, in seconds from the time it was made."""

    made_s: float
    low_s: float
    middle_s: float
    high_s: float
    by_position_s: float


@dataclass(slots=True)
class Waits:
    """Estimates, by (run, generation), and the starts."""

    every: int
    random: random.Random
    first: dict[tuple[str, int], ShownEstimate] = field(default_factory=dict)
    later: dict[tuple[str, int], ShownEstimate] = field(default_factory=dict)
    started_s: dict[tuple[str, int], float] = field(default_factory=dict)
    took_s: list[float] = field(default_factory=list)
    estimator: Estimator = field(default_factory=Estimator)
    _fresh: list[str] = field(default_factory=list)
    _queued: int = 0

    def record_fact(self, fact: Fact, sequence: int, now_s: float) -> None:
        if isinstance(fact, RunQueued):
            self._fresh.append(fact.run_id)
        elif isinstance(fact, RunPlaced):
            self.started_s[fact.run_id, fact.generation] = now_s

    def look(self, cluster: Cluster, policy: Policy, now_s: float) -> None:
        """Nothing is left to be decided now: estimate if it is time to."""
        fresh = [run_id for run_id in self._fresh if run_id in cluster.queued]
        self._fresh.clear()
        before, self._queued = self._queued, self._queued + len(fresh)
        if self._queued // self.every == before // self.every:
            return
        started = time.perf_counter()
        found = self.estimator.estimates(cluster, policy, at(now_s))
        self.took_s.append(time.perf_counter() - started)
        waiting = list(cluster.queued)
        for run_id, kept in ((fresh[-1], self.first), (self.random.choice(waiting), self.later)):
            if run_id in found:
                low_s, middle_s, high_s = ((each - START).total_seconds() - now_s for each in found[run_id])
                shown = ShownEstimate(now_s, low_s, middle_s, high_s, by_position_s(cluster, policy, run_id, now_s))
                kept[run_id, cluster.runs[run_id].next_generation] = shown


def by_position_s(cluster: Cluster, policy: Policy, run_id: str, now_s: float) -> float:
    """The simple way: the place in line over the starts a second of the last hours."""
    now, runs = at(now_s), cluster.runs
    own = queue.key_of(cluster, runs[run_id], now, policy)
    ahead = sum(queue.key_of(cluster, runs[other], now, policy) < own for other in cluster.queued)
    rate = cluster.waits.rate_per_s(now, PACE_S)
    return (ahead + 1) / rate if rate > 0 else math.inf


class Everybody:
    """The kind of all runs, without any difference."""

    keys = ("*",)


@dataclass(slots=True)
class Durations:
    """What runs were predicted to take as they were submitted, against three others' ways."""

    durations_s: dict[str, float]
    policy: Policy
    cluster: Cluster
    held: dict[float, int] = field(default_factory=lambda: defaultdict(int))
    #: Pinball loss over all quantiles.
    loss: float = 0.0
    loss_of_all: float = 0.0
    #: Absolute error of the median, and of the mean of the user's runs.
    error: float = 0.0
    error_of_user: float = 0.0
    count: int = 0
    took_s: list[float] = field(default_factory=list)
    _of_user: dict[str, tuple[float, int]] = field(default_factory=dict)
    _user: dict[str, str] = field(default_factory=dict)

    def record_fact(self, fact: Fact, sequence: int, now_s: float) -> None:
        if isinstance(fact, RunAccepted):
            self._submitted(fact)
        elif isinstance(fact, RunCompleted):
            user = self._user[fact.run_id]
            total, count = self._of_user.get(user, (0.0, 0))
            self._of_user[user] = (total + self.durations_s[fact.run_id], count + 1)

    def _submitted(self, fact: RunAccepted) -> None:
        actual_s, user = self.durations_s[fact.run_id], fact.spec.user or ""
        self._user[fact.run_id] = user
        history, config = self.cluster.history, self.policy.predict
        started = time.perf_counter()
        found = history.predict(run_kind_of(fact.spec), config)
        found.mean_remaining_s()
        self.took_s.append(time.perf_counter() - started)
        of_all = history.predict(Everybody(), config)
        self.count += 1
        for q in QUANTILES:
            self.held[q] += actual_s <= found.quantile(q)
            self.loss += pinball(found, q, actual_s)
            self.loss_of_all += pinball(of_all, q, actual_s)
        total, count = self._of_user.get(user, (0.0, 0))
        self.error += abs(found.quantile(0.5) - actual_s)
        self.error_of_user += abs((total / count if count else config.prior_s) - actual_s)


def pinball(found: Distribution, q: float, actual_s: float) -> float:
    """The loss that the true quantile makes least."""
    off = actual_s - found.quantile(q)
    return q * off if off > 0 else (q - 1) * off


def played(trace: Trace, policy: Policy, resume_cost_s: float, waits: Waits, progress: Progress) -> Durations:
    """Play the whole trace."""
    durations_s = {job.run_id: job.duration_s for job in trace.jobs}
    core = Core(policy, (waits.record_fact,))
    durations = Durations(durations_s, policy, core.cluster)
    core.listeners = (waits.record_fact, durations.record_fact)
    bar = progress.add_task("jobs", total=len(trace.jobs))
    player = play_trace(trace, Agents(durations_s, resume_cost_s), lambda done: progress.update(bar, completed=done))
    turn = next(player)
    while True:
        outcome = core.turn(turn)
        if not outcome.facts:
            waits.look(core.cluster, policy, turn.now_s)
        try:
            turn = player.send(outcome)
        except StopIteration:
            return durations


@dataclass(frozen=True, slots=True)
class Quality:
    """Figures over (estimate, actual wait from when it was made)."""

    count: int
    held: float
    before: float
    error: float
    error_by_position: float
    #: The median of how many times as long the end of the range is as its beginning.
    times: float


def quality(shown: dict[tuple[str, int], ShownEstimate], started_s: dict[tuple[str, int], float]) -> Quality | None:
    pairs = [(each, started_s[key] - each.made_s) for key, each in shown.items() if key in started_s]
    pairs = [(each, wait_s) for each, wait_s in pairs if wait_s > SHORTEST_S]
    if not pairs:
        return None
    return Quality(
        len(pairs),
        statistics.fmean(each.low_s <= wait_s <= each.high_s for each, wait_s in pairs),
        statistics.fmean(wait_s < each.low_s for each, wait_s in pairs),
        statistics.median(abs(each.middle_s - wait_s) / wait_s for each, wait_s in pairs),
        statistics.median(abs(each.by_position_s - wait_s) / wait_s for each, wait_s in pairs),
        statistics.median((each.high_s + 30) / (each.low_s + 30) for each, wait_s in pairs),
    )


def rows_of(name: str, found: Quality | None) -> list[tuple[str, str, str]]:
    if found is None:
        return [(f"{name}: estimates", "none waited", "")]
    held = f"{found.held:.1%} (earlier {found.before:.1%}, later {1 - found.held - found.before:.1%})"
    return [
        (f"{name}: estimates", str(found.count), ""),
        (f"{name}: started between p10 and p90", held, "75 to 85%"),
        (f"{name}: median error of p50", f"{found.error:.1%}", "<= 30%"),
        (f"{name}: median error of position / rate", f"{found.error_by_position:.1%}", "more than that of p50"),
        (f"{name}: p90 over p10, median", f"{found.times:.1f}", ""),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--policy", help="a name or a file; default: by priority, then submission")
    parser.add_argument("--resume-cost-s", type=float, default=60.0)
    parser.add_argument("--every", type=int, default=20, help="of the runs that come to wait, every so many-th")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    policy = policies.load(given.policy) if given.policy else Policy()
    trace = read_pai(given.trace, given.gpus, given.gpus_per_node)
    waits, durations = measured(trace, policy, given.resume_cost_s, given.every, given.seed)
    if given.json:
        print(json.dumps(figures(waits, durations), indent=2))
        return
    table = Table("figure", "measured", "target", title=f"{trace.name}, {given.gpus} GPUs, {policy.name}")
    for row in rows(waits, durations):
        table.add_row(*row)
    Console().print(table)


def measured(trace: Trace, policy: Policy, resume_cost_s: float, every: int, seed: int) -> tuple[Waits, Durations]:
    """Play the trace, with a bar on stderr."""
    waits = Waits(every, random.Random(seed), estimator=Estimator(seed=seed))
    with Progress(transient=True, console=Console(stderr=True)) as progress:
        return waits, played(trace, policy, resume_cost_s, waits, progress)


def figures(waits: Waits, durations: Durations) -> dict[str, Any]:
    """All figures, for programs."""
    found = {"as_queued": quality(waits.first, waits.started_s), "later": quality(waits.later, waits.started_s)}
    return {
        **{name: asdict(each) if each is not None else None for name, each in found.items()},
        "estimates_ms": statistics.median(waits.took_s) * 1e3 if waits.took_s else None,
        "durations_below": {str(q): durations.held[q] / durations.count for q in QUANTILES},
        "pinball_over_all": durations.loss / durations.loss_of_all,
        "error_over_user_mean": durations.error / durations.error_of_user,
        "predict_us": statistics.median(durations.took_s) * 1e6,
    }


def rows(waits: Waits, durations: Durations) -> list[tuple[str, str, str]]:
    """All figures, for people, and what they should be."""
    found = rows_of("as queued", quality(waits.first, waits.started_s))
    found += rows_of("later", quality(waits.later, waits.started_s))
    if waits.took_s:
        took = f"{statistics.median(waits.took_s) * 1e3:.0f} ms, most {max(waits.took_s) * 1e3:.0f} ms"
        found.append(("estimates of all that wait, median", took, ""))
    held = ", ".join(f"{durations.held[q] / durations.count:.1%} below p{q * 100:g}" for q in QUANTILES)
    found.append(("durations", held, ""))
    found.append(("pinball loss over that of all runs", f"{durations.loss / durations.loss_of_all:.2f}", "below 1"))
    error = f"{durations.error / durations.error_of_user:.2f}"
    found.append(("error of the median over that of the user's mean", error, "below 1"))
    cost = f"{statistics.median(durations.took_s) * 1e6:.0f} us, p99 {percentile(durations.took_s, 0.99) * 1e6:.0f} us"
    found.append(("one prediction", cost, ""))
    return found


if __name__ == "__main__":
    main()
