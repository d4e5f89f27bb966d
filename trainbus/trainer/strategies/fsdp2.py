"""FSDP2: weights, gradients and optimizer state sharded over the ranks; exact with logical ranks, plain without."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor

from contracts.spec.training import Training
from contracts.tensor_files import TensorKind
from trainbus.task import Task
from trainbus.trainer.chained_optimizer import make_optimizer
from trainbus.trainer.checkpoint.weights import WeightSource, load_except
from trainbus.trainer.deferred_model import DeferredModel
from trainbus.trainer.exact.buffer_sync import BufferSync
from trainbus.trainer.exact.exchange import BufferPool, PeerLink, TreeExchange
from trainbus.trainer.exact.norm import clip_factor, global_norm
from trainbus.trainer.exact.tree import LeafStep, SumStack, TreePlan
from trainbus.trainer.exact.zero1 import check_elementwise
from trainbus.trainer.optimizer_state import OptimizerState, StateMismatch, read_whole, unpack
from trainbus.trainer.readable_tensor import MemoryTensor, ReadableTensor
from trainbus.trainer.strategies.base import StepResult, Strategy
from trainbus.trainer.strategies.fsdp_units import find_fsdp_units
from trainbus.trainer.training_state import StateEntries, StateEntry
from trainbus.trainer.world import World


class FSDP2Strategy(Strategy):
    """Each rank holds a shard, by rows, of every weight, its gradient and its optimizer state.

    In exact mode the reduce-scatter adds the leaves up along the fixed tree, and the norm is an exact sum, so that the
    weights are the same to the bit for any number of ranks. The model must be used as ``model(...)`` in the task.
    """

    def __init__(
        self, task: Task, model: DeferredModel, training: Training, world: World, find_weights: WeightSource
    ) -> None:
        """Shard ``model`` and load its weights, where ``find_weights`` returns them."""
        super().__init__(task, shard_model(task, model, world, find_weights), training, world)
        exact = training.logical_ranks is not None
        self._plan = TreePlan(self.leaf_count, world.size, world.rank)
        self._backward = BackwardState(self._plan)
        self._buffers = BufferSync(self.model, self.leaf_count, world, training.buffers)
        #: Gathers what is saved.
        self._link = PeerLink(world.device)
        #: The sums of a single rank, for which FSDP2 needs no reduce-scatter; then the whole gradient.
        self._stack: SumStack[list[Tensor]] = SumStack(_add_in_place)
        self._gradients: list[Tensor] | None = None
        self._sharded = _list_sharded(self.model)
        for module in self._sharded:
            # Sums, not means: the weights of all micro-batches add up to 1.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        self._sharded[0].set_reduce_scatter_unused_params(True)
        if exact:
            for number, module in enumerate(self._sharded):
                module.set_custom_reduce_scatter(TreeReduceScatter(self._backward, number))
        #: Ranks with fewer leaves take part in fewer gatherings of the weights, so those then stay for the whole step.
        self._keeps_weights = self.leaf_count % world.size != 0
        #: Whether this step's collectives run outside of the forward and backward passes.
        self._is_explicit = False
        #: Another rank may use other modules, whose collectives this rank then runs too.
        self._always_explicit = task.find_unused_parameters
        self.optimizer = make_optimizer(task, self.model)
        if exact:
            check_elementwise(self.optimizer, training.strategy)
        # What was gathered for a measurement must not outlive it: the weights may be others when training goes on.
        self.model.register_forward_hook(self._after_forward)
        self._parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]

    def begin_step(self, *, has_empty: bool, counted: Any | None = None) -> None:
        """Gather all weights here, for the whole step, where not every rank has a forward pass that would gather them.

        The collectives of such a step do not depend on what the passes do: all weights are gathered before the first
        pass, and a leaf's gradients are reduced after its last, module by module in the order of the model.
        """
        self._is_explicit = has_empty or self._always_explicit
        for module in self._sharded[1:]:
            module.set_reshard_after_forward(not (self._keeps_weights or self._is_explicit), recurse=False)
        if self._is_explicit:
            self._root_state._lazy_init()
            for module in self._sharded:
                module.unshard()

    @contextmanager
    def _micro_batch(self, leaf: int, *, first: bool, last: bool) -> Iterator[None]:
        root = self._sharded[0]
        self._backward.leaf = self._plan.steps[leaf]
        root.set_requires_gradient_sync(last and not self._is_explicit)
        if self._keeps_weights or self._is_explicit:
            root.set_reshard_after_backward(last and leaf == self.leaves[-1] and not self._is_explicit)
        yield
        if last:
            if self._is_explicit:
                root.set_requires_gradient_sync(True)
                root.set_reshard_after_backward(leaf == self.leaves[-1])
                # What FSDP2 runs at the end of a backward pass, for modules that took no part in it.
                self._root_state._root_post_backward_final_callback()
            self._buffers.leaf_done(leaf, self._leaf_weight)
            if self._world.size == 1:
                self._gradients = self._stack.push(self._plan.steps[leaf], self._local_gradients())
                self._clear_gradients()
            elif leaf != self.leaves[-1]:
                # What the reduce-scatter hands out before the last leaf is no sum yet.
                self._clear_gradients()

    def step(self, clip_norm: float | None) -> StepResult:
        self._backward.finish()
        self._buffers.step_done()
        self._world.confirm_arrival()
        if self._gradients is not None:
            for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
                parameter.grad = _like(parameter, gradient)
            self._gradients = None
        gradients = self._local_gradients()
        if self._scale.enabled:
            torch._foreach_mul_(gradients, 1.0 / self._scale.scale)
        norm = global_norm(gradients, self._world.device, reduce=self._world.size > 1)
        if taken := self._scale.accept(norm):
            if (factor := clip_factor(norm, clip_norm)) is not None:
                torch._foreach_mul_(gradients, factor.to(torch.float32))
            self.optimizer.step()
        self._buffers.commit()
        self._clear_gradients()
        return StepResult(norm, skipped=not taken)

    @property
    def _root_state(self) -> FSDPState:
        return self._sharded[0]._get_fsdp_state()

    def _local_gradients(self) -> list[Tensor]:
        """Return this rank's shard of the gradient of each trained parameter: zeros where no pass has used it."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [_local(parameter.grad) for parameter in self._parameters if parameter.grad is not None]

    def _clear_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _after_forward(self, *_: Any) -> None:
        if not torch.is_grad_enabled():
            self._reshard()

    def _reshard(self) -> None:
        """Put the shards in place of gathered weights, which nothing that reads or writes the weights must meet."""
        for module in self._sharded:
            module.reshard()

    def sync_buffers(self) -> None:
        """Only reshard: buffers are the same on every rank after each step."""
        self._reshard()

    # -- state ---------------------------------------------------------------

    def parameters_for_ema(self) -> dict[str, Tensor]:
        self._reshard()
        return {name: _local(p.detach()) for name, p in self.model.named_parameters() if p.requires_grad}

    def load_ema(self, ema: Mapping[str, Tensor], saved: Mapping[str, ReadableTensor]) -> None:
        parameters = dict(self.model.named_parameters())
        for name, tensor in ema.items():
            tensor.copy_(_read_shard(saved[name], parameters[name]))

    @property
    def holds_whole_state(self) -> bool:
        return self._world.size == 1

    def state_entries(self, ema: Mapping[str, Tensor] | None = None) -> StateEntries:
        self._reshard()
        # The moving average is kept of local shards; its whole is shaped as the parameter.
        parameters = dict(self.model.named_parameters())
        return super().state_entries({name: _like(parameters[name], tensor) for name, tensor in (ema or {}).items()})

    def _entries(self, kind: TensorKind, tensors: Mapping[str, Tensor]) -> list[StateEntry]:
        return [self._entry(kind, name, tensor.detach()) for name, tensor in tensors.items()]

    def _entry(self, kind: TensorKind, name: str, tensor: Tensor) -> StateEntry:
        is_live = self._world.size == 1 or not isinstance(tensor, DTensor)
        return StateEntry(kind, name, tensor, partial(self._gather, tensor), is_live)

    def _gather(self, tensor: Tensor, owner: int) -> Callable[[], Tensor | None]:
        """Start to gather a sharded tensor on ``owner``; every rank calls it with its shard."""
        local = _local(tensor)
        if self._world.size == 1 or not isinstance(tensor, DTensor):
            return lambda: local
        if self._world.rank != owner:
            return self._link.start([(_as_bytes(local), owner)], [], 0)
        whole = local.new_empty(tensor.shape)
        spans = enumerate(_row_spans(tensor.shape[0], self._world.size))
        rows = {rank: whole[start:stop] for rank, (start, stop) in spans}
        rows.pop(owner).copy_(local)
        arrived = self._link.start([], [(_as_bytes(part), rank) for rank, part in rows.items()], 0)

        def wait() -> Tensor:
            arrived()
            return whole

        return wait

    def _load_optimizer(self, state: OptimizerState[ReadableTensor]) -> None:
        parameters = dict(self.model.named_parameters())
        for key, saved in state.tensors.items():
            if saved.shape and saved.shape != parameters[key.rpartition("/")[0]].shape:
                raise StateMismatch(f"optimizer state {key!r} has shape {tuple(saved.shape)}")
        unpack(state, self.optimizer, self.model, _read_sharded)


def _add_in_place(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    torch._foreach_add_(left, right)
    return left


def shard_model(
    task: Task,
    model: DeferredModel,
    world: World,
    find_weights: WeightSource,
    *,
    reshard_after_forward: bool | None = None,
) -> nn.Module:
    """Shard the blocks one by one, and the rest of the model as the root, and give each rank its rows of the weights.

    A rank holds its shards and one whole tensor at a time.

    Args:
        find_weights: returns what the model's tensors are loaded from; the others keep their initial values.
        reshard_after_forward: as ``fully_shard`` has it; True: also the root is not kept whole after its forward pass.

    Raises:
        StateMismatch: a tensor does not fit the model; nothing is sharded then.
    """
    module = model.module
    weights = find_weights(module)
    initial = dict(module.named_parameters())
    mesh = init_device_mesh(world.device.type, (world.size,))
    for unit in [*find_fsdp_units(task, module), module]:
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard_after_forward)
    # As ``to_empty`` does, which would give what has values new memory as well.
    module._apply(  # type: ignore[no-untyped-call]
        lambda tensor: torch.empty_like(tensor, device=world.device) if tensor.is_meta else tensor
    )
    saved = load_except(weights, module, lambda tensor: isinstance(tensor, DTensor))
    for name, parameter in module.named_parameters():
        if (found := saved.get(id(parameter))) is None and model.is_deferred(initial[name]):
            found = MemoryTensor(model.materialize(initial[name]))
        if found is not None:
            _local(parameter.detach()).copy_(_read_shard(found, parameter))
    return module


def _list_sharded(model: nn.Module) -> list[FSDPModule]:
    """Return the sharded modules, root first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(parameter: Tensor, local: Tensor) -> Tensor:
    """Return a local shard as a tensor sharded like ``parameter``."""
    if not isinstance(parameter, DTensor):
        return local
    shape, stride = parameter.shape, parameter.stride()
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _row_spans(rows: int, world_size: int) -> Iterator[tuple[int, int]]:
    """Which rows each rank has: equal numbers, and what is left to the last, as FSDP2 has it."""
    each = -(-rows // world_size)
    for rank in range(world_size):
        yield min(rank * each, rows), min((rank + 1) * each, rows)


def _read_shard(saved: ReadableTensor, parameter: Tensor) -> Tensor:
    """Return this rank's rows of a saved tensor that is shaped as the parameter, on the host."""
    if not isinstance(parameter, DTensor):
        return saved.read()
    mesh = parameter.device_mesh
    return saved.read_rows(*list(_row_spans(saved.shape[0], mesh.size()))[mesh.get_local_rank()])


def _read_sharded(saved: ReadableTensor, parameter: Tensor) -> Tensor:
    """Return a saved tensor of the parameter's state, sharded as the parameter is."""
    if not saved.shape:
        return read_whole(saved, parameter)
    return _like(parameter, _read_shard(saved, parameter).to(parameter.device))


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor's memory, flat: NCCL and gloo know fewer types than torch."""
    return tensor.view(-1).view(torch.uint8)


#: Exchanges that are under way at a time: one is sent while another one's sums arrive.
MAX_PENDING = 2


class BackwardState:
    """Which leaf is in backward now, and which exchanges are under way: one for all parameter groups of a model."""

    def __init__(self, plan: TreePlan) -> None:
        self.plan = plan
        self.leaf: LeafStep | None = None
        #: One for all groups: each would else keep buffers for the whole of its gradient.
        self.pool = BufferPool()
        self._pending: deque[TreeReduceScatter] = deque()

    def add_pending(self, exchange: TreeReduceScatter) -> None:
        """Note that an exchange has begun; finish the oldest one if too many are under way."""
        self._pending.append(exchange)
        if len(self._pending) > MAX_PENDING:
            self._pending.popleft().finish()

    def finish(self) -> None:
        """Finish the exchanges that are under way; to be called after the last backward of a step."""
        while self._pending:
            self._pending.popleft().finish()


class TreeReduceScatter(ReduceScatter):
    """Reduce-scatter of one parameter group along the fixed tree.

    FSDP2 calls it once for every leaf, with the leaf's gradient cut into a shard for each rank. The sums of the rank's
    own leaves stay here until its last leaf; then the ranks exchange the shards of their maximal nodes. The output
    holds the sum only after ``BackwardState.finish``, so that communication overlaps with backward.
    """

    def __init__(self, backward: BackwardState, number: int) -> None:
        """``number`` tells the groups of a model apart."""
        self._backward, self._number = backward, number
        self._stack: SumStack[Tensor] = SumStack(self._add)
        #: The sums of this rank's maximal nodes that are complete.
        self._complete: list[Tensor] = []
        self._exchange: TreeExchange | None = None
        self._output: Tensor | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        flat = self._backward.pool.allocate(math.prod(int(each) for each in size), dtype, device)
        return flat.view([int(each) for each in size])

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        leaf, plan = self._backward.leaf, self._backward.plan
        assert leaf is not None, "backward outside of a leaf"
        total = self._stack.push(leaf, input_tensor)
        if total is not None:
            self._complete.append(total)
        if len(self._complete) < len(plan.nodes) or total is None:
            return
        if self._exchange is None:
            shard = output_tensor.numel()
            spans = [(rank * shard, (rank + 1) * shard) for rank in range(len(plan.nodes_by_rank))]
            link = PeerLink(output_tensor.device, group)
            self._exchange = TreeExchange(plan, spans, link, self._number, self._backward.pool)
        self._exchange.start_reduce_scatter(self._complete)
        self._output = output_tensor
        self._backward.add_pending(self)

    def finish(self) -> None:
        """Wait for the other ranks' sums and put this rank's shard into the output."""
        assert self._exchange is not None
        assert self._output is not None
        self._output.copy_(self._exchange.finish_reduce_scatter().view_as(self._output))
        self._exchange.release()
        for total in self._complete:
            self._backward.pool.release(total)
        self._complete, self._output = [], None

    def _add(self, left: Tensor, right: Tensor) -> Tensor:
        left.add_(right)
        self._backward.pool.release(right)
        return left
