"""Counts the bytes of the tensors that a piece of code holds at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Inside the context, follows every tensor that this thread makes until its memory is free; meta has none."""

    def __init__(self) -> None:
        super().__init__()
        #: The most bytes that were live after an operation.
        self.peak_bytes = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = {_key(tensor) for tensor in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        self._live = {key: (ref, size) for key, (ref, size) in self._live.items() if not ref.expired()}
        for tensor in _tensors(result):
            if _key(tensor) not in given:
                storage = tensor.untyped_storage()
                self._live[_key(tensor)] = (StorageWeakRef(storage), storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._live.values()))
        return result


def _tensors(tree: Any) -> list[Tensor]:
    found = [leaf.to_local() if isinstance(leaf, DTensor) else leaf for leaf in tree_leaves(tree)]
    return [leaf for leaf in found if type(leaf) in (Tensor, torch.nn.Parameter) and not leaf.is_meta]


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
