"""A task whose steps take a little while without using a core: time to kill something in mid-run."""

import io
import time

import torch
from PIL import Image
from torch import nn

from trainbus import Task


class Slow(Task):
    """Logistic regression on 8x8 pixels, ``step_s`` of waiting a batch."""

    def __init__(self, step_s: float = 0.02) -> None:
        self.step_s = step_s

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
        x_B88, y_B = batch
        return nn.functional.cross_entropy(model(x_B88), y_B)

    def metrics(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
        x_B88, y_B = batch
        logits = model(x_B88)
        return {
            "loss": nn.functional.cross_entropy(logits, y_B),
            "accuracy": (logits.argmax(1) == y_B).float().mean(),
        }
