"""The tensors of a batch, wherever in it they lie. Serving imports this without the modules that read datasets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def to_device(batch: Any, move: Callable[[Any], Any]) -> Any:
    """Apply ``move`` to every tensor inside nested tuples, lists and mappings, and to each batch that has its own `to`.

    Such a batch keeps its type: the attributes of a graph or of a tokenizer's encoding are what the model reads.
    """
    match batch:
        case dict():
            return {key: to_device(value, move) for key, value in batch.items()}
        case tuple() if hasattr(batch, "_fields"):
            return type(batch)(*(to_device(value, move) for value in batch))
        case tuple() | list():
            return type(batch)(to_device(value, move) for value in batch)
        case _ if hasattr(batch, "to"):
            return move(batch)
        case Mapping():
            return {key: to_device(value, move) for key, value in batch.items()}
        case _:
            return batch
