"""Samples: their order (order, sampler), their bytes (reader), batches (loader), ``Loader`` for any PyTorch loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainbus.data.dataset import Dataset as Dataset
    from trainbus.data.reader import DatasetError as DatasetError
    from trainbus.data.standalone import Loader as Loader
    from trainbus.data.standalone import open_dataset as open_dataset

_PLACES = {"Dataset": "dataset", "DatasetError": "reader", "Loader": "standalone", "open_dataset": "standalone"}
__all__ = ["Dataset", "DatasetError", "Loader", "open_dataset"]


def __getattr__(name: str) -> Any:
    """Import on demand: the order and the plan of a run are needed where there is no torch."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
