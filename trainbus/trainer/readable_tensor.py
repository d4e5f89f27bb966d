"""Tensors of a saved state that are read when they are needed, whole or by rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class ReadableTensor(Protocol):
    """A whole saved tensor, wherever it lies. Each read returns a new tensor on the host."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> torch.Size: ...

    def read(self) -> Tensor:
        """Return the whole tensor."""

    def read_rows(self, start: int, stop: int) -> Tensor:
        """Return the rows ``start`` to ``stop`` of the first dimension, shape ``[stop - start, *shape[1:]]``.

        It reads no other row. The tensor has at least one dimension, and ``0 <= start <= stop <= shape[0]``.
        """


@dataclass(frozen=True, slots=True)
class MemoryTensor:
    """A saved tensor that lies in this process's memory."""

    tensor: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    def read(self) -> Tensor:
        return self.tensor.detach().to("cpu", copy=True)

    def read_rows(self, start: int, stop: int) -> Tensor:
        return self.tensor[start:stop].detach().to("cpu", copy=True)


def make_readable(tensors: Mapping[str, Tensor]) -> dict[str, ReadableTensor]:
    """Return live tensors as saved ones, not copied."""
    return {name: MemoryTensor(tensor) for name, tensor in tensors.items()}
