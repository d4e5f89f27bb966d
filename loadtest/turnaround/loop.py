"""The loop that all three systems run: two ranks of DDP on gloo, a checkpoint every so many steps.

Standalone: needs torch alone, since it is copied beside torchrun's script and into Ray's environment.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

BATCH = 64


def make_model(width: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, 10))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(
    width: int,
    steps: int,
    every: int,
    lines: Path,
    state: dict[str, Any] | None,
    save: Callable[[int, Callable[[], dict[str, Any]]], None],
) -> None:
    """Train up to ``steps`` from ``state``, appending one JSON line a step (step, time, pid, rank) to ``lines``.

    Args:
        save: called on every rank every ``every`` steps, with what makes the state.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, world = dist.get_rank(), dist.get_world_size()
    model = make_model(width)
    optimizer = make_optimizer(model)
    first = 1
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"] + 1
    parallel = DistributedDataParallel(model)
    with lines.open("a", buffering=1) as file:
        for step in range(first, steps + 1):
            generator = torch.Generator().manual_seed(step)
            x_B64 = torch.rand(BATCH, 64, generator=generator)[rank::world]
            y_B = torch.randint(10, (BATCH,), generator=generator)[rank::world]
            optimizer.zero_grad()
            cross_entropy(parallel(x_B64), y_B).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            file.write(json.dumps({"step": step, "time": time.time(), "pid": os.getpid(), "rank": rank}) + "\n")
            if step % every == 0:
                save(step, partial(_state, model, optimizer, step))


def _state(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}


def save_file(path: Path, state: dict[str, Any]) -> None:
    """Write a state so that it is there whole or not at all, and durable."""
    unfinished = path.with_suffix(".partial")
    with unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
