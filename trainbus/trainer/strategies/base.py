"""What the training loop asks of a strategy.

A step is made of ``leaf_count`` leaves: equal slices of the global batch. In exact mode they are the run's logical
ranks, whatever the number of processes is; in fast mode each process is one. Everything about a leaf (its samples,
its micro-batches, its random numbers) is a function of the step and the leaf alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainbus.task import Task, TaskError
from trainbus.trainer.optimizer_state import OptimizerState

#: What autocast computes in; weights, gradients and optimizer state are those of the model as the task made it.
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class StepResult:
    #: Norm of the whole gradient before clipping, shape ``[]``, float64, the same on every rank.
    grad_norm: Tensor
    #: The gradient was no number in fp16: the weights stay, the loss scale went down. The step counts all the same.
    skipped: bool = False


@dataclass(slots=True)
class State:
    """Whole tensors by name: all of them when loaded; one rank's share, disjoint from the others', when saved.

    Saved tensors are the live ones where the rank has them, on its device and not copied: they may share memory
    (tied weights), and the next step changes them.
    """

    #: Weights and buffers under the names of ``model.state_dict()``.
    model: dict[str, Tensor] = field(default_factory=dict)
    #: When saved, ``values`` and ``groups`` are complete on rank 0 and empty elsewhere.
    optimizer: OptimizerState = field(default_factory=OptimizerState)
    #: The moving average of the weights, by parameter name.
    ema: dict[str, Tensor] = field(default_factory=dict)
    #: fp16's loss scale; JSON. On every rank.
    scaler: dict[str, Any] | None = None


class Strategy(Protocol):
    """Gradients, steps and state, for one way of spreading them over the ranks."""

    #: The user's own module, unwrapped.
    model: nn.Module
    #: The optimizer whose groups a schedule may change.
    optimizer: Optimizer
    #: Leaves of a step over all ranks, and those that this rank computes, in this order.
    leaf_count: int
    leaves: range

    def backward(self, batch: Any | None, weight: float, *, leaf: int, first: bool, last: bool) -> Tensor:
        """Add ``weight`` times the gradient of the batch's mean loss; return the weighted loss (shape ``[]``).

        The weights of all micro-batches of all leaves sum to 1 in a step. Called at least once for each of
        ``leaves``, in order, with None where there are no samples. ``first`` and ``last`` are of the
        leaf's micro-batches.
        """
        ...

    def step(self, clip_norm: float | None) -> StepResult:
        """Update the weights and clear the gradients."""
        ...

    def sync_buffers(self) -> None:
        """Make buffers (BatchNorm statistics) the same on every rank: measured is then what is saved."""
        ...

    def parameters_for_ema(self) -> dict[str, Tensor]:
        """Return this rank's part of the trained weights by name: what a moving average is kept of."""
        ...

    def load_ema(self, ema: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
        """Copy whole saved tensors into local ones that are shaped like ``parameters_for_ema()``."""
        ...

    def state(self, ema: Mapping[str, Tensor] | None = None) -> State:
        """Return the tensors that this rank is to save, about as many bytes on each; called on every rank.

        ``ema`` is shaped like ``parameters_for_ema()``.
        """
        ...

    def survivor_state(self, ema: Mapping[str, Tensor] | None = None) -> State | None:
        """Return the whole state after the last completed step, of this rank alone, or None if it has not all of it.

        Communicates with nobody, and may be called when a collective has failed in the middle of a step.
        """
        ...

    def load_state(self, state: State) -> None:
        """Take up a whole state; called on every rank with the same one. No ``model`` leaves weights as they are."""
        ...


class LossModule(nn.Module):
    """The task's loss as a module, so that DDP and DeepSpeed see one forward whatever the task does inside.

    The task is handed its own model, not a wrapper, and may use its attributes.
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


def shares(sizes_bytes: Mapping[str, int], parts: int) -> list[list[str]]:
    """Divide names among ``parts`` owners by bytes, alike on every rank: largest first, each to whoever has least."""
    owned: list[list[str]] = [[] for _ in range(parts)]
    load = [0] * parts
    for name in sorted(sizes_bytes, key=lambda name: (-sizes_bytes[name], name)):
        least = min(range(parts), key=lambda part: (load[part], part))
        owned[least].append(name)
        load[least] += sizes_bytes[name]
    return owned


def share_of(state: State, parts: int, part: int) -> State:
    """Return one owner's share of a state that this rank holds whole."""
    kinds = {"model": state.model, "optimizer": state.optimizer.tensors, "ema": state.ema}
    sizes = {f"{kind}/{name}": tensor.nbytes for kind, tensors in kinds.items() for name, tensor in tensors.items()}
    mine = set(shares(sizes, parts)[part])
    model, optimizer, ema = (
        {name: tensor for name, tensor in tensors.items() if f"{kind}/{name}" in mine}
        for kind, tensors in kinds.items()
    )
    values, groups = (state.optimizer.values, state.optimizer.groups) if part == 0 else ({}, [])
    return State(model, OptimizerState(optimizer, values, groups), ema, state.scaler)
