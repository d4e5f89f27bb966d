"""Protection of the agent's credentials from ranks, which run as the same user."""

from __future__ import annotations

import ctypes
import sys

PR_SET_DUMPABLE = 4


def protect_credentials() -> None:
    """Deny access to this process's environment and memory to all but root; processes that it starts are not protected.

    Without it every process of the agent's user reads the store's keys from ``/proc/<agent>/environ``. On Linux only.

    Raises:
        OSError: the kernel refuses.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the agent's memory cannot be protected from its ranks")
