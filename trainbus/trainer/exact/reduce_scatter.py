"""FSDP2's reduce-scatter along the fixed tree: a rank's shard of the sum over all leaves, in one order for any W.

FSDP calls it once for every parameter group and leaf, with the leaf's gradient cut into a shard for each rank. What
the rank's own leaves add up to stays here until its last leaf; then the maximal nodes' shards are exchanged, and the
owner of a shard finishes the tree. Collectives only move bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from trainbus.trainer.exact.tree import Leaf, Node, leaves_of_ranks, maximal_nodes, reduce_tree


class LeafTurn:
    """Which of the rank's leaves is in backward now; one for all parameter groups of a model."""

    def __init__(self, leaf_count: int, world_size: int) -> None:
        self.leaf_count = leaf_count
        self.nodes = [maximal_nodes(leaf_count, leaves) for leaves in leaves_of_ranks(leaf_count, world_size)]
        self.leaf: Leaf | None = None
        #: Exchanges under way, finished by ``finish`` after the last backward.
        self.pending: list[TreeReduceScatter] = []

    def finish(self) -> None:
        for each in self.pending:
            each.finish()
        self.pending.clear()


class TreeReduceScatter(ReduceScatter):
    """Reduce-scatter of one parameter group: the output holds the sum after ``LeafTurn.finish``."""

    def __init__(self, turn: LeafTurn, rank: int) -> None:
        self._turn, self._rank = turn, rank
        #: Sums so far, the deepest node last; and those of the maximal nodes that are complete.
        self._stack: list[Tensor] = []
        self._complete: list[Tensor] = []
        #: Buffers by size, kept from step to step: fresh ones cost page faults.
        self._free: dict[int, list[Tensor]] = {}
        self._exchange: tuple[Any, Tensor, Tensor] | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        free = self._free.get(_numel(size), [])
        fitting = next((n for n, each in enumerate(free) if each.dtype == dtype and each.device == device), None)
        return torch.empty(*size, dtype=dtype, device=device) if fitting is None else free.pop(fitting)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        leaf = self._turn.leaf
        assert leaf is not None, "backward outside of a leaf"
        self._stack.append(input_tensor)
        for _ in range(leaf.merges):
            right, left = self._stack.pop(), self._stack.pop()
            self._stack.append(left.add_(right))
            self._release(right)
        if leaf.completes is None:
            return
        self._complete.append(self._stack.pop())
        if len(self._complete) == len(self._turn.nodes[self._rank]):
            self._start_exchange(output_tensor, group)

    def _start_exchange(self, output: Tensor, group: dist.ProcessGroup) -> None:
        shard, ranks = output.numel(), len(self._turn.nodes)
        counts = [len(nodes) for nodes in self._turn.nodes]
        own = counts[self._rank]
        if own == 1:
            send = self._complete[0]
        else:
            send = self.allocate((own * shard * ranks,), dtype=output.dtype, device=output.device)
            pieces = send.view(ranks, own, shard)
            for number, total in enumerate(self._complete):
                pieces[:, number].copy_(total.view(ranks, shard))
                self._release(total)
        self._complete = []
        received = self.allocate((sum(counts) * shard,), dtype=output.dtype, device=output.device)
        work = dist.all_to_all_single(
            received, send, [count * shard for count in counts], [own * shard] * ranks, group=group, async_op=True
        )
        self._exchange = (work, received, output)
        # Kept until the exchange is over; ``finish`` gives it back.
        self._stack = [send]
        self._turn.pending.append(self)

    def finish(self) -> None:
        """Wait for the other ranks' nodes and add them up."""
        assert self._exchange is not None
        work, received, output = self._exchange
        work.wait()
        nodes: list[Node] = [node for each in self._turn.nodes for node in each]
        sums = dict(zip(nodes, received.view(len(nodes), -1).unbind(0), strict=True))
        output.copy_(
            reduce_tree((0, self._turn.leaf_count), sums, lambda left, right: left.add_(right)).view_as(output)
        )
        self._release(received)
        self._release(self._stack.pop())
        self._exchange = None

    def _release(self, buffer: Tensor) -> None:
        self._free.setdefault(buffer.numel(), []).append(buffer)


def _numel(size: Sequence[int | torch.SymInt]) -> int:
    count = 1
    for each in size:
        count *= int(each)
    return count
