"""Simulated agents: they publish the nodes' facts about their runs, on a virtual clock.

Only they know how long a job takes. A preempted job has a checkpoint of all its work and releases its slots at once;
preemption costs the time that every later start takes before it makes progress again. A job whose node is lost goes
back to the last checkpoint that it made by itself.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Self

from contracts.base import Fact
from contracts.events.checkpoint import CheckpointCommitted
from contracts.events.node import NodeLeft, NodeLost
from contracts.events.run import CheckpointRef, RunExited, RunPlaced, RunReleased, RunStarted, RunStopping
from trainbus.operate.simulation.traces import Trace

#: How often a job makes a checkpoint by itself, in seconds of work.
CHECKPOINT_EVERY_S = 600.0


@dataclass(slots=True)
class Work:
    """How far a job is."""

    #: Seconds that it still needs on all of its slots.
    left_s: float
    generation: int = 0
    nodes: tuple[str, ...] = ()
    #: From when on it makes progress; infinite while it has no slots.
    from_s: float = math.inf
    done_s: float = 0.0
    #: Speed on the slots that it has: 1 on those it was submitted with.
    speed: float = 1.0


class Agents:
    """All agents of all nodes."""

    def __init__(self, durations_s: dict[str, float], resume_cost_s: float) -> None:
        self.work = {run_id: Work(duration_s) for run_id, duration_s in durations_s.items()}
        self.resume_cost_s = resume_cost_s
        #: (when it is done, count, run, generation), also those that were preempted since.
        self._ends: list[tuple[float, int, str, int]] = []
        self._count = 0

    @classmethod
    def of(cls, trace: Trace, resume_cost_s: float) -> Self:
        """Return the agents of a trace's jobs."""
        return cls({job.run_id: job.duration_s for job in trace.jobs}, resume_cost_s)

    def handle_fact(self, fact: Fact, now_s: float) -> list[Fact]:
        """Act on the scheduler's fact; return the facts that the agents publish in reply."""
        if isinstance(fact, RunPlaced):
            return self._placed(fact, now_s)
        if isinstance(fact, RunStopping):
            return self._preempted(fact, now_s)
        return []

    def handle_node_event(self, fact: Fact, now_s: float) -> None:
        """Stop the jobs of a node that is gone."""
        if isinstance(fact, NodeLost | NodeLeft):
            for work in self.work.values():
                if fact.node_id in work.nodes:
                    _broken(work, fact.node_id, now_s)

    def next_s(self) -> float:
        """Return when the next job is done; infinite if none runs."""
        while self._ends and not self._current(*self._ends[0][2:]):
            heapq.heappop(self._ends)
        return self._ends[0][0] if self._ends else math.inf

    def finish_due(self, now_s: float) -> list[Fact]:
        """Return the facts of the jobs that are done by now."""
        facts: list[Fact] = []
        while self.next_s() <= now_s:
            _, _, run_id, generation = heapq.heappop(self._ends)
            work = self.work[run_id]
            work.done_s, work.left_s = work.done_s + work.left_s, 0.0
            work.from_s = math.inf
            facts.append(_committed(run_id, generation, work.done_s, final=True))
            facts += [_of_node(_EXITED, run_id, generation, node_id) for node_id in work.nodes]
            work.nodes = ()
        return facts

    def _placed(self, fact: RunPlaced, now_s: float) -> list[Fact]:
        work = self.work[fact.run_id]
        work.generation = fact.generation
        work.nodes = tuple(member.node_id for member in fact.members)
        work.speed = fact.world_size / fact.spec.slots.min
        work.from_s = now_s + (self.resume_cost_s if fact.generation > 1 else 0.0)
        end_s = work.from_s + work.left_s / work.speed
        if end_s < math.inf:
            self._count += 1
            heapq.heappush(self._ends, (end_s, self._count, fact.run_id, fact.generation))
        return [_of_node(_STARTED, fact.run_id, fact.generation, node_id) for node_id in work.nodes]

    def _preempted(self, fact: RunStopping, now_s: float) -> list[Fact]:
        work = self.work[fact.run_id]
        if work.generation != fact.generation:
            return []
        progress_s = max(now_s - work.from_s, 0.0) * work.speed
        work.done_s, work.left_s, work.from_s = work.done_s + progress_s, work.left_s - progress_s, math.inf
        facts: list[Fact] = [_committed(fact.run_id, fact.generation, work.done_s)] if progress_s > 0 else []
        nodes, work.nodes = work.nodes, ()
        return facts + [_of_node(_RELEASED, fact.run_id, fact.generation, node_id) for node_id in nodes]

    def _current(self, run_id: str, generation: int) -> bool:
        work = self.work[run_id]
        return work.generation == generation and work.from_s < math.inf


def _broken(work: Work, node_id: str, now_s: float) -> None:
    """The gang has lost a node, and what it did since its last checkpoint."""
    work.nodes = tuple(name for name in work.nodes if name != node_id)
    if work.from_s < math.inf:
        progress_s = max(now_s - work.from_s, 0.0) * work.speed
        kept_s = progress_s // CHECKPOINT_EVERY_S * CHECKPOINT_EVERY_S
        work.done_s, work.left_s, work.from_s = work.done_s + kept_s, work.left_s - kept_s, math.inf


# Each fact is a copy of a valid one: they are many, and nothing in them needs to be validated again.

_REF = CheckpointRef(uri="s3://models/trace", step=0, epoch=0, samples_consumed=0)
_STARTED = RunStarted(run_id="r", generation=1, node_id="n")
_RELEASED = RunReleased(run_id="r", generation=1, node_id="n")
_EXITED = RunExited(run_id="r", generation=1, node_id="n", outcome="succeeded")
_COMMITTED = CheckpointCommitted(run_id="r", generation=1, checkpoint=_REF, size_bytes=1)


def _of_node(fact: Fact, run_id: str, generation: int, node_id: str) -> Fact:
    return fact.model_copy(update={"run_id": run_id, "generation": generation, "node_id": node_id})


def _committed(run_id: str, generation: int, done_s: float, *, final: bool = False) -> Fact:
    # A step is a second of work: it tells what has been done, and not what is left.
    step = math.ceil(done_s)
    uri = f"s3://models/{run_id}/{generation}-{step}.json"
    ref = _REF.model_copy(update={"uri": uri, "step": step, "samples_consumed": step})
    facts = {"run_id": run_id, "generation": generation, "checkpoint": ref}
    return _COMMITTED.model_copy(update=facts | {"final": True} if final else facts)
