"""Holds a run at a step until another process on this machine releases it: the demo, and tests.

A hold is a locked file. Who wants to see something happen to a running run creates it; the run waits at a step that it
names for as long as the lock lasts. The lock ends with the process that has it, so a crash of that process holds up no
run, and on another machine, where there is no such file, the run goes on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from contracts.ranks import STOP_FILE_VARIABLE

#: Seconds between two looks of a waiting rank.
INTERVAL_S = 0.02


class StepHold:
    """The holding side of a hold. Use it as a context manager, so that an error releases the run."""

    def __init__(self, path: Path) -> None:
        """Create the file and lock it."""
        import fcntl  # only where ranks run, which is not Windows

        self.path = path
        self._file = path.open("w")
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Let the runs that wait go on. A second call changes nothing."""
        self.path.unlink(missing_ok=True)
        self._file.close()


def wait_at(step: float, holds: Mapping[str, float]) -> None:
    """Wait for those holds whose step has come.

    Args:
        step: how far the run is: a number of steps, or a share of them.
        holds: by the path of a hold, from where on the run waits for it; in the unit of ``step``.
    """
    for path, held_step in holds.items():
        if step >= held_step:
            wait_while_held(Path(path))


def wait_while_held(path: Path) -> None:
    """Wait as long as another process has the hold, and this rank is not asked to stop."""
    stop_file = os.environ.get(STOP_FILE_VARIABLE, "")
    while is_held(path) and not os.path.exists(stop_file):
        time.sleep(INTERVAL_S)


def is_held(path: Path) -> bool:
    """Return whether a process has the hold."""
    import fcntl

    try:
        with path.open("r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False
