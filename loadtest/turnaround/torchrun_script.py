"""What torchrun starts: the loop, resumed from the last file that it saved. Arguments: folder, width, steps, every."""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from loop import save_file, train

folder, (width, steps, every) = Path(sys.argv[1]), map(int, sys.argv[2:5])
# The agent's store outlives the ranks: under the same keys, a new attempt would meet the dead ones' addresses.
rank, world, attempt = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(world)
store = dist.TCPStore(*place, is_master=False, timeout=timedelta(seconds=30))
dist.init_process_group(
    "gloo", store=dist.PrefixStore(f"attempt_{attempt}", store), rank=int(rank), world_size=int(world)
)
saved = folder / "state.pt"


def save(step, state):  # type: ignore[no-untyped-def]
    if dist.get_rank() == 0:
        save_file(saved, state())


train(width, steps, every, folder / "lines.jsonl", torch.load(saved) if saved.exists() else None, save)
