"""What a checkpoint costs training: how long it holds a step, what it takes from the rate, how fast it is durable.

    python -m loadtest.stall [--megabytes 500] [--checkpoints 12] [--folder DIR]

One process trains a model whose state (fp32 weights and Adam's moments) is of the given size. The stall is the time
that ``save`` and ``wait_for_staging`` hold the loop, compared with one warm copy of the same bytes; the
rate is that of the steps taken while a checkpoint is written, against steps without any; durable is from
``save`` to the end of the last fsync, against a plain write and fdatasync of the same bytes.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from contracts.spec.training import Training
from loadtest.common import percentile, report
from trainbus.agent_link.channels import Journal
from trainbus.task import Task
from trainbus.trainer.checkpoint import Progress
from trainbus.trainer.checkpoint_manager import CheckpointManager
from trainbus.trainer.strategies import make_strategy
from trainbus.trainer.survivor_state import SurvivorStore
from trainbus.trainer.training_state import assemble
from trainbus.trainer.world import World

WIDTH = 1024
BATCH = 32


class Wide(Task):
    """Equal square layers, as many as the state's size takes."""

    def __init__(self, layers: int) -> None:
        self.layers = layers

    def model(self) -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(self.layers)))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-4)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(batch), batch)


class Loop:
    """A training loop cut to what a checkpoint has to do with."""

    def __init__(self, size_bytes: int, folder: Path) -> None:
        training = Training(max_steps=10**6, checkpoint_every_steps=10**6)
        task = Wide(max(1, size_bytes // (3 * 4 * (WIDTH * WIDTH + WIDTH))))
        torch.manual_seed(0)
        self.strategy = make_strategy(task, training, World())
        self.batch = torch.randn(BATCH, WIDTH, device=World().device)
        self.progress = Progress()
        self.checkpoints = CheckpointManager(
            folder / "checkpoints",
            self.strategy,
            training,
            world=World(),
            journal=Journal(folder / "rank_0.jsonl"),
            exactness="samples-exact",
            survivors=SurvivorStore(),
        )

    def step(self) -> tuple[float, float]:
        """Return (seconds of the step, of them held by the checkpoint)."""
        started = time.perf_counter()
        self.strategy.backward(self.batch, 1.0, leaf=0, first=True, last=True)
        before = time.perf_counter()
        self.checkpoints.wait_for_staging()
        held = time.perf_counter() - before
        self.strategy.step(None)
        self.progress.step += 1
        self.checkpoints.record_step(self.progress, None)
        return time.perf_counter() - started, held

    def tensors(self) -> dict[str, torch.Tensor]:
        state = assemble(self.strategy.state_entries(), World())
        return {**state.model, **{f"optimizer.{name}": tensor for name, tensor in state.optimizer.tensors.items()}}


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        loop = Loop(args.megabytes * 10**6, folder)
        loop.step()
        size_bytes = sum(tensor.nbytes for tensor in loop.tensors().values())
        base = _peak_bytes()
        loop.checkpoints.prepare(None)
        stalls, calls, writing, quiet, durable = measure_checkpoints(loop, args.checkpoints, folder)
        extra = _peak_bytes() - base
        copy_s = _memcpy_s(size_bytes)
        raw = min(_timed(lambda: raw_write(folder / "raw", size_bytes)) for _ in range(args.repeats))
        peers = _peers(loop, folder, args.repeats)
    middle, worst = statistics.median(stalls) / copy_s, percentile(stalls, 0.99) / copy_s
    rate = statistics.mean(quiet) / statistics.mean(writing)
    speed = raw / min(durable)
    rows = [
        ("state", f"{size_bytes / 1e6:.0f} MB", ""),
        ("one warm memcpy", f"{copy_s * 1e3:.1f} ms", f"{size_bytes / copy_s / 1e9:.1f} GB/s"),
        ("stall, p50", f"{statistics.median(stalls) * 1e3:.1f} ms = {middle:.2f} memcpy", "1.25 (stretch 0.1)"),
        ("stall, p99", f"{worst:.2f} memcpy", "2"),
        ("rate while it is written", f"{rate:.3f}", "0.95"),
        ("raw write + fdatasync", f"{raw * 1e3:.0f} ms", f"{size_bytes / raw / 1e6:.0f} MB/s"),
        ("durable, hashed, in training", f"{speed:.2f} of raw", "0.9"),
        *((f"{peer}, training stopped", f"{raw / s:.2f} of raw", f"{s * 1e3:.0f} ms") for peer, s in peers.items()),
        ("peak extra memory", f"{extra / size_bytes:.2f} of the state", "1"),
    ]
    figures: dict[str, Any] = {
        "size_bytes": size_bytes,
        "memcpy_s": copy_s,
        "stall_s": stalls,
        "save_call_s": calls,
        "stall_p50_memcpys": middle,
        "stall_p99_memcpys": worst,
        "rate_while_writing": rate,
        "raw_s": raw,
        "durable_s": durable,
        "durable_of_raw": speed,
        "peers_s": peers,
        "extra_bytes": extra,
    }
    report("stall", rows, figures)


def measure_checkpoints(loop: Loop, checkpoints: int, folder: Path) -> tuple[list[float], ...]:
    stalls, calls, writing, quiet, durable = [], [], [], [], []
    for number in range(checkpoints + 1):
        without = [loop.step()[0] for _ in range(5)]
        started = time.perf_counter()
        loop.checkpoints.save(loop.progress, epoch=loop.progress.epoch, ema=None, metrics={})
        called = time.perf_counter() - started
        during, held = [], 0.0
        while loop.checkpoints.is_writing:
            step_s, waited_s = loop.step()
            during.append(step_s)
            held += waited_s
        elapsed = time.perf_counter() - started
        loop.checkpoints.wait_for_writes()
        shutil.rmtree(folder / "checkpoints")
        if number:  # the first one's pages were new to the disk's cache
            stalls.append(called + held)
            calls.append(called)
            quiet.append(statistics.mean(without))
            writing.append(statistics.mean(during))
            durable.append(elapsed)
    return stalls, calls, writing, quiet, durable


def _memcpy_s(size_bytes: int) -> float:
    source, target = torch.ones(size_bytes, dtype=torch.uint8), torch.ones(size_bytes, dtype=torch.uint8)
    return min(_timed(lambda: target.copy_(source)) for _ in range(5))


def raw_write(path: Path, size_bytes: int) -> None:
    block = memoryview(bytes(8 * 2**20))
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    left = size_bytes
    while left:
        left -= os.write(fd, block[: min(left, len(block))])
    os.fdatasync(fd)
    os.close(fd)
    path.unlink()


def _peers(loop: Loop, folder: Path, repeats: int) -> dict[str, float]:
    from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

    tensors, place = loop.tensors(), folder / "peer"

    def synced(save: Callable[[], None]) -> float:
        def work() -> None:
            save()
            files = [place] if place.is_file() else [path for path in place.rglob("*") if path.is_file()]
            for path in files:
                fd = os.open(path, os.O_RDONLY)
                os.fdatasync(fd)
                os.close(fd)

        best = min(_timed(work) for _ in range(repeats))
        shutil.rmtree(place) if place.is_dir() else place.unlink()
        return best

    return {
        "torch.save": synced(lambda: torch.save(tensors, place)),
        "safetensors.save_file": synced(lambda: save_file(tensors, place)),
        "DCP": synced(lambda: save_distributed(tensors, checkpoint_id=place, no_dist=True)),
    }


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=500, help="size of the state")
    parser.add_argument("--checkpoints", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3, help="of what it is compared with; the best counts")
    parser.add_argument(
        "--folder", type=Path, default=None, help="where to write; default: the folder for temporary files"
    )
    run(parser.parse_args())


if __name__ == "__main__":
    main()
