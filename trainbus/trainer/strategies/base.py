"""The interface of a strategy: how a step is spread over the ranks.

A step is made of ``leaf_count`` leaves: equal slices of the global batch. In exact mode they are the run's logical
ranks, for every number of processes; in fast mode each process is one. Everything about a leaf (its samples,
its micro-batches, its random numbers) is a function of the step and the leaf only.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from contracts.spec.training import Training
from contracts.tensor_files import TensorKind
from trainbus.task import Task, TaskError
from trainbus.trainer import optimizer_state as packing
from trainbus.trainer.exact.tree import divide_leaves
from trainbus.trainer.optimizer_state import OptimizerState
from trainbus.trainer.readable_tensor import ReadableTensor
from trainbus.trainer.training_state import State, StateEntries, StateEntry, local_entries
from trainbus.trainer.world import World

#: The type that autocast computes in; weights, gradients and optimizer state keep the type of the task's model.
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: The loss scale of fp16, as torch.amp.GradScaler has it.
INITIAL_SCALE, GROWTH, BACKOFF, GROWTH_INTERVAL = 2.0**16, 2.0, 0.5, 2000
#: Below this the loss itself overflows, and a smaller scale does not help.
MIN_SCALE = 2.0**-14


@dataclass(frozen=True, slots=True)
class StepResult:
    #: Norm of the whole gradient before clipping, shape ``[]``, float64, the same on every rank.
    grad_norm: Tensor
    #: The gradient overflowed in fp16: the weights stay, the loss scale went down. The step counts all the same.
    skipped: bool = False


class Strategy(ABC):
    """Gradients, steps and state, for one way of spreading them over the ranks."""

    #: The optimizer whose groups a schedule may change.
    optimizer: Optimizer

    def __init__(self, task: Task, model: nn.Module, training: Training, world: World) -> None:
        """Prepare a step. ``model`` is on the rank's device and has its weights."""
        self._world = world
        #: The user's own module, unwrapped.
        self.model = model
        #: Leaves of a step over all ranks, and those that this rank computes, in this order.
        self.leaf_count = training.logical_ranks or world.size
        self.leaves = divide_leaves(self.leaf_count, world.size)[world.rank]
        self._leaf_weight = 0.0
        self._loss: nn.Module = LossModule(task, self.model, training.precision, world.device)
        self._scale = LossScale(training.precision == "fp16")

    # --- a step ---------------------------------------------------------------------------------

    def begin_step(self, *, has_empty: bool, counted: Any | None = None) -> None:  # noqa: B027
        """Prepare for the step's ``backward`` calls; every rank calls it.

        Args:
            has_empty: a micro-batch has no samples that count, on this rank or another; the same on every rank.
            counted: a batch of this rank with samples that count, on the host; None if it has none.
        """

    def backward(
        self,
        batch: Any | None,
        weight: float,
        *,
        leaf: int,
        first: bool,
        last: bool,
        on_loss: Callable[[Tensor], None] = lambda loss: None,
    ) -> Tensor:
        """Add ``weight`` times the gradient of the batch's mean loss; return the weighted loss (shape ``[]``).

        The weights of all micro-batches of all leaves sum to 1 in a step. The trainer calls it at least once for each
        of ``leaves``, in order, with None where there are no samples. ``first`` and ``last`` are of the leaf's
        micro-batches. ``on_loss`` gets the weighted loss before this call sends any gradient to another rank.
        """
        self._leaf_weight = weight if first else self._leaf_weight + weight
        with self._micro_batch(leaf, first=first, last=last):
            loss: Tensor = self._forward(batch) * weight
            on_loss(loss.detach())
            self._propagate(loss)
        return loss.detach()

    @abstractmethod
    def _micro_batch(self, leaf: int, *, first: bool, last: bool) -> AbstractContextManager[None]:
        """Return a context for the forward and backward pass of one micro-batch."""

    def _forward(self, batch: Any | None) -> Tensor:
        if batch is None:  # no weight has a part in this loss
            return torch.zeros((), device=self._world.device, requires_grad=True)
        loss: Tensor = self._loss(batch)
        return loss

    def _propagate(self, loss: Tensor) -> None:
        (loss * self._scale.scale).backward()  # type: ignore[no-untyped-call]

    @abstractmethod
    def step(self, clip_norm: float | None) -> StepResult:
        """Update the weights and clear the gradients."""

    def discard_unfinished_step(self) -> None:  # noqa: B027
        """Undo what an unfinished step has changed, without any other rank; weights change in ``step`` alone."""

    def sync_buffers(self) -> None:
        """Make buffers (BatchNorm statistics) the same on every rank, so that what is measured is what is saved."""
        if self._world.size > 1:
            # A copy each: what does not arrive whole must not get into a state that survivors save.
            sent = [buffer.clone() for buffer in self.model.buffers()]
            for copy in sent:
                dist.broadcast(copy, src=0)
            self._world.confirm_arrival()
            for buffer, copy in zip(self.model.buffers(), sent, strict=True):
                buffer.copy_(copy)

    # --- state ----------------------------------------------------------------------------------

    @property
    @abstractmethod
    def holds_whole_state(self) -> bool:
        """Whether this rank can list and fetch the whole state without any other rank."""

    def copied_tensors(self) -> list[Tensor]:
        """Return what every rank has a copy of, to the bit, in an order that is the same on every rank."""
        return []

    def _copies_of(self, state: OptimizerState[Tensor]) -> list[Tensor]:
        """Return the weights and what of the optimizer's state this rank has."""
        weights = [parameter.detach() for parameter in self.model.parameters()]
        return [*weights, *(state.tensors[name] for name in sorted(state.tensors))]

    def state_entries(self, ema: Mapping[str, Tensor] | None = None) -> StateEntries:
        """List the whole training state; called on every rank. ``ema`` is shaped like ``parameters_for_ema()``."""
        optimizer, state = self._optimizer_entries()
        tensors = [*self._entries("model", self.model.state_dict()), *optimizer, *self._entries("ema", ema or {})]
        return StateEntries(tensors, state.values, state.groups, self._scale.state())

    def _entries(self, kind: TensorKind, tensors: Mapping[str, Tensor]) -> list[StateEntry]:
        return local_entries(kind, tensors)

    def _optimizer_entries(self) -> tuple[list[StateEntry], OptimizerState[Tensor]]:
        """Return the optimizer's tensors as entries, and the state with everything else."""
        state = packing.pack(self.optimizer, self.model)
        return self._entries("optimizer", state.tensors), state

    def load_state(self, state: State[ReadableTensor]) -> None:
        """Load all of a whole state but the weights; called on every rank with the same one."""
        self._load_optimizer(state.optimizer)
        self._scale.load(state.scaler)

    def _load_optimizer(self, state: OptimizerState[ReadableTensor]) -> None:
        packing.unpack(state, self.optimizer, self.model)

    def parameters_for_ema(self) -> dict[str, Tensor]:
        """Return this rank's part of the trained weights by name: what a moving average follows."""
        return {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}

    def load_ema(self, ema: Mapping[str, Tensor], saved: Mapping[str, ReadableTensor]) -> None:
        """Load whole saved tensors into local ones that are shaped like ``parameters_for_ema()``."""
        for name, tensor in ema.items():
            tensor.copy_(saved[name].read())


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
            trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            return torch.cat([parameter.reshape(-1)[:1].float() * 0.0 for parameter in trained]).sum()
        with torch.autocast(self._device_type, dtype=self._dtype, enabled=self._dtype is not None):
            loss = self._task.loss(self.model, batch)
        if not isinstance(loss, Tensor) or loss.shape != ():
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise TaskError(f"{type(self._task).__name__}.loss() must return a scalar tensor (a mean), not {shape}")
        return loss.float()


class LossScaleUnderflow(Exception):
    """The gradient overflows at any scale."""


class LossScale:
    """The loss scale of fp16: it doubles after GROWTH_INTERVAL good steps and halves at a bad one.

    It is a power of two, so that scaling is exact, and the same on every device and for any number of ranks.
    With ``enabled=False`` it stays 1. See "Mixed Precision Training" (Micikevicius et al., 2018), 3.2.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.scale = INITIAL_SCALE if enabled else 1.0
        self._good_steps = 0

    def accept(self, norm: Tensor | float) -> bool:
        """Return whether a step whose gradient has this norm may be taken, and set the next step's scale.

        Only with ``enabled`` does it read the norm, which waits for the device.
        """
        if not self.enabled:
            return True
        if math.isfinite(norm):
            self._good_steps += 1
            if self._good_steps == GROWTH_INTERVAL:
                self.scale, self._good_steps = self.scale * GROWTH, 0
            return True
        self.scale, self._good_steps = self.scale * BACKOFF, 0
        if self.scale < MIN_SCALE:
            raise LossScaleUnderflow(
                "the gradient overflows fp16 at any loss scale: lower the learning rate or use bf16"
            )
        return False

    def state(self) -> dict[str, Any] | None:
        return {"scale": self.scale, "good_steps": self._good_steps} if self.enabled else None

    def load(self, state: dict[str, Any] | None) -> None:
        if self.enabled and state is not None:
            self.scale, self._good_steps = float(state["scale"]), int(state["good_steps"])
