"""One answer of all ranks to the question whether the run is asked to stop."""

from __future__ import annotations

from typing import Any

from trainbus.script import should_stop


def is_stop_agreed(device: Any) -> bool:
    """Return whether a rank is asked to stop: the same answer in every rank.

    Every rank must call it at the same step. ``device`` is where the process group reduces tensors.
    """
    import torch
    from torch import distributed

    is_asked = should_stop()
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return is_asked
    flag = torch.tensor([int(is_asked)], device=device)
    distributed.all_reduce(flag, op=distributed.ReduceOp.MAX)
    return bool(flag.item())


def wait_for_ranks() -> None:
    """Wait until every rank has come here; return at once where there is one rank."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        distributed.barrier()
