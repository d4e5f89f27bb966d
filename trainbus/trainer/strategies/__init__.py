"""How a step is spread over the ranks. See ``base.py`` for the interface."""

from __future__ import annotations

from contracts.spec.training import Training
from trainbus.task import Task
from trainbus.trainer.checkpoint.weights import WeightSource, load_weights
from trainbus.trainer.deferred_model import build_deferred
from trainbus.trainer.strategies.base import Strategy
from trainbus.trainer.world import World


def make_strategy(
    task: Task, training: Training, world: World, find_weights: WeightSource = lambda model: {}
) -> Strategy:
    """Build the task's model, and return the strategy that the request names around it.

    Args:
        find_weights: returns what the model's tensors are loaded from; the others keep their initial values.

    Raises:
        StateMismatch: these do not fit the model; the text names the tensor.
    """
    if training.strategy == "fsdp2":
        from trainbus.trainer.strategies.fsdp2 import FSDP2Strategy

        return FSDP2Strategy(task, build_deferred(task.model), training, world, find_weights)
    if training.strategy == "deepspeed" and training.zero_stage == 3:
        from trainbus.trainer.strategies.deepspeed import DeepSpeedStrategy
        from trainbus.trainer.strategies.partitioned_build import PartitionedBuild

        build = PartitionedBuild(build_deferred(task.model), find_weights, world.device)
        return DeepSpeedStrategy(task, build.module, training, world, build)
    model = task.model()
    load_weights(find_weights(model), model)
    model.to(world.device)
    if training.strategy == "deepspeed":
        from trainbus.trainer.strategies.deepspeed import DeepSpeedStrategy

        return DeepSpeedStrategy(task, model, training, world)
    if training.logical_ranks is not None:
        from trainbus.trainer.strategies.exact_ddp import ExactDDPStrategy

        return ExactDDPStrategy(task, model, training, world)
    from trainbus.trainer.strategies.ddp import DDPStrategy

    return DDPStrategy(task, model, training, world)
