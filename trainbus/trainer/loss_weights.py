"""What each micro-batch counts for in the mean loss of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from trainbus.task import Task, TaskError
from trainbus.trainer.step_agreement import StepAgreement, sum_in_order
from trainbus.trainer.step_data import StepData


def has_loss_weights(task: Task) -> bool:
    """Return whether the task weighs its batches by something else than their samples."""
    return type(task).loss_weight is not Task.loss_weight


def weigh_batch(task: Task, batch: Any) -> float:
    """Return the task's weight of a batch.

    Raises:
        TaskError: it is no finite number from 0 on.
    """
    weight = float(torch.as_tensor(task.loss_weight(batch)))
    if not 0 <= weight < float("inf"):
        raise TaskError(f"{type(task).__name__}.loss_weight() must return a number from 0 on, not {weight}")
    return weight


@dataclass(frozen=True, slots=True)
class StepWeights:
    """The shares of this rank's micro-batches in a step; those of all ranks add up to 1."""

    #: By leaf, in the order of its micro-batches.
    shares: dict[int, list[float]]
    #: A micro-batch of some rank counts for nothing.
    has_empty: bool

    def find_counted(self, data: StepData) -> Any | None:
        """Return a batch of this rank that counts, None if it has none."""
        pairs = [pair for leaf in data.leaves for pair in zip(self.shares[leaf.leaf], leaf.micro_batches, strict=True)]
        return next((micro.batch for share, micro in pairs if share), None)


def weigh_step(task: Task, data: StepData, agreement: StepAgreement) -> StepWeights:
    """Weigh a step's micro-batches; every rank calls it.

    Samples need no exchange. Weights that the task gives are added up over all ranks before the first pass: in the
    order of the leaves, so that the sum is the same to the bit for any number of ranks.

    Raises:
        TaskError: nothing in the global batch counts.
    """
    if not has_loss_weights(task):
        total: float = data.global_samples
        shares = {leaf.leaf: [micro.samples / total for micro in leaf.micro_batches] for leaf in data.leaves}
        return StepWeights(shares, data.has_empty)
    weights = {
        leaf.leaf: [0.0 if micro.batch is None else weigh_batch(task, micro.batch) for micro in leaf.micro_batches]
        for leaf in data.leaves
    }
    sums = {leaf: sum_in_order(values) for leaf, values in weights.items()}
    total, has_empty = agreement.sum_weights(sums, any(0.0 in values for values in weights.values()))
    if total == 0:
        raise TaskError(f"{type(task).__name__}.loss_weight() is 0 for all samples of a global batch")
    return StepWeights({leaf: [value / total for value in values] for leaf, values in weights.items()}, has_empty)
