"""Keeps buffers that forward changes (BatchNorm statistics) equal: leaves start from the same and end with one value.

``first``: a step leaves the buffers as leaf 0 left them. ``mean``: the mean over the leaves, weighted by their samples
and added up along the tree; integer buffers are those of leaf 0. Buffers that no forward changes cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainbus.trainer.exact.tree import Node, SumStack, TreePlan, reduce_tree
from trainbus.trainer.world import World

#: Larger buffers count as changed only if autograd's version counter shows it; statistics are never that large.
COMPARED_BYTES = 2**20


class BufferSync:
    """Call ``leaf_done`` after each leaf and ``step_done`` after the last, then ``commit`` to make it so."""

    def __init__(self, model: nn.Module, leaf_count: int, world: World, rule: Literal["first", "mean"]) -> None:
        self._world, self._mean = world, rule == "mean"
        self._places = [
            (module, name)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._plan = TreePlan(leaf_count, world.size, world.rank)
        self._live = [self._buffer(place) for place in range(len(self._places))]
        #: As they are at the start of a step; what forward makes of them is kept in ``_new``.
        self._start = [buffer.clone() for buffer in self._live]
        self._versions = [buffer._version for buffer in self._live]
        self._floats = [place for place, buffer in enumerate(self._live) if buffer.is_floating_point()]
        #: Those that have ever been changed, on all ranks alike.
        self._known: list[int] = []
        #: What this step leaves: leaf 0's values where leaf 0 is, then those that all agreed on.
        self._new: dict[int, Tensor] = {}
        self._touched: set[int] = set()
        self._stack: SumStack[list[Tensor]] = SumStack(_add)
        self._sums: dict[Node, list[Tensor]] = {}

    def leaf_done(self, leaf: int, weight: float) -> None:
        """Keep the leaf's values of the buffers, and restore those from the start of the step."""
        if not self._places:
            return
        changed = self._find_changed()
        step = self._plan.steps[leaf]
        if leaf == 0:
            self._new = {place: self._buffer(place).clone() for place in changed}
        if self._mean:
            self._touched.update(changed)
            # All floating-point buffers, since another leaf may change what this one does not.
            total = self._stack.push(step, [self._buffer(place) * weight for place in self._floats])
            if total is not None and step.completes is not None:
                self._sums[step.completes] = total
        self._restore(changed)

    def step_done(self) -> None:
        """Agree on the step's result with all ranks."""
        if not self._places:
            return
        if self._mean:
            self._agree_on_mean()
        elif self._world.size > 1:
            self._broadcast_first()
        else:
            self._known = sorted({*self._known, *self._new})

    def commit(self) -> None:
        """Write the agreed values into the buffers; nothing here can fail on one rank alone."""
        with torch.no_grad():
            for place, value in self._new.items():
                self._live[place].copy_(value)
                self._start[place].copy_(value)
                self._versions[place] = self._live[place]._version
        self._new, self._sums = {}, {}

    def roll_back(self) -> None:
        """Restore the buffers from after the last completed step."""
        self._restore(list(range(len(self._places))))
        self._new, self._sums, self._touched = {}, {}, set()
        self._stack.clear()

    def _buffer(self, place: int) -> Tensor:
        module, name = self._places[place]
        buffer = module._buffers[name]
        assert buffer is not None
        return buffer

    def _find_changed(self) -> list[int]:
        changed, unsure = [], []
        for place, live in enumerate(self._live):
            buffer = self._buffer(place)
            if buffer is not live or live._version != self._versions[place]:
                changed.append(place)
            elif place in self._known and not self._mean:
                changed.append(place)  # probably changed; to count it is harmless
            elif live.nbytes <= COMPARED_BYTES:
                unsure.append(place)
        # Batch norm's kernels write running statistics without touching the version counter.
        if unsure:
            differ = torch.stack([(self._live[place] != self._start[place]).any() for place in unsure])
            changed += [place for place, differs in zip(unsure, differ.tolist(), strict=True) if differs]
        return sorted(changed)

    def _restore(self, places: list[int]) -> None:
        with torch.no_grad():
            for place in places:
                module, name = self._places[place]
                module._buffers[name] = self._live[place]  # a module may have put another tensor there
                self._live[place].copy_(self._start[place])
                self._versions[place] = self._live[place]._version

    def _broadcast_first(self) -> None:
        """Broadcast rank 0's values: one message, and a second if a buffer changes for the first time."""
        mask = torch.zeros(len(self._places), dtype=torch.uint8)
        mask[sorted(self._new)] = 1
        known = self._known
        values = [self._new.get(place, self._start[place]) for place in known]
        message = _pack_tensors([mask.to(self._world.device), *values])
        dist.broadcast(message, src=0)
        mask, *values = _unpack_tensors(message, [mask, *values])
        found = mask.nonzero().flatten().tolist()
        unknown = sorted(set(found) - set(known))
        if unknown:
            late = [self._new.get(place, self._start[place]) for place in unknown]
            message = _pack_tensors(late)
            dist.broadcast(message, src=0)
            values += _unpack_tensors(message, late)
            self._known = known + unknown
        self._new = {p: value for p, value in zip(known + unknown, values, strict=True) if p in set(found)}

    def _agree_on_mean(self) -> None:
        """Set ``_new`` to the mean of the leaves' buffers, the same on all ranks. Every rank calls it once a step.

        All ranks' messages have the same length: which buffers the rank's leaves changed (uint8, [buffers]), its values
        of those that are no floating-point numbers (rank 0's count: it has leaf 0), and for each of its nodes of the
        tree the weighted sum of each floating-point buffer, with zeros up to the nodes of the rank with the most.
        """
        mask = torch.zeros(len(self._places), dtype=torch.uint8)
        mask[sorted(self._touched)] = 1
        whole = [place for place in range(len(self._places)) if place not in set(self._floats)]
        firsts = [self._new.get(place, self._start[place]) for place in whole]
        mine = self._plan.nodes
        most = max(map(len, self._plan.nodes_by_rank))
        nothing = [torch.zeros_like(self._start[place]) for place in self._floats]
        sums = [self._sums[mine[n]] if n < len(mine) else nothing for n in range(most)]
        parts = [mask.to(self._world.device), *firsts, *(tensor for node in sums for tensor in node)]
        message = _pack_tensors(parts)
        messages = [message]
        if self._world.size > 1:
            messages = [torch.empty_like(message) for _ in range(self._world.size)]
            dist.all_gather(messages, message)
        by_node: dict[Node, list[Tensor]] = {}
        touched: set[int] = set()
        for rank, nodes in enumerate(self._plan.nodes_by_rank):
            theirs = _unpack_tensors(messages[rank], parts)
            touched.update(theirs[0].nonzero().flatten().tolist())
            if rank == 0:
                firsts = theirs[1 : 1 + len(whole)]
            left = theirs[1 + len(whole) :]
            for n, node in enumerate(nodes):
                by_node[node] = left[n * len(self._floats) : (n + 1) * len(self._floats)]
        values = dict(zip(whole, firsts, strict=True))
        values |= dict(zip(self._floats, reduce_tree(self._plan.root, by_node, _add), strict=True))
        self._new = {place: values[place] for place in sorted(touched)}
        self._touched = set()


def _add(left: Iterable[Tensor], right: Iterable[Tensor]) -> list[Tensor]:
    return [a + b for a, b in zip(left, right, strict=True)]


def _pack_tensors(tensors: list[Tensor]) -> Tensor:
    """Return the bytes of all tensors, each from a multiple of 16 on."""
    parts = []
    for tensor in tensors:
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        parts += [raw, raw.new_zeros(-raw.numel() % 16)]
    return torch.cat(parts)


def _unpack_tensors(message: Tensor, like: list[Tensor]) -> list[Tensor]:
    found, place = [], 0
    for tensor in like:
        raw = message[place : place + tensor.nbytes]
        found.append(raw.view(tensor.dtype).reshape(tensor.shape))
        place += tensor.nbytes + -tensor.nbytes % 16
    return found
