"""DeepSpeed ZeRO stages 0 to 3, with the task's own optimizer.

State goes out and comes in whole and by parameter name (as DDP's does), so a run may change its world size, its
stage or its strategy between two generations and loses nothing.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from contracts.spec.training import Training
from contracts.tensor_files import TensorKind
from trainbus.data.batch_tensors import to_device
from trainbus.task import Task, TaskError
from trainbus.trainer import optimizer_state as packing
from trainbus.trainer.chained_optimizer import list_optimizers, make_optimizer
from trainbus.trainer.optimizer_state import OptimizerState, StateMismatch
from trainbus.trainer.readable_tensor import ReadableTensor
from trainbus.trainer.strategies.base import StepResult, Strategy
from trainbus.trainer.strategies.partitioned_build import PartitionedBuild
from trainbus.trainer.training_state import StateEntry, local_entries
from trainbus.trainer.world import World


def import_deepspeed(device: torch.device) -> Any:
    """Import deepspeed for this device, or say how to get it."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("DS_BUILD_OPS", "0")
    # Its autotuner, which we do not use, imports mlflow where that is installed: 7 of 8 seconds.
    without_mlflow = "mlflow" not in sys.modules
    if without_mlflow:
        sys.modules["mlflow"] = None  # type: ignore[assignment]
    try:
        import deepspeed
    except ModuleNotFoundError as error:
        raise TaskError(
            "training.strategy 'deepspeed' needs the package deepspeed on every node: "
            "pip install 'trainbus[deepspeed]' there, or use strategy 'ddp'"
        ) from error
    finally:
        if without_mlflow:
            del sys.modules["mlflow"]
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # This op serves inference alone, and having it means compiling it with g++ at the first start.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


class DeepSpeedStrategy(Strategy):
    """Optimizer state (stage 1), gradients (2) and weights (3) are sharded over the ranks; weights are fp32."""

    holds_whole_state = False

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        training: Training,
        world: World,
        build: PartitionedBuild | None = None,
    ) -> None:
        """``build``: of the model, where its weights are to be partitioned here (stage 3)."""
        deepspeed = import_deepspeed(world.device)
        super().__init__(task, model, training, world)
        self._stage = training.zero_stage
        self.optimizer = make_optimizer(task, self.model)
        if len(list_optimizers(self.optimizer)) > 1:
            raise TaskError(
                "training.strategy 'deepspeed' takes one optimizer: give it parameter groups, or use another strategy"
            )
        self._names = packing.parameter_names(self.model)
        for index, members in enumerate(packing.group_names(self.optimizer, self.model)):
            if self._stage and not members:
                raise TaskError(
                    f"parameter group {index} has no trained parameter, which DeepSpeed does not support: "
                    f"leave it out in {type(task).__name__}.optimizer()"
                )
        config: dict[str, Any] = {
            # Batches are ours; DeepSpeed only wants three numbers that agree with each other.
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": self._stage, "overlap_comm": False},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 2**31,
        }
        if self._stage:
            # ZeRO works out the norm only when it clips; a limit that is never reached makes it report it.
            config["gradient_clipping"] = training.clip_norm or 1e30
        if world.gpu is not None:
            # DeepSpeed takes the GPU of this number, although a rank on a MIG slice sees but one.
            os.environ["LOCAL_RANK"] = str(world.gpu.index)
        if build is not None:
            deepspeed.init_distributed(dist.get_backend(), dist_init_required=False)
            build.partition(deepspeed, config)
        self._engine, self._zero, _, _ = deepspeed.initialize(
            model=self._loss, optimizer=self.optimizer, config=config, dist_init_required=False
        )
        if self._stage:
            self.optimizer = self._zero.optimizer
        #: What a rank without samples computes on, with no weight: another rank's micro-batch.
        self._stand_in: Any | None = None

    def begin_step(self, *, has_empty: bool, counted: Any | None = None) -> None:
        """Send a batch to all ranks where one may need it: ZeRO communicates in the passes through each module."""
        self._stand_in = None
        if not has_empty or not self._stage:
            return
        holder = self._world.all_gather_objects(counted is not None).index(True)
        sent = self._world.broadcast_object(counted if self._world.rank == holder else None, holder)
        self._stand_in = to_device(sent, lambda tensor: tensor.to(self._world.device))

    @contextmanager
    def _micro_batch(self, leaf: int, *, first: bool, last: bool) -> Iterator[None]:
        self._engine.set_gradient_accumulation_boundary(last)
        yield
        if not last:
            self._engine.step()  # off the boundary it only counts

    def _forward(self, batch: Any | None) -> Tensor:
        if batch is None and self._stand_in is not None:
            return self._forward_stand_in()
        loss: Tensor = self._engine(batch)
        return loss

    def _forward_stand_in(self) -> Tensor:
        """Run the passes that the other ranks run; the caller gives this loss no weight."""
        kept = [buffer.clone() for buffer in self.model.buffers()]
        loss: Tensor = self._engine(self._stand_in)
        for buffer, value in zip(self.model.buffers(), kept, strict=True):
            buffer.copy_(value)
        return loss

    def _propagate(self, loss: Tensor) -> None:
        # DeepSpeed divides the sum over the ranks by their number; our weights already sum to 1.
        loss = loss * self._world.size
        if not self._stage:
            loss = loss * self._scale.scale
        elif self._scale.enabled:
            self._zero.override_loss_scale(self._scale.scale)  # ZeRO then scales, and takes it off in its step
        self._engine.backward(loss)

    def step(self, clip_norm: float | None) -> StepResult:
        self._world.confirm_arrival()
        norm: Any = self._step_sharded() if self._stage else self._step_whole(clip_norm)
        norm = torch.as_tensor(norm, dtype=torch.float64, device=self._world.device).detach()
        return StepResult(norm, skipped=self._scale.enabled and not bool(torch.isfinite(norm)))

    def _step_sharded(self) -> Any:
        """Take ZeRO's step, which takes none where the gradient overflowed; return the norm, then infinite."""
        self._engine.step()
        norm = self._engine.get_global_grad_norm()
        self._scale.accept(norm)
        return norm

    def _step_whole(self, clip_norm: float | None) -> Tensor:
        """Take the step of stage 0, which leaves clipping and the loss scale to us; return the norm."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        if self._scale.enabled:
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            torch._foreach_mul_(gradients, 1.0 / self._scale.scale)
        norm = torch.nn.utils.clip_grad_norm_(parameters, float("inf") if clip_norm is None else clip_norm)
        if self._scale.accept(norm):
            self._engine.step()
        else:
            self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _entries(self, kind: TensorKind, tensors: Mapping[str, Tensor]) -> list[StateEntry]:
        if kind != "model":
            return local_entries(kind, tensors)
        entries: list[StateEntry] = []
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if hasattr(tensor, "ds_id"):
                entries.append(self._gathered_entry(kind, name, tensor, tensor.dtype, partial(_gather_weight, tensor)))
            else:
                entries += local_entries(kind, {name: tensor})
        return entries

    def _gathered_entry(
        self, kind: TensorKind, name: str, parameter: Tensor, dtype: torch.dtype, gather: Callable[[], Tensor]
    ) -> StateEntry:
        """List a tensor, shaped as a parameter, that a collective call puts together on all ranks at once."""

        def fetch(owner: int) -> Callable[[], Tensor | None]:
            whole = gather()
            kept = whole if owner == self._world.rank else None
            return lambda: kept

        return StateEntry(kind, name, torch.empty(_shape(parameter), dtype=dtype, device="meta"), fetch, False)

    def _partition_of(self, parameter: Any, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor; the last one is padded with zeros."""
        size = parameter.ds_tensor.numel()
        flat, start = whole.to(parameter.device).flatten(), size * self._world.rank
        part = torch.zeros(size, dtype=whole.dtype, device=parameter.device)
        own = flat[start : start + size]
        part[: own.numel()] = own
        return part

    def _optimizer_entries(self) -> tuple[list[StateEntry], OptimizerState[Tensor]]:
        if not self._stage:
            return super()._optimizer_entries()
        entries: list[StateEntry] = []
        state: OptimizerState[Tensor] = OptimizerState()
        for group, flat, parameters in self._parameter_groups():
            members = [self._names[id(parameter)] for parameter in parameters]
            state.groups += packing.pack_groups([group], [members])
            for parameter, name in zip(parameters, members, strict=True):
                for key, value in self.optimizer.state.get(flat, {}).items():
                    if isinstance(value, Tensor) and value.shape == flat.shape:
                        gather = partial(self._gather_optimizer_tensor, parameter, key, value)
                        entries.append(
                            self._gathered_entry("optimizer", f"{name}/{key}", parameter, value.dtype, gather)
                        )
                    elif isinstance(value, Tensor):
                        entries += local_entries("optimizer", {f"{name}/{key}": value})
                    else:
                        state.values.setdefault(name, {})[key] = value
        return entries, state

    def _gather_optimizer_tensor(self, parameter: Tensor, key: str, shard: Tensor) -> Tensor:
        """Put an optimizer tensor together from its parts in the ranks' flat shards."""
        if self._stage == 3:
            from deepspeed.utils import safe_get_full_optimizer_state

            return torch.as_tensor(safe_get_full_optimizer_state(parameter, key))
        whole = torch.zeros(parameter.numel(), dtype=shard.dtype, device=shard.device)
        for theirs, ours in _fragments(parameter, whole, shard):
            theirs.copy_(ours)
        # The other ranks have zeros there; as integers, the sum is the bits themselves.
        dist.all_reduce(whole.view(torch.uint8))
        return whole.view(parameter.shape)

    def _load_optimizer(self, state: OptimizerState[ReadableTensor]) -> None:
        if not self._stage:
            return super()._load_optimizer(state)
        groups = self._parameter_groups()
        packing.check_groups(state, [[self._names[id(p)] for p in parameters] for _, _, parameters in groups])
        by_name: dict[str, dict[str, ReadableTensor]] = {}
        for name_and_key, saved in state.tensors.items():
            name, _, key = name_and_key.rpartition("/")
            by_name.setdefault(name, {})[key] = saved
        for _, flat, parameters in groups:
            values = self.optimizer.state[flat]
            for parameter in parameters:
                name = self._names[id(parameter)]
                for key, saved in by_name.get(name, {}).items():
                    if not saved.shape and _shape(parameter) != saved.shape:
                        values[key] = saved.read()
                        continue
                    if saved.shape != _shape(parameter):
                        raise StateMismatch(f"optimizer state {name}/{key} has shape {tuple(saved.shape)}")
                    values.setdefault(key, torch.zeros_like(flat))
                    self._set_optimizer_tensor(parameter, key, values[key], saved.read())
                values.update(state.values.get(name, {}))
        return packing.restore_groups(self.optimizer.param_groups, state.groups)

    def _set_optimizer_tensor(self, parameter: Tensor, key: str, shard: Tensor, whole: Tensor) -> None:
        """Put this rank's part of a whole tensor into its flat shard."""
        if self._stage == 3:
            from deepspeed.utils import safe_set_local_optimizer_state

            safe_set_local_optimizer_state(parameter, self._partition_of(parameter, whole), key)
            return
        for theirs, ours in _fragments(parameter, whole.flatten(), shard):
            ours.copy_(theirs)

    def _parameter_groups(self) -> list[tuple[dict[str, Any], Tensor, list[Tensor]]]:
        """Return each parameter group: its hyperparameters, this rank's flat shard, and the sharded parameters.

        Stage 3 cuts groups into sub-groups, of which there is one a group below a billion elements.
        """
        if self._stage == 3:
            shards, members = self._zero.fp32_partitioned_groups_flat, self._zero.fp16_groups
        else:
            shards, members = self._zero.single_partition_of_fp32_groups, self._zero.bit16_groups
        return list(zip(self.optimizer.param_groups, shards, members, strict=True))


def _gather_weight(parameter: Tensor) -> Tensor:
    """Return a parameter of stage 3, whole; every rank calls it."""
    if parameter.requires_grad:
        from deepspeed.utils import safe_get_full_fp32_param

        return torch.as_tensor(safe_get_full_fp32_param(parameter))
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters([parameter]):
        return parameter.detach().clone()


def _shape(parameter: Any) -> torch.Size:
    """Return the whole parameter's shape; stage 3 leaves an empty tensor in its place."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def _fragments(parameter: Tensor, whole: Tensor, shard: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what of a flat tensor of the parameter lies in this rank's shard, if any: (in the whole, in the shard)."""
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is not None:
        theirs, ours = mapping.lp_fragment_address, mapping.hp_fragment_address
        yield whole.narrow(0, theirs.start, theirs.numel), shard.narrow(0, ours.start, ours.numel)
