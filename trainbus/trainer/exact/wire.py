"""Bytes between ranks, point to point: nothing on the way adds anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

Message = tuple[Tensor, int]


class Wire:
    """Sends and receives groups of tensors, and counts what it sends.

    Straight from and into the tensors given, so that nothing is packed or unpacked on the way and parts may be of any
    size. All ranks start the same groups in the same order.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._staged = self._on_cuda and dist.get_backend() == "gloo"
        self.sent_bytes = 0

    @property
    def orders_streams(self) -> bool:
        """Whether waiting is the device's affair (NCCL) and the host goes on at once."""
        return self._on_cuda and not self._staged

    def start(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Callable[[], None]:
        """Start a group; the returned function waits until all of it is done."""
        self.sent_bytes += sum(tensor.nbytes for tensor, _ in sends)
        if self.orders_streams:
            operations = [dist.P2POp(dist.isend, tensor, peer) for tensor, peer in sends if tensor.numel()]
            operations += [dist.P2POp(dist.irecv, tensor, peer) for tensor, peer in receives if tensor.numel()]
            works: list[dist.Work | None] = list(dist.batch_isend_irecv(operations)) if operations else []
            return lambda: _wait(works)
        landed = [(torch.empty_like(tensor, device="cpu") if self._staged else tensor) for tensor, _ in receives]
        works = [
            dist.irecv(tensor, peer, tag=tag)
            for tensor, (_, peer) in zip(landed, receives, strict=True)
            if tensor.numel()
        ]
        works += [dist.isend(tensor.cpu(), peer, tag=tag) for tensor, peer in sends if tensor.numel()]

        def wait() -> None:
            _wait(works)
            if self._staged:
                for (tensor, _), host in zip(receives, landed, strict=True):
                    tensor.copy_(host)

        return wait


def _wait(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()
