"""Exact mode with whole weights on every rank: ``ddp``, and ``zero1`` with the optimizer sharded over the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from contracts.spec.training import Training
from trainbus.task import Task, TaskError
from trainbus.trainer import optimizer_state as packing
from trainbus.trainer.chained_optimizer import make_optimizer
from trainbus.trainer.environment import enable_determinism
from trainbus.trainer.exact.buffer_sync import BufferSync
from trainbus.trainer.exact.gradient_tree import GradientTree
from trainbus.trainer.exact.layout import Slot, gradient_of, in_memory_order, is_dense
from trainbus.trainer.exact.norm import clip_factor, piece_norms, total_norm
from trainbus.trainer.exact.zero1 import ShardedOptimizer
from trainbus.trainer.optimizer_state import OptimizerState
from trainbus.trainer.readable_tensor import ReadableTensor
from trainbus.trainer.strategies.base import StepResult, Strategy
from trainbus.trainer.training_state import StateEntry
from trainbus.trainer.world import World


class ExactDDPStrategy(Strategy):
    """A step is the sum over V leaves along a fixed tree: the same bits for any number of processes up to V."""

    def __init__(self, task: Task, model: nn.Module, training: Training, world: World) -> None:
        assert training.logical_ranks is not None
        if world.size > training.logical_ranks:
            raise TaskError(f"{world.size} ranks are more than training.logical_ranks ({training.logical_ranks})")
        enable_determinism()
        super().__init__(task, model, training, world)
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        for _, parameter in named:
            if not is_dense(parameter):
                parameter.data = parameter.data.contiguous()
        self._named = dict(named)
        sharded = training.strategy == "zero1"
        self._tree = GradientTree(
            list(self._named.values()), list(self._named), self.leaf_count, world, sharded=sharded
        )
        # By parameter, from the first registered on: the order of the sum must not depend on buckets.
        slots = sorted((s for bucket in self._tree.buckets for s in bucket.slots), key=lambda slot: slot.index)
        self._slots: list[Slot] = slots
        self.optimizer = make_optimizer(task, self.model)
        self._sharded = ShardedOptimizer(self.optimizer, self.model, self._named, self._tree) if sharded else None
        self._buffers = BufferSync(self.model, self.leaf_count, world, training.buffers)

    @contextmanager
    def _micro_batch(self, leaf: int, *, first: bool, last: bool) -> Iterator[None]:
        self._tree.begin_micro_batch(leaf, first=first, last=last)
        yield
        self._tree.end_micro_batch(leaf, last=last)
        if last:
            self._buffers.leaf_done(leaf, self._leaf_weight)

    def step(self, clip_norm: float | None) -> StepResult:
        self._tree.finish_step()
        self._buffers.step_done()
        self._world.confirm_arrival()
        unscale = 1.0 / self._scale.scale
        norm = self._norm()
        taken = self._scale.accept(norm)
        norm = norm * unscale
        self._buffers.commit()
        if taken:
            self._multiply(clip_factor(norm, clip_norm), unscale)
            if self._sharded is not None:
                self._sharded.step()
            else:
                self.optimizer.step()
        self._tree.clear_gradients()
        return StepResult(norm, skipped=not taken)

    def _norm(self) -> Tensor:
        if self._sharded is not None:
            return total_norm(self._sharded.piece_norms())
        pieces = []
        for slot in self._slots:
            flat = in_memory_order(gradient_of(slot.parameter))
            pieces += [flat[piece.start : piece.stop] for piece in slot.pieces()]
        return total_norm(piece_norms(pieces))

    def _multiply(self, factor: Tensor | None, unscale: float) -> None:
        if self._sharded is not None:
            gradients = self._sharded.gradients()
        elif self._tree.flat:
            gradients = self._tree.flats
        else:
            gradients = [parameter.grad for parameter in self._named.values() if parameter.grad is not None]
        if unscale != 1.0:
            torch._foreach_mul_(gradients, unscale)
        if factor is not None and gradients:
            torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))

    def sync_buffers(self) -> None:
        """Do nothing: buffers are the same on every rank after each step."""

    @property
    def holds_whole_state(self) -> bool:
        return self._sharded is None or self._world.size == 1

    def copied_tensors(self) -> list[Tensor]:
        sharded = self._sharded is not None
        state = OptimizerState[Tensor]() if sharded else packing.pack(self.optimizer, self.model)
        return [*self._copies_of(state), *(buffer.detach() for buffer in self.model.buffers())]

    def discard_unfinished_step(self) -> None:
        self._buffers.roll_back()

    def _optimizer_entries(self) -> tuple[list[StateEntry], OptimizerState[Tensor]]:
        return super()._optimizer_entries() if self._sharded is None else self._sharded.state_entries()

    def _load_optimizer(self, state: OptimizerState[ReadableTensor]) -> None:
        super()._load_optimizer(state) if self._sharded is None else self._sharded.load(state)
