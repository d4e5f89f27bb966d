"""The norm of the gradient, to the same bit whoever holds which part of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

EPSILON = 1e-6


def piece_norms(pieces: Sequence[Tensor]) -> Tensor:
    """Return each piece's norm, shape ``[pieces]``, float64. Each is computed alone, so its bits are its own."""
    return torch.stack(torch._foreach_norm(list(pieces), 2, dtype=torch.float32)).double()


def total_norm(norms: Tensor) -> Tensor:
    """Return the norm of everything from those of all pieces in their fixed order; shape ``[]``."""
    return norms.square().sum().sqrt()


def clip_factor(norm: Tensor, clip_norm: float | None) -> Tensor | None:
    """Return what the gradient is multiplied with, None where it surely is 1; as ``clip_grad_norm_`` has it."""
    if clip_norm is None:
        return None
    if norm.device.type == "cpu" and float(norm) + EPSILON <= clip_norm:
        return None
    return (clip_norm / (norm + EPSILON)).clamp(max=1.0)
