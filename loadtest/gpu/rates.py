"""What a step and a checkpoint cost beside a plain loop, torch's own staging, and the disk."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from contracts.spec.training import Training
from loadtest.gpu.common import Row, Sizes, device, timed
from loadtest.stall import Loop, measure_checkpoints, raw_write
from services.kit.ports import free_ports
from tests.trainbus.exact_tasks import GPT, GPTModel
from trainbus.trainer.strategies import make_strategy
from trainbus.trainer.world import World

STEP_LIMIT, STALL_LIMIT = 1.02, 0.5
REPEATS = 3


def measure_steps(sizes: Sizes) -> list[Row]:
    rows = []
    os.environ["MASTER_PORT"] = str(free_ports(1)[0])
    World().init_process_group(os.environ, always=True)  # FSDP2 needs one for a single rank, too
    try:
        for width, layers in sizes.models:
            task = GPT(width=width, layers=layers, context=sizes.context)
            count = sum(parameter.numel() for parameter in task.model().parameters())
            for strategy in ("ddp", "fsdp2"):
                ours, plain = _step_times(task, strategy, sizes)
                ratio = ours / plain
                name = f"step, {strategy}, {count / 1e6:.0f}M parameters"
                # In miniature a step is so short that only the machine is measured.
                met = None if sizes.is_mini else ratio <= STEP_LIMIT
                rows.append(Row(name, f"{ratio:.3f} of a plain loop ({plain * 1e3:.1f} ms)", f"{STEP_LIMIT}", met))
    finally:
        dist.destroy_process_group()
    return rows


def _step_times(task: GPT, strategy: str, sizes: Sizes) -> tuple[float, float]:
    """Return the median seconds of our step and of a plain one, in repetitions that take turns."""
    batch = torch.randint(256, (sizes.batch, sizes.context + 1), device=device())
    ours: list[float] = []
    plain: list[float] = []
    for _ in range(REPEATS):
        for make, found in ((_plain_step, plain), (_our_step, ours)):
            step = make(task, strategy, batch)
            step()
            found += [timed(step) for _ in range(sizes.timed_steps)]
            del step
            if device().type == "cuda":
                torch.cuda.empty_cache()
    return statistics.median(ours), statistics.median(plain)


def _our_step(task: GPT, strategy: str, batch: Tensor) -> Callable[[], None]:
    training = Training.model_validate({"max_steps": 1, "strategy": strategy, "precision": "bf16"})
    found = make_strategy(task, training, World())
    found.model.train()

    def step() -> None:
        found.begin_step(has_empty=False)
        found.backward(batch, 1.0, leaf=0, first=True, last=True)
        found.step(1.0)

    return step


def _plain_step(task: GPT, strategy: str, batch: Tensor) -> Callable[[], None]:
    model: nn.Module = task.model().to(device())
    assert isinstance(model, GPTModel)
    if strategy == "fsdp2":
        for module in (*model.blocks, model):
            fully_shard(module)
    optimizer = task.optimizer(model)
    model.train()

    def step() -> None:
        with torch.autocast(device().type, dtype=torch.bfloat16):
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measure_checkpoint(sizes: Sizes, folder: Path) -> list[Row]:
    loop = Loop(sizes.state_megabytes * 10**6, folder)
    loop.step()
    loop.checkpoints.prepare(None)
    stalls, _, _, _, durable = measure_checkpoints(loop, sizes.checkpoints, folder)
    tensors = loop.tensors()
    size_bytes = sum(tensor.nbytes for tensor in tensors.values())
    on_gpu = device().type == "cuda"
    stager = DefaultStager(StagingOptions(on_gpu, on_gpu, use_async_staging=False, use_non_blocking_copy=on_gpu))
    stager.stage(tensors)
    staged = min(timed(lambda: stager.stage(tensors)) for _ in range(REPEATS))
    stager.close()
    raw = min(timed(lambda: raw_write(folder / "raw", size_bytes)) for _ in range(REPEATS))
    ratio, speed = statistics.median(stalls) / staged, raw / min(durable)
    met = None if sizes.is_mini else ratio <= STALL_LIMIT
    return [
        Row(
            f"stall of a checkpoint, {size_bytes / 1e6:.0f} MB", f"{ratio:.2f} of DefaultStager", f"{STALL_LIMIT}", met
        ),
        Row("durable rate", f"{speed:.2f} of the disk's", "0.9", None if sizes.is_mini else speed >= 0.9),
    ]
