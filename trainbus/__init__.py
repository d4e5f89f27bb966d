"""trainbus: training runs that start, survive and finish. What a user's code imports.

``Client`` and ``AsyncClient`` submit runs and read what came of them; ``Task`` and ``Trainer`` are what runs in a
rank. Each is imported at its first use: in a rank ``import trainbus`` loads no bus, and a script that only calls
``report``, ``checkpoint`` and their like loads the standard library alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from trainbus.report import report  # also so that importing the module later does not replace the function
from trainbus.script import artifact, checkpoint, init_dir, output_dir, params, resume, resume_step, should_stop

if TYPE_CHECKING:
    from trainbus.client.client import AsyncClient, Client
    from trainbus.client.errors import TrainbusError
    from trainbus.model.saved_model import load_model
    from trainbus.task import Task
    from trainbus.trainer.trainer import Trainer

__all__ = [
    "AsyncClient",
    "Client",
    "Task",
    "TrainbusError",
    "Trainer",
    "artifact",
    "checkpoint",
    "init_dir",
    "load_model",
    "output_dir",
    "params",
    "report",
    "resume",
    "resume_step",
    "should_stop",
]

_MODULES = {
    "AsyncClient": "trainbus.client.client",
    "Client": "trainbus.client.client",
    "Task": "trainbus.task",
    "Trainer": "trainbus.trainer.trainer",
    "TrainbusError": "trainbus.client.errors",
    "load_model": "trainbus.model.saved_model",
}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'trainbus' has no attribute {name!r}")
