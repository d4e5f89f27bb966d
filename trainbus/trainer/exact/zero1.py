"""An optimizer sharded over the ranks (ZeRO-1, Rajbhandari et al., 2020) with the bits of an unsharded one.

A rank steps on the pieces of parameters that it owns, whose gradients it has reduced anyway, and the ranks gather
weights instead of gradients. To the optimizer each piece is a parameter of its own, on any number of ranks, so that no
kernel ever sees a tensor whose shape depends on that number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from trainbus.task import TaskError
from trainbus.trainer import optimizer_state as packing
from trainbus.trainer.chained_optimizer import list_optimizers
from trainbus.trainer.exact.exchange import Message
from trainbus.trainer.exact.gradient_tree import GradientTree
from trainbus.trainer.exact.layout import Piece, gradient_of, in_memory_order
from trainbus.trainer.exact.norm import piece_norms
from trainbus.trainer.optimizer_state import OptimizerState, StateMismatch
from trainbus.trainer.readable_tensor import ReadableTensor, make_readable
from trainbus.trainer.training_state import StateEntry, local_entries

#: Optimizers that update each element independently, so that a parameter may be cut into pieces.
ELEMENTWISE: tuple[type[Optimizer], ...] = (
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.SGD,
    optim.ASGD,
    optim.RMSprop,
    optim.Rprop,
    optim.Adagrad,
    optim.Adadelta,
)


def check_elementwise(optimizer: Optimizer, strategy: str) -> None:
    """Raise ``TaskError`` unless the optimizer may step on pieces of parameters."""
    unknown = [type(each).__name__ for each in list_optimizers(optimizer) if type(each) not in ELEMENTWISE]
    if unknown:
        known = ", ".join(sorted(kind.__name__ for kind in ELEMENTWISE))
        raise TaskError(
            f"training.strategy {strategy!r} cuts parameters into pieces, which {unknown[0]} "
            f"may not support: use one of torch.optim's {known}, or strategy 'ddp'"
        )


class ShardedOptimizer:
    """Replaces the parameters in the task's optimizer by pieces. The optimizer object stays the same."""

    def __init__(self, optimizer: Optimizer, model: nn.Module, named: Mapping[str, Tensor], tree: GradientTree) -> None:
        check_elementwise(optimizer, "zero1")
        self._optimizer, self._named, self._tree = optimizer, dict(named), tree
        self._group_names = packing.group_names(optimizer, model)
        self._weights = self._flatten_weights()
        self._owners, self._owned = self._divide()
        self._own_numbers = [number for number, piece in enumerate(self._owners) if piece in self._owned]
        self._pieces = {name: list(pieces) for name, pieces in groupby(self._owners, self._name)}
        before = packing.pack(optimizer, model)
        by_name: dict[str, list[nn.Parameter]] = {}
        for piece, parameter in self._owned.items():
            by_name.setdefault(self._name(piece), []).append(parameter)
        for group, members in zip(optimizer.param_groups, self._group_names, strict=True):
            group["params"] = [parameter for name in members for parameter in by_name.get(name, [])]
        self.load(OptimizerState(make_readable(before.tensors), before.values, before.groups))

    def step(self) -> None:
        """Step on this rank's pieces, and gather the weights of all ranks."""
        self._optimizer.step()
        self._tree.all_gather(self._weights)

    def gradients(self) -> list[Tensor]:
        """Return the gradients that this rank steps with, flat."""
        rank = self._tree.world.rank
        return [flat[slice(*shards[rank])] for flat, shards in zip(self._tree.flats, self._tree.shards, strict=True)]

    def piece_norms(self) -> Tensor:
        """Return the norms of all pieces, this rank's own and the others'."""
        world = self._tree.world
        norms = torch.zeros(len(self._owners), dtype=torch.float64, device=world.device)
        if self._owned:
            norms[self._own_numbers] = piece_norms([gradient_of(parameter) for parameter in self._owned.values()])
        # Each is a number on one rank and zero on the others, so the sum is exact.
        return world.all_reduce(norms)

    def load(self, state: OptimizerState[ReadableTensor]) -> None:
        """Load this rank's pieces; of each tensor it reads the rows that these lie in."""
        packing.check_groups(state, self._group_names)
        tensors: dict[str, dict[str, ReadableTensor]] = {}
        for name_and_key, saved in state.tensors.items():
            name, _, key = name_and_key.rpartition("/")
            if name not in self._named:
                raise StateMismatch(f"the checkpoint has optimizer state of {name!r}, which the model does not train")
            if saved.shape and saved.shape != self._named[name].shape:
                raise StateMismatch(f"optimizer state {name_and_key!r} has shape {tuple(saved.shape)}")
            tensors.setdefault(name, {})[key] = saved
        self._optimizer.state.clear()
        for name, pieces in groupby(self._owned, self._name):
            self._load_pieces(list(pieces), state.values.get(name, {}), tensors.get(name, {}))
        packing.restore_groups(self._optimizer.param_groups, state.groups)

    def _load_pieces(
        self, pieces: Sequence[Piece], values: Mapping[str, Any], tensors: Mapping[str, ReadableTensor]
    ) -> None:
        """Load the state of one parameter's pieces, which follow each other."""
        parameter = self._named[self._name(pieces[0])]
        for piece in pieces if values else ():
            self._piece_state(piece).update(values)
        start, stop = pieces[0].start, pieces[-1].stop
        for key, saved in tensors.items():
            run = _read_run(saved, parameter, start, stop) if saved.shape else None
            for piece in pieces:
                part = saved.read() if run is None else run[piece.start - start : piece.stop - start]
                self._piece_state(piece)[key] = part if run is None else part.to(parameter.device, copy=True)

    def state_entries(self) -> tuple[list[StateEntry], OptimizerState[Tensor]]:
        """Return the optimizer's tensors as entries, and the state with everything else. Every rank calls it."""
        entries: list[StateEntry] = []
        groups = packing.pack_groups(self._optimizer.param_groups, self._group_names)
        state: OptimizerState[Tensor] = OptimizerState(groups=groups)
        everywhere = self._tree.world.all_gather_objects(self._describe_state())
        for name, values in sorted((name, values) for described in everywhere for name, values in described.items()):
            for key, value in sorted(values.items()):
                if isinstance(value, torch.dtype):
                    like = torch.empty_like(self._named[name], dtype=value, device="meta")
                    fetch = partial(self._fetch, name, key, value)
                    entries.append(StateEntry("optimizer", f"{name}/{key}", like, fetch, False))
                elif isinstance(value, Tensor):
                    entries += local_entries("optimizer", {f"{name}/{key}": value})
                else:
                    state.values.setdefault(name, {})[key] = value
        return entries, state

    def _fetch(self, name: str, key: str, dtype: torch.dtype, owner: int) -> Callable[[], Tensor | None]:
        """Start to send the pieces of a state tensor to ``owner``."""
        rank = self._tree.world.rank
        whole = torch.empty_like(self._named[name], dtype=dtype) if rank == owner else None
        sends: list[Message] = []
        receives: list[Message] = []
        for piece in self._pieces.get(name, ()):
            holder = self._owners[piece]
            if whole is not None:
                place = in_memory_order(whole)[piece.start : piece.stop]
                if holder == rank:
                    place.copy_(self._piece_state(piece)[key])
                else:
                    receives.append((place, holder))
            elif holder == rank:
                sends.append((self._piece_state(piece)[key], owner))
        landed = self._tree.link.start(sends, receives, 0)

        def wait() -> Tensor | None:
            landed()
            return None if whole is None else whole.contiguous()

        return wait

    def _piece_state(self, piece: Piece) -> dict[str, Any]:
        state: dict[str, Any] = self._optimizer.state[self._owned[piece]]
        return state

    def _describe_state(self) -> dict[str, dict[str, Any]]:
        """Return the state of the parameters whose first piece is here; a dtype stands for a sharded tensor."""
        described: dict[str, dict[str, Any]] = {}
        for piece, parameter in self._owned.items():
            if piece.start == 0 and parameter in self._optimizer.state:
                described[self._name(piece)] = {
                    key: value.dtype if isinstance(value, Tensor) and value.ndim > 0 else value
                    for key, value in self._optimizer.state[parameter].items()
                }
        return described

    def _name(self, piece: Piece) -> str:
        return self._tree.names[piece.index]

    def _flatten_weights(self) -> list[Tensor]:
        """Move the weights into flat tensors laid out as the gradients are."""
        flats = []
        for bucket in self._tree.buckets:
            flat = bucket.empty()
            for slot in bucket.slots:
                place = slot.view(flat)
                place.copy_(slot.parameter.detach())
                slot.parameter.data = place
            flats.append(flat)
        return flats

    def _divide(self) -> tuple[dict[Piece, int], dict[Piece, nn.Parameter]]:
        """Return the owner of each piece, and this rank's pieces as parameters: spans of the flat weights."""
        owners: dict[Piece, int] = {}
        owned: dict[Piece, nn.Parameter] = {}
        for bucket, shards, weights, gradients in zip(
            self._tree.buckets, self._tree.shards, self._weights, self._tree.flats, strict=True
        ):
            for slot in bucket.slots:
                for piece in slot.pieces():
                    start = slot.offset + piece.start
                    owners[piece] = next(n for n, (first, end) in enumerate(shards) if first <= start < end)
                    if owners[piece] == self._tree.world.rank:
                        place = slice(start, slot.offset + piece.stop)
                        owned[piece] = nn.Parameter(weights[place])
                        owned[piece].grad = gradients[place]
        return dict(sorted(owners.items())), dict(sorted(owned.items()))


def _read_run(saved: ReadableTensor, parameter: Tensor, start: int, stop: int) -> Tensor:
    """Return the elements ``start`` to ``stop`` of a saved tensor, counted as the parameter's lie in memory, flat."""
    if not parameter.is_contiguous():
        laid_out = torch.empty_like(parameter, dtype=saved.dtype, device="cpu").copy_(saved.read())
        return in_memory_order(laid_out)[start:stop]
    row_length = math.prod(saved.shape[1:])
    first, last = start // row_length, -(-stop // row_length)
    offset = first * row_length
    return saved.read_rows(first, last).flatten()[start - offset : stop - offset]
