"""An exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


class MovingAverage:
    """Follows the weights at ``1 - decay`` of the distance a step; starts as a copy of them.

    Works on any part of the weights, and every partition gives the same bits: each product and
    sum is rounded on its own, where a fused kernel may round differently at the ragged end of a shard.
    """

    def __init__(self, parameters: Mapping[str, Tensor], decay: float) -> None:
        self._decay = decay
        self._parameters = [tensor.detach() for tensor in parameters.values()]
        self.tensors = {name: tensor.detach().clone() for name, tensor in parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages after a step."""
        averages = list(self.tensors.values())
        torch._foreach_mul_(averages, self._decay)
        torch._foreach_add_(averages, torch._foreach_mul(self._parameters, 1 - self._decay))

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Swap the averages into the model inside the context, with memory for one more tensor."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for parameter, average in zip(self._parameters, self.tensors.values(), strict=True):
            kept = parameter.clone()
            parameter.copy_(average)
            average.copy_(kept)
