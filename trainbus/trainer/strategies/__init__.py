"""How a step is spread over the ranks. See ``base.py`` for the interface."""

from __future__ import annotations

from torch import nn

from contracts.spec.training import Training
from trainbus.task import Task
from trainbus.trainer.strategies.base import Strategy
from trainbus.trainer.world import World


def make_strategy(task: Task, model: nn.Module, training: Training, world: World) -> Strategy:
    """Return the strategy that the request names, around a model whose weights are loaded already."""
    if training.strategy == "deepspeed":
        from trainbus.trainer.strategies.deepspeed import DeepSpeedStrategy

        return DeepSpeedStrategy(task, model, training, world)
    if training.strategy == "fsdp2":
        from trainbus.trainer.strategies.fsdp2 import FSDP2Strategy

        return FSDP2Strategy(task, model, training, world)
    if training.logical_ranks is not None:
        from trainbus.trainer.strategies.exact_ddp import ExactDDPStrategy

        return ExactDDPStrategy(task, model, training, world)
    from trainbus.trainer.strategies.ddp import DDPStrategy

    return DDPStrategy(task, model, training, world)
