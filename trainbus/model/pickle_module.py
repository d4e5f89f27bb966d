"""The pickle module of a Task's model in MLflow: ``mlflow.pytorch.load_model`` reads ``data/model.pth`` with it.

That file holds no weights and no code. It is laid out as ``torch.load`` expects (magic number, version, system, object,
storages), and its object is the path to the model's folder, so the weights are stored once, as safetensors.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

#: ``torch.load`` asks a pickle module for these.
from pickle import Pickler, dump, dumps
from typing import Any

__all__ = ["Pickler", "Unpickler", "dump", "dumps", "load"]


class Unpickler(pickle.Unpickler):
    """Reads plain values alone; the object of the file, a path relative to it, becomes the model in that folder."""

    #: Set by ``torch.load``.
    persistent_load: Callable[[Any], Any]

    def __init__(self, file: Any, **_: Any) -> None:
        super().__init__(file)
        self._path = Path(file.name)

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"{self._path} is not of trainbus: it asks for {module_name}.{global_name}")

    def load(self) -> Any:
        """Return the model."""
        from trainbus.model.saved_model import load_model

        return load_model((self._path.parent / super().load()).resolve())


def load(file: Any, **_: Any) -> Any:
    """Return the next value of a file: what stands before and after the object."""
    return _PlainUnpickler(file).load()


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"this file is not of trainbus: it asks for {module_name}.{global_name}")
