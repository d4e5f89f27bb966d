"""DeepSpeed ZeRO stages 0 to 2, with the task's own optimizer.

State goes out and comes in whole and by parameter name (as DDP's does), so a run may change its world size, its
stage or its strategy between two generations and loses nothing.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from contracts.events.train import Training
from trainbus.task import Task, TaskError
from trainbus.trainer import optimizer_state as packing
from trainbus.trainer.optimizer_state import OptimizerState, StateMismatch
from trainbus.trainer.strategies.base import LossModule, State, StepResult, host_copy
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


class DeepSpeedStrategy:
    """Optimizer state (stage 1) and gradients (stage 2) are sharded over the ranks; weights are fp32."""

    def __init__(self, task: Task, model: nn.Module, training: Training, world: World) -> None:
        deepspeed = import_deepspeed(world.device)
        self._world = world
        self._stage = training.zero_stage
        self.leaf_count, self.leaves = world.size, range(world.rank, world.rank + 1)
        self.model = model.to(world.device)
        self.optimizer = task.optimizer(self.model)
        self._names = packing.parameter_names(self.model)
        module = LossModule(task, self.model, training.precision, world.device)
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
        self._engine, self._zero, _, _ = deepspeed.initialize(
            model=module, optimizer=self.optimizer, config=config, dist_init_required=False
        )
        if self._stage:
            self.optimizer = self._zero.optimizer

    def backward(self, batch: Any | None, weight: float, *, leaf: int, first: bool, last: bool) -> Tensor:
        self._engine.set_gradient_accumulation_boundary(last)
        loss: Tensor = self._engine(batch) * weight
        # DeepSpeed divides the sum over the ranks by their number; our weights already sum to 1.
        self._engine.backward(loss * self._world.size)
        if not last:
            self._engine.step()  # off the boundary it only counts
        return loss.detach()

    def step(self, clip_norm: float | None) -> StepResult:
        norm: Any = None
        if not self._stage:
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            norm = torch.nn.utils.clip_grad_norm_(parameters, float("inf") if clip_norm is None else clip_norm)
        self._engine.step()
        if self._stage:
            norm = self._engine.get_global_grad_norm()
        return StepResult(torch.as_tensor(norm, dtype=torch.float64, device=self._world.device).detach())

    def sync_buffers(self) -> None:
        for buffer in self.model.buffers():
            dist.broadcast(buffer, src=0)

    def parameters_for_ema(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}

    def load_ema(self, ema: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
        for name, tensor in ema.items():
            tensor.copy_(saved[name])

    def state(self, ema: Mapping[str, Tensor] | None = None) -> State:
        # Rank 0 saves it all: it is where the shards are put together.
        optimizer = self.optimizer_state()
        if not self._world.is_first:
            return State()
        return State({name: t.detach() for name, t in self.model.state_dict().items()}, optimizer, dict(ema or {}))

    def survivor_state(self, ema: Mapping[str, Tensor] | None = None) -> State | None:
        return None

    def load_state(self, state: State) -> None:
        if state.model:
            self.model.load_state_dict(state.model)
        self.load_optimizer_state(state.optimizer)

    def model_state(self) -> dict[str, Tensor]:
        # In fp32 every rank has all updated weights after each step, at every stage up to 2.
        return host_copy(self.model) if self._world.is_first else {}

    def optimizer_state(self) -> OptimizerState:
        """Put the shards together, one tensor at a time, so that no rank ever holds more than one of them twice."""
        if not self._stage:
            return packing.pack(self.optimizer, self.model) if self._world.is_first else OptimizerState()
        from deepspeed.utils import safe_get_full_optimizer_state

        state = OptimizerState()
        for group, flat, parameters in self._groups():
            values = self.optimizer.state.get(flat, {})
            members = [self._names[id(parameter)] for parameter in parameters]
            state.groups += packing.pack_groups([group], [members])
            for parameter, name in zip(parameters, members, strict=True):
                for key, value in values.items():
                    if isinstance(value, Tensor) and value.shape == flat.shape:
                        full = safe_get_full_optimizer_state(parameter, key)  # a collective
                        tensor = full.reshape(parameter.shape)
                    elif isinstance(value, Tensor):
                        tensor = value
                    else:
                        state.values.setdefault(name, {})[key] = value
                        continue
                    if self._world.is_first:
                        state.tensors[f"{name}/{key}"] = tensor.detach().to("cpu", copy=True).contiguous()
        return state

    def load_optimizer_state(self, state: OptimizerState) -> None:
        if not self._stage:
            packing.unpack(state, self.optimizer, self.model)
            return
        groups = self._groups()
        packing.check_groups(state, [[self._names[id(p)] for p in parameters] for _, _, parameters in groups])
        by_name: dict[str, dict[str, Tensor]] = {}
        for name_and_key, tensor in state.tensors.items():
            name, _, key = name_and_key.rpartition("/")
            by_name.setdefault(name, {})[key] = tensor
        for _, flat, parameters in groups:
            values = self.optimizer.state[flat]
            for parameter in parameters:
                name = self._names[id(parameter)]
                for key, tensor in by_name.get(name, {}).items():
                    if tensor.ndim == 0:
                        values[key] = tensor.clone()
                        continue
                    if tensor.shape != parameter.shape:
                        raise StateMismatch(f"optimizer state {name}/{key} has shape {tuple(tensor.shape)}")
                    buffer = values.setdefault(key, torch.zeros_like(flat))
                    mapping = getattr(parameter, "_hp_mapping", None)
                    if mapping is not None:  # some of this parameter lies in this rank's shard
                        theirs, ours = mapping.lp_fragment_address, mapping.hp_fragment_address
                        fragment = tensor.flatten().narrow(0, theirs.start, theirs.numel)
                        buffer.narrow(0, ours.start, ours.numel).copy_(fragment)
                values.update(state.values.get(name, {}))
        packing.restore_groups(self.optimizer.param_groups, state.groups)

    def _groups(self) -> list[tuple[dict[str, Any], Tensor, list[Tensor]]]:
        """Each parameter group: its hyperparameters, this rank's flat shard, and the parameters it is a shard of."""
        shards = self._zero.single_partition_of_fp32_groups
        return list(zip(self.optimizer.param_groups, shards, self._zero.bit16_groups, strict=True))
