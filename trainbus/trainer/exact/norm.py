"""The norm of the gradient, to the same bit however the gradient is divided among ranks. There are two.

Whole gradients, and ZeRO-1's, are cut into pieces that depend on the model alone: each norm of a piece is computed by
itself, and they are added up in their order.

FSDP2's shards depend on the number of ranks, so ``global_norm`` needs a sum without an order. Floating-point addition
depends on its order, integer addition does not: each square is cut into two integers of 31 bits relative to the largest
element, and those are added exactly, in any order, by any kernel. (Reproducible sums: Demmel and Nguyen, "Fast
reproducible floating-point summation", ARITH 2013.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

EPSILON = 1e-6
#: Bits of each of the two integers that a square becomes.
DIGIT_BITS = 31
#: Elements that are added up in float64 before they become an integer: 2**21 terms below 2**31 stay below 2**53,
#: so that sum is exact in any order too.
BLOCK = 2**16
#: Elements that each kernel works on: what stays in a processor's cache; on other devices launches cost more.
CPU_SLAB, DEVICE_SLAB = BLOCK, 2**24


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


def global_norm(pieces: Iterable[Tensor], device: torch.device, *, reduce: bool) -> Tensor:
    """Return the Euclidean norm (float64, shape ``[]``) of a gradient of which each rank holds disjoint pieces.

    Every rank calls it when ``reduce`` and gets the same; without, the pieces are all there is. Not finite if any
    element is not. Relative error below 1e-9 for up to 2**32 elements.
    """
    own = [piece.detach().reshape(-1) for piece in pieces if piece.numel()]
    largest = torch.zeros((), dtype=torch.float64, device=device)
    for piece in own:
        low, high = torch.aminmax(piece)
        largest = torch.maximum(largest, torch.maximum(high, -low).double())
    # Whether anything is not a number must be known to all, and a maximum need not carry NaN across ranks.
    finite = torch.isfinite(largest)
    word = torch.stack([torch.where(finite, largest, 0.0), (~finite).double()])
    if reduce:
        dist.all_reduce(word, op=dist.ReduceOp.MAX)
    top, broken = word.tolist()
    if broken:
        return torch.full((), math.nan, dtype=torch.float64, device=device)
    if top == 0.0:
        return torch.zeros((), dtype=torch.float64, device=device)
    _, exponent = math.frexp(top)
    digits = torch.zeros(2, dtype=torch.int64, device=device)
    slab = CPU_SLAB if device.type == "cpu" else DEVICE_SLAB
    for piece in own:
        for start in range(0, piece.numel(), slab):
            digits += _digits(piece[start : start + slab], 2.0**-exponent)
    if reduce:
        dist.all_reduce(digits)
    high_sum, low_sum = digits.tolist()
    # Python's integers hold the whole sum; the one rounding is here.
    total = (high_sum << DIGIT_BITS) + low_sum
    norm = math.ldexp(math.sqrt(total / 2 ** (2 * DIGIT_BITS)), exponent)
    return torch.full((), norm, dtype=torch.float64, device=device)


def _digits(slab: Tensor, scale: float) -> Tensor:
    """Return the sum of the squares of ``slab * scale`` (all within [-1, 1]) as two integers: high and low digits."""
    square = slab.double().mul_(scale).square_().mul_(2.0**DIGIT_BITS)
    high = square.floor()
    low = square.sub_(high).mul_(2.0**DIGIT_BITS).floor_()
    return torch.stack([_sum_of_blocks(high), _sum_of_blocks(low)])


def _sum_of_blocks(digits: Tensor) -> Tensor:
    """Add integers below 2**31 up, exactly: each block in float64, and the blocks as integers."""
    whole = digits.numel() // BLOCK * BLOCK
    rest = digits[whole:].sum().long()
    return digits[:whole].view(-1, BLOCK).sum(1).long().sum() + rest if whole else rest
