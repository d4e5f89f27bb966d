"""A trace through the scheduler, on a virtual clock.

``play_trace`` is the world: submissions, agents, and the clock. The scheduler is on the other end: here the live
``fold`` and ``decide`` (``simulate``), in ``over_bus.py`` the whole service. Everything of one instant is folded before
anything is decided, and the clock stands still until nothing is left to decide.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime

from contracts.base import Fact
from contracts.events.capacity import PolicyAdopted
from contracts.events.run import RunCancelling, RunPlaced
from contracts.scheduling import Policy
from services.scheduler.core.decide import run_steps
from services.scheduler.core.decisions import MAX_FACTS_PER_CYCLE, NOTHING_LEFT, decision_record, fact_of, in_order
from services.scheduler.core.fold import apply
from services.scheduler.core.state.cluster import Cluster
from trainbus.operate.simulation.agents import Agents
from trainbus.operate.simulation.traces import START, Trace, accepted, at

#: Cycles at one instant after which the simulation fails: the scheduler does not come to rest.
MAX_CYCLES_PER_INSTANT = 100_000
#: How often the clock alone may wake an idle scheduler that then decides nothing, before the simulation ends.
MAX_IDLE_WAKES = 100


class NeverAtRest(RuntimeError):
    """The scheduler goes on deciding although nothing happens: it would never come to rest."""


@dataclass(frozen=True, slots=True)
class WorldEvents:
    """What happens at an instant, before the scheduler's next cycle."""

    now_s: float
    facts: Sequence[Fact]


@dataclass(frozen=True, slots=True)
class CycleOutcome:
    """The facts of one cycle; and when the next one is due if nothing happens."""

    facts: Sequence[Fact]
    wake_s: float | None = None


#: Is called with every fact, its sequence and its virtual time, in the order of the log.
Listener = Callable[[Fact, int, float], None]
#: Is called with the number of jobs submitted so far.
Progress = Callable[[int], None]
Player = Generator[WorldEvents, CycleOutcome, None]


def ignore_progress(submitted: int) -> None:
    """Show no progress."""


def play_trace(trace: Trace, agents: Agents, progress: Progress = ignore_progress) -> Player:
    """Yield what happens, turn by turn; receive what the scheduler decides on it."""
    jobs = deque(trace.jobs)
    events = deque(sorted(trace.events, key=lambda event: event[0]))
    now_s = min(jobs[0].submit_s, 0.0) if jobs else 0.0
    facts: list[Fact] = list(trace.nodes)
    waiting: dict[str, None] = {}
    cycles = idle_wakes = 0
    while True:
        outcome = yield WorldEvents(now_s, facts)
        cycles += 1
        facts = [reply for fact in outcome.facts for reply in agents.handle_fact(fact, now_s)]
        facts += agents.finish_due(now_s)
        for fact in outcome.facts:
            if isinstance(fact, RunPlaced):
                waiting.pop(fact.run_id, None)
        if outcome.facts or facts:
            idle_wakes = 0
            if cycles > MAX_CYCLES_PER_INSTANT:
                raise NeverAtRest(
                    f"{MAX_CYCLES_PER_INSTANT} cycles at {now_s:g} s; the last published {outcome.facts[:5]}"
                )
            continue
        if waiting:
            # Nothing ever ends in a test of packing: a run that is not placed as it comes never will be.
            facts = [RunCancelling(run_id=run_id, reason="found no place as it came") for run_id in waiting]
            waiting = {}
            continue
        next_s = min(jobs[0].submit_s if jobs else math.inf, events[0][0] if events else math.inf, agents.next_s())
        if outcome.wake_s is not None and now_s < outcome.wake_s < next_s:
            idle_wakes += next_s == math.inf
            next_s = outcome.wake_s if idle_wakes <= MAX_IDLE_WAKES else next_s
        if next_s == math.inf:
            return
        now_s, cycles = next_s, 0
        facts = agents.finish_due(now_s)
        while events and events[0][0] <= now_s:
            facts.append(events.popleft()[1])
            agents.handle_node_event(facts[-1], now_s)
        while jobs and jobs[0].submit_s <= now_s:
            job = jobs.popleft()
            facts.append(accepted(job))
            if trace.packing:
                waiting[job.run_id] = None
        progress(len(trace.jobs) - len(jobs))


@dataclass(slots=True)
class Effort:
    """What the decisions took."""

    #: Processor seconds of each cycle.
    cycle_s: list[float] = field(default_factory=list)
    decisions: int = 0
    wall_s: float = 0.0


def simulate(
    trace: Trace,
    policy: Policy,
    *,
    resume_cost_s: float = 60.0,
    listeners: Sequence[Listener] = (),
    progress: Progress = ignore_progress,
) -> Effort:
    """Play the trace with ``fold`` and ``decide`` as they run live."""
    started = time.perf_counter()
    core = Core(policy, listeners)
    player = play_trace(trace, Agents.of(trace, resume_cost_s), progress)
    with suppress(StopIteration):
        turn = next(player)
        while True:
            turn = player.send(core.turn(turn))
    core.effort.wall_s = time.perf_counter() - started
    return core.effort


def wake_s(wake_at: datetime | None, now_s: float) -> float | None:
    """Return when the next cycle is due. An alarm in this microsecond goes off in the next one."""
    return max((wake_at - START).total_seconds(), now_s + 1e-6) if wake_at is not None else None


class Core:
    """The scheduler without a bus: the log is a counter."""

    def __init__(self, policy: Policy, listeners: Sequence[Listener] = ()) -> None:
        self.policy, self.listeners = policy, tuple(listeners)
        self.cluster = Cluster()
        self.effort = Effort()
        self._sequence = 0
        self._left_over = NOTHING_LEFT
        self._fold_fact(PolicyAdopted(digest=policy.digest, policy=policy, instance="simulate"), 0.0, START)

    def turn(self, turn: WorldEvents) -> CycleOutcome:
        """Fold what happened, decide once, and fold what was decided."""
        now = at(turn.now_s)
        for fact in turn.facts:
            self._fold_fact(fact, turn.now_s, now)
        started = time.thread_time()
        left_over = self._left_over
        result = run_steps(self.cluster, now, self.policy, START, left_over=left_over)
        self._left_over = result.left_over
        self.effort.cycle_s.append(time.thread_time() - started)
        record = decision_record(self.cluster, now, self.policy, START, left_over)
        decisions = in_order(result.decisions)[:MAX_FACTS_PER_CYCLE]
        facts = [fact_of(decision, self.cluster, now, record) for decision in decisions]
        for fact in facts:
            self._fold_fact(fact, turn.now_s, now)
        self.effort.decisions += len(facts)
        return CycleOutcome(facts, wake_s(result.wake_at, turn.now_s))

    def _fold_fact(self, fact: Fact, now_s: float, now: datetime) -> None:
        self._sequence += 1
        apply(self.cluster, fact, self._sequence, now)
        for listener in self.listeners:
            listener(fact, self._sequence, now_s)
