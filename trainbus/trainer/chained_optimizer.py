"""Several optimizers of one model as one, such as Muon for matrices and AdamW for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from trainbus.task import Task, TaskError


class ChainedOptimizer(Optimizer):
    """Has the parameter groups of all, one optimizer after the other, and steps them in this order.

    The groups and the state are those of the optimizers themselves, so a schedule or a checkpoint sees one optimizer.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})
        self.optimizers = list(optimizers)
        for optimizer in optimizers:
            self.state.update(optimizer.state)
            optimizer.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step each optimizer; a closure is not supported."""
        for optimizer in self.optimizers:
            optimizer.step()


def make_optimizer(task: Task, model: nn.Module) -> Optimizer:
    """Return the task's optimizer, or its several ones as one.

    Raises:
        TaskError: it returns something else, or two of its optimizers have a parameter in common.
    """
    found = task.optimizer(model)
    if isinstance(found, Optimizer):
        return found
    name = f"{type(task).__name__}.optimizer()"
    if not found or not all(isinstance(each, Optimizer) for each in found):
        raise TaskError(f"{name} must return a torch.optim.Optimizer, or a list of them, not {type(found).__name__}")
    try:
        return ChainedOptimizer(found)
    except ValueError as error:
        raise TaskError(f"{name}: {error}") from error


def list_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Return the task's own optimizers."""
    return optimizer.optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
