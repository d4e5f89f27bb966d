"""DistributedDataParallel in fast mode, and a single process when there is one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from contracts.spec.training import Training
from trainbus.task import Task
from trainbus.trainer import optimizer_state as packing
from trainbus.trainer.strategies.base import LossModule, StepResult, Strategy, ignore
from trainbus.trainer.strategies.loss_scale import LossScale
from trainbus.trainer.training_state import State, StateEntries, local_entries
from trainbus.trainer.world import World


class DDPStrategy(Strategy):
    """Every rank holds everything. The step is the exact mean over the global batch for every slicing."""

    def __init__(self, task: Task, model: nn.Module, training: Training, world: World) -> None:
        self._world = world
        self.leaf_count, self.leaves = world.size, range(world.rank, world.rank + 1)
        self.model = model.to(world.device)
        self.optimizer = task.optimizer(self.model)
        self._parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._scale = LossScale(training.precision == "fp16")
        module = LossModule(task, self.model, training.precision, world.device)
        self._ddp: DistributedDataParallel | None = None
        if world.size > 1:
            self._ddp = DistributedDataParallel(
                module, gradient_as_bucket_view=True, find_unused_parameters=task.find_unused_parameters
            )
        self._forward = self._ddp or module

    def backward(
        self,
        batch: Any | None,
        weight: float,
        *,
        leaf: int,
        first: bool,
        last: bool,
        on_loss: Callable[[Tensor], None] = ignore,
    ) -> Tensor:
        with nullcontext() if last or self._ddp is None else self._ddp.no_sync():
            loss: Tensor = self._forward(batch) * weight
            on_loss(loss.detach())
            # DDP divides the sum over the ranks by their number; our weights already sum to 1.
            (loss * (self._world.size * self._scale.scale)).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def step(self, clip_norm: float | None) -> StepResult:
        taken = True
        if self._scale.enabled:
            gradients = [p.grad for p in self._parameters if p.grad is not None]
            torch._foreach_mul_(gradients, 1.0 / self._scale.scale)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, float("inf") if clip_norm is None else clip_norm)
        if self._scale.enabled:
            taken = self._scale.accept(float(norm))
        if taken:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(norm.detach().double(), skipped=not taken)

    def sync_buffers(self) -> None:
        if self._world.size > 1:
            for buffer in self.model.buffers():
                dist.broadcast(buffer, src=0)

    @property
    def holds_whole_state(self) -> bool:
        return True

    def state_entries(self, ema: Mapping[str, Tensor] | None = None) -> StateEntries:
        optimizer = packing.pack(self.optimizer, self.model, copy=False)
        tensors = [
            *local_entries("model", self.model.state_dict()),
            *local_entries("optimizer", optimizer.tensors),
            *local_entries("ema", ema or {}),
        ]
        return StateEntries(tensors, optimizer.values, optimizer.groups, self._scale.state())

    def load_state(self, state: State) -> None:
        if state.model:
            self.model.load_state_dict(state.model)
        packing.unpack(state.optimizer, self.optimizer, self.model)
        self._scale.load(state.scaler)
