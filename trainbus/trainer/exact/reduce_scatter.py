"""Gives FSDP2 a reduce-scatter along the fixed tree: the sum over all leaves in one order for any number of ranks.

FSDP2 calls it once for every parameter group and leaf, with the leaf's gradient cut into a shard for each rank. The
sums of the rank's own leaves stay here until its last leaf; then the ranks exchange the shards of their maximal nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from trainbus.trainer.exact.exchange import PeerLink, TreeExchange
from trainbus.trainer.exact.tree import LeafStep, SumStack, TreePlan


class BackwardState:
    """Which leaf is in backward now, and which exchanges are under way: one for all parameter groups of a model."""

    def __init__(self, plan: TreePlan) -> None:
        self.plan = plan
        self.leaf: LeafStep | None = None
        self.pending: list[TreeReduceScatter] = []

    def finish(self) -> None:
        """Finish the exchanges that are under way; to be called after the last backward of a step."""
        for each in self.pending:
            each.finish()
        self.pending.clear()


class TreeReduceScatter(ReduceScatter):
    """Reduce-scatter of one parameter group.

    Its output holds the sum only after ``BackwardState.finish``, so that communication overlaps with backward.
    """

    def __init__(self, backward: BackwardState, number: int) -> None:
        """``number`` tells the groups of a model apart."""
        self._backward, self._number = backward, number
        self._stack: SumStack[Tensor] = SumStack(self._add)
        #: The sums of this rank's maximal nodes that are complete.
        self._complete: list[Tensor] = []
        #: Buffers by size, kept from step to step: fresh ones cost page faults.
        self._free: dict[int, list[Tensor]] = {}
        self._exchange: TreeExchange | None = None
        self._output: Tensor | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        free = self._free.get(math.prod(int(each) for each in size), [])
        fitting = next((n for n, each in enumerate(free) if each.dtype == dtype and each.device == device), None)
        return torch.empty(*size, dtype=dtype, device=device) if fitting is None else free.pop(fitting)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        leaf, plan = self._backward.leaf, self._backward.plan
        assert leaf is not None, "backward outside of a leaf"
        total = self._stack.push(leaf, input_tensor)
        if total is not None:
            self._complete.append(total)
        if len(self._complete) < len(plan.nodes) or total is None:
            return
        if self._exchange is None:
            shard = output_tensor.numel()
            spans = [(rank * shard, (rank + 1) * shard) for rank in range(len(plan.nodes_by_rank))]
            link = PeerLink(output_tensor.device, group)
            self._exchange = TreeExchange(plan, spans, link, self._number, output_tensor)
        self._exchange.start_reduce_scatter(self._complete)
        self._output = output_tensor
        self._backward.pending.append(self)

    def finish(self) -> None:
        """Wait for the other ranks' sums and put this rank's shard into the output."""
        assert self._exchange is not None
        assert self._output is not None
        self._output.copy_(self._exchange.finish_reduce_scatter().view_as(self._output))
        for total in self._complete:
            self._release(total)
        self._complete, self._output = [], None

    def _add(self, left: Tensor, right: Tensor) -> Tensor:
        left.add_(right)
        self._release(right)
        return left

    def _release(self, buffer: Tensor) -> None:
        self._free.setdefault(buffer.numel(), []).append(buffer)
