"""Storages without memory: each records the operations that fill it, and replays them when its bytes are needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map

#: Nested replays take stack frames, and a chain that branches takes exponential time.
MAX_DEPTH, MAX_COST = 64, 10_000


class DeferralError(Exception):
    """A tensor cannot be deferred; the text says why."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a tensor lies in its storage: elements, not bytes."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Geometry:
        """Return the geometry of a strided tensor.

        Raises:
            DeferralError: the tensor is sparse, or a lazy conjugate or negative, which numbers cannot describe.
        """
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            raise DeferralError("a tensor is sparse, or a lazy conjugate or negative")
        return cls(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    @property
    def span_bytes(self) -> int:
        """Bytes of the smallest storage that holds the tensor at its offset."""
        if 0 in self.size:
            return 0
        last = sum((length - 1) * step for length, step in zip(self.size, self.stride, strict=True))
        return (self.offset + last + 1) * self.dtype.itemsize

    def allocate(self, device: str = "cpu") -> Tensor:
        """Return an uninitialised tensor of this size and stride in a storage of its own, at offset 0."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device)

    def view(self, memory: torch.UntypedStorage) -> Tensor:
        """Return the tensor that lies so in ``memory``."""
        return torch.empty(0, dtype=self.dtype).set_(memory, self.offset, self.size, self.stride)


@dataclass(frozen=True, slots=True)
class StorageView:
    """A tensor in a deferred storage, as it is after the storage's first ``version`` operations."""

    storage: DeferredStorage
    version: int
    geometry: Geometry


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """A call of an ATen operator whose deferred arguments are ``StorageView``s."""

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    #: Operators without a dtype argument compute in it.
    default_dtype: torch.dtype
    #: Of torch's generator on the host, before the call; None: the operator draws no random numbers.
    random_state: Tensor | None = None

    @property
    def inputs(self) -> dict[DeferredStorage, int]:
        """Return the versions of the deferred storages that the operator reads or writes."""
        leaves = tree_leaves((self.args, self.kwargs))
        return {leaf.storage: leaf.version for leaf in leaves if isinstance(leaf, StorageView)}

    def cost(self, memory: DeferredStorage | None = None) -> int:
        """Return how many operations a replay runs, where ``memory`` has been replayed already."""
        return 1 + sum(each.costs[version - 1] for each, version in self.inputs.items() if each is not memory)

    @property
    def real_bytes(self) -> int:
        """Return how many bytes of tensors that are not deferred are arguments."""
        leaves = tree_leaves((self.args, self.kwargs))
        return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_meta)

    def copy_inputs(self, max_bytes: int) -> Operation:
        """Return the operation with copies of the tensors that are not deferred, which may change later.

        Raises:
            DeferralError: one has more than ``max_bytes``.
        """
        args, kwargs = tree_map(lambda leaf: _copy(leaf, max_bytes), (self.args, dict(self.kwargs)))
        return replace(self, args=args, kwargs=kwargs)

    def run(self, memories: Mapping[DeferredStorage, torch.UntypedStorage]) -> Any:
        """Call the operator; it writes to ``memories``, and reads what else it needs from further replays."""
        found = dict(memories)

        def resolve(leaf: Any) -> Any:
            if not isinstance(leaf, StorageView):
                return leaf
            if leaf.storage not in found:
                found[leaf.storage] = leaf.storage.replay(leaf.version)
            return leaf.geometry.view(found[leaf.storage])

        args, kwargs = tree_map(resolve, (self.args, dict(self.kwargs)))
        # After the replays, which set it, too.
        if self.random_state is not None:
            torch.set_rng_state(self.random_state)
        with _default_dtype(self.default_dtype):
            return self.func(*args, **kwargs)


class DeferredStorage:
    """A storage on the meta device, with the operations that fill it.

    The first one, its birth, returns a tensor in it; the others write to it.
    """

    def __init__(self, tensor: Tensor, birth: Operation, output: int) -> None:
        """``tensor``, on the meta device, stands for the leaf number ``output`` of what ``birth`` returns."""
        #: As long as it lives, no other storage has its address.
        self.meta = tensor.untyped_storage()
        self._geometry, self._output = Geometry.of(tensor), output
        self._operations: list[Operation] = []
        #: How many operations a replay runs, by the version that it ends with.
        self.costs: list[int] = []
        self.depth = 0
        self.append(birth)

    @property
    def version(self) -> int:
        """How many operations have written to the storage."""
        return len(self._operations)

    def append(self, operation: Operation) -> None:
        """Record an operation that writes to the storage.

        Raises:
            DeferralError: a replay would take too long, or be nested too deeply.
        """
        cost = (self.costs[-1] if self.costs else 0) + operation.cost(self)
        self.depth = max(self.depth, *(each.depth + 1 for each in operation.inputs if each is not self), 0)
        if cost > MAX_COST or self.depth > MAX_DEPTH:
            raise DeferralError(f"a tensor is computed in {cost} operations, {self.depth} deep")
        self._operations.append(operation)
        self.costs.append(cost)

    def materialize(self, geometry: Geometry) -> Tensor:
        """Return a tensor that lies so in the storage, in fresh memory that holds no more than it."""
        found = geometry.view(self.replay())
        has_more = found.untyped_storage().nbytes() > geometry.span_bytes or geometry.offset
        return geometry.allocate().copy_(found) if has_more else found

    def replay(self, version: int | None = None) -> torch.UntypedStorage:
        """Return fresh memory on the host with the bytes after ``version`` operations; None: after all of them."""
        memory = self._replay_birth()
        for operation in self._operations[1:version]:
            operation.run({self: memory})
        return memory

    def _replay_birth(self) -> torch.UntypedStorage:
        found: Tensor = tree_leaves(self._operations[0].run({}))[self._output]
        if Geometry.of(found) != self._geometry:
            # The meta kernel has other strides; what views of the storage refer to are its.
            found = self._geometry.allocate().copy_(found)
        return found.untyped_storage()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    if dtype is before:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _copy(leaf: Any, max_bytes: int) -> Any:
    """Copy a tensor on the host with its strides, on which the last bits of a result may depend."""
    if not isinstance(leaf, Tensor) or leaf.is_meta:
        return leaf
    geometry = replace(Geometry.of(leaf), offset=0)
    if geometry.span_bytes > max_bytes:
        raise DeferralError(f"a tensor of {geometry.span_bytes} bytes from elsewhere is an operand")
    flat = leaf.detach().as_strided((geometry.span_bytes // leaf.element_size(),), (1,)).clone()
    return geometry.view(flat.untyped_storage())
