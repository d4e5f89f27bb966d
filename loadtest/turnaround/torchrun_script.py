"""What torchrun starts: the loop, resumed from the last file that it saved. Arguments: folder, width, steps, every."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from loop import save_file, train

folder, (width, steps, every) = Path(sys.argv[1]), map(int, sys.argv[2:5])
dist.init_process_group("gloo")
saved = folder / "state.pt"


def save(step, state):  # type: ignore[no-untyped-def]
    if dist.get_rank() == 0:
        save_file(saved, state())


train(width, steps, every, folder / "lines.jsonl", torch.load(saved) if saved.exists() else None, save)
