"""The training state as named tensors, and how the ranks divide it among them to save it.

A strategy lists the tensors: one entry each, with its size and a way to bring it, whole, to one rank. ``assemble``
gives every rank about as many bytes to save, and brings each tensor to the rank that saves it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Generic

import torch
from torch import Tensor

from contracts.tensor_files import TensorKind
from trainbus.trainer.optimizer_state import AnyTensor, OptimizerState
from trainbus.trainer.world import World

#: Starts to bring a tensor to the rank ``owner`` and returns a function that waits for it. On the owner that function
#: returns the whole tensor; on other ranks its result has no meaning.
Fetch = Callable[[int], Callable[[], Tensor | None]]


@dataclass(slots=True)
class State(Generic[AnyTensor]):
    """Whole tensors by name: all of them, readable, when loaded; one rank's share, disjoint from others', when saved.

    Saved tensors are the live ones where the rank has them, on its device and not copied: they may share memory
    (tied weights), and the next step changes them.
    """

    #: Weights and buffers under the names of ``model.state_dict()``.
    model: dict[str, AnyTensor] = field(default_factory=dict)
    #: When saved, ``values`` and ``groups`` are complete on rank 0 and empty elsewhere.
    optimizer: OptimizerState[AnyTensor] = field(default_factory=OptimizerState)
    #: The moving average of the weights, by parameter name.
    ema: dict[str, AnyTensor] = field(default_factory=dict)
    #: The loss scale of fp16, as JSON. On every rank.
    scaler: dict[str, Any] | None = None

    @property
    def tensors(self) -> dict[TensorKind, dict[str, AnyTensor]]:
        """The tensors by kind and name."""
        return {"model": self.model, "optimizer": self.optimizer.tensors, "ema": self.ema}


@dataclass(frozen=True, slots=True)
class StateEntry:
    """One tensor of the state. All ranks list the same entries in the same order."""

    kind: TensorKind
    name: str
    #: A tensor of the whole one's shape and dtype; its values have no meaning, and it may be on meta.
    like: Tensor
    fetch: Fetch
    #: Whether the owner fetches the live tensor, which the next step changes, and no copy.
    is_live: bool

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.name}"

    @property
    def size_bytes(self) -> int:
        return self.like.numel() * self.like.element_size()


@dataclass(frozen=True, slots=True)
class StateEntries:
    """A whole training state: its tensors as entries, and everything else as plain values."""

    tensors: list[StateEntry]
    values: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]
    scaler: dict[str, Any] | None = None


def local_entries(kind: TensorKind, tensors: Mapping[str, Tensor]) -> list[StateEntry]:
    """List tensors that every rank holds whole."""

    def fetch(tensor: Tensor) -> Fetch:
        return lambda owner: lambda: tensor

    return [StateEntry(kind, name, tensor.detach(), fetch(tensor.detach()), True) for name, tensor in tensors.items()]


def assemble(entries: StateEntries, world: World) -> State[Tensor]:
    """Return the share of the state that this rank saves; every rank calls it with the same entries."""
    state: State[Tensor] = State(scaler=entries.scaler)
    for entry, tensor in fetch_share(divide_entries(entries.tensors, world.size), world.rank):
        state.tensors[entry.kind][entry.name] = tensor
    if world.is_first:
        state.optimizer.values, state.optimizer.groups = entries.values, entries.groups
    return state


def divide_entries(entries: Sequence[StateEntry], parts: int) -> list[list[StateEntry]]:
    """Return the share of each rank, alike on every rank: about as many bytes."""
    by_key = {entry.key: entry for entry in entries}
    keys = divide_by_bytes({entry.key: entry.size_bytes for entry in entries}, parts)
    return [[by_key[key] for key in owned] for owned in keys]


def fetch_share(shares: Sequence[Sequence[StateEntry]], rank: int) -> Iterator[tuple[StateEntry, Tensor]]:
    """Bring the tensors of a rank's share to it, one after the other; every rank calls it with the same shares.

    The ranks take turns as owners, so that each round brings one tensor to each rank at the same time. A caller that
    releases each tensor before it asks for the next one holds at most one copy at a time, beside the live tensors.
    """
    for entries in zip_longest(*shares):
        started = [(owner, entry, entry.fetch(owner)) for owner, entry in enumerate(entries) if entry is not None]
        arrived = {owner: (entry, wait()) for owner, entry, wait in started}
        del started  # what brings a tensor may hold it
        if rank in arrived:
            entry, tensor = arrived.pop(rank)
            assert tensor is not None
            yield entry, tensor
            del tensor


def divide_by_bytes(sizes_bytes: Mapping[str, int], parts: int) -> list[list[str]]:
    """Divide names among ``parts`` owners, alike on every rank: largest first, each to the owner with the least."""
    owned: list[list[str]] = [[] for _ in range(parts)]
    load = [0] * parts
    for name in sorted(sizes_bytes, key=lambda name: (-sizes_bytes[name], name)):
        least = min(range(parts), key=lambda part: (load[part], part))
        owned[least].append(name)
        load[least] += sizes_bytes[name]
    return owned


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
