"""DistributedDataParallel, and a single process when there is one rank."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from contracts.events.train import Training
from trainbus.task import Task
from trainbus.trainer import optimizer_state as packing
from trainbus.trainer.optimizer_state import OptimizerState
from trainbus.trainer.strategies.base import LossModule, host_copy
from trainbus.trainer.world import World


class DDPStrategy:
    """Every rank holds everything. The step is the exact mean over the global batch, whatever the slices."""

    def __init__(self, task: Task, model: nn.Module, training: Training, world: World) -> None:
        self._world = world
        self.model = model.to(world.device)
        self.optimizer = task.optimizer(self.model)
        self._parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        module = LossModule(task, self.model, training.precision, world.device)
        self._ddp: DistributedDataParallel | None = None
        if world.size > 1:
            self._ddp = DistributedDataParallel(
                module, gradient_as_bucket_view=True, find_unused_parameters=task.find_unused_parameters
            )
        self._forward = self._ddp or module

    def backward(self, batch: Any | None, weight: float, *, last: bool) -> Tensor:
        with nullcontext() if last or self._ddp is None else self._ddp.no_sync():
            loss: Tensor = self._forward(batch) * weight
            # DDP divides the sum over the ranks by their number; our weights already sum to 1.
            (loss * self._world.size).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def step(self, clip_norm: float | None) -> Tensor:
        limit = float("inf") if clip_norm is None else clip_norm
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, limit)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm.detach()

    def sync_buffers(self) -> None:
        if self._world.size > 1:
            for buffer in self.model.buffers():
                dist.broadcast(buffer, src=0)

    def model_state(self) -> dict[str, Tensor]:
        return host_copy(self.model) if self._world.is_first else {}

    def optimizer_state(self) -> OptimizerState:
        return packing.pack(self.optimizer, self.model) if self._world.is_first else OptimizerState()

    def load_optimizer_state(self, state: OptimizerState) -> None:
        packing.unpack(state, self.optimizer, self.model)
