"""Exact mode: whether it is, and what it costs.

    python -m loadtest.exact verify        every number of processes up to V, every model: one digest
    python -m loadtest.exact cost          a step against plain DDP with equal leaves
    python -m loadtest.exact collective    the reduction alone against all_reduce

Figures are minima over interleaved repetitions, since whatever else runs on a machine only ever adds time. Plain DDP
gets what it can do best: leaves of equal size, accumulated with ``no_sync``, the same optimizer and clipping.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from contracts.spec.training import Training
from loadtest.common import report
from tests.trainbus.exact_gang import Case, gang
from trainbus.agent_link.process_exit import hard_exit
from trainbus.task import Task
from trainbus.trainer.chained_optimizer import make_optimizer
from trainbus.trainer.exact.gradient_tree import GradientTree
from trainbus.trainer.strategies.exact_ddp import ExactDDPStrategy
from trainbus.trainer.world import World

Rows = list[tuple[str, str, str]]
MODELS: dict[str, Callable[[], nn.Module]] = {
    "MLP, 1.9M parameters": lambda: _mlp(1024, 1),
    "MLP, 8.2M parameters": lambda: _mlp(2048, 1),
    "CNN, 1.3M parameters": lambda: _cnn(),
}
VERIFIED: list[Case] = [
    Case("mlp", rules={"clip_norm": 0.5}),
    Case("cnn", rules={"clip_norm": 0.5}),
    Case("gpt"),
    Case("gpt", rules={"precision": "bf16"}),
    Case("gpt", rules={"precision": "fp16"}),
]


def verify() -> tuple[Rows, dict[str, Any]]:
    rows: Rows = []
    figures: list[dict[str, Any]] = []
    for base in VERIFIED:
        for strategy in ("ddp", "zero1"):
            for leaf_count in (4, 7, 12):
                case = Case(base.name, rules={**base.rules, "strategy": strategy, "logical_ranks": leaf_count})
                digests = [gang(case, world, range(3)).digest for world in range(1, leaf_count + 1)]
                equal = digests.count(digests[0])
                precision = base.rules.get("precision", "fp32")
                label = f"{base.name} {precision} {strategy} V={leaf_count}"
                rows.append((label, f"{equal} of {leaf_count} world sizes equal", f"{leaf_count}"))
                figures.append({"case": label, "equal": equal, "of": leaf_count, "digest": digests[0]})
                print(*rows[-1], flush=True)
    return rows, {"verified": figures}


def cost(repeats: int, steps: int) -> tuple[Rows, dict[str, Any]]:
    rows: Rows = []
    figures: dict[str, float] = {}
    plans = [("V=4, W=1", 1, 4, 1.05), ("V=4, W=2", 2, 4, 1.03), ("V=6, W=2, uneven subtrees", 2, 6, 1.10)]
    for model, make in MODELS.items():
        for label, world, leaf_count, limit in plans:
            for strategy in ("ddp", "zero1"):
                times = _in_processes(world, _cost_rank, make, strategy, leaf_count, repeats, steps)
                ratio = times["exact"] / times["plain"]
                name = f"{model}, {label}, {strategy}"
                figures[name] = ratio
                milliseconds = f"({times['exact'] * 1e3:.1f} against {times['plain'] * 1e3:.1f} ms)"
                rows.append((name, f"{ratio:.3f} {milliseconds}", f"at most {limit}"))
                print(*rows[-1], flush=True)
    return rows, {"ratios": figures}


def collective(repeats: int, size_bytes: int) -> tuple[Rows, dict[str, Any]]:
    rows: Rows = []
    figures: dict[str, float] = {}
    for world in (2, 4):
        times = _in_processes(world, _collective_rank, size_bytes, repeats)
        for name, seconds in times.items():
            ratio = seconds / times["all_reduce"]
            figures[f"W={world} {name}"] = ratio
            limit = "at most 1.15" if name != "all_reduce" else ""
            rows.append(
                (f"{size_bytes / 2**20:.0f} MiB, W={world}, {name}", f"{ratio:.3f} ({seconds * 1e3:.1f} ms)", limit)
            )
    return rows, {"ratios": figures}


class _Made(Task):
    """The model with made-up data; the loss is what both sides compute."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        self._make = make

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self._make()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])


def _cost_rank(
    world: World, make: Callable[[], nn.Module], strategy: str, leaf_count: int, repeats: int, steps: int
) -> dict[str, float]:
    task = _Made(make)
    batch = torch.randn(32, 3, 16, 16), torch.randint(0, 10, (32,))
    rules = {"max_steps": 1, "global_batch": 32 * leaf_count, "logical_ranks": leaf_count, "strategy": strategy}
    exact = ExactDDPStrategy(task, task.model(), Training.model_validate(rules), world)
    model = task.model()
    plain = DistributedDataParallel(model, gradient_as_bucket_view=True) if world.size > 1 else model
    optimizer = make_optimizer(task, model)

    def exact_step() -> None:
        for leaf in exact.leaves:
            exact.backward(batch, 1 / leaf_count, leaf=leaf, first=True, last=True)
        exact.step(1.0)

    def plain_step() -> None:
        for number in range(len(exact.leaves)):
            last = number == len(exact.leaves) - 1
            with plain.no_sync() if isinstance(plain, DistributedDataParallel) and not last else nullcontext():
                (task.loss(plain, batch) / len(exact.leaves)).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return _interleaved({"plain": plain_step, "exact": exact_step}, repeats, steps)


def _collective_rank(world: World, size_bytes: int, repeats: int) -> dict[str, float]:
    parameter = nn.Parameter(torch.zeros(size_bytes // 4))
    flat = torch.ones(size_bytes // 4)
    exact = GradientTree([parameter], ["flat"], world.size, world)
    general = GradientTree([parameter], ["flat"], world.size, world, shortcut=False)

    def through(tree: GradientTree) -> Callable[[], None]:
        def reduce() -> None:
            for reduction in tree.reductions:
                reduction.start()
            for reduction in tree.reductions:
                reduction.reduce()
            for reduction in tree.reductions:
                reduction.wait()

        return reduce

    steps = {"all_reduce": lambda: _all_reduce(flat), "exact": through(exact), "exact, general path": through(general)}
    return _interleaved(steps, repeats, 1)


def _all_reduce(flat: Tensor) -> None:
    dist.all_reduce(flat)


def _interleaved(sides: dict[str, Callable[[], None]], repeats: int, steps: int) -> dict[str, float]:
    """Return each side's best seconds a call."""
    best: dict[str, float] = defaultdict(lambda: float("inf"))
    for repeat in range(repeats + 1):
        for name, call in sides.items():
            if dist.is_initialized():
                dist.barrier()
            started = time.perf_counter()
            for _ in range(steps):
                call()
            if dist.is_initialized():
                dist.barrier()
            if repeat:  # the first is for warming up
                best[name] = min(best[name], (time.perf_counter() - started) / steps)
    return dict(best)


def _in_processes(world_size: int, work: Callable[..., dict[str, float]], *arguments: Any) -> dict[str, float]:
    """Run ``work(world, *arguments)`` in processes that form a gloo group; return rank 0's figures."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("fork")
        ranks = [
            context.Process(target=_rank, args=(rank, world_size, folder, work, arguments))
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        found: dict[str, float] = torch.load(Path(folder) / "figures.pt")
        return found


def _rank(
    rank: int, world_size: int, folder: str, work: Callable[..., dict[str, float]], arguments: Sequence[Any]
) -> None:
    torch.set_num_threads(1)
    if world_size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    found = work(World(rank, world_size, 0), *arguments)
    if rank == 0:
        torch.save(found, Path(folder) / "figures.pt")
    if world_size > 1:
        dist.barrier()
    hard_exit(0)


def _mlp(width: int, hidden: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(768, width), nn.ReLU()]
    for _ in range(hidden):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def _cnn(channels: int = 64) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1),
        nn.BatchNorm2d(2 * channels),
        nn.ReLU(),
        nn.Conv2d(2 * channels, 4 * channels, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * channels * 16, 220),
        nn.ReLU(),
        nn.Linear(220, 10),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["verify", "cost", "collective"])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--mib", type=int, default=25)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for what in options.what:
        if what == "verify":
            rows, figures = verify()
        elif what == "cost":
            rows, figures = cost(options.repeats, options.steps)
        else:
            rows, figures = collective(options.repeats, options.mib * 2**20)
        report(f"exact-{what}", rows, figures)


if __name__ == "__main__":
    main()
