"""The same loop as a Task: what the code package of our own runs holds, beside ``loop.py``."""

import io

import loop
import torch
from PIL import Image
from torch import nn
from torch.nn.functional import cross_entropy

from trainbus import Task


class Loop(Task):
    """Digits of 8x8 pixels through the perceptron of ``loop.make_model``."""

    def __init__(self, width: int = 512) -> None:
        self.width = width

    def model(self) -> nn.Module:
        return loop.make_model(self.width)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return loop.make_optimizer(model)

    def decode(self, sample: dict[str, bytes]) -> tuple[torch.Tensor, int]:
        image = Image.open(io.BytesIO(sample["png"])).convert("L")
        return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).float() / 255, int(sample["cls"])

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x_B64, y_B = batch
        return cross_entropy(model(x_B64), y_B)
