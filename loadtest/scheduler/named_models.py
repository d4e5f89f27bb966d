"""How full the cluster becomes where pods name models of GPUs, beside published FGD on the same pods in the same run.

    python -m loadtest.scheduler.named_models --traces FOLDER [--mixes capacity,root,uniform,groups] [--seeds 101,102]

The published lists of pods name no models. Here a third of the pods with GPUs names one, drawn from the models that
have a node large enough: by the GPUs that there are of each (``capacity``), by their square root (``root``), all alike
(``uniform``: far more is asked of rare models than there is), or by a power of 0.7 where the two V100 stand for each
other (``groups``). The policy ``fgd`` learns the workload as it arrives; published FGD (``published_fgd.py``) knows all
of it from the start. The figure is the share of GPUs that is allocated when as much was requested as there is.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from contracts.events.node import NodeJoined
from loadtest.common import percentile, report
from loadtest.scheduler.published_fgd import PublishedFgd
from services.scheduler.policies import load
from trainbus.operate.simulation.engine import simulate
from trainbus.operate.simulation.report import Recorder, figures
from trainbus.operate.simulation.traces import (
    WHOLE_MILLI,
    Pod,
    packing_trace,
    read_openb_nodes,
    read_openb_pods,
    tuned,
)

MIXES: dict[str, Callable[[int], float]] = {
    "none": float,
    "capacity": float,
    "root": math.sqrt,
    "uniform": lambda gpus: 1.0,
    "groups": lambda gpus: gpus**0.7,
}
#: Models of which there are fewer GPUs are not named.
MIN_GPUS = 10
V100 = ("V100M16", "V100M32")
console = Console(stderr=True)


def named(pods: Sequence[Pod], nodes: Sequence[NodeJoined], mix: str, share: float, seed: int) -> list[Pod]:
    """Return the pods, of which this share of those with GPUs names a model."""
    source, gpus, largest = random.Random(seed), Counter[str](), Counter[str]()
    for node in nodes:
        gpus[node.accelerator] += node.slots
        largest[node.accelerator] = max(largest[node.accelerator], node.slots)
    found = []
    for pod in pods:
        if pod.gpus and mix != "none" and source.random() < share:
            models = [each for each in sorted(gpus) if largest[each] >= pod.gpus and gpus[each] > MIN_GPUS]
            model = source.choices(models, [MIXES[mix](gpus[each]) for each in models])[0]
            pod = replace(pod, models=V100 if mix == "groups" and model in V100 else (model,))
        found.append(pod)
    return found


def pack(pods: Sequence[Pod], nodes: tuple[NodeJoined, ...]) -> tuple[float, list[float]]:
    """Return the percentage that the scheduler allocates, and the seconds that each of its cycles takes."""
    trace = packing_trace(nodes, pods, "named")
    recorder = Recorder(trace)
    effort = simulate(trace, load("fgd"), listeners=[recorder.record_fact])
    return figures(recorder, effort)["allocated_gpu_percent_at_100"], effort.cycle_s


def pack_as_published(pods: Sequence[Pod], nodes: Sequence[NodeJoined], workload: Sequence[Pod]) -> float:
    """Return the percentage that published FGD allocates."""
    fgd, capacity = PublishedFgd(nodes, workload), WHOLE_MILLI * sum(node.slots for node in nodes)
    requested = allocated = 0
    for pod in pods:
        requested += pod.gpu_milli_total
        allocated += pod.gpu_milli_total if fgd.place(pod) else 0
        if requested >= capacity:
            break
    return 100 * allocated / capacity


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--list", default="default", help="openb_pod_list_<...>.csv")
    parser.add_argument("--mixes", default="capacity,root,uniform,groups", help=f"some of {', '.join(MIXES)}")
    parser.add_argument("--share", type=float, default=0.33, help="of the pods with GPUs that name a model")
    parser.add_argument("--seeds", default="101,102,103")
    given = parser.parse_args()
    nodes = tuple(read_openb_nodes(given.traces / "openb_node_list_gpu_node.csv"))
    listed = list(read_openb_pods(given.traces / f"openb_pod_list_{given.list}.csv"))
    gpu_milli = 1.05 * WHOLE_MILLI * sum(node.slots for node in nodes)
    rows, found, passes = [], list[dict[str, Any]](), list[float]()
    for mix in given.mixes.split(","):
        for seed in map(int, given.seeds.split(",")):
            workload = named(listed, nodes, mix, given.share, seed)
            pods = tuned(workload, gpu_milli, seed)
            ours, took_s = pack(pods, nodes)
            published = pack_as_published(pods, nodes, workload)
            passes += took_s
            found.append({"mix": mix, "seed": seed, "ours": round(ours, 2), "published_fgd": round(published, 2)})
            console.print(found[-1])
        ours, published = (
            statistics.mean(each[name] for each in found if each["mix"] == mix) for name in ("ours", "published_fgd")
        )
        rows.append((f"allocated, models named: {mix}", f"{ours:.2f} %", f">= {published:.2f} % (published FGD)"))
    p99_ms = 1e3 * percentile(passes, 0.99)
    rows.append((f"one decision on {len(nodes):,} nodes, p99", f"{p99_ms:.1f} ms", "<= 10 ms"))
    command = f"--list {given.list} --mixes {given.mixes} --share {given.share} --seeds {given.seeds}"
    report(
        "packing-named-models",
        rows,
        {"command": f"python -m loadtest.scheduler.named_models {command}", "runs": found, "decide_p99_ms": p99_ms},
    )


if __name__ == "__main__":
    main()
