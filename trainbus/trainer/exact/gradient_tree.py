"""Adds the leaves' gradients up along the tree, over all processes, while backward goes on.

A process keeps a stack of the sums it has so far, as the very tensors that autograd made: a right child that is a
single leaf is added by autograd itself, in place, and the last addition of what a process can add writes straight into
the buffer that travels. So there is no pass over memory that plain accumulation would not make. Then the owners of each
bucket's shards finish the tree (``exchange.py``) and, unless the optimizer is sharded too, hand the result back. Every
rank sends (W-1)/W * N * (k+1) elements in a step, k being its number of maximal nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from trainbus.task import TaskError
from trainbus.trainer.exact.exchange import BufferPool, PeerLink, TreeExchange
from trainbus.trainer.exact.layout import Bucket, Span, buckets_of, gradient_of
from trainbus.trainer.exact.tree import LeafStep, TreePlan
from trainbus.trainer.world import World


class GradientTree:
    """Makes ``parameter.grad`` the sum over all leaves.

    For each micro-batch, ``begin_micro_batch`` goes before its forward and ``end_micro_batch`` after its backward;
    ``finish_step`` after the last.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        names: Sequence[str],
        leaf_count: int,
        world: World,
        *,
        sharded: bool = False,
        shortcut: bool = True,
    ) -> None:
        """Hook into ``parameters``, which must be dense.

        Args:
            sharded: leave the sum with its owners, in ``shards`` of ``flats``, for an optimizer that is sharded too.
            shortcut: let gloo's all_reduce add two processes' sums, since a+b is b+a.
        """
        self.parameters, self.names, self.world = list(parameters), list(names), world
        self.plan = TreePlan(leaf_count, world.size, world.rank)
        self.buckets = buckets_of(self.parameters)
        self.link = PeerLink(world.device)
        #: Whether gradients end up in flat buffers; a single process needs none.
        self.flat = sharded or world.size > 1
        self.sharded = sharded
        node_counts = [len(nodes) for nodes in self.plan.nodes_by_rank]
        gloo = world.size > 1 and dist.get_backend() == "gloo" and world.device.type == "cpu"
        all_reduce = shortcut and gloo and not sharded and node_counts == [1, 1]
        side = torch.cuda.Stream(world.device) if world.size > 1 and self.link.orders_streams else None  # type: ignore[no-untyped-call]
        self._side_stream: torch.cuda.Stream | None = side
        self.reductions = (
            [BucketReduction(bucket, self.plan, self.link, sharded, all_reduce, side) for bucket in self.buckets]
            if self.flat
            else []
        )
        self._place_of = {slot.index: (bucket.index, slot) for bucket in self.buckets for slot in bucket.slots}

        self._stack: list[list[Tensor]] = []
        self._leaf: LeafStep | None = None
        self._in_place = False  # whether autograd adds this leaf to the sum on top of the stack
        self._placing = False  # whether gradients go to the buffers as they arrive
        self._seen = [False] * len(self.parameters)
        self._missing: list[int] = []
        self._next = 0  # the first bucket that has not been sent yet: all ranks send them in their order
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(self.parameters)
        ]

    @property
    def flats(self) -> list[Tensor]:
        """The flat gradient of each bucket after ``finish_step``; with ``sharded``, in this rank's shard alone."""
        return [reduction.flats[0] for reduction in self.reductions]

    @property
    def shards(self) -> list[list[Span]]:
        """Where each rank's shard of each bucket lies."""
        return [reduction.shards for reduction in self.reductions]

    def begin_micro_batch(self, leaf: int, *, first: bool, last: bool) -> None:
        """Make ready for a micro-batch of a leaf."""
        self._seen = [False] * len(self.parameters)
        step = self.plan.steps[leaf]
        to_buffer = self.flat and step.completes is not None
        self._placing = to_buffer and last
        if self._placing:
            self._missing = [len(bucket.slots) for bucket in self.buckets]
        if first:
            self._leaf = step
            # A leaf of several micro-batches is a sum of its own, and the last addition writes into the buffer.
            self._in_place = first and last and step.merges > int(to_buffer)
            for index, parameter in enumerate(self.parameters):
                parameter.grad = self._stack[-1][index] if self._in_place else None

    def end_micro_batch(self, leaf: int, *, last: bool) -> None:
        """Take up what backward has left in ``grad``, zeros where it left nothing."""
        step = self.plan.steps[leaf]
        for index, seen in enumerate(self._seen):
            if not seen:
                self._arrive(index, used=False)
        if not last:
            return
        if not self._placing:
            gradients = [gradient_of(parameter) for parameter in self.parameters]
            merges = step.merges
            if self._in_place:
                self._stack.pop()
                merges -= 1
            for _ in range(merges):
                left = self._stack.pop()
                torch._foreach_add_(left, gradients)
                gradients = left
            self._stack.append(gradients)
            return
        del self._stack[len(self._stack) - step.merges :]
        self._placing = False

    def finish_step(self) -> None:
        """Wait for everything that travels; then ``grad`` is the whole sum, and the next step may begin."""
        if not self.flat:
            (gradients,) = self._stack
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient
            self._stack.clear()
            return
        for reduction in self.reductions:
            reduction.reduce()
        for reduction in self.reductions:
            reduction.wait()
        if self._side_stream is not None:
            torch.cuda.current_stream(self._side_stream.device).wait_stream(self._side_stream)
        self._next = 0
        for bucket, flat in zip(self.buckets, self.flats, strict=True):
            for slot in bucket.slots:
                self.parameters[slot.index].grad = slot.view(flat)

    def clear_gradients(self) -> None:
        """Drop the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def all_gather(self, flats: Sequence[Tensor]) -> None:
        """Complete every rank's ``flats`` (one a bucket) from the shards that the ranks have of them."""
        waits = [
            reduction.exchange.start_all_gather(flat)
            for reduction, flat in zip(self.reductions, flats, strict=True)
            if reduction.exchange is not None
        ]
        for wait in waits:
            wait()

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def arrived(parameter: Tensor) -> None:
            if self._leaf is None:
                return  # a backward that is not ours
            if self._seen[index]:
                raise TaskError(
                    f"the gradient of {self.names[index]!r} came in more than one part, which exact mode cannot order: "
                    "with torch.utils.checkpoint, use use_reentrant=False"
                )
            self._seen[index] = True
            self._arrive(index, used=True)

        return arrived

    def _arrive(self, index: int, *, used: bool) -> None:
        parameter = self.parameters[index]
        if not used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad.add_(0.0)  # what adding zeros does: it turns -0 into 0
        elif parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise TaskError(f"the gradient of {self.names[index]!r} is sparse, which exact mode does not add up")
        if not self._placing:
            return
        self._place(index)
        number, _ = self._place_of[index]
        self._missing[number] -= 1
        assert self._leaf is not None
        if self._leaf.completes == self.plan.nodes[-1]:
            while self._next < len(self.buckets) and not self._missing[self._next]:
                self.reductions[self._next].start()
                self._next += 1

    def _place(self, index: int) -> None:
        """Make the additions that are left of a maximal node, the last one into its buffer."""
        assert self._leaf is not None
        assert self._leaf.completes is not None
        number, slot = self._place_of[index]
        target = slot.view(self.reductions[number].flats[self.plan.nodes.index(self._leaf.completes)])
        total = gradient_of(self.parameters[index])
        lefts = [self._stack[-1 - depth][index] for depth in range(self._in_place, self._leaf.merges)]
        for left in lefts[:-1]:
            total = left.add_(total)
        if lefts:
            torch.add(lefts[-1], total, out=target)
        else:
            target.copy_(total)
        self.parameters[index].grad = None


class BucketReduction:
    """The reduction of one bucket in each step: reduce-scatter, and all-gather unless the optimizer is sharded too."""

    def __init__(
        self,
        bucket: Bucket,
        plan: TreePlan,
        link: PeerLink,
        sharded: bool,
        all_reduce: bool,
        side_stream: torch.cuda.Stream | None,
    ) -> None:
        self._link, self._sharded, self._all_reduce, self._side_stream = link, sharded, all_reduce, side_stream
        world_size = len(plan.nodes_by_rank)
        #: The sum of each maximal node of this rank.
        self.flats = [bucket.empty() for _ in plan.nodes]
        self.shards = bucket.piece_shards(world_size) if sharded else bucket.even_shards(world_size)
        self._own = slice(*self.shards[plan.rank])
        self.exchange = None
        if world_size > 1 and not all_reduce:
            self.exchange = TreeExchange(plan, self.shards, link, bucket.index, BufferPool())
        self._is_sent = False
        self._gathered: Callable[[], None] | None = None

    def start(self) -> None:
        """Send this rank's sums to the shards' owners."""
        if self._all_reduce:
            work = dist.all_reduce(self.flats[0], async_op=True)
            assert work is not None
            self._link.sent_bytes += self.flats[0].nbytes
            self._gathered = work.wait
        elif self.exchange is not None:
            with self._on_side_stream():
                self.exchange.start_reduce_scatter(self.flats)
                self._is_sent = True
                if self._side_stream is not None:
                    self.reduce()

    def reduce(self) -> None:
        """Finish the tree on this rank's shard, and send the shard to the other ranks."""
        if not self._is_sent or self.exchange is None:
            return
        self._is_sent = False
        total, target = self.exchange.finish_reduce_scatter(), self.flats[0][self._own]
        if total.data_ptr() != target.data_ptr():
            target.copy_(total)
        if not self._sharded:
            self._gathered = self.exchange.start_all_gather(self.flats[0])

    def wait(self) -> None:
        """Wait for the shards of the other ranks."""
        if self._gathered is not None:
            self._gathered()
            self._gathered = None

    def _on_side_stream(self) -> AbstractContextManager[object]:
        if self._side_stream is None:
            return nullcontext()
        self._side_stream.wait_stream(torch.cuda.current_stream(self._side_stream.device))
        return torch.cuda.stream(self._side_stream)
