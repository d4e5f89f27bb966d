"""Silent drift: copies of one state, on several ranks, that are not the same bits any more.

A processor, a memory or a link that computes wrongly raises no error. Each rank saves a part of the state, so ranks
that have drifted apart would be committed as a mixture. So the ranks compare a checksum of their copies: every
``CHECK_EVERY_STEPS`` steps with the numbers that they exchange anyway, and before each checkpoint.

The checksum is a sum of integers, which has no order: it is the same for every kernel, and one flipped bit changes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

CHECK_EVERY_STEPS = 100
#: Integer types that an element of so many bytes is added up as.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_HALF = 2**32


class RanksDrifted(Exception):
    """The copies of the state differ. ``ranks``: those that differ from the majority; all, where there is none."""

    def __init__(self, step: int, ranks: Sequence[int], world_size: int) -> None:
        self.ranks, self.is_majority_known = tuple(ranks), len(ranks) < world_size
        names = ", ".join(map(str, ranks))
        if self.is_majority_known:
            where = f"that of rank {names} is not" if len(ranks) == 1 else f"those of ranks {names} are not"
            text = f"{where} the others' after step {step}"
        else:
            text = f"those of ranks {names} differ after step {step}, and no majority tells which is right"
        super().__init__(
            f"the ranks' copies of the state have drifted apart: {text}. A device or its memory computes wrongly, "
            "or the task changes weights on some ranks only"
        )


def checksum(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the checksum of tensors in their order: two numbers below 2**32 as float64 on ``device``, shape ``[2]``.

    It queues one pass over the memory and does not wait for the device.
    """
    sums: list[Tensor] = []
    weights: list[int] = []
    on_host = 0
    for index, tensor in enumerate(tensors):
        weight = _weight(index)
        if tensor.device == device:
            sums.append(_sum(tensor))
            weights.append(weight)
        else:  # the counts of steps, which optimizers keep on the host
            on_host += weight * int(_sum(tensor))
    weights.append(1)
    host = torch.tensor([_wrap(on_host)], dtype=torch.int64).to(device, non_blocking=True)
    factors = torch.tensor([_wrap(weight) for weight in weights], dtype=torch.int64).to(device, non_blocking=True)
    total = (torch.cat([torch.stack(sums), host]) * factors).sum() if sums else host[0]
    return torch.stack([total.remainder(_HALF), total.div(_HALF, rounding_mode="floor").remainder(_HALF)]).double()


def find_drifted(checksums: Sequence[tuple[float, float]]) -> tuple[int, ...]:
    """Return the ranks whose checksum is not that of more than half of all; every rank where no half agrees."""
    (most_common, count), *_ = Counter(checksums).most_common(1)
    if count == len(checksums):
        return ()
    if 2 * count <= len(checksums):
        return tuple(range(len(checksums)))
    return tuple(rank for rank, found in enumerate(checksums) if found != most_common)


def _sum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's words modulo 2**64, shape ``[]``, int64."""
    flat = tensor.detach().contiguous().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    if flat.dtype == torch.bool:
        flat = flat.to(torch.uint8)
    wide = flat.numel() * flat.element_size() // 8 * 8 // flat.element_size()
    head, tail = flat[:wide], flat[wide:]
    if head.storage_offset() * head.element_size() % 8:
        head, tail = flat[:0], flat
    # Eight bytes at a time: as fast as memory is read.
    total = head.view(torch.int64).sum() if head.numel() else torch.zeros((), dtype=torch.int64, device=flat.device)
    return total + tail.view(_WORDS[tail.element_size()]).sum(dtype=torch.int64) if tail.numel() else total


def _weight(index: int) -> int:
    """Return an odd number for each tensor, so that two of them cannot be exchanged unseen."""
    return (2 * index + 1) * 0x9E3779B97F4A7C15 % 2**64 | 1


def _wrap(value: int) -> int:
    """Return a number modulo 2**64 as int64 holds it."""
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value
