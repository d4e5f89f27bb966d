"""Traces of real clusters, read into what the simulator plays: nodes, and jobs with their submit times.

A job's duration is known to the simulated agents alone; nothing that the scheduler folds says it.
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from contracts.base import token
from contracts.events.node import NodeFact, NodeJoined
from contracts.events.run import RunAccepted
from contracts.spec.resources import Gang, Resources, Scheduling, Slots
from contracts.spec.run import Code, RunSpec
from contracts.spec.training import Training

#: Virtual time begins here; a trace's times are seconds since.
START = datetime(2026, 1, 1, tzinfo=UTC)
#: Long enough that a simulated node is never taken for lost.
LEASE_TTL_S = 1e9
MIB = 2**20
SOURCE = "trainbus/simulate"
#: Simulated agents make a checkpoint and release their slots at once; without any grace period they could make none.
INSTANT_GRACE_S = 1e-9
#: What a pod that wants no GPU is placed on: one slot, without a share of it.
WHOLE_MILLI = 1000


class TraceError(ValueError):
    """The trace cannot be read; the text says where and why."""


@dataclass(frozen=True, slots=True)
class Job:
    """One job of a trace."""

    run_id: str
    submit_s: float
    #: Seconds of work on all of its slots; infinite where it never ends.
    duration_s: float
    spec: RunSpec

    @property
    def slots(self) -> int:
        return self.spec.slots.min

    @property
    def gpus(self) -> float:
        """Accelerators that it asks for, shares added up."""
        return self.spec.slots.min * self.spec.resources.share

    @property
    def user(self) -> str:
        return self.spec.user or ""


@dataclass(frozen=True, slots=True)
class Trace:
    """What there is to be played."""

    nodes: tuple[NodeJoined, ...]
    #: In the order of submission.
    jobs: tuple[Job, ...]
    name: str = ""
    #: What else happens to nodes, and when: they join later, are drained, leave, are lost.
    events: tuple[tuple[float, NodeFact], ...] = ()
    #: Whether jobs only come, and one that finds no place as it comes goes away again: a test of packing.
    packing: bool = False

    @property
    def slots(self) -> int:
        return sum(node.slots for node in self.all_nodes)

    @property
    def all_nodes(self) -> tuple[NodeJoined, ...]:
        """Also those that join later."""
        return self.nodes + tuple(fact for _, fact in self.events if isinstance(fact, NodeJoined))


@dataclass(slots=True)
class Specs:
    """Makes the requests of a trace, one object for all jobs that ask for the same."""

    made: dict[tuple[object, ...], RunSpec] = field(default_factory=dict)

    def get(
        self,
        slots: int,
        *,
        user: str = "",
        share: float = 1.0,
        cpus: float = 0.0,
        memory_bytes: int = 0,
        accelerators: tuple[str, ...] = (),
        bundle: int = 1,
        priority: int = 0,
        max_slots: int = 0,
        limit_s: float | None = None,
    ) -> RunSpec:
        key = (slots, user, share, cpus, memory_bytes, accelerators, bundle, priority, max_slots, limit_s)
        if key not in self.made:
            self.made[key] = RunSpec(
                name="job",
                user=user or None,
                team=user or None,
                priority=priority,
                slots=Slots(min=slots, max=max(slots, max_slots)),
                resources=Resources(share=share, cpus=cpus, memory_bytes=memory_bytes, accelerators=accelerators),
                gang=Gang(bundle=bundle),
                scheduling=Scheduling(limit_s=limit_s),
                # A task has checkpoints: it goes on where it was preempted.
                task="trace:Job",
                code=Code(uri="s3://code/trace.tar.gz", sha256="0" * 64),
                training=Training(max_steps=1),
                grace_s=INSTANT_GRACE_S,
            )
        return self.made[key]


def accepted(job: Job) -> RunAccepted:
    """The fact by which the scheduler learns of a job."""
    return RunAccepted(run_id=job.run_id, spec=job.spec, request_id=job.run_id, request_source=SOURCE)


def at(seconds: float) -> datetime:
    """The virtual time ``seconds`` after the start."""
    return START + timedelta(seconds=seconds)


def nodes_of(gpus: int, per_node: int, accelerator: str = "gpu") -> tuple[NodeJoined, ...]:
    """Nodes of ``per_node`` slots, the last one with what is left over."""
    sizes = [per_node] * (gpus // per_node) + ([gpus % per_node] if gpus % per_node else [])
    width = len(str(max(len(sizes) - 1, 0)))
    return tuple(node(f"node-{i:0{width}}", size, accelerator) for i, size in enumerate(sizes))


def node(node_id: str, slots: int, accelerator: str, cpus: float = 0.0, memory_bytes: int = 0) -> NodeJoined:
    return NodeJoined(
        node_id=node_id,
        incarnation="1",
        address="simulated",
        slots=slots,
        accelerator=accelerator,
        cpus=cpus,
        memory_bytes=memory_bytes,
        lease_ttl_s=LEASE_TTL_S,
    )


# -- job logs in the columns of the Alibaba v2020 simulator -----------------------------------------


def read_pai(path: Path, gpus: int, per_node: int = 8) -> Trace:
    """A job log with the columns submit_time, num_gpu, duration and user; others are not looked at."""
    rows = list(_rows(path, ("submit_time", "num_gpu", "duration", "user")))
    specs = Specs()
    jobs = [_pai_job(path, line, row, specs) for line, row in rows]
    ordered = sorted(jobs, key=lambda job: job.submit_s)  # stable: the file's order among equals
    if len({job.run_id for job in ordered}) < len(ordered):
        raise TraceError(f"{path}: two jobs have the same job_id")
    return Trace(nodes_of(gpus, per_node), tuple(ordered), path.name)


def _pai_job(path: Path, line: int, row: dict[str, str], specs: Specs) -> Job:
    submit_s, duration_s = _number(path, line, row, "submit_time"), _number(path, line, row, "duration")
    gpus = _number(path, line, row, "num_gpu")
    # Several whole ones, or a share of one.
    slots, share = (1, gpus) if gpus < 1 else (math.ceil(gpus), 1.0)
    name = row.get("job_id") or str(line)
    spec = specs.get(slots, user=row["user"].strip(), share=share)
    return Job(token(f"job-{name}"), submit_s, duration_s, spec)


# -- pods and nodes of the openb traces -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pod:
    """What a pod asks for."""

    cpu_milli: int
    memory_mib: int
    gpus: int
    #: Of each GPU.
    gpu_milli: int
    models: tuple[str, ...] = ()

    @property
    def gpu_milli_total(self) -> int:
        return self.gpus * self.gpu_milli


def read_openb(nodes_path: Path, pods_path: Path, tune: float, seed: int) -> Trace:
    """Read pods in random order, topped up (or cut) to ``tune`` times the GPUs of the nodes."""
    nodes = tuple(read_openb_nodes(nodes_path))
    pods = tuned(tuple(read_openb_pods(pods_path)), tune * WHOLE_MILLI * sum(n.slots for n in nodes), seed)
    return packing_trace(nodes, pods, pods_path.name)


def packing_trace(nodes: tuple[NodeJoined, ...], pods: Iterable[Pod], name: str) -> Trace:
    """Return the trace in which these pods arrive one after the other, and never end."""
    specs = Specs()
    # One a second: each is decided on alone, which is all that its time means.
    jobs = tuple(Job(f"pod-{i:06}", float(i), math.inf, pod_spec(pod, specs)) for i, pod in enumerate(pods, 1))
    return Trace(nodes, jobs, name, packing=True)


def tuned(pods: Sequence[Pod], gpu_milli: float, seed: int) -> list[Pod]:
    """The pods in random order, with others drawn from them until they ask for so much; or cut to it.

    Raises:
        TraceError: no number of them does.
    """
    source = random.Random(seed)
    found = list(pods)
    total = sum(pod.gpu_milli_total for pod in found)
    if total == 0:
        raise TraceError("no pod asks for a GPU: there is nothing to be packed")
    source.shuffle(found)
    while total < gpu_milli:
        found.append(pods[source.randrange(len(pods))])
        total += found[-1].gpu_milli_total
    while found and total - found[-1].gpu_milli_total >= gpu_milli:
        total -= found.pop().gpu_milli_total
    source.shuffle(found)
    return found


def pod_spec(pod: Pod, specs: Specs) -> RunSpec:
    """One bundle of all of the pod's GPUs; without any, one slot with no share of it."""
    slots = max(pod.gpus, 1)
    return specs.get(
        slots,
        share=min(pod.gpu_milli / WHOLE_MILLI, 1.0) if pod.gpus else 0.0,
        cpus=pod.cpu_milli / 1000 / slots,
        memory_bytes=pod.memory_mib * MIB // slots,
        accelerators=pod.models,
        bundle=slots,
    )


def read_openb_nodes(path: Path) -> Iterator[NodeJoined]:
    for line, row in _rows(path, ("sn", "cpu_milli", "memory_mib", "gpu", "model")):
        slots = int(_number(path, line, row, "gpu"))
        cpus = _number(path, line, row, "cpu_milli") / 1000
        memory_bytes = int(_number(path, line, row, "memory_mib")) * MIB
        yield node(token(row["sn"]), slots, row["model"].strip() or "cpu", cpus, memory_bytes)


def read_openb_pods(path: Path) -> Iterator[Pod]:
    for line, row in _rows(path, ("cpu_milli", "memory_mib", "num_gpu", "gpu_milli")):
        cpu_milli, memory_mib, gpus, gpu_milli = (
            int(_number(path, line, row, name)) for name in ("cpu_milli", "memory_mib", "num_gpu", "gpu_milli")
        )
        models = tuple(model for model in (row.get("gpu_spec") or "").split("|") if model)
        yield Pod(cpu_milli, memory_mib, gpus, gpu_milli if gpus else 0, models)


# -- reading ----------------------------------------------------------------------------------------


def _rows(path: Path, needed: Iterable[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """The rows of a CSV file with their line numbers."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            if missing := [name for name in needed if name not in (reader.fieldnames or ())]:
                raise TraceError(f"{path} has no column {', '.join(missing)}")
            for row in reader:
                yield reader.line_num, row
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path} cannot be read: {error}") from error


def _number(path: Path, line: int, row: dict[str, str], name: str) -> float:
    try:
        value = float(row[name])
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise TraceError(f"{path}, line {line}: {name} is {row[name]!r}, not a number of at least 0")
    return value
