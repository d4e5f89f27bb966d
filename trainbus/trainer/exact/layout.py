"""Where each parameter lies in the flat buffers that ranks exchange, and in which pieces it is normed and stepped.

Two divisions of the same elements. Buckets (flat tensors of some megabytes) decide what travels together, and have no
influence on any bit. Pieces (fixed runs of one parameter's elements) decide how norms are added up and what a sharded
optimizer computes at once; kernels may treat the end of a tensor unlike its middle, so pieces depend only on the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

#: Parameters start at multiples of this number of elements: kernels may take another path on unaligned memory.
ALIGN = 64
#: Elements of a piece. It is part of the arithmetic, so it must never change.
PIECE = 65_536
#: As DDP has them; the first bucket is small so that the first transfer starts early.
FIRST_BUCKET_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20

Span = tuple[int, int]


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """Elements ``start`` to ``stop`` of a parameter, in the order in which they lie in memory."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter's place in a bucket. ``index`` counts the trained parameters."""

    index: int
    offset: int
    parameter: Tensor

    def view(self, flat: Tensor) -> Tensor:
        """Return the parameter's place in ``flat``, shaped and strided like the parameter itself."""
        shape, strides = self.parameter.shape, self.parameter.stride()
        return flat.as_strided(shape, strides, flat.storage_offset() + self.offset)

    def pieces(self) -> Iterator[Piece]:
        for start in range(0, self.parameter.numel(), PIECE):
            yield Piece(self.index, start, min(start + PIECE, self.parameter.numel()))


@dataclass(slots=True)
class Bucket:
    index: int
    dtype: torch.dtype
    device: torch.device
    slots: list[Slot] = field(default_factory=list)
    size: int = 0

    def add(self, index: int, parameter: Tensor) -> None:
        self.slots.append(Slot(index, self.size, parameter))
        self.size += -(-parameter.numel() // ALIGN) * ALIGN

    def empty(self) -> Tensor:
        """Return a flat tensor of the bucket's size; its padding is zero."""
        return torch.zeros(self.size, dtype=self.dtype, device=self.device)

    def even_shards(self, world_size: int) -> list[Span]:
        """Divide the bucket into contiguous spans, as equal as alignment allows."""
        units = self.size // ALIGN
        edges = [units * rank // world_size * ALIGN for rank in range(world_size + 1)]
        return list(pairwise(edges))

    def piece_shards(self, world_size: int) -> list[Span]:
        """Divide the bucket into contiguous spans of whole pieces, as equal as these allow."""
        starts = [slot.offset + piece.start for slot in self.slots for piece in slot.pieces()]
        edges = [0]
        for rank in range(1, world_size):
            wanted = self.size * rank // world_size
            edges.append(max(edges[-1], min([*starts, self.size], key=lambda start: abs(start - wanted))))
        edges.append(self.size)
        return list(pairwise(edges))


def buckets_of(parameters: Iterable[Tensor]) -> list[Bucket]:
    """Lay parameters out in the order in which their gradients arrive: the last registered first."""
    buckets: list[Bucket] = []
    for index, parameter in reversed(list(enumerate(parameters))):
        last = buckets[-1] if buckets else None
        cap_bytes = FIRST_BUCKET_BYTES if len(buckets) == 1 else BUCKET_BYTES
        if (
            last is None
            or (last.dtype, last.device) != (parameter.dtype, parameter.device)
            or (last.size + parameter.numel()) * parameter.element_size() > cap_bytes
        ):
            last = Bucket(len(buckets), parameter.dtype, parameter.device)
            buckets.append(last)
        last.add(index, parameter)
    return buckets


def gradient_of(parameter: Tensor) -> Tensor:
    """Return the gradient, which every parameter has once a leaf is complete: zeros where it was not used."""
    assert parameter.grad is not None
    return parameter.grad


def in_memory_order(tensor: Tensor) -> Tensor:
    """Return a dense tensor's elements as one dimension, in the order in which they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def is_dense(tensor: Tensor) -> bool:
    """Return whether the tensor's elements fill one stretch of memory, each once."""
    place = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != place:
                return False
            place *= size
    return True
