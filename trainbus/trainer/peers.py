"""Peers that are gone, under NCCL.

With gloo a collective raises as soon as a peer is gone. NCCL's kernels wait for it, and the watchdog ends the process
minutes later. The agent knows at once that a rank has ended, and informs the others: they abort the communicator.
The kernels then end as if all were well, with whatever was there as their result: see ``World.confirm_arrival``.
"""

from __future__ import annotations

from collections.abc import MutableMapping

import torch.distributed as dist

#: The watchdog aborts a communicator with an error, and leaves the process to us: CleanUpOnly.
ERROR_HANDLING_VARIABLE, CLEAN_UP_ONLY = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "2"


def keep_process_on_errors(env: MutableMapping[str, str]) -> None:
    """Keep NCCL's watchdog from ending the process with the state that it holds; call it before the group is formed."""
    env.setdefault(ERROR_HANDLING_VARIABLE, CLEAN_UP_ONLY)


def abort_communicator() -> None:
    """End the collectives that wait for a peer that is gone; from any thread. Those of gloo end by themselves."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        group = dist.group.WORLD
        assert group is not None
        group.abort()
