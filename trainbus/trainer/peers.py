"""Peers that are gone, under NCCL.

With gloo a collective raises as soon as a peer is gone. NCCL's kernels wait for it, and the watchdog ends the process
minutes later. The agent knows at once that a rank has ended, and informs the others: they abort the communicator.
The kernels then end as if all were well, with whatever was there as their result, so each update is confirmed first.
"""

from __future__ import annotations

from collections.abc import MutableMapping

import torch
import torch.distributed as dist

from trainbus.trainer.world import World

#: The watchdog aborts a communicator with an error, and leaves the process to us: CleanUpOnly.
ERROR_HANDLING_VARIABLE, CLEAN_UP_ONLY = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "2"


class PeerLostError(RuntimeError):
    """Another rank is gone, and what it had to send did not arrive. Raised where gloo raises its own error."""


def keep_process_on_errors(env: MutableMapping[str, str]) -> None:
    """Keep NCCL's watchdog from ending the process with the state that it holds; call it before the group is formed."""
    env.setdefault(ERROR_HANDLING_VARIABLE, CLEAN_UP_ONLY)


def abort_communicator() -> None:
    """End the collectives that wait for a peer that is gone; from any thread. Those of gloo end by themselves."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        group = dist.group.WORLD
        assert group is not None
        group.abort()


class UpdateConfirmation:
    """Confirms before each update that all of its gradients have arrived. It costs nothing with gloo.

    With NCCL the ranks add up ones behind the gradients, in the communicator's order, and the host waits for the sum:
    the price of one small all-reduce, and of a host that runs no further ahead than the update.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._is_needed = world.size > 1 and dist.get_backend() == "nccl"

    def wait(self) -> None:
        """Wait for everything that the ranks have sent in this step; call it before anything of it changes the state.

        Raises:
            PeerLostError: the communicator was aborted.
        """
        if not self._is_needed:
            return
        present = torch.ones(1, dtype=torch.float32, device=self._world.device)
        dist.all_reduce(present)
        if present.tolist() != [self._world.size]:
            raise PeerLostError("a peer is gone: the gradients of this step did not arrive")
