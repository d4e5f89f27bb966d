"""Traces of our own making, for tests and for trying things out: bursts, a few heavy users, heavy-tailed durations.

The same seed gives the same trace.
"""

from __future__ import annotations

import random

from contracts.events.node import NodeJoined
from trainbus.operate.simulation.traces import MIB, Job, Pod, Specs, Trace, node, nodes_of

#: GPUs of a job, and how often.
SIZES = ((1, 70), (2, 12), (4, 9), (8, 7), (16, 2))
#: Share of the jobs that come in bursts of one user, as sweeps do.
BURSTY = 0.5
BURST = 12
MEDIAN_S = 600.0
#: Spread of the logarithm of durations: the longest per cent then has most of the work.
SIGMA = 1.8
LONGEST_S = 5 * 86_400.0


def jobs(count: int, gpus: int, seed: int, *, load: float = 1.2, per_node: int = 8, users: int = 8) -> Trace:
    """Return ``count`` jobs that request ``load`` times the cluster's capacity while they arrive."""
    source = random.Random(seed)
    specs = Specs()
    drawn = [(_size(source, gpus), _duration_s(source)) for _ in range(count)]
    span_s = sum(size * duration_s for size, duration_s in drawn) / (gpus * load)
    times, names = _arrivals(source, count, span_s, users)
    made = [
        Job(f"job-{i:06}", float(round(submit_s)), float(duration_s), specs.get(size, user=user))
        for i, (submit_s, user, (size, duration_s)) in enumerate(zip(times, names, drawn, strict=True))
    ]
    return Trace(nodes_of(gpus, per_node), tuple(sorted(made, key=lambda job: job.submit_s)), f"generated-{seed}")


def _size(source: random.Random, gpus: int) -> int:
    return source.choices([min(size, gpus) for size, _ in SIZES], [weight for _, weight in SIZES])[0]


def _duration_s(source: random.Random) -> int:
    return max(round(min(source.lognormvariate(0.0, SIGMA) * MEDIAN_S, LONGEST_S)), 1)


def _arrivals(source: random.Random, count: int, span_s: float, users: int) -> tuple[list[float], list[str]]:
    """When jobs come and whose they are; a burst is one user's, within a few minutes."""
    names = [f"team{i % 3}/user{i}" for i in range(users)]
    weights = [1 / (i + 1) ** 1.5 for i in range(users)]
    times: list[float] = []
    owners: list[str] = []
    while len(times) < count:
        first_s, owner = source.uniform(0, span_s), source.choices(names, weights)[0]
        size = source.randint(2, 2 * BURST) if source.random() < BURSTY / BURST else 1
        for _ in range(min(size, count - len(times))):
            times.append(first_s + (source.expovariate(1 / 60) if size > 1 else 0.0))
            owners.append(owner)
    return times, owners


def cluster(count: int, seed: int) -> tuple[NodeJoined, ...]:
    """Nodes of several sizes and models."""
    source = random.Random(seed)
    kinds = (("A100", 8, 96, 768), ("T4", 4, 64, 256), ("T4", 2, 32, 128))
    made = []
    for i in range(count):
        model, slots, cpus, memory_gib = source.choice(kinds)
        made.append(node(f"node-{i:04}", slots, model, float(cpus), memory_gib * 1024 * MIB))
    return tuple(made)


def pods(count: int, seed: int) -> list[Pod]:
    """Pods that ask for shares of a GPU, for whole ones, and some for none."""
    source = random.Random(seed)
    made = []
    for _ in range(count):
        kind = source.random()
        cpu_milli, memory_mib = source.choice((2_000, 4_000, 8_000)), source.choice((4_096, 16_384))
        if kind < 0.1:
            made.append(Pod(cpu_milli, memory_mib, 0, 0))
        elif kind < 0.5:
            made.append(Pod(cpu_milli, memory_mib, 1, source.choice((200, 250, 460, 500, 810))))
        else:
            gpus = source.choices((1, 2, 4, 8), (80, 10, 6, 4))[0]
            made.append(Pod(cpu_milli * gpus, memory_mib * gpus, gpus, 1000))
    return made
