"""Lightning on two ranks of a node: killed in the middle, it goes on from the last epoch that was kept."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from typing import Any

import pytest

from contracts.events.checkpoint import CheckpointCommitted
from contracts.events.run import RunExited
from tests.kit.support import until
from tests.worker.conftest import World
from tests.worker.test_output_folder import commits, last_checkpoint, lines, place

pytestmark = pytest.mark.shell
pytest.importorskip("lightning", reason="the extra trainbus[integrations] is not installed")

__all__ = ["commits"]

EPOCHS = 4
#: It waits in epoch 3 of its first attempt, until it is killed there.
SCRIPT = """
import os, time
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trainbus.integrations.lightning import TrainbusCheckpoint, TrainbusLogger

class Regression(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)
    def training_step(self, batch, index):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

class Hold(Callback):
    def on_train_epoch_start(self, trainer, module):
        print("rank", trainer.global_rank, "of", trainer.world_size, "epoch", trainer.current_epoch, flush=True)
        while trainer.current_epoch == 2 and keep.resume_path is None:
            time.sleep(0.05)

seed_everything(0, verbose=False)
x = torch.randn(16, 4)
keep = TrainbusCheckpoint()
trainer = Trainer(
    max_epochs=4, accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy="ddp",
    callbacks=[Hold(), keep], logger=TrainbusLogger(), log_every_n_steps=1,
    enable_progress_bar=False, enable_model_summary=False,
)
data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=2)
trainer.fit(Regression(), data, ckpt_path=keep.resume_path)
"""


async def has_begun(world: World, rank: int, epoch: int) -> bool:
    return f"rank {rank} of 2 epoch {epoch}" in await lines(world, rank)


async def test_two_ranks_are_killed_and_go_on(world: World, agent: Any, commits: None) -> None:
    await agent()
    await place(world, SCRIPT, slots=(0, 1))
    second = await world.wait_for(CheckpointCommitted, count=2, timeout_s=240)
    assert (second.checkpoint.step, second.checkpoint.epoch) == (8, 2)
    for rank in (0, 1):
        await until(partial(has_begun, world, rank, 2), f"rank {rank} in its third epoch")
    processes = json.loads((world.settings.data_dir / "runs/r1/g1/processes.json").read_text())
    os.killpg(processes[1]["pid"], signal.SIGKILL)
    failed = await world.wait_for(RunExited)
    assert (failed.outcome, failed.rank) == ("failed", 1)
    await place(world, SCRIPT, slots=(0, 1), generation=2, resume=await last_checkpoint(world))
    ended = await world.wait_for(RunExited, count=2, timeout_s=240)
    assert ended.outcome == "succeeded", await lines(world)
    for rank in (0, 1):
        begun = [line for line in await lines(world, rank) if line.startswith("rank ")]
        assert begun == [f"rank {rank} of 2 epoch {epoch}" for epoch in (0, 1, 2, 2, 3)]
    assert (await last_checkpoint(world)).epoch == EPOCHS
    assert ended.metrics["loss"] > 0
