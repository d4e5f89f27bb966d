"""trainbus: training runs that start, survive and finish. What a user's code imports.

``Task`` and ``Trainer`` bring torch with them and are loaded when first used; ``report`` brings
nothing, so that a script which only reports its metrics starts as fast as before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainbus.report import report

if TYPE_CHECKING:
    from trainbus.task import Task
    from trainbus.trainer.trainer import Trainer

__all__ = ["Task", "Trainer", "report"]


def __getattr__(name: str) -> object:
    if name == "Task":
        from trainbus.task import Task

        return Task
    if name == "Trainer":
        from trainbus.trainer.trainer import Trainer

        return Trainer
    raise AttributeError(f"module 'trainbus' has no attribute {name!r}")
