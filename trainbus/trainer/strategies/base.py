"""What the training loop asks of a strategy."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainbus.task import Task, TaskError
from trainbus.trainer.optimizer_state import OptimizerState


class Strategy(Protocol):
    """Gradients, steps and state, for one way of spreading them over the ranks."""

    #: The user's own module, unwrapped.
    model: nn.Module
    #: The user's optimizer, whose groups a schedule may change.
    optimizer: Optimizer

    def backward(self, batch: Any | None, weight: float, *, last: bool) -> Tensor:
        """Add ``weight`` times the gradient of the batch's mean loss; return the weighted loss (shape ``[]``).

        The weights of all micro-batches on all ranks sum to 1 in a step. Every rank calls this equally often,
        with None where it has no samples. ``last`` marks the step's last call.
        """
        ...

    def step(self, clip_norm: float | None) -> Tensor:
        """Update the weights, clear the gradients, and return the global gradient norm before clipping."""
        ...

    def sync_buffers(self) -> None:
        """Give every rank rank 0's buffers (BatchNorm statistics): measured is then what is saved."""
        ...

    def model_state(self) -> dict[str, Tensor]:
        """Return full weights and buffers on the host of rank 0; called on every rank."""
        ...

    def optimizer_state(self) -> OptimizerState:
        """Return the full optimizer state on the host of rank 0; called on every rank."""
        ...

    def load_optimizer_state(self, state: OptimizerState) -> None:
        """Take up a full optimizer state; called on every rank with the same one."""
        ...


class LossModule(nn.Module):
    """The task's loss as a module, so that DDP and DeepSpeed see one forward whatever the task does inside.

    The task is handed its own model, not a wrapper, and may use its attributes.
    """

    def __init__(self, task: Task, model: nn.Module, precision: str, device: torch.device) -> None:
        super().__init__()
        self.model = model
        self._task = task
        self._bf16 = precision == "bf16"
        self._device_type = device.type

    def forward(self, batch: Any | None) -> Tensor:
        if batch is None:
            # A rank without samples still takes part in the sum of the gradients, with zeros.
            parts = [parameter.sum() * 0.0 for parameter in self.model.parameters() if parameter.requires_grad]
            return torch.stack([part.float() for part in parts]).sum()
        with torch.autocast(self._device_type, dtype=torch.bfloat16, enabled=self._bf16):
            loss = self._task.loss(self.model, batch)
        if not isinstance(loss, Tensor) or loss.shape != ():
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise TaskError(f"{type(self._task).__name__}.loss() must return a scalar tensor (a mean), not {shape}")
        return loss.float()


def host_copy(model: nn.Module) -> dict[str, Tensor]:
    """Copy weights and buffers to the host, each tensor on its own (tied ones too, which safetensors wants)."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in model.state_dict().items()}
