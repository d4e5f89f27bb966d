"""Training that has diverged, and the check that keeps its weights out of whatever a later attempt could begin with."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

#: Elements that are added up at a time, so that the check needs no memory of the state's size.
BLOCK_ELEMENTS = 2**22


class TrainingDiverged(Exception):
    """The loss, the gradient or the state is not a finite number any more."""


def check_finite(files: Mapping[str, Mapping[str, Tensor]], trained: Collection[str], step: int) -> None:
    """Check the optimizer's state, the moving average and the ``trained`` weights: buffers may hold infinity (masks).

    Args:
        files: tensors by the file and the name that a checkpoint has them under.

    Raises:
        TrainingDiverged: one is not finite; the text names it.
    """
    for file, tensors in files.items():
        kind = file.rpartition("-")[0]
        for name, tensor in tensors.items():
            if (kind != "model" or name in trained) and not is_finite(tensor):
                raise TrainingDiverged(
                    f"the state of step {step} is not finite ({kind}/{name}), and is not kept: "
                    "lower the learning rate or set training.clip_norm"
                )


def is_finite(tensor: Tensor) -> bool:
    """Return whether every element is a finite number."""
    if not tensor.is_floating_point():
        return True
    for block in tensor.detach().reshape(-1).split(BLOCK_ELEMENTS):  # type: ignore[no-untyped-call]
        # A sum is the fastest pass over memory. It may overflow, so only a finite one decides.
        if not torch.isfinite(block.sum(dtype=torch.float32 if block.element_size() < 4 else None)):
            wide = block.float() if block.element_size() == 1 else block
            if not torch.isfinite(wide).all():
                return False
    return True
