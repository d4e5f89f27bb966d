"""What Ray Train starts: the loop, resumed from the checkpoint that it reported.

Arguments: folder, width, steps, every, folder for Ray's own files.
"""

import logging
import sys
import tempfile
from pathlib import Path

import ray
import torch
import torch.distributed as dist
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, get_checkpoint, report
from ray.train.torch import TorchConfig, TorchTrainer


def work(config):  # type: ignore[no-untyped-def]
    sys.path.insert(0, config["here"])
    from loop import train

    state = None
    if (checkpoint := get_checkpoint()) is not None:
        with checkpoint.as_directory() as saved:
            state = torch.load(Path(saved) / "state.pt")

    def save(step, make):  # type: ignore[no-untyped-def]
        with tempfile.TemporaryDirectory() as scratch:
            if dist.get_rank() == 0:
                torch.save(make(), Path(scratch) / "state.pt")
                report({"step": step}, checkpoint=Checkpoint.from_directory(scratch))
            else:
                report({"step": step})

    train(config["width"], config["steps"], config["every"], Path(config["folder"]) / "lines.jsonl", state, save)


folder, (width, steps, every) = Path(sys.argv[1]), map(int, sys.argv[2:5])
here = str(Path(__file__).parent)
ray.init(num_cpus=2, include_dashboard=False, logging_level=logging.ERROR, _temp_dir=sys.argv[5])
TorchTrainer(
    work,
    train_loop_config={"folder": str(folder), "width": width, "steps": steps, "every": every, "here": here},
    torch_config=TorchConfig(backend="gloo"),
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(
        storage_path=str(folder / "storage"),
        failure_config=FailureConfig(max_failures=100),
        checkpoint_config=CheckpointConfig(num_to_keep=2),
    ),
).fit()
