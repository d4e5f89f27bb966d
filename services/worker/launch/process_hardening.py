"""Keeps the agent's credentials from the user's code, which runs as the same user beside it."""

from __future__ import annotations

import ctypes
import sys

PR_SET_DUMPABLE = 4


def hide_from_ranks() -> None:
    """Close this process's environment and memory to all but root; what it starts anew is open again.

    Without it ``/proc/<agent>/environ`` has the store's keys for whoever runs as the agent's user. On Linux only.

    Raises:
        OSError: the kernel refuses.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot close the agent's memory to its ranks")
