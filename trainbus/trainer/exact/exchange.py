"""Moves gradients between ranks and adds them up along the fixed tree, for every strategy of exact mode.

Nothing on the way adds anything: bytes travel from rank to rank, and the owner of a shard makes all additions itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainbus.trainer.exact.layout import Span
from trainbus.trainer.exact.tree import Node, TreePlan, reduce_tree

#: A tensor and the rank that it goes to or comes from.
Message = tuple[Tensor, int]


class PeerLink:
    """Sends and receives groups of tensors between ranks, and counts the bytes that it sends.

    Tensors travel straight from and into the memory given, so that nothing is packed on the way and parts may be of
    any size. All ranks start the same groups in the same order.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._on_cuda = device.type == "cuda"
        self._staged = self._on_cuda and dist.is_initialized() and dist.get_backend() == "gloo"
        self.sent_bytes = 0

    @property
    def orders_streams(self) -> bool:
        """Whether waiting only orders CUDA streams (NCCL), so that the host goes on at once."""
        return self._on_cuda and not self._staged

    def start(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Callable[[], None]:
        """Start a group of messages, each a tensor and the rank that it goes to or comes from.

        The returned function waits until all of it is done. What one rank sends, its peer has to receive under the same
        ``tag``; empty tensors are not sent.
        """
        sends = [(tensor, peer) for tensor, peer in sends if tensor.numel()]
        receives = [(tensor, peer) for tensor, peer in receives if tensor.numel()]
        self.sent_bytes += sum(tensor.nbytes for tensor, _ in sends)
        if self.orders_streams:
            operations = [dist.P2POp(dist.isend, tensor, peer, self._group) for tensor, peer in sends]
            operations += [dist.P2POp(dist.irecv, tensor, peer, self._group) for tensor, peer in receives]
            batch: list[dist.Work | None] = list(dist.batch_isend_irecv(operations)) if operations else []
            return lambda: _wait_for(batch)
        landed = [(torch.empty_like(tensor, device="cpu") if self._staged else tensor) for tensor, _ in receives]
        works = [dist.irecv(tensor, peer, self._group, tag) for tensor, (_, peer) in zip(landed, receives, strict=True)]
        works += [dist.isend(tensor.cpu(), peer, self._group, tag) for tensor, peer in sends]

        def wait() -> None:
            _wait_for(works)
            if self._staged:
                for (tensor, _), host in zip(receives, landed, strict=True):
                    tensor.copy_(host)

        return wait


class BufferPool:
    """Flat buffers that are used again: allocating them anew in each step costs more than filling them."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype, torch.device], list[Tensor]] = {}

    def allocate(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a flat tensor with any values."""
        free = self._free.get((size, dtype, device))
        return free.pop() if free else torch.empty(size, dtype=dtype, device=device)

    @property
    def size_bytes(self) -> int:
        """The bytes of the buffers that are free now."""
        return sum(buffer.nbytes for free in self._free.values() for buffer in free)

    def release(self, buffer: Tensor) -> None:
        """Let the next ``allocate`` have a buffer."""
        self._free.setdefault((buffer.numel(), buffer.dtype, buffer.device), []).append(buffer)


class TreeExchange:
    """Reduce-scatter and all-gather of one flat tensor, in the order of the tree.

    Each rank has a flat sum for each of its maximal nodes. Their shards go to the owners, which finish the tree.
    A rank sends (W-1)/W * N * k elements, k being its number of maximal nodes.
    """

    def __init__(self, plan: TreePlan, spans: Sequence[Span], link: PeerLink, number: int, pool: BufferPool) -> None:
        """Prepare an exchange that may happen many times.

        Args:
            spans: where the shard of each rank lies in the flat tensor.
            number: tells this exchange from others that are under way at the same time.
            pool: the buffers for other ranks' sums come from it. They stay with this exchange until ``release``.
        """
        self._plan, self._spans, self._link, self._tag, self._pool = plan, spans, link, 2 * number, pool
        world_size = len(spans)
        self._peers = [(plan.rank + distance) % world_size for distance in range(1, world_size)]
        self._received: dict[Node, Message] = {}
        self._sums: Sequence[Tensor] = ()
        self._arrived: Callable[[], None] | None = None

    @property
    def own_span(self) -> Span:
        return self._spans[self._plan.rank]

    def start_reduce_scatter(self, sums: Sequence[Tensor]) -> None:
        """Start to send this rank's sums, one flat tensor for each of its maximal nodes, to the shards' owners."""
        sends = [(flat[slice(*self._spans[peer])], peer) for peer in self._peers for flat in sums]
        self._sums = sums
        self._received = self._received or self._allocate(sums[0])
        self._arrived = self._link.start(sends, list(self._received.values()), self._tag)

    def finish_reduce_scatter(self) -> Tensor:
        """Wait for the other ranks' sums; return this rank's shard of the sum over all leaves.

        It lies in one of the buffers, or of the sums.
        """
        assert self._arrived is not None
        self._arrived()
        own = slice(*self.own_span)
        by_node = {node: flat[own] for node, flat in zip(self._plan.nodes, self._sums, strict=True)}
        by_node |= {node: tensor for node, (tensor, _) in self._received.items()}
        self._sums, self._arrived = (), None
        return reduce_tree(self._plan.root, by_node, lambda left, right: left.add_(right))

    def release(self) -> None:
        """Give the buffers back; what the last ``finish_reduce_scatter`` returned is not valid any more."""
        for buffer, _ in self._received.values():
            self._pool.release(buffer)
        self._received = {}

    def _allocate(self, like: Tensor) -> dict[Node, Message]:
        start, stop = self.own_span
        return {
            node: (self._pool.allocate(stop - start, like.dtype, like.device), peer)
            for peer in self._peers
            for node in self._plan.nodes_by_rank[peer]
        }

    def start_all_gather(self, flat: Tensor) -> Callable[[], None]:
        """Start to complete ``flat`` on every rank from the shards that the ranks own; return what waits for it."""
        own = flat[slice(*self.own_span)]
        receives = [(flat[slice(*self._spans[peer])], peer) for peer in self._peers]
        return self._link.start([(own, peer) for peer in self._peers], receives, self._tag + 1)


def _wait_for(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()
