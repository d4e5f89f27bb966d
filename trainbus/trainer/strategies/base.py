"""The interface of a strategy: how a step is spread over the ranks.

A step is made of ``leaf_count`` leaves: equal slices of the global batch. In exact mode they are the run's logical
ranks, for every number of processes; in fast mode each process is one. Everything about a leaf (its samples,
its micro-batches, its random numbers) is a function of the step and the leaf only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainbus.task import Task, TaskError
from trainbus.trainer.training_state import State, StateEntries

#: The type that autocast computes in; weights, gradients and optimizer state keep the type of the task's model.
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class StepResult:
    #: Norm of the whole gradient before clipping, shape ``[]``, float64, the same on every rank.
    grad_norm: Tensor
    #: The gradient overflowed in fp16: the weights stay, the loss scale went down. The step counts all the same.
    skipped: bool = False


def ignore(loss: Tensor) -> None:
    """Do nothing with a loss."""


class Strategy(ABC):
    """Gradients, steps and state, for one way of spreading them over the ranks."""

    #: The user's own module, unwrapped.
    model: nn.Module
    #: The optimizer whose groups a schedule may change.
    optimizer: Optimizer
    #: Leaves of a step over all ranks, and those that this rank computes, in this order.
    leaf_count: int
    leaves: range

    @abstractmethod
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
        """Add ``weight`` times the gradient of the batch's mean loss; return the weighted loss (shape ``[]``).

        The weights of all micro-batches of all leaves sum to 1 in a step. The trainer calls it at least once for each
        of ``leaves``, in order, with None where there are no samples. ``first`` and ``last`` are of the leaf's
        micro-batches. ``on_loss`` gets the weighted loss before this call sends any gradient to another rank.
        """

    @abstractmethod
    def step(self, clip_norm: float | None) -> StepResult:
        """Update the weights and clear the gradients."""

    @abstractmethod
    def state_entries(self, ema: Mapping[str, Tensor] | None = None) -> StateEntries:
        """List the whole training state; called on every rank. ``ema`` is shaped like ``parameters_for_ema()``."""

    @abstractmethod
    def load_state(self, state: State) -> None:
        """Load a whole state; called on every rank with the same one. No ``model`` leaves weights as they are."""

    @property
    @abstractmethod
    def holds_whole_state(self) -> bool:
        """Whether this rank can list and fetch the whole state without any other rank."""

    def discard_unfinished_step(self) -> None:  # noqa: B027
        """Undo what an unfinished step has changed, without any other rank; weights change in ``step`` alone."""

    def sync_buffers(self) -> None:  # noqa: B027
        """Make buffers (BatchNorm statistics) the same on every rank, so that what is measured is what is saved."""

    def parameters_for_ema(self) -> dict[str, Tensor]:
        """Return this rank's part of the trained weights by name: what a moving average follows."""
        return {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}

    def load_ema(self, ema: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
        """Copy whole saved tensors into local ones that are shaped like ``parameters_for_ema()``."""
        for name, tensor in ema.items():
            tensor.copy_(saved[name])


class LossModule(nn.Module):
    """The task's loss as a module, so that DDP and DeepSpeed see one forward.

    The task gets its own model, not a wrapper, and may use its attributes.
    """

    def __init__(self, task: Task, model: nn.Module, precision: str, device: torch.device) -> None:
        super().__init__()
        self.model = model
        self._task = task
        self._dtype = AUTOCAST.get(precision)
        self._device_type = device.type

    def forward(self, batch: Any | None) -> Tensor:
        if batch is None:
            # A rank without samples still takes part in the sum of the gradients, with zeros.
            parts = [parameter.sum() * 0.0 for parameter in self.model.parameters() if parameter.requires_grad]
            return torch.stack([part.float() for part in parts]).sum()
        with torch.autocast(self._device_type, dtype=self._dtype, enabled=self._dtype is not None):
            loss = self._task.loss(self.model, batch)
        if not isinstance(loss, Tensor) or loss.shape != ():
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise TaskError(f"{type(self._task).__name__}.loss() must return a scalar tensor (a mean), not {shape}")
        return loss.float()
