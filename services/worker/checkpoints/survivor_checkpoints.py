"""Checkpoints that ranks wrote and that were not committed when they ended: kept on the node for the next generation.

``<run>/left/g<generation>/step_<n>-rank_<r>/``, where ``<run>`` is the run's folder on this node. The store may have
been away for as long as anybody would wait; the disk was not.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

_STEP = re.compile(r"step_(\d+)-rank_\d+")


def folder_of(run_folder: Path) -> Path:
    """Where ranks find it."""
    return run_folder / "left"


def keep(generation_folder: Path, wanted: Callable[[int], bool]) -> None:
    """Set aside what the ranks of a generation, which have all ended, wrote of the ``wanted`` steps. Repeatable."""
    written = generation_folder / "checkpoints"
    if not written.is_dir():
        return
    steps = {path: int(found[1]) for path in written.iterdir() if (found := _STEP.fullmatch(path.name))}
    for path in written.iterdir():
        if path not in steps or not wanted(steps[path]):
            shutil.rmtree(path, ignore_errors=True)
    target = folder_of(generation_folder.parent) / generation_folder.name
    target.parent.mkdir(exist_ok=True)
    if any(written.iterdir()):
        os.rename(written, target)


def drop(run_folder: Path, before: int | None = None) -> None:
    """Remove what generations ``before`` that one left; all of it, if None is given."""
    folder = folder_of(run_folder)
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name.startswith("g") and (before is None or int(path.name[1:]) < before):
            # Ranks that look at this moment see all of it or nothing.
            hidden = path.with_name(f".{uuid.uuid4().hex}")
            os.rename(path, hidden)
            shutil.rmtree(hidden, ignore_errors=True)
