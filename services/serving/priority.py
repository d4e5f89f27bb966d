"""The priority of processes: low while a version is loaded, so that what answers meanwhile is hardly held up by it.

Raising it again needs a right that root and many containers have (CAP_SYS_NICE), and others can be given
(``LimitNICE=20`` of systemd, ``ulimit -e 20``). Where that is missing, all processes keep the priority of the service.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
from pathlib import Path

#: What loads a version gets a tenth of a core that is wanted by a process that answers.
LOADING_NICENESS, ANSWERING_NICENESS = 10, 0
_CAP_SYS_NICE = 1 << 23


@functools.cache
def can_raise() -> bool:
    """Return whether this process, and those that it starts, may raise a priority that they have lowered."""
    limit: int | None = getattr(resource, "RLIMIT_NICE", None)
    if limit is None:  # not Linux
        return False
    # A limit of 20 - n allows the niceness n.
    if resource.getrlimit(limit)[0] >= 20 - ANSWERING_NICENESS:
        return True
    try:
        status = Path("/proc/self/status").read_text()
        capabilities = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    except (OSError, StopIteration):
        return False
    return bool(int(capabilities, 16) & _CAP_SYS_NICE)


def set_niceness(pid: int, niceness: int) -> None:
    """Give a process and all its threads this niceness, where it could be raised again. It may have ended."""
    if not can_raise():
        return
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            # For Linux, the niceness is a thread's.
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, int(thread.name), niceness)
