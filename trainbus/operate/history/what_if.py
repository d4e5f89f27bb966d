"""The submissions of the past on other nodes, or by another policy: played, and compared with what happened.

The recorded work of each run is played, in slot-seconds, by the simulator, with the very ``fold`` and ``decide`` that
run live. The first scenario is the past itself, played the same way: the others are compared with that one, so that
what the simulator leaves out is left out on both sides.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from contracts.events.node import NodeFact, NodeJoined
from contracts.scheduling import Policy
from contracts.spec.run import RunSpec
from services.scheduler.core.explain.estimate import quantile
from trainbus.operate.history.history import History, NodeKind, RunRecord, offered
from trainbus.operate.simulation.engine import simulate
from trainbus.operate.simulation.report import JobRecord, Recorder
from trainbus.operate.simulation.traces import INSTANT_GRACE_S, Job, Trace, node

#: ``40x8``, ``4x8:H100``, ``4x8:H100@spot-a``: nodes, slots on each, accelerator, pool.
_NODES = re.compile(r"^(\d+)x(\d+)(?::([^@\s]+))?(?:@([A-Za-z0-9_-]+))?$")
#: Work that is less is none: the run was over as soon as it had slots.
LEAST_S = 0.001


class WhatIfError(ValueError):
    """It cannot be played; the text says what to change."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is assumed instead of what was."""

    name: str
    nodes: tuple[NodeJoined, ...]
    policy: Policy
    #: What becomes of nodes, in seconds since the beginning.
    events: tuple[tuple[float, NodeFact], ...] = ()


@dataclass(frozen=True, slots=True)
class Submissions:
    """What is played, the same in every scenario."""

    jobs: tuple[Job, ...]
    #: The runs that count; the others are there because they held slots when the stretch began.
    counted: frozenset[str]
    #: Runs that had not ended, whose work is therefore what such runs usually take.
    assumed: int


@dataclass(frozen=True, slots=True)
class Figures:
    """What a scenario comes to. Waits are times without slots, from submission to the end."""

    name: str
    policy: str
    #: The most that there were at a time.
    slots: int
    jobs: int
    #: Jobs that ended, and those that never do: they ask for more than these nodes have, or, in the past, go on still.
    completed: int
    never: int
    avg_wait_s: float
    p50_wait_s: float
    p90_wait_s: float
    p99_wait_s: float
    max_wait_s: float
    avg_jct_s: float
    p99_jct_s: float
    makespan_s: float
    utilisation: float
    preemptions: int
    #: What the nodes cost while they were there, until all was done; None if no price is known.
    cost: float | None
    #: The same for each slot-hour in which one was used.
    cost_per_used_slot_h: float | None


@dataclass(frozen=True, slots=True)
class Prices:
    """What a slot costs for an hour: by the node's pool, else by its accelerator."""

    per_slot_hour: Mapping[str, float]

    def cost(self, slot_s: Mapping[NodeKind, float]) -> float:
        """Return the cost of these slot-seconds of each kind of node; a kind without a price costs 0."""
        return math.fsum(self._price(kind) * amount_s / 3600 for kind, amount_s in slot_s.items())

    def _price(self, kind: NodeKind) -> float:
        by_pool = self.per_slot_hour.get(kind.pool)
        return self.per_slot_hour.get(kind.accelerator, 0.0) if by_pool is None else by_pool


def parse_nodes(text: str, prefix: str = "node") -> tuple[NodeJoined, ...]:
    """Nodes out of ``40x8`` or ``32x8:H100,16x4:A100@spot-a``: number, slots, accelerator, pool.

    Raises:
        WhatIfError: it is not of that form.
    """
    found: list[NodeJoined] = []
    for group, part in enumerate(filter(None, (each.strip() for each in text.split(",")))):
        match = _NODES.match(part)
        if match is None:
            raise WhatIfError(f"{part!r} are no nodes: write NUMBERxSLOTS[:ACCELERATOR][@POOL], for example 40x8:H100")
        count, slots, accelerator, pool = match.groups()
        for number in range(int(count)):
            made = node(f"{prefix}-{group}-{number:04}", int(slots), accelerator or "gpu")
            found.append(made.model_copy(update={"labels": {"pool": pool}}) if pool else made)
    if not found:
        raise WhatIfError("there are no nodes: give some, for example --nodes 4x8:H100")
    return tuple(found)


def like(nodes: tuple[NodeJoined, ...], template: Sequence[NodeJoined]) -> tuple[NodeJoined, ...]:
    """``nodes`` with the accelerator of the template where none was named and the template has one kind alone."""
    kinds = {each.accelerator for each in template}
    if len(kinds) != 1:
        return nodes
    kind = kinds.pop()
    return tuple(n.model_copy(update={"accelerator": kind}) if n.accelerator == "gpu" else n for n in nodes)


def submissions(history: History, resume_cost_s: float) -> Submissions:
    """The runs of the stretch with their work, and those that were there when it began with what they had left.

    What starting again has cost them is no work: the simulation adds it where it starts them again.
    """
    counted, carried = history.submitted, history.carried
    usual = _usual([run for run in history.runs.values() if run.outcome])
    jobs: list[Job] = []
    assumed = 0
    for run in [*carried, *counted]:
        work_slot_s = run.work_slot_s - resume_cost_s * run.restart_slots
        if not run.outcome:
            assumed += 1
            work_slot_s = max(work_slot_s, usual(run))
        submit_s = max((run.submitted_at - history.start).total_seconds(), 0.0)
        duration_s = max(work_slot_s / run.spec.slots.min, LEAST_S)
        jobs.append(Job(run.run_id, submit_s, duration_s, _playable(run.spec)))
    jobs.sort(key=lambda job: job.submit_s)
    return Submissions(tuple(jobs), frozenset(run.run_id for run in counted), assumed)


def _usual(ended: Iterable[RunRecord]) -> Callable[[RunRecord], float]:
    """What runs of as many slots usually take, in slot-seconds; of any number, where there were none."""
    by_slots: dict[int, list[float]] = defaultdict(list)
    everything: list[float] = []
    for run in ended:
        by_slots[run.spec.slots.min].append(run.work_slot_s)
        everything.append(run.work_slot_s / run.spec.slots.min)

    def usual(run: RunRecord) -> float:
        if alike := by_slots.get(run.spec.slots.min):
            return median(alike)
        return median(everything) * run.spec.slots.min if everything else 0.0

    return usual


def _playable(spec: RunSpec) -> RunSpec:
    """The request as it competes for slots. Its data is there, and letting go takes no time."""
    alone = {"data": None, "resume_from": None, "init_from": None, "init_exclude": ()}
    return spec.model_copy(update={**alone, "grace_s": INSTANT_GRACE_S})


def play(
    scenario: Scenario,
    given: Submissions,
    prices: Prices,
    *,
    resume_cost_s: float,
    progress: Callable[[int], None] = lambda submitted: None,
) -> tuple[Figures, Recorder]:
    """Play the submissions in a scenario."""
    trace = Trace(scenario.nodes, given.jobs, scenario.name, scenario.events)
    recorder = Recorder(trace)
    simulate(trace, scenario.policy, resume_cost_s=resume_cost_s, listeners=(recorder.record_fact,), progress=progress)
    return _played(scenario, given, recorder, prices), recorder


def _played(scenario: Scenario, given: Submissions, recorder: Recorder, prices: Prices) -> Figures:
    everybody = list(recorder.records.values())
    records = [record for record in everybody if record.job.run_id in given.counted]
    done = [record for record in records if record.completed_s < math.inf]
    last_s = max((record.completed_s for record in everybody if record.completed_s < math.inf), default=0.0)
    used_slot_s = math.fsum(
        (min(span.end_s, last_s) - span.start_s) * span.gpus for record in everybody for span in record.spans
    )
    slot_s, most = offered(scenario.nodes, scenario.events, last_s)
    return _figures(
        scenario.name,
        scenario.policy.name,
        most,
        len(records),
        waits=[record.jct_s - _held_s(record) for record in done],
        times=[record.jct_s for record in done],
        makespan_s=last_s,
        used_slot_s=used_slot_s,
        offered_slot_s=math.fsum(slot_s.values()),
        preemptions=sum(record.preemptions for record in records),
        cost=prices.cost(slot_s),
    )


def _held_s(record: JobRecord) -> float:
    return math.fsum(span.end_s - span.start_s for span in record.spans)


def recorded(history: History, policy: str, prices: Prices, name: str = "as recorded") -> Figures:
    """What really happened, in the same figures."""
    runs = history.submitted
    done = [run for run in runs if run.ended_at is not None]
    waits = [wait_s for run in done if (wait_s := run.wait_s) is not None]
    times = [(run.ended_at - run.submitted_at).total_seconds() for run in done if run.ended_at is not None]
    last = max((run.ended_at for run in done if run.ended_at is not None), default=history.start)
    return _figures(
        name,
        policy,
        sum(node.slots for node in history.nodes),
        len(runs),
        waits=waits,
        times=times,
        makespan_s=max((last - history.start).total_seconds(), 0.0),
        used_slot_s=history.totals.used_slot_s,
        offered_slot_s=math.fsum(history.totals.offered_slot_s.values()),
        preemptions=sum(run.preemptions for run in runs),
        cost=prices.cost(history.totals.offered_slot_s),
    )


def _figures(
    name: str,
    policy: str,
    slots: int,
    jobs: int,
    *,
    waits: list[float],
    times: list[float],
    makespan_s: float,
    used_slot_s: float,
    offered_slot_s: float,
    preemptions: int,
    cost: float,
) -> Figures:
    waits, times = sorted(max(wait_s, 0.0) for wait_s in waits), sorted(times)
    used_h = used_slot_s / 3600
    return Figures(
        name,
        policy,
        slots,
        jobs,
        len(times),
        jobs - len(times),
        avg_wait_s=fmean(waits or [0.0]),
        p50_wait_s=quantile(waits, 0.5),
        p90_wait_s=quantile(waits, 0.9),
        p99_wait_s=quantile(waits, 0.99),
        max_wait_s=quantile(waits, 1.0),
        avg_jct_s=fmean(times or [0.0]),
        p99_jct_s=quantile(times, 0.99),
        makespan_s=makespan_s,
        utilisation=used_slot_s / offered_slot_s if offered_slot_s else 0.0,
        preemptions=preemptions,
        cost=cost or None,
        cost_per_used_slot_h=cost / used_h if cost and used_h else None,
    )


def prices_of(policies: Iterable[Policy], given: Iterable[str]) -> Prices:
    """The prices that policies name for their pools, and those given as ``H100=2.5``, which count more.

    Raises:
        WhatIfError: one is not of that form.
    """
    found: dict[str, float] = {}
    for pool in (pool for policy in policies for pool in policy.pools.pools):
        found.setdefault(pool.accelerator, pool.price_per_slot_hour)
        found[pool.name] = pool.price_per_slot_hour
    for text in given:
        name, _, value = text.partition("=")
        try:
            price = float(value)
        except ValueError:
            price = math.nan
        if not name or not price >= 0:
            raise WhatIfError(f"{text!r} is no price: write ACCELERATOR=PRICE or POOL=PRICE, for an hour of one slot")
        found[name] = price
    return Prices(found)
