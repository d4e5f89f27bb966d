"""Adds the leaves' gradients up along the tree, over all processes, while backward goes on.

A process keeps a stack of the sums it has so far, as the very tensors that autograd made: a right child that is a
single leaf is added by autograd itself, in place, and the last addition of what a process can add writes straight into
the buffer that travels. So there is no pass over memory that plain accumulation would not make. Then each bucket's
sums go in shards to the shards' owners, which finish the tree and, unless the optimizer is sharded too, hand the
result back. Every rank sends (W-1)/W * N * (k+1) elements in a step, k being its number of maximal nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from trainbus.task import TaskError
from trainbus.trainer.exact.layout import Bucket, Span, buckets_of
from trainbus.trainer.exact.tree import Leaf, Node, leaves_of_ranks, maximal_nodes, plan, reduce_tree
from trainbus.trainer.exact.wire import Wire
from trainbus.trainer.world import World


class GradientTree:
    """Makes ``parameter.grad`` the sum over all leaves.

    For each micro-batch, ``begin`` goes before its forward and ``end`` after its backward; ``finish`` after the last.
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
        self.leaves = leaves_of_ranks(leaf_count, world.size)[world.rank]
        self.buckets = buckets_of(self.parameters)
        self.wire = Wire(world.device) if world.size > 1 else None
        #: Whether gradients end up in flat buffers; a single process needs none.
        self.flat = sharded or world.size > 1
        self.sharded = sharded
        self._root: Node = (0, leaf_count)
        self._plan = {leaf.index: leaf for leaf in plan(leaf_count, self.leaves)}
        self._nodes = [maximal_nodes(leaf_count, leaves) for leaves in leaves_of_ranks(leaf_count, world.size)]
        self._mine = self._nodes[world.rank]
        gloo = world.size > 1 and dist.get_backend() == "gloo" and world.device.type == "cpu"
        self._all_reduce = shortcut and gloo and not sharded and [len(nodes) for nodes in self._nodes] == [1, 1]
        self._transfers = [_Transfer(bucket, self) for bucket in self.buckets] if self.flat else []
        self._place_of = {slot.index: (bucket.index, slot) for bucket in self.buckets for slot in bucket.slots}
        self._side = torch.cuda.Stream() if self.wire is not None and self.wire.orders_streams else None  # type: ignore[no-untyped-call]

        self._stack: list[list[Tensor]] = []
        self._leaf: Leaf | None = None
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
        """The flat gradients of every bucket, whole after ``finish``; with ``sharded``, in this rank's shard alone."""
        return [transfer.flats[0] for transfer in self._transfers]

    @property
    def shards(self) -> list[list[Span]]:
        """Where each rank's shard of each bucket lies."""
        return [transfer.shards for transfer in self._transfers]

    def begin(self, leaf: int, *, first: bool, last: bool) -> None:
        """Make ready for a micro-batch of a leaf."""
        self._seen = [False] * len(self.parameters)
        plan = self._plan[leaf]
        to_buffer = self.flat and plan.completes is not None
        self._placing = to_buffer and last
        if self._placing:
            self._missing = [len(bucket.slots) for bucket in self.buckets]
        if first:
            self._leaf = plan
            # A leaf of several micro-batches is a sum of its own, and the last addition writes into the buffer.
            self._in_place = first and last and plan.merges > int(to_buffer)
            for index, parameter in enumerate(self.parameters):
                parameter.grad = self._stack[-1][index] if self._in_place else None

    def end(self, leaf: int, *, last: bool) -> None:
        """Take up what backward has left in ``grad``, zeros where it left nothing."""
        plan = self._plan[leaf]
        for index, seen in enumerate(self._seen):
            if not seen:
                self._arrive(index, used=False)
        if not last:
            return
        if not self._placing:
            gradients = [_gradient(parameter) for parameter in self.parameters]
            merges = plan.merges
            if self._in_place:
                self._stack.pop()
                merges -= 1
            for _ in range(merges):
                left = self._stack.pop()
                torch._foreach_add_(left, gradients)
                gradients = left
            self._stack.append(gradients)
            return
        del self._stack[len(self._stack) - plan.merges :]
        self._placing = False

    def finish(self) -> None:
        """Wait for everything that travels; then ``grad`` is the whole sum, and the next step may begin."""
        if not self.flat:
            (gradients,) = self._stack
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient
            self._stack.clear()
            return
        for transfer in self._transfers:
            transfer.complete()
        for transfer in self._transfers:
            transfer.settle()
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)
        self._next = 0
        for bucket, flat in zip(self.buckets, self.flats, strict=True):
            for slot in bucket.slots:
                self.parameters[slot.index].grad = slot.view(flat)

    def forget(self) -> None:
        """Drop the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def gather(self, flats: Sequence[Tensor]) -> None:
        """Complete every rank's ``flats`` (one a bucket) from the shards that the ranks have of them."""
        if self.wire is None:
            return
        waits = [transfer.hand_out(flat, self.wire) for transfer, flat in zip(self._transfers, flats, strict=True)]
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
        if self._leaf.completes == self._mine[-1]:
            while self._next < len(self.buckets) and not self._missing[self._next]:
                self._transfers[self._next].start()
                self._next += 1

    def _place(self, index: int) -> None:
        """Make the additions that are left of a maximal node, the last one into its buffer."""
        assert self._leaf is not None
        assert self._leaf.completes is not None
        number, slot = self._place_of[index]
        target = slot.view(self._transfers[number].flats[self._mine.index(self._leaf.completes)])
        total = _gradient(self.parameters[index])
        lefts = [self._stack[-1 - depth][index] for depth in range(self._in_place, self._leaf.merges)]
        for left in lefts[:-1]:
            total = left.add_(total)
        if lefts:
            torch.add(lefts[-1], total, out=target)
        else:
            target.copy_(total)
        self.parameters[index].grad = None

    def _stream(self) -> AbstractContextManager[object]:
        if self._side is None:
            return nullcontext()
        self._side.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._side)


class _Transfer:
    """One bucket's way through a step. Its buffers are kept: allocating them anew costs more than filling them."""

    def __init__(self, bucket: Bucket, tree: GradientTree) -> None:
        self._bucket, self._tree = bucket, tree
        world, nodes = tree.world, tree._nodes
        self.flats = [bucket.empty() for _ in tree._mine]
        self.shards = (bucket.piece_shards if tree.sharded else bucket.even_shards)(world.size)
        self._peers = [(world.rank + step) % world.size for step in range(1, world.size)]
        start, stop = self.shards[world.rank]
        self._received: dict[Node, tuple[Tensor, int]] = {}
        if not tree._all_reduce:
            self._received = {node: (bucket.empty(stop - start), peer) for peer in self._peers for node in nodes[peer]}
        #: For the peers' sums of this rank's shard; for the finished shards of the peers.
        self._sums_here: Callable[[], None] | None = None
        self._handed_out: Callable[[], None] | None = None

    def start(self) -> None:
        """Send this rank's sums to the shards' owners."""
        tree = self._tree
        if tree.wire is None:
            return
        if tree._all_reduce:
            work = dist.all_reduce(self.flats[0], async_op=True)
            assert work is not None
            tree.wire.sent_bytes += self.flats[0].nbytes
            self._handed_out = work.wait
            return
        with tree._stream():
            sends = [(flat[slice(*self.shards[peer])], peer) for peer in self._peers for flat in self.flats]
            self._sums_here = tree.wire.start(sends, list(self._received.values()), 2 * self._bucket.index)
            if tree._side is not None:
                self.complete()

    def complete(self) -> None:
        """Finish the tree on this rank's shard, and hand it out."""
        tree = self._tree
        if self._sums_here is None or tree.wire is None:
            return
        self._sums_here()
        self._sums_here = None
        mine = slice(*self.shards[tree.world.rank])
        target = self.flats[0][mine]
        sums = {node: flat[mine] for node, flat in zip(tree._mine, self.flats, strict=True)}
        sums |= {node: tensor for node, (tensor, _) in self._received.items()}
        middle = reduce_tree(tree._root, sums, lambda left, right: left.add_(right))
        if middle.data_ptr() != target.data_ptr():
            target.copy_(middle)
        if not tree.sharded:
            self._handed_out = self.hand_out(self.flats[0], tree.wire)

    def hand_out(self, flat: Tensor, wire: Wire) -> Callable[[], None]:
        """Send this rank's shard of ``flat`` to the others and take theirs."""
        mine = flat[slice(*self.shards[self._tree.world.rank])]
        sends = [(mine, peer) for peer in self._peers]
        receives = [(flat[slice(*self.shards[peer])], peer) for peer in self._peers]
        return wire.start(sends, receives, 2 * self._bucket.index + 1)

    def settle(self) -> None:
        if self._handed_out is not None:
            self._handed_out()
            self._handed_out = None


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
