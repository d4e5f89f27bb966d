"""Somebody's own training script: no Task, started once for each slot. Argument: the rank that breaks."""

import sys

import torch
import torch.distributed as dist

import trainbus

dist.init_process_group("gloo")
rank = dist.get_rank()
for step in range(1, 6):
    if step == 3 and sys.argv[1:] == [str(rank)]:
        raise SystemExit(f"rank {rank} breaks")
    total = torch.tensor([float(rank + step)])
    dist.all_reduce(total)
    if rank == 0:
        trainbus.report({"train/loss": 1 / total.item()}, step=step)
        print(f"step={step} throughput={100 * step}", flush=True)
dist.destroy_process_group()
