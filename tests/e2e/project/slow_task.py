"""A task that can be held at a step: there is as much time as it takes to kill something in mid-run."""

import io
import time

import torch
from PIL import Image
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from trainbus import Task
from trainbus.ranks.step_hold import wait_at


class Slow(Task):
    """Logistic regression on 8x8 pixels, ``step_s`` of waiting a batch.

    ``holds`` are steps by the paths of holds: after that many it waits for as long as the test has the hold.
    """

    def __init__(self, step_s: float = 0.02, holds: dict[str, int] | None = None) -> None:
        self.step_s, self.holds = step_s, holds or {}

    def schedule(self, optimizer: torch.optim.Optimizer, total_steps: int) -> LambdaLR:
        self.steps = LambdaLR(optimizer, lambda _: 1.0)  # a constant rate: it counts the steps, through resumes too
        return self.steps

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def decode(self, sample: dict[str, bytes]) -> tuple[torch.Tensor, int]:
        image = Image.open(io.BytesIO(sample["png"])).convert("L")
        x = torch.tensor(list(image.getdata()), dtype=torch.float32).view(8, 8) / 255
        return x, int(sample["cls"])

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if model.training:
            time.sleep(self.step_s)
            wait_at(self.steps.last_epoch, self.holds)
        x_B88, y_B = batch
        return nn.functional.cross_entropy(model(x_B88), y_B)

    def metrics(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
        x_B88, y_B = batch
        logits = model(x_B88)
        return {
            "loss": nn.functional.cross_entropy(logits, y_B),
            "accuracy": (logits.argmax(1) == y_B).float().mean(),
        }
