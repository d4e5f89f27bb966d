"""Checkpoints that ranks wrote to disk and that were never committed: kept on the node for the next generation.

``<run>/survivors/g<generation>/step_<n>-rank_<r>/``, where ``<run>`` is the run's folder on this node. They are on the
disk even if the store was away when the ranks ended.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

_STEP = re.compile(r"step_(\d+)-rank_\d+")


def survivor_dir(run_folder: Path) -> Path:
    """Return the folder in which ranks find the checkpoints of earlier generations."""
    return run_folder / "survivors"


def save(generation_folder: Path, may_commit: Callable[[int], bool]) -> None:
    """Keep what the ranks of a generation that has ended wrote of steps that ``may_commit``. Repeatable."""
    written = generation_folder / "checkpoints"
    if not written.is_dir():
        return
    steps = {path: int(found[1]) for path in written.iterdir() if (found := _STEP.fullmatch(path.name))}
    for path in written.iterdir():
        if path not in steps or not may_commit(steps[path]):
            shutil.rmtree(path, ignore_errors=True)
    target = survivor_dir(generation_folder.parent) / generation_folder.name
    target.parent.mkdir(exist_ok=True)
    if any(written.iterdir()):
        os.rename(written, target)


def remove(run_folder: Path, before: int | None = None) -> None:
    """Remove what generations ``before`` that one left; all of it without one."""
    folder = survivor_dir(run_folder)
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name.startswith("g") and (before is None or int(path.name[1:]) < before):
            # Ranks that list the folder meanwhile see all of it or nothing.
            hidden = path.with_name(f".{uuid.uuid4().hex}")
            os.rename(path, hidden)
            shutil.rmtree(hidden, ignore_errors=True)
