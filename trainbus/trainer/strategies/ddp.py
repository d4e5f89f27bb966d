"""DistributedDataParallel in fast mode, and a single process when there is one rank."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from contracts.spec.training import Training
from trainbus.task import Task, TaskError
from trainbus.trainer import optimizer_state as packing
from trainbus.trainer.chained_optimizer import make_optimizer
from trainbus.trainer.strategies.base import StepResult, Strategy
from trainbus.trainer.world import World


class DDPStrategy(Strategy):
    """Every rank holds everything. The step is the exact mean over the global batch for every slicing."""

    holds_whole_state = True

    def __init__(self, task: Task, model: nn.Module, training: Training, world: World) -> None:
        super().__init__(task, model, training, world)
        self.optimizer = make_optimizer(task, self.model)
        self._parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._finds_unused = task.find_unused_parameters
        self._ddp: DistributedDataParallel | None = None
        if world.size > 1:
            self._loss = self._ddp = DistributedDataParallel(
                self._loss, gradient_as_bucket_view=True, find_unused_parameters=task.find_unused_parameters
            )

    def _micro_batch(self, leaf: int, *, first: bool, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last or self._ddp is None else self._ddp.no_sync()

    def _forward(self, batch: Any | None) -> Tensor:
        loss: Tensor = self._loss(batch)  # also without samples: DDP communicates in its own forward and backward
        return loss

    def _propagate(self, loss: Tensor) -> None:
        # DDP divides the sum over the ranks by their number; our weights already sum to 1.
        (loss * (self._world.size * self._scale.scale)).backward()  # type: ignore[no-untyped-call]

    def copied_tensors(self) -> list[Tensor]:
        # Each rank has buffers of its own samples until they are saved.
        return self._copies_of(packing.pack(self.optimizer, self.model))

    def step(self, clip_norm: float | None) -> StepResult:
        self._world.confirm_arrival()
        if self._ddp is not None and not self._finds_unused:
            self._check_used()
        if self._scale.enabled:
            gradients = [p.grad for p in self._parameters if p.grad is not None]
            torch._foreach_mul_(gradients, 1.0 / self._scale.scale)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, float("inf") if clip_norm is None else clip_norm)
        if taken := self._scale.accept(norm):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(norm.detach().double(), skipped=not taken)

    def _check_used(self) -> None:
        """Raise ``TaskError`` if DDP still waits for the gradient of a parameter that the loss does not use."""
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and parameter.grad is None:
                raise TaskError(
                    f"the parameter {name!r} has no part in the loss: set find_unused_parameters = True in the task, "
                    "or the parameter's requires_grad to False"
                )
