"""What came of a simulation: each job's record, and the figures over all of them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC
from statistics import fmean
from typing import IO, Any

from contracts.base import Fact
from contracts.events.node import NodeJoined, NodeLeft, NodeLost
from contracts.events.run import (
    Member,
    RunAccepted,
    RunCancelled,
    RunCompleted,
    RunExited,
    RunFailed,
    RunPlaced,
    RunQueued,
    RunReleased,
    RunStopping,
    RunWaiting,
)
from contracts.scheduling import Policy
from services.scheduler.core.explain.estimate import quantile
from trainbus.operate.simulation.engine import Effort
from trainbus.operate.simulation.traces import SOURCE, Job, Trace, at

#: Decimals of the figures in JSON.
DIGITS = 6
#: How many of the jobs that can never run are named.
MAX_NAMED_JOBS = 20


@dataclass(slots=True)
class Span:
    """A placement: from when to when, and where."""

    start_s: float
    members: tuple[Member, ...]
    #: Accelerators that it has, shares added up.
    gpus: float
    end_s: float = math.inf


@dataclass(slots=True)
class JobRecord:
    """What became of a job."""

    job: Job
    spans: list[Span] = field(default_factory=list)
    preemptions: int = 0
    completed_s: float = math.inf
    #: Ended otherwise than well, and why.
    ended: str = ""
    #: The last reason for which it was said to wait.
    waiting: str = ""

    @property
    def wait_s(self) -> float:
        """All the time in which it made no progress: queued, preempted, and starting again."""
        return self.completed_s - self.job.submit_s - self.job.duration_s

    @property
    def jct_s(self) -> float:
        return self.completed_s - self.job.submit_s


class Recorder:
    """Listens to a simulation and keeps what the figures and the plots are made of."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.records = {job.run_id: JobRecord(job) for job in trace.jobs}
        #: (time, GPUs in use) and (time, GPUs that waiting jobs ask for), at each change.
        self.used: list[tuple[float, float]] = [(0.0, 0.0)]
        self.wanted: list[tuple[float, float]] = [(0.0, 0.0)]
        #: (GPUs that were asked for so far, GPUs given) after each arrival, for packing.
        self.packed: list[tuple[float, float]] = []
        self._arrived = self._given = 0.0
        #: Run -> the nodes that it has something on; and the runs that wait.
        self._live: dict[str, set[str]] = {}
        self._waiting_ids: set[str] = set()

    def record_fact(self, fact: Fact, sequence: int, now_s: float) -> None:
        """A listener of the simulation."""
        if isinstance(fact, RunAccepted):
            self._arrived += self.records[fact.run_id].job.gpus
            self.packed.append((self._arrived, self._given))
            self._start_waiting(fact.run_id, now_s)
        elif isinstance(fact, RunQueued):
            self._start_waiting(fact.run_id, now_s)
        elif isinstance(fact, RunPlaced):
            self._placed(fact, now_s)
        elif isinstance(fact, RunReleased | RunExited):
            self._ended(fact.run_id, fact.node_id, now_s)
        elif isinstance(fact, RunStopping):
            self.records[fact.run_id].preemptions += 1
        elif isinstance(fact, RunCompleted):
            self.records[fact.run_id].completed_s = now_s
        elif isinstance(fact, RunFailed | RunCancelled):
            self.records[fact.run_id].ended = fact.reason
            self._stop_waiting(fact.run_id, now_s)
        elif isinstance(fact, RunWaiting):
            self.records[fact.run_id].waiting = fact.code
        elif isinstance(fact, NodeLost | NodeLeft):
            for run_id in list(self._live):
                self._ended(run_id, fact.node_id, now_s)

    def _placed(self, fact: RunPlaced, now_s: float) -> None:
        record = self.records[fact.run_id]
        gpus = sum(len(member.slots) for member in fact.members) * record.job.spec.resources.share
        record.spans.append(Span(now_s, fact.members, gpus))
        self._live[fact.run_id] = {member.node_id for member in fact.members}
        self._given += gpus
        if self.packed:
            self.packed[-1] = (self._arrived, self._given)
        self._stop_waiting(fact.run_id, now_s)
        _step(self.used, now_s, gpus)

    def _ended(self, run_id: str, node_id: str, now_s: float) -> None:
        """The run has nothing on this node any more; its placement is over with the last one."""
        live = self._live.get(run_id, set())
        if node_id not in live:
            return
        live.discard(node_id)
        if not live:
            del self._live[run_id]
            span = self.records[run_id].spans[-1]
            span.end_s = now_s
            self._given -= span.gpus
            _step(self.used, now_s, -span.gpus)

    def _start_waiting(self, run_id: str, now_s: float) -> None:
        if run_id not in self._waiting_ids:
            self._waiting_ids.add(run_id)
            _step(self.wanted, now_s, self.records[run_id].job.gpus)

    def _stop_waiting(self, run_id: str, now_s: float) -> None:
        if run_id in self._waiting_ids:
            self._waiting_ids.discard(run_id)
            _step(self.wanted, now_s, -self.records[run_id].job.gpus)


def _step(series: list[tuple[float, float]], now_s: float, change: float) -> None:
    value = series[-1][1] + change
    if series[-1][0] == now_s:
        series[-1] = (now_s, value)
    else:
        series.append((now_s, value))


# -- figures ----------------------------------------------------------------------------------------


def figures(recorder: Recorder, effort: Effort) -> dict[str, Any]:
    """Everything that is worth a number, flat."""
    trace, records = recorder.trace, list(recorder.records.values())
    found: dict[str, Any] = {"jobs": len(records)}
    found |= _packing(recorder) if trace.packing else _waiting(recorder, records)
    found["preemptions"] = sum(record.preemptions for record in records)
    found["decisions"] = effort.decisions
    found["decisions_per_s"] = effort.decisions / effort.wall_s if effort.wall_s else 0.0
    found["decide_p99_ms"] = quantile(sorted(effort.cycle_s), 0.99) * 1000
    found["decide_s"] = sum(effort.cycle_s)
    found["wall_s"] = effort.wall_s
    return {name: round(value, DIGITS) if isinstance(value, float) else value for name, value in found.items()}


def _waiting(recorder: Recorder, records: Sequence[JobRecord]) -> dict[str, Any]:
    done = [record for record in records if record.completed_s < math.inf]
    waits, times = sorted(record.wait_s for record in done), sorted(record.jct_s for record in done)
    first_s = min((record.job.submit_s for record in records), default=0.0)
    last_s = max((record.completed_s for record in done), default=first_s)
    held = sum((min(span.end_s, last_s) - span.start_s) * span.gpus for record in records for span in record.spans)
    room = recorder.trace.slots * (last_s - first_s)
    busy, backlog_s = _backlog(recorder)
    infeasible = [record for record in records if not record.spans and not record.ended]
    return {
        "completed": len(done),
        "infeasible": len(infeasible),
        "infeasible_jobs": [
            {"run_id": s.job.run_id, "slots": s.job.slots, "code": s.waiting} for s in infeasible[:MAX_NAMED_JOBS]
        ],
        "unfinished": sum(bool(record.spans) and not record.ended for record in records) - len(done),
        "avg_wait_s": fmean(waits or [0.0]),
        "p50_wait_s": quantile(waits, 0.5),
        "p99_wait_s": quantile(waits, 0.99),
        "max_wait_s": quantile(waits, 1.0),
        "avg_jct_s": fmean(times or [0.0]),
        "p50_jct_s": quantile(times, 0.5),
        "p99_jct_s": quantile(times, 0.99),
        "makespan_s": last_s - first_s,
        "utilisation": held / room if room else 0.0,
        "allocated_while_backlog": busy,
        "backlog_s": backlog_s,
    }


def _backlog(recorder: Recorder) -> tuple[float, float]:
    """The share of slots in use while those that wait ask for more than there are in all; and for how long."""
    slots = recorder.trace.slots
    marks = sorted({moment for moment, _ in recorder.used} | {moment for moment, _ in recorder.wanted})
    used, wanted = _at(recorder.used, marks), _at(recorder.wanted, marks)
    held = total_s = 0.0
    for i in range(len(marks) - 1):
        if wanted[i] > slots:
            held += used[i] * (marks[i + 1] - marks[i])
            total_s += marks[i + 1] - marks[i]
    return (held / (slots * total_s) if total_s and slots else 0.0), total_s


def _at(series: Sequence[tuple[float, float]], marks: Sequence[float]) -> list[float]:
    """The value of a step series at each of the ascending marks."""
    values, i = [], 0
    for mark in marks:
        while i + 1 < len(series) and series[i + 1][0] <= mark:
            i += 1
        values.append(series[i][1])
    return values


def _packing(recorder: Recorder) -> dict[str, Any]:
    records = recorder.records.values()
    placed = sum(bool(record.spans) for record in records)
    capacity = recorder.trace.slots
    at_100 = next((given for asked, given in recorder.packed if asked >= capacity), None)
    reasons: dict[str, int] = {}
    for record in records:
        if not record.spans:
            reasons[record.waiting or record.ended] = reasons.get(record.waiting or record.ended, 0) + 1
    return {
        "arrived": len(recorder.packed),
        "placed": placed,
        "unplaced": len(recorder.packed) - placed,
        "unplaced_reasons": reasons,
        "arrived_gpus": recorder.packed[-1][0] if recorder.packed else 0.0,
        "allocated_gpu_percent_at_100": 100 * at_100 / capacity if at_100 is not None else None,
        "allocated_gpu_percent": 100 * recorder.packed[-1][1] / capacity if recorder.packed and capacity else 0.0,
    }


# -- the log ----------------------------------------------------------------------------------------


class EventLog:
    """Writes every fact as one line of JSON: a CloudEvent with its sequence in the log."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def record_fact(self, fact: Fact, sequence: int, now_s: float) -> None:
        """A listener of the simulation."""
        head = {
            "specversion": "1.0",
            "sequence": sequence,
            "id": fact.event_id,
            "source": SOURCE,
            "type": fact.type,
            "subject": fact.subject,
            "time": at(now_s).astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
        }
        # As on the bus: defaults are left out of the body.
        body = fact.model_dump_json(exclude_defaults=True)
        self._file.write(f'{json.dumps(head)[:-1]}, "data": {body}}}\n')


def placements(recorder: Recorder) -> list[tuple[str, int, tuple[tuple[str, tuple[int, ...]], ...]]]:
    """Every placement (run, generation, members) in the order of time, to compare two simulations by."""
    found = [
        (span.start_s, run_id, generation, tuple((m.node_id, m.slots) for m in span.members))
        for run_id, record in recorder.records.items()
        for generation, span in enumerate(record.spans, 1)
    ]
    return [(run_id, generation, members) for _, run_id, generation, members in sorted(found)]


def summary(recorder: Recorder, effort: Effort, policy: Policy, settings: dict[str, Any]) -> dict[str, Any]:
    """The figures under what they were measured with."""
    head = {"trace": recorder.trace.name, "policy": policy.name, "policy_digest": policy.digest, **settings}
    return head | {"gpus": recorder.trace.slots, "nodes": len(recorder.trace.all_nodes)} | figures(recorder, effort)


def nodes_of(trace: Trace) -> list[NodeJoined]:
    """The nodes in the order in which a chart shows them."""
    return sorted(trace.all_nodes, key=lambda joined: joined.node_id)
